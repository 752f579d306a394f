// Launches one tile's split_d forward kernel.
// Called by the translation units made from variant.cu.in.
#pragma once

#include "cuda/mma/prefill/launch.cuh"
#include "cuda/mma/split_d/forward_kernel.cuh"
#include "cuda/mma/split_d/split_d.hpp"

namespace plait::cuda::mma {

template <class T, int kOutDim, int kChoice>
void launch_split_d_tile(const AttentionProblem& p, const AttentionTensors& t, const KeyRanges& ranges,
                         int64_t cache_rows, cudaStream_t stream) {
  constexpr catalog::SplitDTile kTile = catalog::split_d_tiles(kOutDim)[kChoice];
  static_assert(sizeof(SplitDStorage<T, kTile>) == kTile.fixed_bytes() && sizeof(PrefillWork) <= kTile.kWorkBytes);
  const int64_t blocks = tiles_bound(p, kTile.rows, false) * p.heads_q;
  if (blocks == 0) return;
  const PrefillParams params{p,
                             t,
                             row_layout(p, t.q, p.head_dim),
                             row_layout(p, t.k, p.head_dim),
                             row_layout(p, t.v, p.head_dim_v),
                             row_layout(p, t.out, p.head_dim_v, dtype_bytes(p.out_dtype)),
                             false,
                             false,
                             ScoreScale::of(p),
                             prefill_order(p, kTile.rows, cache_rows)};
  launch(split_d_forward_kernel<T, kOutDim, kChoice>, blocks * ranges.count, kTile.threads(),
         static_cast<int>(kTile.smem_bytes(p.head_dim)), stream,
         SplitDParams{params, ranges, static_cast<unsigned>(blocks)});
}

// Compiles the tiles of the bucket (the last of a list may repeat) and launches `chosen` of them.
template <class T, int kOutDim, int kChoice = 0>
void launch_chosen_split_d_tile(const catalog::SplitDTile& chosen, const AttentionProblem& p, const AttentionTensors& t,
                                const KeyRanges& ranges, int64_t cache_rows, cudaStream_t stream) {
  constexpr const catalog::SplitDTiles& kTiles = catalog::split_d_tiles(kOutDim);
  if (chosen == kTiles[kChoice]) {
    return launch_split_d_tile<T, kOutDim, kChoice>(p, t, ranges, cache_rows, stream);
  }
  if constexpr (kChoice + 1 < kTiles.size() && !(kTiles[kChoice + 1] == kTiles[kChoice])) {
    launch_chosen_split_d_tile<T, kOutDim, kChoice + 1>(chosen, p, t, ranges, cache_rows, stream);
  } else {
    throw Error(ErrorCode::kInternal, "device", "a tile was planned that the bucket does not have");
  }
}

template <class T, int kOutDim>
void launch_split_d_forward(const AttentionProblem& problem, const AttentionTensors& tensors, const KeyRanges& ranges,
                            int64_t smem_limit_bytes, int64_t cache_rows, cudaStream_t stream) {
  const catalog::SplitDTile* tile = catalog::split_d_tile(problem.head_dim, problem.head_dim_v, smem_limit_bytes);
  if (tile == nullptr) throw Error(ErrorCode::kInternal, "device", "planned for more shared memory than it has");
  launch_chosen_split_d_tile<T, kOutDim>(*tile, problem, tensors, ranges, cache_rows, stream);
}

}  // namespace plait::cuda::mma
