// Turns a problem into the decode kernel's parameters and launches one tile's kernel.
// Called by variant.cu.in's translation units.
#pragma once

#include <bit>
#include <tuple>

#include "cuda/mma/decode/cluster.cuh"
#include "cuda/mma/decode/decode.hpp"
#include "cuda/mma/decode/kernel.cuh"
#include "cuda/runtime/launch.cuh"

namespace plait::cuda::mma {

inline DecodeTensor decode_tensor(const AttentionProblem& p, const CanonicalTensor& t, const RowLayout& layout) {
  return {t.data,       t.batch_stride, t.head_stride, layout.seq_stride, 0, p.joint_passes() > 1 ? t.pseudo_stride : 0,
          t.dim_stride, layout.dim,     layout.path};
}

// Rows in groups: `block_stride` from group to group, `row_stride` in one.
inline void set_groups(DecodeTensor& t, int64_t block_stride, int64_t row_stride) {
  t.block_stride = block_stride, t.row_stride = row_stride;
}

inline void set_keys(DecodeParams& params, const AttentionProblem& p, const AttentionTensors& t) {
  const RowLayout k = row_layout(p, t.k, p.head_dim), v = row_layout(p, t.v, p.head_dim_v);
  params.vectors = k.path != LoadPath::kAny && v.path != LoadPath::kAny;
  params.k = decode_tensor(p, t.k, k), params.v = decode_tensor(p, t.v, v);
  params.key_group_log2 = -1;
  if (p.page_size > 0) {
    params.key_group = static_cast<int>(p.page_size);
    set_groups(params.k, t.k.batch_stride, t.k.seq_stride), set_groups(params.v, t.v.batch_stride, t.v.seq_stride);
    params.k.batch_stride = params.v.batch_stride = 0;
    params.table = t.cache.block_table, params.table_stride = t.cache.block_stride;
  } else if (k.per > 1 || v.per > 1) {
    params.key_group = static_cast<int>(p.pseudo_heads);
    set_groups(params.k, t.k.seq_stride, t.k.pseudo_stride), set_groups(params.v, t.v.seq_stride, t.v.pseudo_stride);
  }
  const auto group = static_cast<uint32_t>(params.key_group);
  if (std::has_single_bit(group)) params.key_group_log2 = std::countr_zero(group);
}

inline DecodeParams decode_params(const DecodeLayout& layout, const AttentionProblem& p, const AttentionTensors& t,
                                  int64_t cache_rows, void* workspace) {
  DecodeParams params{};
  params.ragged = p.cached, params.causal = p.causal;
  params.batch = static_cast<int>(p.batch), params.units = static_cast<int>(layout.units);
  params.row_tiles = static_cast<int>(layout.row_tiles), params.group = static_cast<int>(layout.group);
  params.by_group = Divisor::of(layout.group);
  params.rows = static_cast<int>(layout.rows), params.tile_rows = static_cast<int>(layout.tile_rows);
  params.mask_rows = static_cast<int>(p.seqlen_q * p.rows_per_position());
  params.key_capacity = static_cast<int>(layout.keys);
  params.split_keys = static_cast<int>(layout.split_keys), params.splits = static_cast<int>(layout.splits);
  params.unit_log2 = layout.clusters.unit_log2(), params.cluster_log2 = layout.clusters.blocks_log2;
  params.slice_log2 = layout.slice_log2, params.spread = layout.clusters.spread ? 1 : 0;
  params.window_left = p.window_left, params.window_right = p.window_right;
  params.token_group =
      p.mode == HeadMode::kInterleaved && p.mask == PseudoMask::kToken ? static_cast<int>(p.pseudo_heads) : 1;
  params.passes = static_cast<int>(p.joint_passes());
  params.score = ScoreScale::of(p);
  set_keys(params, p, t);
  const int64_t per = p.rows_per_position();
  params.rows_in_group = static_cast<int>(per);
  for (const auto& [to, from, dim, bytes] : {std::tuple{&params.q, &t.q, p.head_dim, int64_t{2}},
                                             {&params.out, &t.out, p.head_dim_v, dtype_bytes(p.out_dtype)}}) {
    *to = decode_tensor(p, *from, row_layout(p, *from, dim, bytes));
    if (per > 1) set_groups(*to, from->seq_stride, from->pseudo_stride);
  }
  params.seqlens = t.cache.seqlens, params.batch_idx = t.cache.batch_idx;
  params.cache_rows = cache_rows, params.new_keys = p.new_keys;
  if (!params.ragged) {
    params.keys = params.keys_of(params.key_capacity, layout.tile.step_keys);
    params.shares = Shares::of(static_cast<unsigned>(p.batch * layout.units * params.keys.steps),
                               static_cast<unsigned>(layout.workers), layout.split_keys > 0 ? 1 : kFewestSteps);
  }
  char* at = static_cast<char*>(workspace);
  params.partial_out = reinterpret_cast<float*>(at);
  params.partial_stats = reinterpret_cast<float2*>(at + layout.out_bytes);
  params.arrivals = reinterpret_cast<int*>(at + layout.out_bytes + layout.stats_bytes);
  params.out_float = p.out_dtype == DType::kFloat32;
  params.lse = static_cast<float*>(t.lse.data);
  params.lse_batch_stride = t.lse.batch_stride, params.lse_head_stride = t.lse.head_stride;
  params.lse_row_stride = t.lse.row_stride;
  params.sinks = p.has_sinks ? static_cast<const float*>(t.sinks) : nullptr, params.sinks_stride = t.sinks_stride;
  return params;
}

// Behind launch_prepare() without waiting for its end, where there was one and the GPU can.
template <class T, int kHeadDim, int kSize, int kGpu>
void launch_decode_tile(const DecodeParams& params, int64_t workers, int compute_capability, cudaStream_t stream) {
  constexpr catalog::DecodeTile kTile = catalog::decode_tiles(kHeadDim)[kSize][kGpu];
  static_assert(sizeof(DecodeStorage<T, kTile>) <= kTile.smem_bytes());
  launch_dependent(decode_kernel<T, kHeadDim, kSize, kGpu>, workers, kTile.threads(),
                   static_cast<int>(kTile.smem_bytes()), compute_capability, stream, params);
}

template <class T, int kHeadDim>
void launch_decode_clusters(const DecodeLayout& layout, const DecodeParams& params, cudaStream_t stream) {
  constexpr DecodeAccess kRows = DecodeAccess::kRows, kAny = DecodeAccess::kAny;
  const bool rows = params.vectors && params.key_group == 0 && params.passes == 1 && params.q.path != LoadPath::kAny;
  const auto units = static_cast<unsigned>(params.units);
  const dim3 grid(1U << layout.clusters.unit_log2(), layout.clusters.spread ? 2 * units : units,
                  static_cast<unsigned>(params.batch));
  const unsigned cluster = 1U << layout.clusters.blocks_log2;
  const auto go = [&]<catalog::ClusterBlock kBlock>() {
    static_assert(sizeof(DecodeStorage<T, catalog::cluster_tile(kHeadDim, kBlock)>) <=
                  catalog::cluster_tile(kHeadDim, kBlock).smem_bytes());
    launch_clusters(
        rows ? decode_cluster_kernel<T, kHeadDim, kBlock, kRows> : decode_cluster_kernel<T, kHeadDim, kBlock, kAny>,
        grid, cluster, layout.tile.threads(), static_cast<int>(layout.cluster_smem_bytes),
        layout.clusters.blocks_log2 > kPortableClusterLog2, stream, params);
  };
  switch (layout.clusters.block) {
    case catalog::ClusterBlock::kShared:
      return go.template operator()<catalog::ClusterBlock::kShared>();
    case catalog::ClusterBlock::kLong:
      return go.template operator()<catalog::ClusterBlock::kLong>();
    case catalog::ClusterBlock::kWide:
      return go.template operator()<catalog::ClusterBlock::kWide>();
  }
}

template <class T, int kHeadDim>
void launch_decode(const DecodeLayout& layout, const AttentionProblem& p, const AttentionTensors& t, int64_t cache_rows,
                   void* workspace, int compute_capability, Stream stream) {
  if (layout.rows == 0 || p.batch == 0) return;
  const DecodeParams params = decode_params(layout, p, t, cache_rows, workspace);
  if (layout.clusters.any()) {
    launch_decode_clusters<T, kHeadDim>(layout, params, stream);
    return;
  }
  const bool prepared = layout.arrivals > 0 || params.ragged;
  const auto go = [&]<int kSize, int kGpu>() {
    launch_decode_tile<T, kHeadDim, kSize, kGpu>(params, params.ragged ? layout.workers : params.shares.workers,
                                                 prepared ? compute_capability : 0, stream);
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
