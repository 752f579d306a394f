// The CUDA backends as the rest of the library sees them: no CUDA header, and all of it exists in a build without CUDA.
// Called by api/: the registry, DeviceInfo::cuda, merge_states.
#pragma once

#include "core/registry.hpp"
#include "core/validate.hpp"

namespace plait::cuda {

// Whether this build has the kernels. Without them the functions that launch or query throw kUnsupported.
bool built();

DeviceInfo device_info(int32_t index);
int32_t device_count() noexcept;

// Planning: tiles, workspace bytes and reasons; no CUDA call, always built.
void plan_attention(const AttentionProblem& problem, const DeviceInfo& device, Plan& plan);
void plan_premix(const PremixProblem& problem, const DeviceInfo& device, Plan& plan);
bool plan_premixes(std::span<const PremixProblem> problems, const DeviceInfo& device, Plan& plan);
void plan_collapse(const CollapseProblem& problem, const DeviceInfo& device, Plan& plan);
void plan_kvcache(const KvCacheProblem& problem, const DeviceInfo& device, Plan& plan);

// Running a plan of cuda_naive or cuda_mma, on the tensors' device and executor.stream.
void run_attention(const Plan& plan, const AttentionProblem& problem, const AttentionTensors& tensors, void* workspace,
                   const Executor& executor);
void run_premix(const Plan& plan, const PremixProblem& problem, const PremixTensors& tensors, void* workspace,
                const Executor& executor);
void run_premixes(const Plan& plan, std::span<const PremixProblem> problems, std::span<const PremixTensors> tensors,
                  void* workspace, const Executor& executor);
void run_collapse(const Plan& plan, const CollapseProblem& problem, const CollapseTensors& tensors, void* workspace,
                  const Executor& executor);
void run_kvcache(const Plan& plan, const KvCacheProblem& problem, const KvCacheTensors& tensors, void* workspace,
                 const Executor& executor);

void merge_states(const MergeArgs& args, const AttentionOutputs& outputs, const Executor& executor);
void merge_states_backward(const MergeArgs& args, const AttentionOutputs& outputs, const TensorView& dout,
                           const TensorView* dlse, const TensorView* douts, const TensorView* dlses,
                           const Executor& executor);

}  // namespace plait::cuda
