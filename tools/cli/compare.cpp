// Errors against the oracle and the accuracy bars.
// Called through compare.hpp.
#include "compare.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "tensors.hpp"

namespace plait::cli {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// |got - oracle|, 0 for equal infinities, infinite where one of the two is not a number or infinite alone.
double distance(double got, double oracle) {
  if (got == oracle) return 0;
  const double apart = std::abs(got - oracle);
  return std::isnan(apart) ? kInfinity : apart;
}

}  // namespace

double rms_bar(DType dtype, Kind kind) {
  if (dtype == DType::kFloat32) return kind == Kind::kForward ? 2e-6 : 1e-5;
  const double brain = kind == Kind::kOtherGrad ? 3.8e-3 : 2.6e-3;
  return dtype == DType::kFloat16 ? brain / 8 : brain;
}

double max_abs_bar(const std::vector<double>& eager, const std::vector<double>& oracle, DType dtype) {
  constexpr double kEagerFactor = 2, kSumRoundings = 32;
  double error = 0, size = 0;
  for (size_t i = 0; i < oracle.size(); ++i) {
    error = std::max(error, distance(eager[i], oracle[i]));
    if (std::isfinite(oracle[i])) size = std::max(size, std::abs(oracle[i]));
  }
  return kEagerFactor * error + (roundoff(dtype) + kSumRoundings * roundoff(DType::kFloat32)) * size;
}

double relative_rms(const std::vector<double>& got, const std::vector<double>& oracle) {
  double error_squares = 0, size_squares = 0;
  for (size_t i = 0; i < oracle.size(); ++i) {
    const double error = distance(got[i], oracle[i]);
    error_squares += error * error;
    if (std::isfinite(oracle[i])) size_squares += oracle[i] * oracle[i];
  }
  return error_squares == 0 ? 0 : std::sqrt(error_squares / size_squares);
}

Comparison compare(const std::string& name, const std::vector<double>& got, const std::vector<double>& oracle,
                   double max_abs_limit, std::optional<double> rms_limit) {
  Comparison result{.name = name, .max_abs_bar = max_abs_limit, .rms_bar = rms_limit};
  for (size_t i = 0; i < oracle.size(); ++i) result.max_abs = std::max(result.max_abs, distance(got[i], oracle[i]));
  result.rms = relative_rms(got, oracle);
  result.passed =
      result.max_abs <= max_abs_limit && (!rms_limit || result.rms <= *rms_limit) && got.size() == oracle.size();
  return result;
}

}  // namespace plait::cli
