// Which keys of which rows a block works on: its even share of all steps of keys, or whole splits of a fixed size.
// Called by kernel.cuh and cluster.cuh. Lengths of a cache are read on the device; every block finds its share by
// itself.
#pragma once

#include "cuda/common/rows.cuh"
#include "cuda/mma/decode/params.cuh"

namespace plait::cuda::mma {

// Where a number of all steps lies. Uniform over the block.
struct StepPlace {
  int batch, kv_batch;  // kv_batch: row of a dense cache
  int sequence_keys;
  int unit;             // of the sequence
  unsigned unit_begin;  // the unit's first step, counted over all; past the end: all steps
  SequenceKeys keys;
};

// Part of a unit's keys.
struct DecodeSegment {
  int batch, kv_batch, sequence_keys;
  int head_kv, row_begin, rows;  // rows of the unit: from row_begin of the key head's
  int key_begin, key_end;        // that the segment attends to; empty: none
};

// Which of a unit's partial results a segment gives.
struct DecodePart {
  int part, parts;                         // of the unit
  int first_slot, second_slot, slot_step;  // partial results of part 0, of part 1, from there to the next
  int arrival;                             // counter
  __device__ __forceinline__ int slot(int i) const { return i == 0 ? first_slot : second_slot + (i - 1) * slot_step; }
};

struct RowPlace {
  int64_t out, lse;
  float sink;
};

inline constexpr unsigned kAllSteps = 0xffffffffu;  // more than there are

struct DecodeSchedule {
  const DecodeParams& p;
  int step_keys;

  // The unit of step `step`. Called by whole warps; all lanes get the same.
  __device__ __forceinline__ StepPlace find(unsigned step) const {
    return p.ragged ? find_ragged(step) : find_alike(step);
  }

  // Clusters: block blockIdx.x of a unit with one row tile, of sequence blockIdx.z, has an even share of its keys.
  __device__ __forceinline__ DecodeSegment cluster_share() const {
    const int batch = blockIdx.z;
    const int2 sequence = p.ragged ? cached_sequence(batch) : make_int2(p.key_capacity, batch);
    const SequenceKeys keys = p.ragged ? p.keys_of(sequence.x, step_keys) : p.keys;
    const int begin = blockIdx.x * keys.steps >> p.unit_log2, end = (blockIdx.x + 1) * keys.steps >> p.unit_log2;
    const int key_begin = keys.lo + begin * step_keys, key_end = min(keys.lo + end * step_keys, keys.hi);
    return {batch, sequence.y, sequence.x, static_cast<int>(blockIdx.y >> p.spread),
            0,     p.rows,     key_begin,  max(key_begin, key_end)};
  }

  // Even shares: steps [begin, end) of the unit at `at`.
  __device__ __forceinline__ DecodeSegment share(const StepPlace& at, unsigned begin, unsigned end) const {
    return segment(at, at.keys.lo + static_cast<int>(begin - at.unit_begin) * step_keys,
                   at.keys.lo + static_cast<int>(end - at.unit_begin) * step_keys);
  }
  __device__ __forceinline__ DecodePart share_part(const StepPlace& at, const Shares& shares, unsigned worker) const {
    const unsigned first = shares.owner(at.unit_begin), last = shares.owner(at.unit_begin + at.keys.steps - 1);
    // A worker has at most two parts of split units: one that begins its share, and one that ends it.
    return {static_cast<int>(worker - first),
            static_cast<int>(last - first) + 1,
            static_cast<int>(2 * first + 1),
            static_cast<int>(2 * (first + 1)),
            2,
            static_cast<int>(first)};
  }

  // Fixed splits: the split of step `step` of the unit at `at`.
  __device__ __forceinline__ DecodeSegment split(const StepPlace& at, unsigned step) const {
    const int begin = (at.keys.first + static_cast<int>(step - at.unit_begin)) * p.split_keys;
    return segment(at, begin, at.keys.hi - begin > p.split_keys ? begin + p.split_keys : at.keys.hi);
  }
  __device__ __forceinline__ DecodePart split_part(const StepPlace& at, unsigned step) const {
    const int arrival = at.batch * p.units + at.unit, slot = arrival * p.splits;
    return {static_cast<int>(step - at.unit_begin), at.keys.steps, slot, slot + 1, 1, arrival};
  }

 private:
  __device__ __forceinline__ StepPlace find_alike(unsigned step) const {
    const unsigned in_sequence = static_cast<unsigned>(p.keys.steps) * p.units, batch = step / in_sequence;
    const unsigned before = batch * in_sequence, unit = (step - before) / static_cast<unsigned>(p.keys.steps);
    return {static_cast<int>(batch), static_cast<int>(batch),      p.key_capacity,
            static_cast<int>(unit),  before + unit * p.keys.steps, p.keys};
  }

  // Key count and row of the cache of sequence `index`. Whatever the lengths hold, both are inside the cache.
  __device__ __forceinline__ int2 cached_sequence(int index) const {
    const int64_t row = p.batch_idx != nullptr ? p.batch_idx[index] : index;
    const bool legal = p.table != nullptr || (row >= 0 && row < p.cache_rows);
    const int64_t keys = clamped(p.seqlens[index] + p.new_keys, 0, p.key_capacity);
    return make_int2(legal ? static_cast<int>(keys) : 0, legal ? static_cast<int>(row) : 0);
  }

  // The lanes look at 32 sequences at a time.
  __device__ __forceinline__ StepPlace find_ragged(unsigned step) const {
    const int lane = static_cast<int>(threadIdx.x % 32);
    unsigned before = 0;  // steps of the sequences from 0 to first - 1
#pragma unroll 1
    for (int first = 0;; first += 32) {
      const int2 sequence = cached_sequence(min(first + lane, p.batch - 1));
      const SequenceKeys keys = p.keys_of(sequence.x, step_keys);
      const unsigned own = first + lane < p.batch ? static_cast<unsigned>(keys.steps) * p.units : 0u;
      unsigned upto = own;  // inclusive sum over the lanes
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const unsigned below = __shfl_up_sync(kAllLanes, upto, distance);
        if (lane >= distance) upto += below;
      }
      const unsigned reached = __ballot_sync(kAllLanes, step < before + upto);
      if (reached != 0) {
        const int found = __ffs(static_cast<int>(reached)) - 1;
        const auto of = [&](int value) { return __shfl_sync(kAllLanes, value, found); };
        const SequenceKeys its{of(keys.lo), of(keys.hi), of(keys.steps), of(keys.first)};
        const unsigned begin = before + static_cast<unsigned>(of(static_cast<int>(upto - own)));
        const unsigned unit = (step - begin) / static_cast<unsigned>(its.steps);
        return {first + found, of(sequence.y), of(sequence.x), static_cast<int>(unit), begin + unit * its.steps, its};
      }
      before += __shfl_sync(kAllLanes, upto, 31);
      if (first + 32 >= p.batch) return {0, 0, 0, 0, before, keys};
    }
  }

  // Keys [key_begin, key_end) of the unit at `at`, as far as its rows see them.
  __device__ __forceinline__ DecodeSegment segment(const StepPlace& at, int key_begin, int key_end) const {
    DecodeSegment s{at.batch, at.kv_batch, at.sequence_keys, at.unit, 0, p.rows, 0, 0};
    int lo = at.keys.lo, hi = at.keys.hi;
    if (p.row_tiles > 1) {
      s.head_kv = at.unit / p.row_tiles;
      s.row_begin = (at.unit - s.head_kv * p.row_tiles) * p.tile_rows;
      s.rows = min(p.tile_rows, p.rows - s.row_begin);
      const Interval seen = p.mask(at.sequence_keys)
                                .rows(p.by_group.divide(s.row_begin), p.by_group.divide(s.row_begin + s.rows - 1) + 1);
      lo = static_cast<int>(seen.lo), hi = static_cast<int>(seen.hi);
    }
    s.key_begin = max(key_begin, lo);
    s.key_end = max(s.key_begin, min(key_end, hi));
    return s;
  }
};

// Element offset of row `row` of a unit in q or out; `pass`: the pseudo-head of joint mode (0 for out).
__device__ __forceinline__ int64_t row_offset(const DecodeParams& p, const DecodeTensor& t, const DecodeSegment& s,
                                              int row, int pass) {
  const int of_head = s.row_begin + row, position = static_cast<int>(p.by_group.divide(of_head));
  const int head = s.head_kv * p.group + of_head - position * p.group;
  const int64_t start = s.batch * t.batch_stride + head * t.head_stride + pass * t.pass_stride;
  if (p.rows_in_group == 1) return start + position * t.row_stride;
  const int block = position / p.rows_in_group;
  return start + block * t.block_stride + (position - block * p.rows_in_group) * t.row_stride;
}

// Where the result of row `row` of a unit goes, in elements; its sink, -inf without one.
__device__ __forceinline__ RowPlace row_place(const DecodeParams& p, const DecodeSegment& s, int row) {
  const int of_head = s.row_begin + row, position = static_cast<int>(p.by_group.divide(of_head));
  const int head = s.head_kv * p.group + of_head - position * p.group;
  return {row_offset(p, p.out, s, row, 0),
          s.batch * p.lse_batch_stride + head * p.lse_head_stride + position * p.lse_row_stride,
          p.sinks != nullptr ? p.sinks[head * p.sinks_stride] : -CUDART_INF_F};
}

}  // namespace plait::cuda::mma
