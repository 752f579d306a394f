// Whether decode serves a problem, and when it is faster than prefill. Plain C++, no CUDA call.
// Called by plan.cpp of the CUDA backends.
#pragma once

#include "core/problem.hpp"
#include "plait/plan.hpp"

namespace plait::cuda::mma {

// For a forward problem that asks for no strategy: sets kSplitKv where that is faster, with the reason.
void choose_split(const AttentionProblem& problem, const DeviceInfo& device, Plan& plan);

// Whether split_kv is faster than split_q. False where it does not serve the problem, or where there is nothing to do.
bool split_kv_is_faster(const AttentionProblem& problem, const DeviceInfo& device);

// About how many clocks split_kv takes; infinite where its counters do not hold the problem.
double split_kv_clocks(const AttentionProblem& problem, const DeviceInfo& device);

// Tiles, splits, workspace and reasons of strategy split_kv. Throws where the problem is too large for its counters.
void plan_decode(const AttentionProblem& problem, const DeviceInfo& device, Plan& plan);

// Whether the kernel's counters hold a cache step. If not, the plan becomes one of cuda_naive, or the call is refused
// where it asks for cuda_mma or for split_kv.
bool cache_served(const AttentionProblem& problem, const DeviceInfo& device, Plan& plan);

}  // namespace plait::cuda::mma
