// Where a consumer is in the rings of shared memory, and how it waits, lets go and leaves out.
// Called by scores.cuh.
#pragma once

#include "cuda/sm90/prefill/storage.cuh"

namespace plait::cuda::sm90 {

template <class T, catalog::Sm90PrefillTile kTile>
struct PrefillReader {
  using Storage = PrefillStorage<T, kTile>;
  using KeyRing = RingPosition<kTile.stages>;
  static constexpr int kKeys = kTile.tile_keys;

  struct Position {
    RingPosition<kTile.work_slots> work;
    RingPosition<kTile.query_slots> query;
    KeyRing key;  // of keys; values are as far, or one tile behind
  };

  const PrefillParams& params;
  Storage& storage;
  int warpgroup, lane;

  // The warp has read a slot.
  __device__ __forceinline__ void release(uint64_t& empty) const {
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&empty));
  }

  // Leaves out tiles of keys and values that other warpgroups of the block need.
  __device__ __forceinline__ void skip(KeyRing& at, int tiles) const {
#pragma unroll 1
    for (; tiles > 0; --tiles) {
      KeyRing values = at;
      skip(storage.values, values, 1);
      skip(storage.keys, at, 1);
    }
  }
  __device__ __forceinline__ void skip(Ring<kTile.stages>& ring, KeyRing& at, int tiles) const {
#pragma unroll 1
    for (; tiles > 0; --tiles, at.advance()) {
      wait(ring, at);
      release(ring.empty[at.slot]);
    }
  }

  // Of the block's consumers. Read anew each time: registers are short.
  static __device__ __forceinline__ int warp() {
    unsigned thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return static_cast<int>(thread / 32);
  }

  // The same for all lanes, which the compiler then knows.
  static __device__ __forceinline__ int uniform(int x) { return __shfl_sync(kAllLanes, x, 0); }

  // Waits for the next row tile. `skipped`: tiles of keys ahead of those in `keys`. False: there are no more.
  __device__ __forceinline__ bool wait_rows(const Position& at, WarpKeys& keys, int& skipped) const {
    const int slot = at.work.slot;
    skipped = 0;
    ptx::mbarrier_wait(ptx::shared_address(&storage.works.full[slot]), at.work.parity);
    const PrefillWork& work = storage.work[slot];
    if (work.tile < 0) return false;
    const WarpKeys own = storage.warp_keys[slot][warp()];
    keys = {uniform(own.first), uniform(own.end), uniform(own.whole_from), uniform(own.whole_to)};
    skipped = static_cast<int>(static_cast<unsigned>(uniform(work.key_count) - 1 - keys.first) / kKeys);
    return true;
  }

  __device__ __forceinline__ void wait_queries(const Position& at) const {
    const uint64_t& full = storage.queries_full[at.work.slot][warpgroup % kTile.query_parts()];
    ptx::mbarrier_wait(ptx::shared_address(&full), at.work.parity);
  }
  __device__ __forceinline__ void wait_keys(const KeyRing& at) const { wait(storage.keys, at); }
  __device__ __forceinline__ void wait_values(const KeyRing& at) const { wait(storage.values, at); }
  __device__ __forceinline__ void wait(const Ring<kTile.stages>& ring, const KeyRing& at) const {
    ptx::mbarrier_wait(ptx::shared_address(&ring.full[at.slot]), at.parity);
  }
};

}  // namespace plait::cuda::sm90
