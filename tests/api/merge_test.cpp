// merge_states: against the definition in float64, empty parts, gradients by finite differences.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "plait/attention.hpp"

namespace plait {
namespace {

constexpr int64_t kParts = 3, kHeads = 2, kRows = 5, kDim = 4;
constexpr double kInf = std::numeric_limits<double>::infinity();

struct Parts {
  std::vector<std::vector<double>> outs, lses;
  std::vector<double> out = std::vector<double>(kHeads * kRows * kDim, NAN),
                      lse = std::vector<double>(kHeads * kRows, NAN);
  std::vector<TensorView> out_views, lse_views;

  explicit Parts(unsigned seed) {
    std::mt19937 engine(seed);
    std::normal_distribution<double> normal;
    for (int64_t i = 0; i < kParts; ++i) {
      outs.emplace_back(out.size());
      lses.emplace_back(lse.size());
      for (double& x : outs.back()) x = normal(engine);
      for (double& x : lses.back()) x = normal(engine);
    }
    // Row 0: one empty part, whose output may hold anything. Row 1: all empty.
    lses[1][0] = -kInf;
    for (int64_t d = 0; d < kDim; ++d) outs[1][d] = NAN;
    for (int64_t i = 0; i < kParts; ++i) lses[i][1] = -kInf;
  }
  static TensorView out_view(std::vector<double>& t) {
    return TensorView::contiguous(t.data(), DType::kFloat64, {1, kHeads, kRows, kDim});
  }
  static TensorView lse_view(std::vector<double>& t) {
    return TensorView::contiguous(t.data(), DType::kFloat64, {1, kHeads, kRows});
  }
  MergeArgs args() {
    out_views.clear();
    lse_views.clear();
    for (int64_t i = 0; i < kParts; ++i) {
      out_views.push_back(out_view(outs[i]));
      lse_views.push_back(lse_view(lses[i]));
    }
    return {out_views.data(), lse_views.data(), kParts};
  }
  void run() { merge_states(args(), {out_view(out), lse_view(lse)}, Executor::threads(), 2); }
};

TEST(MergeStates, EqualsTheDefinition) {
  Parts parts(3);
  parts.run();
  for (int64_t row = 0; row < kHeads * kRows; ++row) {
    double sum = 0;
    for (int64_t i = 0; i < kParts; ++i) sum += std::exp(parts.lses[i][row]);
    if (sum == 0) {
      EXPECT_EQ(parts.lse[row], -kInf);
      for (int64_t d = 0; d < kDim; ++d) EXPECT_EQ(parts.out[row * kDim + d], 0.0);
      continue;
    }
    EXPECT_NEAR(parts.lse[row], std::log(sum), 1e-12);
    for (int64_t d = 0; d < kDim; ++d) {
      double expected = 0;
      for (int64_t i = 0; i < kParts; ++i) {
        if (parts.lses[i][row] > -kInf) expected += std::exp(parts.lses[i][row]) / sum * parts.outs[i][row * kDim + d];
      }
      EXPECT_NEAR(parts.out[row * kDim + d], expected, 1e-12);
    }
  }
}

TEST(MergeStates, LargeLogitsDoNotOverflow) {
  Parts parts(4);
  for (auto& lse : parts.lses) {
    for (double& x : lse) x += 5000;
  }
  parts.run();
  for (int64_t row = 2; row < kHeads * kRows; ++row) EXPECT_TRUE(std::isfinite(parts.lse[row]));
}

TEST(MergeStates, GradientsMatchFiniteDifferences) {
  Parts parts(5);
  parts.run();
  std::mt19937 engine(6);
  std::normal_distribution<double> normal;
  std::vector<double> dout(parts.out.size()), dlse(parts.lse.size());
  for (double& x : dout) x = normal(engine);
  for (double& x : dlse) x = normal(engine);
  std::vector<std::vector<double>> douts(kParts, std::vector<double>(parts.out.size(), NAN));
  std::vector<std::vector<double>> dlses(kParts, std::vector<double>(parts.lse.size(), NAN));
  std::vector<TensorView> dout_views, dlse_views;
  for (int64_t i = 0; i < kParts; ++i) {
    dout_views.push_back(Parts::out_view(douts[i]));
    dlse_views.push_back(Parts::lse_view(dlses[i]));
  }
  merge_states_backward(parts.args(), {Parts::out_view(parts.out), Parts::lse_view(parts.lse)}, Parts::out_view(dout),
                        Parts::lse_view(dlse), dout_views.data(), dlse_views.data(), Executor::threads(), 2);
  const auto loss = [&] {
    parts.run();
    double sum = 0;
    for (size_t i = 0; i < dout.size(); ++i) sum += dout[i] * parts.out[i];
    for (size_t i = 0; i < dlse.size(); ++i) sum += parts.lse[i] > -kInf ? dlse[i] * parts.lse[i] : 0.0;
    return sum;
  };
  const double step = 1e-6;
  const auto check = [&](double& x, double gradient) {
    if (!std::isfinite(x)) {
      EXPECT_EQ(gradient, 0.0);
      return;
    }
    const double saved = x;
    x = saved + step;
    const double up = loss();
    x = saved - step;
    const double down = loss();
    x = saved;
    EXPECT_NEAR(gradient, (up - down) / (2 * step), 1e-7);
  };
  for (int64_t i = 0; i < kParts; ++i) {
    for (size_t j = 0; j < parts.out.size(); ++j) check(parts.outs[i][j], douts[i][j]);
    for (size_t j = 0; j < parts.lse.size(); ++j) check(parts.lses[i][j], dlses[i][j]);
  }
}

}  // namespace
}  // namespace plait
