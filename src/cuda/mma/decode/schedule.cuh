// Which keys of which rows a block works on: its even share of all steps of keys, or whole splits of a fixed size.
// Called by kernel.cuh. Lengths of a cache are read on the device; every block finds its share by itself.
#pragma once

#include "cuda/common/apply_mask.cuh"
#include "cuda/common/loader.cuh"
#include "cuda/common/rows.cuh"

namespace plait::cuda::mma {

// How a key's position becomes an offset: plain rows (group 0), or position / group picks a block (a page through the
// table, or an interleaved position) and position % group a row of it.
struct KeyMap {
  int32_t group = 0, group_log2 = -1;  // group_log2 >= 0: group is a power of two
  const int32_t* table = nullptr;
  int64_t table_stride = 0, table_entries = 0;  // entries that name a page: 0 .. table_entries - 1
  int64_t k_block_stride = 0, k_row_stride = 0, v_block_stride = 0, v_row_stride = 0;
};

struct DecodeParams {
  AttentionProblem problem;
  AttentionTensors tensors;
  RowLayout q, k, v, out;
  bool vectors;  // k and v in 16-byte copies
  KeyMap map;
  ScoreScale score;
  int64_t cache_rows;
  int group, rows, row_tiles, tile_rows, units;  // as DecodeLayout
  int rows_per_position;
  int split_keys, splits;  // 0: even shares
  float* partial_out;      // [partials, tile_rows, head_dim_v]
  float2* partial_stats;   // [partials, tile_rows]: reference, sum
  int* arrivals;
};

// All keys that some row of a sequence sees, and how many steps (splits) of keys that is: at least one, so that rows
// without keys are written too.
struct SequenceKeys {
  int lo, hi, steps, first;  // first: split number of the first
};

// Where a number of all steps lies. Uniform over the block.
struct StepPlace {
  DeviceSequence sequence;
  SequenceKeys keys;
  int unit;             // of the sequence
  unsigned unit_begin;  // the unit's first step, counted over all; past the end: all steps
};

// Part of a unit's keys, and which of its partial results it gives.
struct DecodeSegment {
  DeviceSequence sequence;
  int head_kv, row_begin, rows;            // rows of the unit: from row_begin of the key head's
  int key_begin, key_end;                  // that the segment attends to; empty: none
  int part, parts;                         // of the unit
  int first_slot, second_slot, slot_step;  // partial results of part 0, of part 1, from there to the next
  int arrival;                             // counter
  __device__ __forceinline__ int slot(int i) const { return i == 0 ? first_slot : second_slot + (i - 1) * slot_step; }
};

// Element offset of row `row` of a unit in q or out; `pass`: the pseudo-head of joint mode (0 for out).
__device__ __forceinline__ int64_t row_offset(const DecodeParams& p, const CanonicalTensor& t, const DecodeSegment& s,
                                              int row, int pass) {
  const int position = (s.row_begin + row) / p.group,
            head = s.head_kv * p.group + s.row_begin + row - position * p.group;
  const int64_t start = s.sequence.batch * t.batch_stride + head * t.head_stride;
  const int per = p.rows_per_position;
  if (per == 1) return start + position * t.seq_stride + pass * t.pseudo_stride;
  return start + position / per * t.seq_stride + position % per * t.pseudo_stride;
}

// The steps of all units in order, dealt to `workers` blocks in contiguous shares that differ by one step at most.
// Where the workers are a multiple of equal units, no share crosses from one unit to the next.
struct Shares {
  unsigned steps, workers, quotient, remainder;

  __device__ __forceinline__ Shares(unsigned all, unsigned most_workers, unsigned fewest_steps)
      : steps(all),
        workers(min(most_workers, max(1u, all / fewest_steps))),
        quotient(all / workers),
        remainder(all - quotient * workers) {}
  // floor(worker * steps / workers)
  __device__ __forceinline__ unsigned begin(unsigned worker) const {
    return worker * quotient + worker * remainder / workers;
  }
  __device__ __forceinline__ unsigned owner(unsigned step) const {
    const float guess = static_cast<float>(step) * static_cast<float>(workers) / static_cast<float>(steps);
    unsigned worker = min(workers - 1, static_cast<unsigned>(guess));
    while (begin(worker) > step) --worker;
    while (begin(worker + 1) <= step) ++worker;
    return worker;
  }
};

struct DecodeSchedule {
  const DecodeParams& p;
  int step_keys;

  // The unit of step `step`. Called by whole warps; all lanes get the same.
  __device__ __forceinline__ StepPlace find(unsigned step) const {
    const int lane = static_cast<int>(threadIdx.x % 32), batch = static_cast<int>(p.problem.batch);
    const bool alike = !p.problem.cached;  // sequences
    unsigned before = 0;                   // steps of the sequences from 0 to first - 1
#pragma unroll 1
    for (int first = 0;; first += 32) {
      DeviceSequence sequence = device_sequence(p.problem, p.tensors, min(first + lane, batch - 1), p.cache_rows);
      SequenceKeys keys = keys_of(sequence);
      const unsigned steps = static_cast<unsigned>(keys.steps) * p.units;
      if (alike) {
        const unsigned index = min(step / steps, static_cast<unsigned>(batch));
        sequence.batch = sequence.kv_batch = index;
        return place(sequence, keys, index * steps, index < batch ? step : index * steps);
      }
      const unsigned own = first + lane < batch ? steps : 0u;
      unsigned upto = own;  // inclusive sum over the lanes
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const unsigned below = __shfl_up_sync(kAllLanes, upto, distance);
        if (lane >= distance) upto += below;
      }
      const unsigned reached = __ballot_sync(kAllLanes, step < before + upto);
      const int found = reached != 0 ? __ffs(static_cast<int>(reached)) - 1 : 31;
      const unsigned here = before + __shfl_sync(kAllLanes, upto - own, found);
      before += __shfl_sync(kAllLanes, upto, 31);
      if (reached == 0 && first + 32 < batch) continue;
      sequence.batch = __shfl_sync(kAllLanes, static_cast<int>(sequence.batch), found);
      sequence.kv_batch = __shfl_sync(kAllLanes, static_cast<int>(sequence.kv_batch), found);
      sequence.kv_len = __shfl_sync(kAllLanes, static_cast<int>(sequence.kv_len), found);
      keys.lo = __shfl_sync(kAllLanes, keys.lo, found);
      keys.hi = __shfl_sync(kAllLanes, keys.hi, found);
      keys.steps = __shfl_sync(kAllLanes, keys.steps, found);
      keys.first = __shfl_sync(kAllLanes, keys.first, found);
      return reached != 0 ? place(sequence, keys, here, step) : place(sequence, keys, before, before);
    }
  }

  // Even shares: steps [begin, end) of the unit at `at`, which `worker` has.
  __device__ __forceinline__ DecodeSegment share(const StepPlace& at, const Shares& shares, unsigned worker,
                                                 unsigned begin, unsigned end) const {
    DecodeSegment s = segment(at, at.keys.lo + static_cast<int>(begin - at.unit_begin) * step_keys,
                              at.keys.lo + static_cast<int>(end - at.unit_begin) * step_keys);
    const unsigned first = shares.owner(at.unit_begin), last = shares.owner(at.unit_begin + at.keys.steps - 1);
    s.part = static_cast<int>(worker - first);
    s.parts = static_cast<int>(last - first) + 1;
    // A worker has at most two parts of split units: one that begins its share, and one that ends it.
    s.first_slot = static_cast<int>(2 * first + 1);
    s.second_slot = static_cast<int>(2 * (first + 1));
    s.slot_step = 2;
    s.arrival = static_cast<int>(first);
    return s;
  }

  // Fixed splits: the split of step `step` of the unit at `at`.
  __device__ __forceinline__ DecodeSegment split(const StepPlace& at, unsigned step) const {
    const int part = static_cast<int>(step - at.unit_begin), begin = (at.keys.first + part) * p.split_keys;
    DecodeSegment s = segment(at, begin, at.keys.hi - begin > p.split_keys ? begin + p.split_keys : at.keys.hi);
    s.part = part;
    s.parts = at.keys.steps;
    s.arrival = static_cast<int>(at.sequence.batch) * p.units + at.unit;
    s.first_slot = s.arrival * p.splits;
    s.second_slot = s.first_slot + 1;
    s.slot_step = 1;
    return s;
  }

 private:
  __device__ __forceinline__ StepPlace place(const DeviceSequence& sequence, const SequenceKeys& keys, unsigned before,
                                             unsigned step) const {
    const int unit = static_cast<int>((step - before) / static_cast<unsigned>(keys.steps));
    return {sequence, keys, unit, before + static_cast<unsigned>(unit * keys.steps)};
  }

  __device__ __forceinline__ SequenceKeys keys_of(const DeviceSequence& s) const {
    const NarrowRowMask mask = NarrowRowMask::of(p.problem, s.q_len, s.kv_len);
    const Interval all = mask.rows(0, mask.row_count());
    SequenceKeys keys{static_cast<int>(all.lo), static_cast<int>(all.hi), 1, 0};
    const unsigned size = p.split_keys > 0 ? p.split_keys : step_keys;
    if (p.split_keys > 0) keys.first = static_cast<int>(static_cast<unsigned>(keys.lo) / size);
    const unsigned begin = p.split_keys > 0 ? keys.first * size : keys.lo;
    keys.steps = max(1, static_cast<int>((keys.hi - begin + size - 1) / size));
    return keys;
  }

  // Keys [key_begin, key_end) of the unit at `at`, as far as its rows see them.
  __device__ __forceinline__ DecodeSegment segment(const StepPlace& at, int key_begin, int key_end) const {
    DecodeSegment s{};
    s.sequence = at.sequence;
    s.head_kv = at.unit / p.row_tiles;
    s.row_begin = (at.unit - s.head_kv * p.row_tiles) * p.tile_rows;
    s.rows = min(p.tile_rows, p.rows - s.row_begin);
    const NarrowRowMask mask = NarrowRowMask::of(p.problem, s.sequence.q_len, s.sequence.kv_len);
    const Interval seen = mask.rows(s.row_begin / p.group, (s.row_begin + s.rows - 1) / p.group + 1);
    s.key_begin = max(key_begin, static_cast<int>(seen.lo));
    s.key_end = max(s.key_begin, min(key_end, static_cast<int>(seen.hi)));
    return s;
  }
};

}  // namespace plait::cuda::mma
