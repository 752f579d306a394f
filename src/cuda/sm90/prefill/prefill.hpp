// Forward attention on wgmma and TMA, parallel over query tiles, and over ranges of their keys.
// Called by the cuda_sm90 backend's run().
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/sm90/prefill/layouts.hpp"
#include "cuda/sm90/prefill/ranges.hpp"

namespace plait::cuda::sm90 {

// O and LSE of a problem with complete layouts. T: __half or __nv_bfloat16, as problem.dtype says; kHeadDim: a bucket
// of catalog::kSm90PrefillTiles that holds head_dim and head_dim_v. With ranges: fp32 results of each, one after the
// other from the tensors' on, of range_problem(). cache_rows: of a dense cache, else 0; multiprocessors: of
// the device; workspace: prefill_workspace_bytes(). No synchronisation.
template <class T, int kHeadDim>
void launch_prefill(const AttentionProblem& problem, const AttentionTensors& tensors, const PrefillLayouts& layouts,
                    const KeyRanges& ranges, int64_t cache_rows, int multiprocessors, void* workspace,
                    cudaStream_t stream);

}  // namespace plait::cuda::sm90
