// Encodes the tensor maps, chooses the order of the row tiles and launches the prefill kernel.
// Called by variant.cu.in's translation units.
#pragma once

#include "cuda/runtime/launch.cuh"
#include "cuda/sm90/prefill/kernel.cuh"
#include "cuda/sm90/prefill/order.hpp"
#include "cuda/sm90/prefill/prefill.hpp"
#include "cuda/sm90/tensor_map.hpp"

namespace plait::cuda::sm90 {

template <class T, size_t kIndex>
void launch_tile(const AttentionProblem& p, const AttentionTensors& t, const PrefillLayouts& layouts,
                 const KeyRanges& ranges, int64_t cache_rows, int multiprocessors, void* workspace,
                 cudaStream_t stream) {
  constexpr catalog::Sm90PrefillTile kTile = catalog::kSm90PrefillTiles[kIndex];
  static_assert(sizeof(PrefillStorage<T, kTile>) <= kTile.smem_bytes());
  const int64_t row_tiles = tiles_bound(p, kTile.rows(), false) * p.heads_q,
                works = row_tiles * std::max(1, ranges.count);
  if (works == 0) return;
  if (counts_row_tiles(p)) check(cudaMemsetAsync(workspace, 0, sizeof(unsigned), stream), "cudaMemsetAsync");
  const bool copies_out = layouts.out && p.out_dtype == p.dtype;
  const PrefillParams params{
      .q = row_tile_map(t.q, layouts.q.value()),
      .k = row_tile_map(t.k, layouts.k.value()),
      .v = row_tile_map(t.v, layouts.v.value()),
      .copied_out = copies_out ? row_tile_map(t.out, *layouts.out) : RowTileMap{},
      .problem = p,
      .tensors = t,
      .out = row_layout(p, t.out, p.head_dim_v, dtype_bytes(p.out_dtype)),
      .copies_out = copies_out,
      .score = ScoreScale::of(p),
      .order = row_tile_order(p, kTile.rows(), cache_rows, multiprocessors, ranges.count > 0),
      .ranges = range_params(p, ranges, layouts.group, row_tiles),
      .works = static_cast<unsigned>(works),
      .issued = counts_row_tiles(p) ? static_cast<unsigned*>(workspace) : nullptr,
      .in_turn = sequence_keys(p) > kTile.in_turn_above,
  };
  launch(prefill_kernel<T, kIndex>, std::min<int64_t>(works, multiprocessors), kTile.threads(),
         static_cast<int>(kTile.smem_bytes()), stream, params);
}

template <class T, int kHeadDim>
void launch_prefill(const AttentionProblem& p, const AttentionTensors& t, const PrefillLayouts& layouts,
                    const KeyRanges& ranges, int64_t cache_rows, int multiprocessors, void* workspace,
                    cudaStream_t stream) {
  constexpr size_t kEven = catalog::sm90_prefill_tile_index(kHeadDim, false),
                   kRagged = catalog::sm90_prefill_tile_index(kHeadDim, true);
  const auto launch_one = layouts.tile_index == kEven ? launch_tile<T, kEven> : launch_tile<T, kRagged>;
  launch_one(p, t, layouts, ranges, cache_rows, multiprocessors, workspace, stream);
}

}  // namespace plait::cuda::sm90
