// Runs the CPU backend and the oracle on one problem and compares; picks the instruction set.
// Called by tests/cpu/*_test.cpp.
#pragma once

#include "cpu/targets.hpp"
// After the target list.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "cpu/cpu.hpp"
#include "hwy/highway.h"
#include "reference/reference.hpp"
#include "support/problem_builder.hpp"

namespace plait::testing {

inline AttentionProblem attention_problem(int64_t batch, int64_t heads_q, int64_t heads_kv, int64_t seqlen_q,
                                          int64_t seqlen_kv, int64_t head_dim, int64_t head_dim_v) {
  AttentionProblem problem;
  problem.batch = batch, problem.heads_q = heads_q, problem.heads_kv = heads_kv;
  problem.seqlen_q = seqlen_q, problem.seqlen_kv = seqlen_kv;
  problem.head_dim = head_dim, problem.head_dim_v = head_dim_v;
  return problem;
}

// Exactly workspace_bytes, 64-byte aligned, filled with 0xff (NaN, and -1 as an index), with a guard behind.
class Workspace {
 public:
  explicit Workspace(int64_t bytes) : bytes_(static_cast<size_t>(bytes)), memory_(bytes_ + 64 + kGuard, 0xff) {
    base_ = memory_.data() + (64 - reinterpret_cast<uintptr_t>(memory_.data()) % 64) % 64;
    std::memset(base_ + bytes_, 0x5a, kGuard);
  }
  void* data() { return base_; }
  bool intact() const {
    for (size_t i = 0; i < kGuard; ++i) {
      if (base_[bytes_ + i] != 0x5a) return false;
    }
    return true;
  }

 private:
  static constexpr size_t kGuard = 256;
  size_t bytes_;
  std::vector<unsigned char> memory_;
  unsigned char* base_;
};

struct RunOptions {
  int32_t workers = 2;
  bool sequential = false;  // workers run one after the other
  Strategy strategy = Strategy::kAuto;
};

inline void run_in_order(void*, int32_t workers, void (*body)(void*, int32_t), void* arg) {
  for (int32_t worker = 0; worker < workers; ++worker) body(arg, worker);
}

template <class PlanFunction, class RunFunction>
Plan plan_and_run(const RunOptions& options, Op op, Strategy strategy, PlanFunction plan_it, RunFunction run_it) {
  DeviceInfo device;
  device.workers = options.workers;
  Plan plan;
  plan.op = op;
  plan.backend = Backend::kCpu;
  plan.strategy = strategy;
  plan.device = device;
  plan_it(device, plan);
  EXPECT_GE(plan.workers, 1);
  EXPECT_LE(plan.workers, options.workers);
  EXPECT_FALSE(plan.reasons.empty());
  Workspace workspace(plan.workspace_bytes);
  run_it(plan, workspace.data(), options.sequential ? Executor{run_in_order, nullptr} : Executor::threads());
  EXPECT_TRUE(workspace.intact()) << "wrote past its workspace";
  return plan;
}

// `t` as from with_outputs() or with_gradients(); runs what problem.op says.
inline Plan run_cpu(const AttentionProblem& problem, const AttentionTensors& t, const RunOptions& options = {}) {
  const bool forward = problem.op == Op::kAttentionForward;
  const Strategy strategy = !forward ? Strategy::kAuto : problem.split_size > 0 ? Strategy::kSplitKv : options.strategy;
  return plan_and_run(
      options, problem.op, strategy,
      [&](const DeviceInfo& device, Plan& plan) { cpu::plan_attention(problem, device, plan); },
      [&](const Plan& plan, void* workspace, const Executor& executor) {
        (forward ? cpu::attention_forward : cpu::attention_backward)(plan, problem, t, workspace, executor);
      });
}

inline double rms(const std::vector<double>& x) {
  double sum = 0;
  for (const double v : x) sum += v * v;
  return x.empty() ? 0.0 : std::sqrt(sum / static_cast<double>(x.size()));
}

// Root-mean-square error within `bar` times the reference's root-mean-square (at least `floor`); equal infinities
// match, a NaN never does.
inline void expect_close(const std::vector<double>& got, const std::vector<double>& expected, double bar, double floor,
                         const std::string& what) {
  ASSERT_EQ(got.size(), expected.size()) << what;
  std::vector<double> error, finite;
  for (size_t i = 0; i < got.size(); ++i) {
    if (got[i] == expected[i] && std::isinf(expected[i])) continue;
    error.push_back(got[i] - expected[i]);
    finite.push_back(expected[i]);
  }
  if (error.empty()) return;
  EXPECT_LE(rms(error), bar * std::max(rms(finite), floor)) << what;  // false for NaN
}

// What the oracle makes of the same inputs, in float64.
struct Oracle {
  AttentionTensors tensors;
  explicit Oracle(Attention& a) {
    const AttentionProblem& p = a.problem;
    AttentionTensors& t = tensors = a.inputs;
    t.out = a.arena.poisoned(DType::kFloat64, a.out_shape);
    t.lse = a.arena.rows(DType::kFloat64, a.lse_shape[0], a.lse_shape[1], a.lse_shape[2], 0);
    t.dq = a.arena.poisoned(DType::kFloat64, a.q_shape);
    t.dk = a.arena.poisoned(DType::kFloat64, a.k_shape);
    t.dv = a.arena.poisoned(DType::kFloat64, a.v_shape);
    if (p.has_sinks) {
      const RowTensor dsinks = a.arena.rows(DType::kFloat32, 1, 1, p.heads_q, 0);
      t.dsinks = dsinks.data, t.dsinks_stride = dsinks.row_stride;
    }
    reference::attention_forward(p, t);
    reference::attention_backward(p, t);
  }
};

struct Bars {
  double out, lse, dq_dk, dv;
};
inline Bars bars_of(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
      return {2.6e-3, 1e-6, 3.8e-3, 2.6e-3};
    case DType::kFloat16:
      return {2.6e-3 / 8, 1e-6, 3.8e-3 / 8, 2.6e-3 / 8};
    default:
      return {2e-6, 1e-6, 1e-5, 1e-5};
  }
}

// Forward and backward of a case against the oracle; every output element written, nothing beside it.
inline void check_case(const AttentionCase& c, const RunOptions& options = {}, double slack = 1.0, double floor = 0.0) {
  Attention a(c);
  const Oracle oracle(a);
  const AttentionTensors forward = a.with_outputs();
  run_cpu(a.problem, forward, options);
  const AttentionTensors t = a.with_gradients(forward);
  run_cpu(a.problem, t, options);
  const AttentionTensors& o = oracle.tensors;
  Bars bars = bars_of(c.problem.dtype);
  if (c.out_float32) bars.out = bars_of(DType::kFloat32).out;
  expect_close(values(t.out, a.out_shape), values(o.out, a.out_shape), slack * bars.out, floor, "out");
  expect_close(values(as_canonical(t.lse), a.lse_shape), values(as_canonical(o.lse), a.lse_shape), slack * bars.lse,
               1.0, "lse");
  expect_close(values(t.dq, a.q_shape), values(o.dq, a.q_shape), slack * bars.dq_dk, floor, "dq");
  expect_close(values(t.dk, a.k_shape), values(o.dk, a.k_shape), slack * bars.dq_dk, floor, "dk");
  expect_close(values(t.dv, a.v_shape), values(o.dv, a.v_shape), slack * bars.dv, floor, "dv");
  if (a.problem.has_sinks) {
    expect_close(values(a.dsinks(t), a.sinks_shape()), values(a.dsinks(o), a.sinks_shape()), slack * bars.dq_dk,
                 std::max(floor, 1.0), "dsinks");
  }
  for (const auto& [tensor, shape] : {std::pair(t.out, a.out_shape), std::pair(t.dq, a.q_shape),
                                      std::pair(t.dk, a.k_shape), std::pair(t.dv, a.v_shape)}) {
    EXPECT_EQ(a.arena.written(tensor.data), elements(shape));
  }
}

// The instruction sets of this build that this machine has; use(target) makes the backend run on one.
inline std::vector<int64_t> targets() {
  std::vector<int64_t> all;
  const int64_t usable = HWY_TARGETS & hwy::SupportedTargets();
  for (int bit = 0; bit < 63; ++bit) {
    if ((usable >> bit & 1) != 0) all.push_back(int64_t{1} << bit);
  }
  return all;
}

class ChosenTarget {
 public:
  explicit ChosenTarget(int64_t target) { hwy::DisableTargets(~target); }
  ~ChosenTarget() { hwy::DisableTargets(0); }
  ChosenTarget(const ChosenTarget&) = delete;
  ChosenTarget& operator=(const ChosenTarget&) = delete;
};

}  // namespace plait::testing
