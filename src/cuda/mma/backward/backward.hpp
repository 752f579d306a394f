// Gradients of attention on tensor cores: dq, dk, dv (dsinks is made elsewhere, from delta).
// Called by the CUDA runner.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/problem.hpp"
#include "cuda/mma/backward/workspace.hpp"

namespace plait::cuda::mma {

// T: __half or __nv_bfloat16. kHeadDim: the bucket of max(head_dim, head_dim_v). Writes delta, dq, dk and dv; every
// element exactly once. fp32 dout is rounded to T. `workspace`: backward_workspace_bytes(), 64-byte aligned, any
// contents; delta is at its beginning.
template <class T, int kHeadDim>
void launch_backward(const AttentionProblem& problem, const AttentionTensors& tensors, void* workspace,
                     int64_t smem_limit_bytes, cudaStream_t stream);

}  // namespace plait::cuda::mma
