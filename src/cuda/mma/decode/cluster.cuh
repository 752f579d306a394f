// The decode kernel for few units on sm_90: the blocks of a cluster share a unit's keys, and merge their results through
// each other's shared memory. Called by launch.cuh.
#pragma once

#include "cuda/mma/decode/combine.cuh"
#include "cuda/ptx/cluster.cuh"

namespace plait::cuda::mma {

// What a block is sent, behind its DecodeStorage: from each block of the cluster the kVector columns of its slice's
// items, and the stats of all rows.
template <class T, catalog::DecodeTile kTile>
struct ClusterMerge {
  using Loop = DecodeMainloop<T, kTile>;
  static constexpr int kColumnGroups = kTile.head_dim / kVector;

  const DecodeParams& p;
  const Combine<T, kTile>& combine;
  char* received;

  // Merges the warps, sends each slice of the result to the block that finishes it, and finishes the own slice. Called
  // by the whole block, behind cluster_arrive_relaxed().
  __device__ __forceinline__ void run(const DecodeSegment& s, const typename Loop::Output& out,
                                      SoftmaxRows<Loop::kRows>& rows) const {
    combine.sum_quads(rows);
    __syncwarp();  // the warp has left its ring
    combine.stage(s, out[0], rows, 0);
    __syncthreads();
    ptx::cluster_wait();  // all blocks have begun
    send(s);
    ptx::cluster_arrive();
    ptx::cluster_wait();
    finish_slice(s);
  }

 private:
  static_assert(kTile.row_blocks == 1);
  __device__ __forceinline__ int blocks() const { return 1 << p.cluster_log2; }
  __device__ __forceinline__ int slice() const { return 1 << p.slice_log2; }
  // Part `part` of item `item` of the slice; stats of row `row` of part `part`.
  __device__ __forceinline__ int out_offset(int item, int part) const {
    return ((item << p.cluster_log2) + part) * static_cast<int>(sizeof(float4));
  }
  __device__ __forceinline__ int stats_offset(int row, int part) const {
    return out_offset(slice(), 0) + ((row << p.cluster_log2) + part) * static_cast<int>(sizeof(float2));
  }

  __device__ __forceinline__ void send(const DecodeSegment& s) const {
    const int rank = blockIdx.x;
    const uint32_t to = ptx::shared_address(received);
#pragma unroll 1
    for (int i = threadIdx.x; i < s.rows * kColumnGroups; i += kTile.threads()) {
      const int row = i / kColumnGroups, group = i % kColumnGroups;
      const MergedRow merged = combine.merge_warps(row, group * kVector);
      ptx::store_cluster(ptx::cluster_address(to + out_offset(i & (slice() - 1), rank), i >> p.slice_log2), merged.out);
#pragma unroll 1
      for (int block = group; block < blocks(); block += kColumnGroups) {
        ptx::store_cluster(ptx::cluster_address(to + stats_offset(row, rank), block),
                           make_float2(merged.reference, merged.sum));
      }
    }
  }

  // Neighbouring lanes hold the parts of one item.
  __device__ __forceinline__ void finish_slice(const DecodeSegment& s) const {
    const int part = threadIdx.x & (blocks() - 1);
#pragma unroll 1
    for (int first = 0; first < slice(); first += kTile.threads() >> p.cluster_log2) {
      const int item = first + (threadIdx.x >> p.cluster_log2), i = (blockIdx.x << p.slice_log2) + item;
      const int row = i / kColumnGroups, column = i % kColumnGroups * kVector;
      const bool inside = item < slice() && row < s.rows && column < p.out.dim;
      MergedRow merged;
      if (inside) {
        const float2 stats = *reinterpret_cast<const float2*>(received + stats_offset(row, part));
        merged = {stats.x, stats.y, *reinterpret_cast<const float4*>(received + out_offset(item, part))};
      }
      merge_lanes(merged);
      if (inside && part == 0) write_row<T>(p, s, row, column, merged);
    }
  }

  // The same bits in all lanes, whatever their order.
  __device__ __forceinline__ void merge_lanes(MergedRow& row) const {
    float highest = row.reference;
#pragma unroll 1
    for (int distance = blocks() / 2; distance > 0; distance /= 2) {
      highest = fmaxf(highest, __shfl_xor_sync(kAllLanes, highest, distance));
    }
    row.raise(highest);
#pragma unroll 1
    for (int distance = blocks() / 2; distance > 0; distance /= 2) {
      row.sum += __shfl_xor_sync(kAllLanes, row.sum, distance);
      row.out.x += __shfl_xor_sync(kAllLanes, row.out.x, distance);
      row.out.y += __shfl_xor_sync(kAllLanes, row.out.y, distance);
      row.out.z += __shfl_xor_sync(kAllLanes, row.out.z, distance);
      row.out.w += __shfl_xor_sync(kAllLanes, row.out.w, distance);
    }
  }
};

// Grid: blocks of a cluster, key heads, sequences. It may start while the kernel before it runs.
template <class T, int kHeadDim, DecodeAccess kAccess>
__global__ void __launch_bounds__(catalog::decode_tiles(kHeadDim)[0][0].threads(),
                                  catalog::decode_tiles(kHeadDim)[0][0].most_blocks_per_multiprocessor)
    decode_cluster_kernel(const __grid_constant__ DecodeParams params) {
  if constexpr (ptx::kCapability >= 90) {
    constexpr catalog::DecodeTile kTile = catalog::decode_tiles(kHeadDim)[0][0];
    using Storage = DecodeStorage<T, kTile>;
    using Loop = DecodeMainloop<T, kTile, kAccess>;
    extern __shared__ __align__(128) char shared[];
    auto& storage = *reinterpret_cast<Storage*>(shared);
    ptx::cluster_arrive_relaxed();
    ptx::wait_for_grid();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const DecodeSegment segment = DecodeSchedule{params, kTile.step_keys}.cluster_share();
    typename Loop::Output out;
    SoftmaxRows<Loop::kRows> rows;
    Loop{params, storage, warp, lane}.run(
        segment, [&storage, &segment] { storage.segment = segment; }, out, rows);
    const Combine<T, kTile> combine{params, storage, warp, lane};
    ClusterMerge<T, kTile>{params, combine, shared + sizeof(Storage)}.run(storage.segment, out, rows);
  }
}

}  // namespace plait::cuda::mma
