// Tensor-core attention for head dims of 257 to 1024: the head dim is shared out over the warps of a block.
// Called by the cuda_mma backend's run().
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/problem.hpp"
#include "cuda/mma/split_d/ranges.hpp"

namespace plait::cuda::mma {

// O and LSE of a plain, joint or interleaved problem, dense, packed, or over a dense KV cache of `cache_rows` rows (0:
// no cache). T: __half or __nv_bfloat16. kOutDim: the bucket (catalog::kSplitDBuckets) of head_dim_v; any head_dim.
// smem_limit_bytes: of a block; it chooses the tile. With several ranges O and LSE have one more dimension outside, the
// range (not packed). No workspace, no synchronisation.
template <class T, int kOutDim>
void launch_split_d_forward(const AttentionProblem& problem, const AttentionTensors& tensors, const KeyRanges& ranges,
                            int64_t smem_limit_bytes, int64_t cache_rows, cudaStream_t stream);

// dq, dk and dv (dsinks is made elsewhere, from delta), bit-equal from run to run. kHeadDim: the bucket of
// max(head_dim, head_dim_v). fp32 dout is rounded to T. `workspace`: split_d_backward_workspace_bytes(), 64-byte
// aligned, any contents; delta is at its beginning.
template <class T, int kHeadDim>
void launch_split_d_backward(const AttentionProblem& problem, const AttentionTensors& tensors, void* workspace,
                             int64_t smem_limit_bytes, cudaStream_t stream);

}  // namespace plait::cuda::mma
