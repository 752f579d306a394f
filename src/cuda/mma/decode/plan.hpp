// Whether decode serves a problem, and when it is faster than prefill. Plain C++, no CUDA call.
// Called by plan.cpp of the CUDA backends.
#pragma once

#include "core/problem.hpp"
#include "plait/plan.hpp"

namespace plait::cuda::mma {

// For a forward problem that asks for no strategy: sets kSplitKv where that is faster, with the reason.
void choose_split(const AttentionProblem& problem, const DeviceInfo& device, Plan& plan);

// About how many clocks split_kv takes; infinite where its counters do not hold the problem. A share of them: those of
// one multiprocessor for a split of `keys` keys of one sequence, with a fixed split_size, whatever the batch.
double split_kv_clocks(const AttentionProblem& problem, const DeviceInfo& device);
double split_clocks(const AttentionProblem& problem, const DeviceInfo& device, int64_t keys);

// Tiles, splits, workspace and reasons of strategy split_kv. Throws where the problem is too large for its counters.
void plan_decode(const AttentionProblem& problem, const DeviceInfo& device, Plan& plan);

// Whether the kernel's counters hold a cache step. If not, the plan becomes one of cuda_naive, or the call is refused
// where it asks for cuda_mma or for split_kv.
bool cache_served(const AttentionProblem& problem, const DeviceInfo& device, Plan& plan);

}  // namespace plait::cuda::mma
