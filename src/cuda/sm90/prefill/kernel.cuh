// The prefill kernel: one warpgroup feeds the others, which multiply; a block takes row tiles until there are no more.
// Called by launch.cuh.
#pragma once

#include "cuda/ptx/warpgroup.cuh"
#include "cuda/sm90/prefill/consumer.cuh"
#include "cuda/sm90/prefill/copier.cuh"
#include "cuda/sm90/prefill/finder.cuh"

namespace plait::cuda::sm90 {

template <int kSlots>
__device__ __forceinline__ void start_ring(Ring<kSlots>& ring, int readers, int writers = 1) {
  for (int slot = 0; slot < kSlots; ++slot) {
    ptx::mbarrier_init(ptx::shared_address(&ring.full[slot]), writers);
    ptx::mbarrier_init(ptx::shared_address(&ring.empty[slot]), readers);
  }
}

inline constexpr int kCopiers = 3;  // of queries, keys and values

// Columns that no copy fills.
template <class Tile, int kSlots>
__device__ __forceinline__ void clear_columns(char (&slots)[kSlots][Tile::kBytes], const RowTileMap& map) {
#pragma unroll 1
  for (int slot = 0; slot < kSlots; ++slot) {
#pragma unroll 1
    for (int i = map.index.column_blocks * Tile::kBlockBytes + threadIdx.x * 16; i < Tile::kBytes;
         i += blockDim.x * 16) {
      *reinterpret_cast<uint4*>(slots[slot] + i) = {};
    }
  }
}

template <class T, size_t kIndex>
__global__ void __launch_bounds__(catalog::kSm90PrefillTiles[kIndex].threads(), 1)
    prefill_kernel(const __grid_constant__ PrefillParams params) {
  constexpr catalog::Sm90PrefillTile kTile = catalog::kSm90PrefillTiles[kIndex];
  extern __shared__ __align__(1024) char shared[];
  using Storage = PrefillStorage<T, kTile>;
  auto& storage = *reinterpret_cast<Storage*>(shared);
  const int warp = __shfl_sync(kAllLanes, threadIdx.x / 32, 0);  // the compiler sees that it is uniform
  const int lane = threadIdx.x % 32, warpgroup = warp / kTile.kWarpgroupWarps;
  if (threadIdx.x == 0) {
    start_ring(storage.works, kTile.warps() * 32 + kCopiers, 32);
    for (uint64_t& found : storage.found) ptx::mbarrier_init(ptx::shared_address(&found), 1);
    for (auto& work : storage.queries_full) {
      for (uint64_t& full : work) ptx::mbarrier_init(ptx::shared_address(&full), 1);
    }
    for (uint64_t& empty : storage.queries_empty) {
      ptx::mbarrier_init(ptx::shared_address(&empty), kTile.warps() / kTile.query_parts());
    }
    start_ring(storage.keys, kTile.warps());
    start_ring(storage.values, kTile.warps());
    ptx::fence_mbarrier_init();
    ptx::prefetch_tensor_map(params.q.map);
    ptx::prefetch_tensor_map(params.k.map);
    ptx::prefetch_tensor_map(params.v.map);
  }
  clear_columns<typename Storage::QueryTile>(storage.q, params.q);
  clear_columns<typename Storage::KeyTile>(storage.k, params.k);
  clear_columns<typename Storage::KeyTile>(storage.v, params.v);
  ptx::fence_async_copies();
  __syncthreads();
  if (warpgroup == kTile.warpgroups) {
    ptx::release_registers<kTile.producer_registers>();
    const PrefillCopier<T, kTile> copier{params, storage};
    const int role = warp - kTile.warps();
    if (role == 0) PrefillFinder<T, kTile>{params, storage, lane}.run();
    if ((role == 1 || role == 2) && lane == 0) copier.copy_keys_and_values(role == 1);
    if (role == 3 && lane == 0) copier.copy_queries();
  } else {
    ptx::claim_registers<kTile.consumer_registers>();
    PrefillConsumer<T, kTile>{{params, storage, warpgroup, lane}}.run();
  }
}

}  // namespace plait::cuda::sm90
