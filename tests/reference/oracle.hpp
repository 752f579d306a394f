// Central finite differences, comparisons and shorthand problems for the oracle's own tests.
// Called by tests/reference/*_test.cpp.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "reference/reference.hpp"
#include "support/problem_builder.hpp"

namespace plait::testing {

// Sizes only; float64, plain, no options.
inline AttentionProblem attention_problem(int64_t batch, int64_t heads_q, int64_t heads_kv, int64_t seqlen_q,
                                          int64_t seqlen_kv, int64_t head_dim, int64_t head_dim_v) {
  AttentionProblem problem;
  problem.dtype = DType::kFloat64;
  problem.batch = batch, problem.heads_q = heads_q, problem.heads_kv = heads_kv;
  problem.seqlen_q = seqlen_q, problem.seqlen_kv = seqlen_kv;
  problem.head_dim = head_dim, problem.head_dim_v = head_dim_v;
  return problem;
}

inline void expect_near(const std::vector<double>& got, const std::vector<double>& expected, double tolerance,
                        const std::string& what) {
  ASSERT_EQ(got.size(), expected.size()) << what;
  for (size_t i = 0; i < got.size(); ++i) {
    if (got[i] == expected[i]) continue;  // also equal infinities
    ASSERT_LE(std::abs(got[i] - expected[i]), tolerance * (1.0 + std::abs(expected[i])))
        << what << "[" << i << "]: got " << got[i] << ", expected " << expected[i];
  }
}

// sum(weights * results) over what has a weight and is finite: tails are NaN, empty rows have an LSE of -inf.
inline double weighted_sum(const CanonicalTensor& results, const CanonicalTensor& weights, const Shape& shape) {
  double sum = 0.0;
  for_each_index(shape, [&](const reference::Index& i) {
    const double weight = reference::load(weights, i), result = reference::load(results, i);
    if (!std::isnan(weight) && result != -std::numeric_limits<double>::infinity()) sum += weight * result;
  });
  return sum;
}

// Every element of `gradient` against (loss(x + h) - loss(x - h)) / 2h. Where the input is NaN (rows past the last
// sequence) the gradient must be zero.
template <class Loss>
void expect_gradient(const CanonicalTensor& input, const CanonicalTensor& gradient, const Shape& shape, Loss loss,
                     const std::string& what) {
  constexpr double kStep = 1e-5, kTolerance = 2e-8;
  std::vector<double> expected;
  for_each_index(shape, [&](const reference::Index& i) {
    const double x = reference::load(input, i);
    if (std::isnan(x)) return expected.push_back(0.0);
    reference::store(input, i, x + kStep);
    const double above = loss();
    reference::store(input, i, x - kStep);
    const double below = loss();
    reference::store(input, i, x);
    expected.push_back((above - below) / (2.0 * kStep));
  });
  expect_near(values(gradient, shape), expected, kTolerance, what);
}

// Forward and backward; the returned tensors hold everything.
inline AttentionTensors run_both(Attention& attention) {
  const AttentionTensors t = attention.with_gradients(attention.with_outputs());
  reference::attention_forward(attention.problem, t);
  reference::attention_backward(attention.problem, t);
  return t;
}

// The same input values in other storage: `to` has the sizes of `from`.
inline void copy_inputs(const Attention& from, const Attention& to) {
  assign(to.inputs.q, to.q_shape, values(from.inputs.q, from.q_shape));
  assign(to.inputs.k, to.k_shape, values(from.inputs.k, from.k_shape));
  assign(to.inputs.v, to.v_shape, values(from.inputs.v, from.v_shape));
  assign(to.inputs.dout, to.out_shape, values(from.inputs.dout, from.out_shape));
  assign(as_canonical(to.inputs.dlse), to.lse_shape, values(as_canonical(from.inputs.dlse), from.lse_shape));
  if (from.problem.has_sinks) assign(to.sinks(), to.sinks_shape(), values(from.sinks(), from.sinks_shape()));
}

}  // namespace plait::testing
