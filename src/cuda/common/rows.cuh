// From a block's number to a sequence and a tile of it, and from rows to element offsets.
// Called by the attention kernels of naive, mma, sm90. What the device reads here (lengths, page ids) is never trusted:
// whatever it holds, every offset stays inside its tensor.
#pragma once

#include "core/mask.hpp"
#include "core/problem.hpp"
#include "cuda/common/lanes.hpp"
#include "cuda/common/tiles_bound.hpp"

namespace plait::cuda {

// A sequence of the problem, with lengths as far as its tensors reach. Packed problems have one more than `batch`: the
// rows past cu_seqlens[-1], which see no key and no sink.
struct DeviceSequence : Sequence {
  bool tail;
};

__device__ __forceinline__ int64_t clamped(int64_t value, int64_t low, int64_t high) {
  return value < low ? low : value > high ? high : value;
}

// Sequence `index` of 0 .. batch (packed) or 0 .. batch - 1. `cache_rows`: rows of a dense cache.
__device__ inline DeviceSequence device_sequence(const AttentionProblem& p, const AttentionTensors& t, int64_t index,
                                                 int64_t cache_rows = 0) {
  if (p.cached) {
    const int64_t row = t.cache.batch_idx != nullptr ? t.cache.batch_idx[index] : index;
    const bool legal = p.page_size > 0 || (row >= 0 && row < cache_rows);
    const int64_t keys = clamped(t.cache.seqlens[index] + p.new_keys, 0, p.seqlen_kv);
    return {{index, 0, p.seqlen_q, 0, legal ? keys : 0, legal ? row : 0}, false};
  }
  if (!p.packed) return {{index, 0, p.seqlen_q, 0, p.seqlen_kv, index}, false};
  const int64_t q_begin = clamped(t.cu_seqlens_q[index], 0, p.seqlen_q);
  const int64_t kv_begin = clamped(t.cu_seqlens_kv[index], 0, p.seqlen_kv);
  const bool tail = index == p.batch;
  const int64_t q_end = tail ? p.seqlen_q : clamped(t.cu_seqlens_q[index + 1], q_begin, p.seqlen_q);
  const int64_t kv_end = tail ? p.seqlen_kv : clamped(t.cu_seqlens_kv[index + 1], kv_begin, p.seqlen_kv);
  return {{0, q_begin, q_end - q_begin, kv_begin, kv_end - kv_begin, 0}, tail};
}

// Tile `tile` (of softmax rows, or of keys) of sequence `sequence`; sequence < 0: the block has nothing to do.
struct TileOfSequence {
  int64_t sequence, tile;
};

// The index-th tile over all sequences. Called by whole warps: the lanes count the tiles of 32 sequences at a time.
__device__ inline TileOfSequence find_tile(const AttentionProblem& p, const AttentionTensors& t, int64_t index,
                                           int64_t tile_rows, bool keys) {
  const int64_t per = p.rows_per_position();
  if (!p.packed) {
    const int64_t tiles = ((keys ? p.seqlen_kv : p.seqlen_q) * per + tile_rows - 1) / tile_rows;
    return tiles == 0 ? TileOfSequence{-1, 0} : TileOfSequence{index / tiles, index % tiles};
  }
  const int lane = static_cast<int>(threadIdx.x % 32);
  for (int64_t first = 0; first <= p.batch; first += 32) {
    int64_t tiles = 0;
    if (first + lane <= p.batch) {
      const DeviceSequence s = device_sequence(p, t, first + lane);
      tiles = ((keys ? s.kv_len : s.q_len) * per + tile_rows - 1) / tile_rows;
    }
    int64_t before = tiles;  // inclusive sum over the lanes
    for (int step = 1; step < 32; step *= 2) {
      const int64_t below = __shfl_up_sync(kAllLanes, before, step);
      if (lane >= step) before += below;
    }
    const unsigned reached = __ballot_sync(kAllLanes, index < before);
    if (reached != 0) {
      const int owner = __ffs(static_cast<int>(reached)) - 1;
      return {first + owner, index - __shfl_sync(kAllLanes, before - tiles, owner)};
    }
    index -= __shfl_sync(kAllLanes, before, 31);
  }
  return {-1, 0};
}

// Element offset of softmax row `row` of q, out, dout or dq; `pass`: the pseudo-head of joint mode (0 for out).
__device__ inline int64_t query_offset(const AttentionProblem& p, const CanonicalTensor& t, const Sequence& s,
                                       int64_t head, int64_t row, int64_t pass) {
  const int64_t per = p.rows_per_position(), start = s.batch * t.batch_stride + head * t.head_stride;
  if (per == 1) return start + (s.q_begin + row) * t.seq_stride + pass * t.pseudo_stride;  // divisions are slow
  return start + (s.q_begin + row / per) * t.seq_stride + row % per * t.pseudo_stride;
}

// Element offset of key `key` of k, v, dk or dv (not paged).
__device__ inline int64_t key_row_offset(const AttentionProblem& p, const CanonicalTensor& t, const Sequence& s,
                                         int64_t head, int64_t key, int64_t pass) {
  const int64_t per = p.rows_per_position();
  return s.kv_batch * t.batch_stride + head * t.head_stride + (s.kv_begin + key / per) * t.seq_stride +
         (per == 1 ? pass : key % per) * t.pseudo_stride;
}

inline constexpr int64_t kNoRow = INT64_MIN;  // an offset that nothing may be read at or written to

// Element offset of position `key`, inside the capacity, of a cache of `cache_rows` rows or pages; kNoRow for a page
// that does not exist. `pass`: the pseudo-head of a mixed IHA cache.
__device__ inline int64_t cache_row_offset(const AttentionProblem& p, const KvCacheIndex& cache,
                                           const CanonicalTensor& t, const Sequence& s, int64_t head, int64_t key,
                                           int64_t pass, int64_t cache_rows) {
  int64_t block = s.kv_batch, row = key;
  if (p.page_size > 0) {
    block = cache.block_table[s.batch * cache.block_stride + key / p.page_size];
    row = key % p.page_size;
    if (block < 0 || block >= cache_rows) return kNoRow;
  }
  return block * t.batch_stride + head * t.head_stride + row * t.seq_stride + pass * t.pseudo_stride;
}

// Element offset of softmax row `row` of an LSE-like tensor.
__device__ inline int64_t lse_offset(const AttentionProblem& p, const RowTensor& t, const Sequence& s, int64_t head,
                                     int64_t row) {
  return s.batch * t.batch_stride + head * t.head_stride + (s.q_begin * p.rows_per_position() + row) * t.row_stride;
}

}  // namespace plait::cuda
