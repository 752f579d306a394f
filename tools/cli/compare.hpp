// One output against the oracle: errors, bars and the verdict.
// Called by check.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "plait/tensor.hpp"

namespace plait::cli {

struct Comparison {
  std::string name;
  double max_abs = 0, max_abs_bar = 0;
  double rms = 0;  // root-mean-square error relative to the root mean square of the oracle
  std::optional<double> rms_bar;
  bool passed = false;
};

enum class Kind { kForward, kValueGrad, kOtherGrad };

// The bar of the relative root-mean-square error (docs/numerics.md).
double rms_bar(DType dtype, Kind kind);

// The bar of the largest error: twice that of `eager`, one rounding to `dtype`, and a few dozen of fp32: sums in
// another order than eager's, and probabilities that carry the rounding of logits of a few dozen.
double max_abs_bar(const std::vector<double>& eager, const std::vector<double>& oracle, DType dtype);

// Root-mean-square error relative to the root mean square of the oracle.
double relative_rms(const std::vector<double>& got, const std::vector<double>& oracle);

// Equal infinities have no distance; an infinity or a NaN alone is infinitely far off.
Comparison compare(const std::string& name, const std::vector<double>& got, const std::vector<double>& oracle,
                   double max_abs_limit, std::optional<double> rms_limit);

}  // namespace plait::cli
