// What the decode kernel is told, in the order and width in which its first instructions need it.
// Made by launch.cuh, read by the rest of the folder.
#pragma once

#include "core/mask.hpp"
#include "cuda/common/apply_mask.cuh"
#include "cuda/common/divisor.hpp"
#include "cuda/common/loader.cuh"

namespace plait::cuda::mma {

// q, k, v or out. Row r of a head is at r * row_stride or, with rows in groups (pages, interleaved pseudo-heads), at
// block * block_stride + (r % group) * row_stride.
struct DecodeTensor {
  void* data;
  int64_t batch_stride, head_stride, row_stride, block_stride, pass_stride, dim_stride;
  int32_t dim;
  LoadPath path;

  // For store_chunk().
  __device__ __forceinline__ RowLayout columns() const { return {row_stride, 0, dim_stride, 1, dim, path}; }
};

// All keys that some row of a sequence sees, and how many steps (splits) of keys that is: at least one, so that rows
// without keys are written too.
struct SequenceKeys {
  int lo, hi, steps, first;  // first: split number of the first
};

// The steps of all units in order, dealt to `workers` blocks in contiguous shares that differ by one step at most.
// Where the workers are a multiple of equal units, no share crosses from one unit to the next.
struct Shares {
  unsigned steps, workers, quotient, remainder;

  static constexpr Shares of(unsigned all, unsigned most_workers, unsigned fewest_steps) {
    const unsigned most = all / fewest_steps < 1 ? 1 : all / fewest_steps;
    const unsigned workers = most < most_workers ? most : most_workers;
    return {all, workers, all / workers, all - all / workers * workers};
  }
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

// What a kernel can read, as a template argument: the code of a short sequence runs once, cold.
enum class DecodeAccess {
  kAny,
  kRows,  // q, k and v in 16-byte copies, dense, one pass
};

struct DecodeParams {
  // Which work: sequences that are alike (`shares`, `keys`), or those of a cache, whose lengths the device reads.
  bool ragged, causal;
  int batch, units, row_tiles, group;  // units: of a sequence
  Divisor by_group;                    // rows of a key head to positions
  int rows, tile_rows;                 // softmax rows of a key head and of a unit
  int mask_rows, key_capacity;         // softmax rows of a head, keys of a sequence at most
  int split_keys, splits;              // keys of a fixed split, splits of a sequence at most; 0: even shares
  int unit_log2, cluster_log2;         // clusters: blocks of a unit, and of each of its clusters
  int slice_log2;                      // items of a cluster's result (ClusterMerge) that a block of it finishes
  int spread;                          // 1: every second cluster is of no unit
  Shares shares;
  SequenceKeys keys;
  int passes;                     // joint
  int rows_in_group;              // of q and out; 1: none
  int key_group, key_group_log2;  // of k and v; 0: none. log2 >= 0: a power of two
  bool vectors;                   // k and v in 16-byte copies
  DecodeTensor k, v, q;
  int64_t window_left, window_right;
  int token_group;
  ScoreScale score;
  // A cache.
  const int32_t *seqlens, *batch_idx, *table;
  int64_t table_stride, cache_rows;  // cache_rows: rows or pages
  int64_t new_keys;
  // Results.
  float* partial_out;     // [partials, tile_rows, head_dim_v]; of clusters [unit, cluster, row, bucket]
  float2* partial_stats;  // [partials, tile_rows]: reference, sum; of clusters one for each kVector columns
  int* arrivals;
  DecodeTensor out;
  bool out_float;
  float* lse;
  int64_t lse_batch_stride, lse_head_stride, lse_row_stride;
  const float* sinks;  // null: none
  int64_t sinks_stride;

  constexpr NarrowRowMask mask(int sequence_keys) const {
    return {mask_rows, sequence_keys, causal, window_left, window_right, token_group};
  }
  constexpr SequenceKeys keys_of(int sequence_keys, int step_keys) const {
    const Interval all = mask(sequence_keys).rows(0, mask_rows);
    const int lo = static_cast<int>(all.lo), hi = static_cast<int>(all.hi);
    const unsigned size = split_keys > 0 ? split_keys : step_keys;
    const unsigned first = split_keys > 0 ? static_cast<unsigned>(lo) / size : 0u;
    const unsigned begin = split_keys > 0 ? first * size : static_cast<unsigned>(lo);
    const unsigned steps = (static_cast<unsigned>(hi) - begin + size - 1) / size;
    return {lo, hi, hi <= lo ? 1 : static_cast<int>(steps), static_cast<int>(first)};
  }
};

}  // namespace plait::cuda::mma
