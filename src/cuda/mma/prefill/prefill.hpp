// Tensor-core forward attention, parallel over query tiles (split_q).
// Called by the cuda_mma backend's run().
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/problem.hpp"

namespace plait::cuda::mma {

// O and LSE of a plain, joint or interleaved problem, dense, packed, or over a dense KV cache of `cache_rows` rows (0:
// no cache), whose lengths are read on the device. T: __half or __nv_bfloat16, as problem.dtype says; kHeadDim: a
// bucket of catalog::kPrefillTiles that holds head_dim and head_dim_v. smem_limit_bytes:
// DeviceInfo::smem_per_block_bytes; it chooses the tile. No workspace, no synchronisation.
template <class T, int kHeadDim>
void launch_prefill(const AttentionProblem& problem, const AttentionTensors& tensors, int64_t smem_limit_bytes,
                    int64_t cache_rows, cudaStream_t stream);

}  // namespace plait::cuda::mma
