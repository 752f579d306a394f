// Encodes the tensor maps, chooses the order of the row tiles and launches the prefill kernel.
// Called by variant.cu.in's translation units.
#pragma once

#include "cuda/runtime/launch.cuh"
#include "cuda/sm90/prefill/kernel.cuh"
#include "cuda/sm90/prefill/prefill.hpp"
#include "cuda/sm90/tensor_map.hpp"

namespace plait::cuda::sm90 {

// Row tiles of one section, by blocks: few, so that their keys and values stay in the L2 cache (17 MB with 128 rows of
// head dim 128); two rounds, so that every block takes a long and a short one.
inline constexpr int64_t kSectionRounds = 2;
// Of packed problems, by the mean length: blocks take row tiles as they come, two ahead, which three rounds even out.
inline constexpr int64_t kPackedSectionRounds = 3;

template <class T, int kHeadDim>
void launch_prefill(const AttentionProblem& p, const AttentionTensors& t, const PrefillLayouts& layouts,
                    const KeyRanges& ranges, int64_t cache_rows, int multiprocessors, void* workspace,
                    cudaStream_t stream) {
  constexpr catalog::Sm90PrefillTile kTile = catalog::sm90_prefill_tile(kHeadDim);
  static_assert(sizeof(PrefillStorage<T, kTile>) <= kTile.smem_bytes());
  const int64_t row_tiles = tiles_bound(p, kTile.rows(), false) * p.heads_q,
                works = row_tiles * std::max(1, ranges.count);
  if (works == 0) return;
  const int64_t sequences = p.packed ? std::max<int64_t>(p.batch, 1) : 1;
  const int64_t keys = p.seqlen_kv * p.rows_per_position() / sequences;  // in the mean
  const int64_t rounds = p.packed ? kPackedSectionRounds : kSectionRounds;
  if (counts_row_tiles(p)) check(cudaMemsetAsync(workspace, 0, sizeof(unsigned), stream), "cudaMemsetAsync");
  const PrefillParams params{row_tile_map(t.q, layouts.q.value()),
                             row_tile_map(t.k, layouts.k.value()),
                             row_tile_map(t.v, layouts.v.value()),
                             p,
                             t,
                             row_layout(p, t.out, p.head_dim_v, dtype_bytes(p.out_dtype)),
                             ScoreScale::of(p),
                             mma::prefill_order(p, kTile.rows(), cache_rows, 0, rounds * multiprocessors),
                             range_params(p, ranges, layouts.group, row_tiles),
                             static_cast<unsigned>(works),
                             counts_row_tiles(p) ? static_cast<unsigned*>(workspace) : nullptr,
                             keys > kTile.in_turn_above};
  launch(prefill_kernel<T, kHeadDim>, std::min<int64_t>(works, multiprocessors), kTile.threads(),
         static_cast<int>(kTile.smem_bytes()), stream, params);
}

}  // namespace plait::cuda::sm90
