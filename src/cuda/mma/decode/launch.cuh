// Turns a problem into the decode kernel's parameters and launches one tile's kernel.
// Called by variant.cu.in's translation units.
#pragma once

#include <bit>

#include "cuda/mma/decode/decode.hpp"
#include "cuda/mma/decode/kernel.cuh"
#include "cuda/runtime/launch.cuh"

namespace plait::cuda::mma {

inline KeyMap key_map(const AttentionProblem& p, const AttentionTensors& t, const RowLayout& k, const RowLayout& v,
                      int64_t cache_rows) {
  KeyMap map;
  if (p.page_size > 0) {
    map.group = static_cast<int32_t>(p.page_size);
    map.table = t.cache.block_table;
    map.table_stride = t.cache.block_stride;
    map.table_entries = cache_rows;
    map.k_block_stride = t.k.batch_stride, map.k_row_stride = t.k.seq_stride;
    map.v_block_stride = t.v.batch_stride, map.v_row_stride = t.v.seq_stride;
  } else if (k.per > 1 || v.per > 1) {
    map.group = std::max(k.per, v.per);
    map.k_block_stride = t.k.seq_stride, map.k_row_stride = t.k.pseudo_stride;
    map.v_block_stride = t.v.seq_stride, map.v_row_stride = t.v.pseudo_stride;
  }
  if (map.group > 0 && std::has_single_bit(static_cast<uint32_t>(map.group))) {
    map.group_log2 = std::countr_zero(static_cast<uint32_t>(map.group));
  }
  return map;
}

inline DecodeParams decode_params(const DecodeLayout& layout, const AttentionProblem& p, const AttentionTensors& t,
                                  int64_t cache_rows, void* workspace) {
  DecodeParams params{};
  params.problem = p;
  params.tensors = t;
  params.q = row_layout(p, t.q, p.head_dim);
  params.k = row_layout(p, t.k, p.head_dim);
  params.v = row_layout(p, t.v, p.head_dim_v);
  params.out = row_layout(p, t.out, p.head_dim_v, dtype_bytes(p.out_dtype));
  params.vectors = params.k.path != LoadPath::kAny && params.v.path != LoadPath::kAny;
  params.map = key_map(p, t, params.k, params.v, cache_rows);
  params.score = ScoreScale::of(p);
  params.cache_rows = cache_rows;
  params.group = static_cast<int>(layout.group);
  params.rows = static_cast<int>(layout.rows);
  params.row_tiles = static_cast<int>(layout.row_tiles);
  params.tile_rows = static_cast<int>(layout.tile_rows);
  params.units = static_cast<int>(layout.units);
  params.rows_per_position = static_cast<int>(p.rows_per_position());
  params.split_keys = static_cast<int>(layout.split_keys);
  params.splits = static_cast<int>(layout.splits);
  char* at = static_cast<char*>(workspace);
  params.partial_out = reinterpret_cast<float*>(at);
  params.partial_stats = reinterpret_cast<float2*>(at + layout.out_bytes);
  params.arrivals = reinterpret_cast<int*>(at + layout.out_bytes + layout.stats_bytes);
  return params;
}

// Behind launch_prepare() without waiting for its end, where the GPU can.
template <class T, int kHeadDim, int kSize, int kGpu>
void launch_decode_tile(const DecodeParams& params, int64_t workers, int compute_capability, cudaStream_t stream) {
  constexpr catalog::DecodeTile kTile = catalog::decode_tiles(kHeadDim)[kSize][kGpu];
  static_assert(sizeof(DecodeStorage<T, kTile>) <= kTile.smem_bytes());
  launch_dependent(decode_kernel<T, kHeadDim, kSize, kGpu>, workers, kTile.threads(),
                   static_cast<int>(kTile.smem_bytes()), compute_capability, stream, params);
}

template <class T, int kHeadDim>
void launch_decode(const DecodeLayout& layout, const AttentionProblem& p, const AttentionTensors& t, int64_t cache_rows,
                   void* workspace, int compute_capability, Stream stream) {
  if (layout.rows == 0 || p.batch == 0) return;
  const DecodeParams params = decode_params(layout, p, t, cache_rows, workspace);
  const auto go = [&]<int kSize, int kGpu>() {
    launch_decode_tile<T, kHeadDim, kSize, kGpu>(params, layout.workers, compute_capability, stream);
  };
  const bool large_gpu = layout.choice.gpu == 0;
  if constexpr (catalog::decode_tiles(kHeadDim)[1][0].row_blocks > 1) {
    if (layout.choice.size == 1) {
      large_gpu ? go.template operator()<1, 0>() : go.template operator()<1, 1>();
      return;
    }
  }
  large_gpu ? go.template operator()<0, 0>() : go.template operator()<0, 1>();
}

}  // namespace plait::cuda::mma
