// Premix and collapse on tensor cores, for fp16 and bf16: what the CUDA backends launch.
// Called by cuda_mma's run functions. Which problems are served, and how large a workspace must be, says schedule.hpp.
// A call only launches kernels on `stream`; `workspace` is 64-byte aligned device memory.
#pragma once

#include <cuda_runtime_api.h>

#include <span>

#include "cuda/iha/schedule.hpp"

namespace plait::cuda::iha {

// One to three premixes of one dtype (Q, K, V) in one launch.
void launch_premix_forward(std::span<const PremixProblem> problems, std::span<const PremixTensors> tensors,
                           const Limits& limits, cudaStream_t stream);
// dx and dw of all in one read of dy and x, and a small launch that sums dw in a fixed order.
void launch_premix_backward(std::span<const PremixProblem> problems, std::span<const PremixTensors> tensors,
                            void* workspace, const Limits& limits, cudaStream_t stream);

void launch_collapse_forward(const CollapseProblem& problem, const CollapseTensors& tensors, const Limits& limits,
                             cudaStream_t stream);
void launch_collapse_backward(const CollapseProblem& problem, const CollapseTensors& tensors, void* workspace,
                              const Limits& limits, cudaStream_t stream);

}  // namespace plait::cuda::iha
