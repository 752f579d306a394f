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

// The bar of the largest error: twice that of `eager`, one rounding to `dtype`, and a few of fp32 sums, whose order
// is not eager's.
double max_abs_bar(const std::vector<double>& eager, const std::vector<double>& oracle, DType dtype);

// Equal infinities have no distance; an infinity or a NaN alone is infinitely far off.
Comparison compare(const std::string& name, const std::vector<double>& got, const std::vector<double>& oracle,
                   double max_abs_limit, std::optional<double> rms_limit);

}  // namespace plait::cli
