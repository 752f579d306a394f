// A warp's keys and values, step after step, from global memory to its ring in shared memory.
// Called by mainloop.cuh. Completion: cp_async_commit after each call, cp_async_wait, __syncwarp.
#pragma once

#include "cuda/mma/decode/schedule.cuh"

namespace plait::cuda::mma {

// All keys of a step, then all its values, then the next step. Called by whole warps.
template <class T, catalog::DecodeTile kTile, DecodeAccess kAccess>
struct KeyStream {
  static constexpr int kKeys = kTile.step_keys;
  // One pass: kWide neighbouring lanes copy 16 bytes each of one row, at most 128 bytes.
  static constexpr int kChunks = kTile.head_dim / tile::kChunkElems;
  static constexpr int kWide = kChunks % 8 == 0 ? 8 : 4;
  static constexpr int kGroups = kChunks / kWide;
  static constexpr int kRowsPerPass = 32 / kWide;
  static constexpr int kPasses = kKeys / kRowsPerPass;
  // Turing copies through registers.
  static constexpr int kPassesAtOnce = ptx::kLevel == 75 ? 1 : kPasses, kGroupsAtOnce = ptx::kLevel == 75 ? 1 : kGroups;
  static constexpr int kGroupElems = kWide * tile::kChunkElems;
  static constexpr uint32_t kAllKeys = kKeys == 32 ? 0xffffffffu : (1u << kKeys % 32) - 1;
  static_assert(kChunks % kWide == 0 && kKeys % kRowsPerPass == 0 && kKeys <= 32);

  const DecodeParams& p;
  const T *k, *v;                  // element 0 of key 0 (grouped: of block 0) of the head
  const int32_t* table = nullptr;  // the sequence's pages; null: none
  uint32_t* masks;  // [kTile.steps_under_way()], the warp's: bit i: key i of the step is on a page that exists
  int lane, key, key_end, stride;  // key: the next step's first
  int step = 0;
  int entry = 0, block = 0, row = 0;  // of the lane's key: page id of the next step; block and row of this step

  __device__ __forceinline__ KeyStream(const DecodeParams& params, const DecodeSegment& s, int pass,
                                       uint32_t* warp_masks, int first_key, int key_stride)
      : p(params), masks(warp_masks), lane(threadIdx.x % 32), key(first_key), key_end(s.key_end), stride(key_stride) {
    const auto start = [&](const DecodeTensor& t) {  // the batch stride of pages is 0
      return static_cast<const T*>(t.data) + s.kv_batch * t.batch_stride + s.head_kv * t.head_stride +
             pass * t.pass_stride;
    };
    k = start(p.k), v = start(p.v);
    if constexpr (kAccess == DecodeAccess::kRows) return;
    table = p.table != nullptr ? p.table + s.batch * p.table_stride : nullptr;
    fetch(key);
  }

  __device__ __forceinline__ void load_keys(uint32_t slot) {
    if (key >= key_end) return;
    if (kAccess == DecodeAccess::kAny && p.key_group != 0) locate();
    load(slot, k, p.k);
  }
  __device__ __forceinline__ void load_values(uint32_t slot) {
    if (key >= key_end) return;
    load(slot, v, p.v);
    key += stride;
    ++step;
  }

 private:
  __device__ __forceinline__ int block_of(int position) const {
    return p.key_group_log2 >= 0
               ? position >> p.key_group_log2
               : static_cast<int>(static_cast<unsigned>(position) / static_cast<unsigned>(p.key_group));
  }

  // Reads page ids a step before they are needed.
  __device__ __forceinline__ void fetch(int first_key) {
    const int mine = first_key + lane % kKeys;
    if (table != nullptr && mine < key_end) entry = table[block_of(mine)];
  }

  __device__ __forceinline__ void locate() {
    const int mine = key + lane % kKeys, index = block_of(mine);
    row = mine - index * p.key_group;
    block = index;
    if (table == nullptr) return;
    const bool exists = mine < key_end && entry >= 0 && entry < p.cache_rows;
    block = exists ? entry : -1;
    const uint32_t mask = __ballot_sync(kAllLanes, exists) & kAllKeys;
    if (lane == 0) masks[step % kTile.steps_under_way()] = mask;
    fetch(key + stride);
  }

  __device__ __forceinline__ void load(uint32_t slot, const T* head, const DecodeTensor& t) const {
    const int first_row = lane / kWide, chunk = lane % kWide;
    if (kAccess == DecodeAccess::kAny && !p.vectors) {
      load_any(slot, head, t);
    } else if (kAccess == DecodeAccess::kRows || p.key_group == 0) {
      const T* from = head + (key + first_row) * t.row_stride + chunk * tile::kChunkElems;
#pragma unroll kPassesAtOnce
      for (int pass = 0; pass < kPasses; ++pass) {
        const int r = first_row + pass * kRowsPerPass;
        copy(slot, r, chunk, from, t.dim, key + r < key_end);
        from += kRowsPerPass * t.row_stride;
      }
    } else {
#pragma unroll kPassesAtOnce
      for (int pass = 0; pass < kPasses; ++pass) {
        const int r = first_row + pass * kRowsPerPass;
        const int of = __shfl_sync(kAllLanes, block, r), at = __shfl_sync(kAllLanes, row, r);
        const T* from = head + of * t.block_stride + at * t.row_stride + chunk * tile::kChunkElems;
        copy(slot, r, chunk, from, t.dim, key + r < key_end && of >= 0);
      }
    }
  }

  __device__ __forceinline__ static void copy(uint32_t slot, int r, int chunk, const T* from, int dim, bool inside) {
    const uint32_t to = slot + tile::Swizzle<kTile.head_dim>::offset(r, chunk) * sizeof(T);
#pragma unroll kGroupsAtOnce
    for (int group = 0; group < kGroups; ++group) {
      ptx::cp_async_16(to + group * kGroupElems * sizeof(T), from + group * kGroupElems,
                       inside && group * kGroupElems + chunk * tile::kChunkElems < dim);
    }
  }

  __device__ __forceinline__ void load_any(uint32_t slot, const T* head, const DecodeTensor& t) const {
    const int chunk = lane % kWide;
#pragma unroll 1
    for (int r = lane / kWide; r < kKeys; r += kRowsPerPass) {
      bool inside = key + r < key_end;
      int64_t offset = (key + r) * t.row_stride;
      if (p.key_group != 0) {
        const int of = __shfl_sync(kAllLanes, block, r), at = __shfl_sync(kAllLanes, row, r);
        inside = inside && of >= 0;
        offset = of * t.block_stride + at * t.row_stride;
      }
#pragma unroll 1
      for (int group = 0; group < kGroups; ++group) {
        const uint32_t to = slot + (tile::Swizzle<kTile.head_dim>::offset(r, chunk) + group * kGroupElems) * sizeof(T);
        store_chunk(to, head + offset, group * kGroupElems + chunk * tile::kChunkElems, t.columns(), inside);
      }
    }
  }
};

}  // namespace plait::cuda::mma
