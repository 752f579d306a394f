// Chooses the order of the blocks and launches one tile's prefill kernel.
// Called by variant.cu.in's translation units.
#pragma once

#include "cuda/mma/prefill/kernel.cuh"
#include "cuda/mma/prefill/prefill.hpp"
#include "cuda/runtime/launch.cuh"

namespace plait::cuda::mma {

// Keys and values that blocks running at the same time should share: half of an H200's or an A100's L2 cache.
inline constexpr int64_t kSectionBytes = int64_t{32} << 20;
// Blocks in a section that keep its end short: eight times the multiprocessors of a large GPU, since the longest causal
// tile takes twice the average.
inline constexpr int64_t kSectionBlocks = 1056;

inline PrefillOrder prefill_order(const AttentionProblem& p, int64_t tile_rows, int64_t cache_rows = 0) {
  const int64_t tiles = p.packed ? tiles_bound(p, tile_rows, false) : tiles_bound(p, tile_rows, false) / p.batch;
  const int64_t units = p.batch * p.heads_kv, group = p.heads_q / p.heads_kv;
  const int64_t unit_bytes =
      p.seqlen_kv * (p.mode == HeadMode::kPlain ? 1 : p.pseudo_heads) * (p.head_dim + p.head_dim_v) * 2;
  const int64_t wanted = std::max({int64_t{1}, kSectionBytes / std::max(unit_bytes, int64_t{1}),
                                   kSectionBlocks / std::max(tiles * group, int64_t{1})});
  const int64_t sections = std::max(int64_t{1}, units / wanted);
  const int64_t per_section = std::max(int64_t{1}, (units + sections - 1) / sections);
  const int64_t last_section = units == 0 ? 0 : (units - 1) / per_section;
  return {static_cast<int>(group),
          static_cast<int>(per_section),
          static_cast<int>(tiles),
          static_cast<int>(last_section),
          cache_rows,
          Divisor::of(per_section * group * tiles),
          Divisor::of(per_section * group),
          Divisor::of((units - last_section * per_section) * group),
          Divisor::of(group),
          Divisor::of(p.heads_q),
          Divisor::of(p.heads_kv)};
}

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
