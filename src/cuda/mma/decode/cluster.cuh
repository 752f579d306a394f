// The decode kernel for few units on sm_90: the blocks of a cluster share a unit's keys, and merge their results
// through each other's shared memory. Called by launch.cuh.
#pragma once

#include "cuda/mma/decode/combine.cuh"
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/mbarrier.cuh"

namespace plait::cuda::mma {

// From the blocks' results to O and LSE: each block finishes a slice of the unit's rows x column groups, its items, and
// is sent the others' parts of it, to `received` behind its DecodeStorage: the kVector columns of [item][block], then
// reference and sum of [row][block].
template <class T, catalog::DecodeTile kTile>
struct ClusterMerge {
  using Loop = DecodeMainloop<T, kTile>;
  using Storage = DecodeStorage<T, kTile>;
  static constexpr int kColumnGroups = kTile.head_dim / kVector;

  const DecodeParams& p;
  Storage& storage;

  // By one thread, first of all: the barrier of what will be sent. Then cluster_arrive().
  __device__ __forceinline__ void expect() const {
    const int left = p.rows * kColumnGroups - (rank() << p.slice_log2);
    const int items = max(0, min(slice(), left));
    const int bytes = (items * static_cast<int>(sizeof(float4)) + p.rows * static_cast<int>(sizeof(float2)))
                      << p.cluster_log2;
    ptx::mbarrier_init(barrier(), 1);
    ptx::fence_mbarrier_init();
    ptx::mbarrier_arrive_expect(barrier(), bytes);
  }

  // Merges the warps, sends the parts, finishes the own slice. Called by the whole block, behind cluster_wait().
  __device__ __forceinline__ void run(int warp, int lane, const typename Loop::Output& out,
                                      SoftmaxRows<Loop::kRows>& rows) const {
    const Combine<T, kTile> combine{p, storage, warp, lane};
    combine.sum_quads(rows);
    __syncwarp();  // the warp has left its ring
    combine.stage(p.rows, out[0], rows, 0);
    __syncthreads();
    send(combine);
    ptx::mbarrier_wait_cluster(barrier(), 0);
    finish(combine);
  }

 private:
  static_assert(kTile.row_blocks == 1);
  __device__ __forceinline__ int blocks() const { return 1 << p.cluster_log2; }
  __device__ __forceinline__ int rank() const { return blockIdx.x & (blocks() - 1); }
  __device__ __forceinline__ unsigned unit() const { return blockIdx.z * p.units + (blockIdx.y >> p.spread); }
  __device__ __forceinline__ int slice() const { return 1 << p.slice_log2; }
  __device__ __forceinline__ uint32_t barrier() const { return ptx::shared_address(&storage.received); }
  __device__ __forceinline__ char* received() const { return reinterpret_cast<char*>(&storage + 1); }
  __device__ __forceinline__ int out_offset(int item, int block) const {
    return ((item << p.cluster_log2) + block) * static_cast<int>(sizeof(float4));
  }
  __device__ __forceinline__ int stats_offset(int row, int block) const {
    return out_offset(slice(), 0) + ((row << p.cluster_log2) + block) * static_cast<int>(sizeof(float2));
  }

  // Partial results in the workspace are [unit][cluster][item].
  __device__ __forceinline__ int64_t kept(int cluster, unsigned i) const {
    const int slot = (unit() << (p.unit_log2 - p.cluster_log2)) + cluster;
    return static_cast<int64_t>(slot) * p.rows * kColumnGroups + i;
  }

  __device__ __forceinline__ void send(const Combine<T, kTile>& combine) const {
    const uint32_t to = ptx::shared_address(received());
#pragma unroll 1
    for (unsigned i = threadIdx.x; i < static_cast<unsigned>(p.rows) * kColumnGroups; i += kTile.threads()) {
      const int row = i / kColumnGroups, group = i % kColumnGroups, owner = i >> p.slice_log2;
      const MergedRow merged = combine.merge_warps(row, group * kVector);
      ptx::send_cluster(ptx::cluster_address(to + out_offset(i & (slice() - 1), rank()), owner), merged.out,
                        ptx::cluster_address(barrier(), owner));
#pragma unroll 1
      for (int block = group; block < blocks(); block += kColumnGroups) {
        ptx::send_cluster(ptx::cluster_address(to + stats_offset(row, rank()), block),
                          make_float2(merged.reference, merged.sum), ptx::cluster_address(barrier(), block));
      }
    }
  }

  // Neighbouring lanes hold the parts of one item: first those of the cluster's blocks; where the unit has several
  // clusters then, in the last one's block that owns the slice, those of the clusters. Code that is there once, with
  // the way of one cluster in a line: it runs once, cold.
  __device__ __forceinline__ void finish(const Combine<T, kTile>& combine) const {
    const bool one_cluster = p.unit_log2 == p.cluster_log2;
    bool from_blocks = true;
#pragma unroll 1
    while (true) {
      const int parts_log2 = from_blocks ? p.cluster_log2 : p.unit_log2 - p.cluster_log2;
      const int part = threadIdx.x & ((1 << parts_log2) - 1);
      const bool whole = one_cluster || !from_blocks;
#pragma unroll 1
      for (int first = 0; first < slice(); first += kTile.threads() >> parts_log2) {
        const unsigned item = first + (threadIdx.x >> parts_log2), i = (rank() << p.slice_log2) + item;
        const int row = i / kColumnGroups, column = i % kColumnGroups * kVector;
        const bool inside = item < slice() && row < p.rows && column < p.out.dim;
        MergedRow merged;
        if (inside) {
          if (from_blocks) [[likely]] {
            const float2 stats = *reinterpret_cast<const float2*>(received() + stats_offset(row, part));
            merged = {stats.x, stats.y, *reinterpret_cast<const float4*>(received() + out_offset(item, part))};
          } else {
            const int64_t at = kept(part, i);
            const float2 stats = __ldcg(p.partial_stats + at);
            merged = {stats.x, stats.y, __ldcg(reinterpret_cast<const float4*>(p.partial_out) + at)};
          }
        }
        merge_lanes(merged, parts_log2);
        if (!inside || part != 0) continue;
        if (whole) [[likely]] {
          write_row<T>(p, storage.places[row], column, merged);
        } else {
          const int64_t at = kept(blockIdx.x >> p.cluster_log2, i);
          reinterpret_cast<float4*>(p.partial_out)[at] = merged.out;
          p.partial_stats[at] = make_float2(merged.reference, merged.sum);
        }
      }
      if (whole) [[likely]]
        return;
      ptx::wait_for_grid();  // the counters are zero
      if (!combine.is_last((unit() << p.cluster_log2) + rank(), 1 << (p.unit_log2 - p.cluster_log2))) return;
      from_blocks = false;
    }
  }

  // The same bits in all lanes.
  __device__ __forceinline__ static void merge_lanes(MergedRow& row, int parts_log2) {
    float highest = row.reference;
#pragma unroll 1
    for (int distance = 1 << parts_log2 >> 1; distance > 0; distance >>= 1) {
      highest = fmaxf(highest, __shfl_xor_sync(kAllLanes, highest, distance));
    }
    row.raise(highest);
#pragma unroll 1
    for (int distance = 1 << parts_log2 >> 1; distance > 0; distance >>= 1) {
      row.sum += __shfl_xor_sync(kAllLanes, row.sum, distance);
      row.out.x += __shfl_xor_sync(kAllLanes, row.out.x, distance);
      row.out.y += __shfl_xor_sync(kAllLanes, row.out.y, distance);
      row.out.z += __shfl_xor_sync(kAllLanes, row.out.z, distance);
      row.out.w += __shfl_xor_sync(kAllLanes, row.out.w, distance);
    }
  }
};

// Grid: blocks of a unit, key heads (spread: and as many clusters of no unit in between), sequences. It waits for the
// kernel before it by itself; where a unit has several clusters, that one zeroes their counters.
template <class T, int kHeadDim, catalog::ClusterBlock kBlock, DecodeAccess kAccess>
__global__ void __launch_bounds__(catalog::cluster_tile(kHeadDim, kBlock).threads(),
                                  catalog::cluster_tile(kHeadDim, kBlock).most_blocks_per_multiprocessor)
    decode_cluster_kernel(const __grid_constant__ DecodeParams params) {
  if constexpr (ptx::kCapability >= 90) {
    constexpr catalog::DecodeTile kTile = catalog::cluster_tile(kHeadDim, kBlock);
    using Storage = DecodeStorage<T, kTile>;
    using Loop = DecodeMainloop<T, kTile, kAccess>;
    extern __shared__ __align__(128) char shared[];
    auto& storage = *reinterpret_cast<Storage*>(shared);
    const ClusterMerge<T, kTile> merge{params, storage};
    if (threadIdx.x == 0) merge.expect();
    if ((blockIdx.y & params.spread) != 0) return;
    ptx::cluster_arrive();
    if (params.unit_log2 == params.cluster_log2 || params.ragged) ptx::wait_for_grid();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    typename Loop::Output out;
    SoftmaxRows<Loop::kRows> rows;
    Loop{params, storage, warp, lane}.run(
        DecodeSchedule{params, kTile.step_keys}.cluster_share(), [] { ptx::cluster_wait(); }, out, rows);
    merge.run(warp, lane, out, rows);
  }
}

}  // namespace plait::cuda::mma
