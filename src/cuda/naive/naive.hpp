// The cuda_naive backend: every op and option on CUDA cores, deterministic; the oracle on the device.
// Called by the CUDA registry and by the tests of faster kernels. Pointers are device memory, or host memory that the
// device can read; a call only launches kernels on `stream`: no allocation, no synchronisation. `workspace` holds at
// least the bytes that the op's function of workspace.hpp returns, 64-byte aligned.
#pragma once

#include <cuda_runtime_api.h>

#include "core/problem.hpp"
#include "cuda/naive/workspace.hpp"

namespace plait::cuda::naive {

// Attention with keys and values of the caller; dense or packed, all modes.
void attention_forward(const AttentionProblem& problem, const AttentionTensors& tensors, cudaStream_t stream);
void attention_backward(const AttentionProblem& problem, const AttentionTensors& tensors, void* workspace,
                        cudaStream_t stream);

// Premix with RoPE.
void premix_forward(const PremixProblem& problem, const PremixTensors& tensors, cudaStream_t stream);
void premix_backward(const PremixProblem& problem, const PremixTensors& tensors, void* workspace, cudaStream_t stream);

void collapse_forward(const CollapseProblem& problem, const CollapseTensors& tensors, cudaStream_t stream);
void collapse_backward(const CollapseProblem& problem, const CollapseTensors& tensors, void* workspace,
                       cudaStream_t stream);

// A step over a dense or paged cache: appends in place, then attends. A new key without a place (past the cache, or on
// a page or row that does not exist) is dropped; a key of such a page is masked.
void attention_with_kvcache(const KvCacheProblem& problem, const KvCacheTensors& tensors, void* workspace,
                            cudaStream_t stream);

// merge_states of attention.hpp and its gradients; `outputs` of the backward are the results of the forward. Views hold
// device pointers. More parts than kMostMergeParts are refused in the forward.
inline constexpr int kMostMergeParts = 256;
void merge_states(const MergeArgs& args, const AttentionOutputs& outputs, cudaStream_t stream);
void merge_states_backward(const MergeArgs& args, const AttentionOutputs& outputs, const TensorView& dout,
                           const TensorView* dlse, const TensorView* douts, const TensorView* dlses,
                           cudaStream_t stream);

}  // namespace plait::cuda::naive
