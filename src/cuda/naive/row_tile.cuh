// The 64 softmax rows of a block, and what they see of the keys.
// Included by the kernels whose blocks own rows (forward, dq).
#pragma once

#include "cuda/naive/tile.cuh"

namespace plait::cuda::naive {

// An interval as plain memory, for shared structs.
struct KeyRange {
  int64_t lo, hi;
};

// Lives in shared memory: the accumulators need the registers.
struct RowTile {
  DeviceSequence sequence;
  int64_t head, kv_head, row_begin, row_end, column;
  KeyRange any;                          // keys that some row sees
  KeyRange seen[kTile];                  // keys of each row
  TileRange range[kTile];                // the same, within the key tile
  int64_t q[kTile], k[kTile], v[kTile];  // element offsets
};

// Fills all but ranges and offsets; false: the block has nothing to do. `index`: tile and head. Whole block, ends with
// a barrier.
__device__ inline bool locate_rows(const AttentionProblem& p, const AttentionTensors& t, int64_t index, int64_t column,
                                   int64_t cache_rows, RowTile& tile) {
  const TileOfSequence at = find_tile(p, t, index / p.heads_q, kTile, /*keys=*/false);
  if (at.sequence < 0) return false;
  const DeviceSequence sequence = device_sequence(p, t, at.sequence, cache_rows);
  const RowMask mask = RowMask::of(p, sequence.q_len, sequence.kv_len);
  const int64_t begin = at.tile * kTile, end = min(begin + kTile, mask.row_count());
  if (threadIdx.x == 0) {
    tile.sequence = sequence;
    tile.head = index % p.heads_q;
    tile.kv_head = tile.head / (p.heads_q / p.heads_kv);
    tile.row_begin = begin, tile.row_end = end, tile.column = column;
    const Interval any = sequence.tail ? Interval{} : mask.rows(begin, end);
    tile.any = {any.lo, any.hi};
  }
  if (threadIdx.x < kTile) {
    const int64_t row = begin + threadIdx.x;
    const Interval seen = row < end && !sequence.tail ? mask.row(row) : Interval{};
    tile.seen[threadIdx.x] = {seen.lo, seen.hi};
  }
  __syncthreads();
  return true;
}

// Offset of the thread's row of q, out, dout or dq; kNoRow past the last.
__device__ inline int64_t own_row_offset(const AttentionProblem& p, const CanonicalTensor& t, const RowTile& tile,
                                         int64_t pass) {
  const int64_t row = tile.row_begin + threadIdx.x;
  return row < tile.row_end ? query_offset(p, t, tile.sequence, tile.head, row, pass) : kNoRow;
}

// What the thread's row sees of the keys [key, key_end); returns whether that is all of them. The first kTile threads.
__device__ __forceinline__ bool locate_range(int64_t key, int64_t key_end, RowTile& tile) {
  const KeyRange seen = tile.seen[threadIdx.x];
  tile.range[threadIdx.x] = tile_range(seen.lo, seen.hi, key);
  return tile.row_begin + threadIdx.x >= tile.row_end || (seen.lo <= key && key_end <= seen.hi);
}

// acc += weights^T rows over the keys [key, key_end): rows hold keys or values, weights [key][row].
__device__ inline void key_product(const float (*weights)[kTilePadded], const RowSet& rows, int keys,
                                   bool every_row_sees, int64_t dim, const RowTile& tile, float (*values)[kColumns],
                                   float (&acc)[kPerThread][kColumnsPerThread]) {
  if (every_row_sees) {
    output_product(weights, rows, keys, tile.column, dim, values, [](int, int) { return true; }, acc);
  } else {
    const TileRange* range = tile.range + kPerThread * (threadIdx.x / kSide);
    output_product(
        weights, rows, keys, tile.column, dim, values, [range](int k, int i) { return range[i].holds(k); }, acc);
  }
}

}  // namespace plait::cuda::naive
