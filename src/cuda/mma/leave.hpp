// What becomes of a call that the catalog gave to tensor cores and that turns out too large for the kernels.
// Called by the planning of the CUDA backends; plain C++.
#pragma once

#include <string>

#include "core/problem.hpp"
#include "plait/plan.hpp"

namespace plait::cuda::mma {

// What the caller asked for of the planner's choices.
struct Asked {
  Backend backend;
  Strategy strategy;
  int64_t split_size;  // 0: none
};

// In the words of a refusal: what the call needs, what the backend has, and so what is missing.
struct Lack {
  std::string required, supported, missing;
};

// The plan becomes one of cuda_naive, with the reason. Throws Error kUnsupported where the caller asked for the plan's
// backend, or for a strategy or split_size, which cuda_naive does not have.
void leave_mma(const Asked& asked, const Lack& lack, Plan& plan);
void leave_mma(const AttentionProblem& problem, const Lack& lack, Plan& plan);

}  // namespace plait::cuda::mma
