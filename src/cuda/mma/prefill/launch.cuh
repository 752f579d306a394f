// Chooses the order of the blocks and launches one tile's prefill kernel.
// Called by variant.cu.in's translation units.
#pragma once

#include "cuda/mma/prefill/kernel.cuh"
#include "cuda/mma/prefill/prefill.hpp"
#include "cuda/runtime/launch.cuh"

namespace plait::cuda::mma {

template <class T, int kHeadDim, int kChoice>
void launch_prefill_tile(const AttentionProblem& p, const AttentionTensors& t, int64_t cache_rows,
                         cudaStream_t stream) {
  constexpr catalog::PrefillTile kTile = catalog::prefill_tiles(kHeadDim)[kChoice];
  static_assert(sizeof(PrefillStorage<T, kTile>) == kTile.smem_bytes() && sizeof(PrefillWork) <= kTile.kWorkBytes);
  const int64_t blocks = tiles_bound(p, kTile.rows(), false) * p.heads_q;
  if (blocks == 0) return;
  const RowLayout k = row_layout(p, t.k, p.head_dim), v = row_layout(p, t.v, p.head_dim_v);
  using Loader = typename PrefillMainloop<T, kTile>::KeyLoader;
  const bool key_rows = Loader::steps_evenly(k) && Loader::steps_evenly(v);
  const ScoreScale score = ScoreScale::of(p);
  const PrefillParams params{p,
                             t,
                             row_layout(p, t.q, p.head_dim),
                             k,
                             v,
                             row_layout(p, t.out, p.head_dim_v, dtype_bytes(p.out_dtype)),
                             key_rows,
                             key_rows && !score.transform && k.dim == kHeadDim && v.dim == kHeadDim,
                             score,
                             prefill_order(p, kTile.rows(), cache_rows)};
  launch(prefill_kernel<T, kHeadDim, kChoice>, blocks, kTile.threads(), static_cast<int>(kTile.smem_bytes()), stream,
         params);
}

template <class T, int kHeadDim>
void launch_prefill(const AttentionProblem& problem, const AttentionTensors& tensors, int64_t smem_limit_bytes,
                    int64_t cache_rows, cudaStream_t stream) {
  if (catalog::prefill_tiles(kHeadDim)[0].fits(smem_limit_bytes)) {
    launch_prefill_tile<T, kHeadDim, 0>(problem, tensors, cache_rows, stream);
  } else {
    launch_prefill_tile<T, kHeadDim, 1>(problem, tensors, cache_rows, stream);
  }
}

}  // namespace plait::cuda::mma
