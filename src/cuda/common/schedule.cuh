// Which rows, head and keys a block works on.
// Called by the prefill kernels of mma and sm90, and by split_d's.
#pragma once

#include "cuda/common/prefill_order.hpp"
#include "cuda/common/rows.cuh"

namespace plait::cuda {

// A row tile of one head. Kept in shared memory: only the key loop is short of registers.
struct PrefillWork {
  DeviceSequence sequence;
  int head, head_kv;
  int tile;                    // of the sequence's rows; < 0: nothing to do
  int key_count;               // keys that any row sees ...
  int64_t key_begin;           // ... from this one on
  int64_t k_offset, v_offset;  // elements: key 0 of the head's first pass
};

// The work at a place of the order; its keys are found later. Called by whole warps.
__device__ inline PrefillWork find_work(const AttentionProblem& p, const AttentionTensors& t, const PrefillOrder& order,
                                        const PrefillOrder::Place& place, int tile_rows) {
  const int unit = static_cast<int>(place.unit);
  PrefillWork work{};
  work.tile = place.tile;
  if (p.packed) {
    const TileOfSequence found = find_tile(p, t, work.tile, tile_rows, false);
    work.tile = found.sequence < 0 ? -1 : static_cast<int>(found.tile);
    if (found.sequence < 0) return work;
    work.sequence = device_sequence(p, t, found.sequence);
    work.head_kv = unit;
  } else {
    const unsigned batch = order.by_heads_kv.divide(place.unit);
    work.sequence = device_sequence(p, t, batch, order.cache_rows);
    work.head_kv = unit - static_cast<int>(batch) * static_cast<int>(p.heads_kv);
  }
  work.head = work.head_kv * order.group + place.head_in_group;
  return work;
}

template <class Int>
__device__ inline void find_keys(PrefillWork& work, const BasicRowMask<Int>& mask, int64_t row_begin, int64_t row_end) {
  const Interval keys =
      work.sequence.tail ? Interval{} : mask.rows(static_cast<Int>(row_begin), static_cast<Int>(row_end));
  work.key_begin = keys.lo;
  work.key_count = static_cast<int>(keys.hi - keys.lo);
}

// [lo, hi) of a row relative to the block's first key; rows past the last one are like it, so that they mask nothing.
// Both limits never decrease from row to row.
template <class Int>
__device__ inline int2 row_bounds(const BasicRowMask<Int>& mask, const PrefillWork& work, int64_t row,
                                  int64_t row_end) {
  const Interval seen = mask.row(static_cast<Int>(row < row_end ? row : row_end - 1));
  const int lo = static_cast<int>(clamped(seen.lo - work.key_begin, 0, work.key_count));
  const int hi = static_cast<int>(clamped(seen.hi - work.key_begin, 0, work.key_count));
  return {lo, max(lo, hi)};
}

}  // namespace plait::cuda
