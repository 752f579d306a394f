// Forward attention on wgmma and TMA, parallel over query tiles (split_q).
// Called by the cuda_sm90 backend's run().
#pragma once

#include <cuda_runtime_api.h>

#include "core/problem.hpp"

namespace plait::cuda::sm90 {

// Whether the copy engine can read q, k and v: unit strides and 16-byte alignment of rows.
bool prefill_reads(const AttentionTensors& tensors);

// O and LSE of a plain problem, dense or packed, without a cache. T: __half or __nv_bfloat16, as problem.dtype says;
// kHeadDim: a bucket of catalog::kSm90PrefillTiles that holds head_dim and head_dim_v. multiprocessors: of the device.
// No workspace, no synchronisation.
template <class T, int kHeadDim>
void launch_prefill(const AttentionProblem& problem, const AttentionTensors& tensors, int multiprocessors,
                    cudaStream_t stream);

}  // namespace plait::cuda::sm90
