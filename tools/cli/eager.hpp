// Attention as an eager framework computes it: every score, probability and product rounded to the input dtype.
// Called by check: the yardstick of the max-abs bars (docs/numerics.md).
#pragma once

#include <vector>

#include "problem.hpp"

namespace plait::cli {

// Tensors in the problem's layout, in storage order. `sinks`, `dsinks_sigma` are empty without sinks.
struct EagerInputs {
  std::vector<double> q, k, v, sinks, dout, dlse;
};
struct EagerResults {
  std::vector<double> out, lse, dq, dk, dv;
  // Standard deviation that rounding `out` to its dtype and summing in fp32 give dsinks, by head.
  std::vector<double> dsinks_sigma;
};

EagerResults eager_attention(const Problem& problem, const EagerInputs& inputs);

}  // namespace plait::cli
