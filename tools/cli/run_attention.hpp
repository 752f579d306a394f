// One attention problem with its tensors on the host, and how to run it on a backend of the CPU or of a GPU.
// Called by check and bench.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "gpu.hpp"
#include "problem.hpp"
#include "tensors.hpp"

namespace plait::cli {

// Inputs and the gradients that flow in. `sinks` and the cu_seqlens are empty tensors where the problem has none.
struct Inputs {
  Tensor q, k, v, sinks, cu_q, cu_k, dout, dlse;
};

// Outputs of one forward and backward run, and the plans that made them.
struct Results {
  Tensor out, lse, dq, dk, dv, dsinks;
  Plan forward_plan, backward_plan;
};

// Elements of q, k, v, out and lse together.
double element_count(const Problem& problem);

// N(0, 1) numbers in every floating tensor; q is multiplied by `q_factor`.
Inputs random_inputs(const Problem& problem, std::mt19937_64& random, double q_factor);
// The same numbers as float64.
Inputs to_float64(const Inputs& inputs);
// Allocates the outputs.
Results make_results(const Problem& problem);

AttentionArgs attention_args(const Problem& problem, const Inputs& inputs);
// --strategy and --split-size are about the forward; the backward chooses for itself.
AttentionArgs without_strategy(AttentionArgs args);
AttentionBackwardArgs backward_args(const Problem& problem, const Inputs& inputs, const Results& results);

// Plans once, then only runs. On a GPU it works on copies in device memory: a run is done, and its results are where
// Results has them, after collect().
class Runner {
 public:
  Runner(const Problem& problem, const Inputs& inputs, Results& results);
  void forward();
  void backward();
  void collect();
  // Milliseconds of one call of `body`, which calls forward() or backward().
  double time_ms(const std::function<void()>& body) const;

 private:
  void move_to_gpu(const Problem& problem, const Inputs& inputs);
  Executor executor() const;

  AttentionArgs args_;
  AttentionBackwardArgs backward_args_;
  AttentionOutputs outputs_;
  AttentionGrads grads_;
  Results& results_;
  void *forward_workspace_ = nullptr, *backward_workspace_ = nullptr;
  Buffer host_forward_, host_backward_;
  std::optional<GpuMemory> gpu_;
  std::vector<std::pair<const Tensor*, void*>> on_gpu_;  // outputs and where they are in device memory
};

}  // namespace plait::cli
