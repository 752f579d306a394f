// Rows of a cache step that are copied, turned or mixed: new keys and values into the cache, queries into a workspace.
// Included by naive/kv_cache.cu and by mma/decode/prepare.cu.
#pragma once

#include "cuda/common/mix.cuh"
#include "cuda/common/query_copy.hpp"
#include "cuda/common/rows.cuh"

namespace plait::cuda {

inline constexpr int kMixThreads = 256;    // of a block
inline constexpr int kMixElements = 1024;  // of one row, by a block

// Where the rows of a mix stand in the sequences of a cached problem.
struct CacheRows {
  AttentionProblem problem;
  KvCacheIndex cache;
  int64_t cache_rows;
};

// Position of row n of a sequence, whose last row is its last key; -1 for a length that the cache cannot hold.
__device__ inline int64_t row_position(const CacheRows& rows, const Mix& m, int64_t batch, int64_t n) {
  const int64_t keys = rows.cache.seqlens[batch] + rows.problem.new_keys;
  return keys < 0 || keys > rows.problem.seqlen_kv ? -1 : keys - m.seqlen + n;
}

// Offset of a new key's place; kNoRow where the cache has none.
__device__ inline int64_t cache_place(const CacheRows& rows, const Mix& m, int64_t batch, int64_t n) {
  const int64_t position = rows.cache.seqlens[batch] + n;
  if (position < 0 || position >= rows.problem.seqlen_kv) return kNoRow;
  const int64_t row = rows.cache.batch_idx != nullptr ? rows.cache.batch_idx[batch] : batch;
  if (rows.problem.page_size == 0 && (row < 0 || row >= rows.cache_rows)) return kNoRow;
  const Sequence sequence{batch, 0, 0, 0, 0, row};
  return cache_row_offset(rows.problem, rows.cache, m.y, sequence, /*head=*/0, position, /*pass=*/0, rows.cache_rows);
}

// Block `block`, of kMixThreads threads: one row of one sequence, kMixElements elements of y, which is a cache
// (`append`: behind the keys that it holds) or an ordinary tensor. `blocks`: of a row.
__device__ inline void mix_cache_row(const Mix& m, const CacheRows& rows, bool append, int64_t block, int64_t blocks) {
  const int64_t place = block / blocks, batch = place / m.seqlen, n = place % m.seqlen;
  const int64_t x_base = position_offset(m.x, batch, n);
  const int64_t y_base = append ? cache_place(rows, m, batch, n) : position_offset(m.y, batch, n);
  if (y_base == kNoRow) return;
  const int64_t position = append ? rows.cache.seqlens[batch] + n : row_position(rows, m, batch, n);
  const int first = static_cast<int>(block % blocks) * kMixElements;
  for (int e = first + threadIdx.x; e < min(first + kMixElements, m.out() * m.dim); e += kMixThreads) {
    const int out = e / m.dim, d = e % m.dim;
    store(m.y.data, m.y.dtype, y_base + head_offset(m.y, m.y_pseudo, out) + d * m.y.dim_stride,
          mixed(m, x_base, position, out, d));
  }
}

inline int64_t row_blocks(const Mix& m) { return (int64_t{m.out()} * m.dim + kMixElements - 1) / kMixElements; }

// Rows of `heads` source heads, each copied, or mixed by `w` into P pseudo-heads.
inline Mix mix_of(const KvCacheProblem& p, const CanonicalTensor& x, const CanonicalTensor& y, int64_t heads,
                  int64_t rows, int64_t dim, const TensorView* w) {
  Mix m;
  m.batch = p.attention.batch, m.seqlen = rows;
  m.heads = static_cast<int>(heads), m.dim = static_cast<int>(dim);
  m.x = x, m.y = y;
  m.per_head = w == nullptr;
  if (w == nullptr) return m;
  m.y_pseudo = static_cast<int>(p.attention.pseudo_heads);
  m.w = {w->data, w->dtype, w->stride[0], w->stride[1], w->stride[2], 0};
  return m;
}

inline void turn(const KvCacheProblem& p, const KvCacheTensors& t, Mix& m) {
  if (!p.has_rope) return;
  m.rope = {true,  false, p.rope_style == RopeStyle::kPairs, static_cast<int>(p.rope_dim / 2), p.rope_rows, 0,
            t.cos, t.sin};
}

inline Mix new_keys(const KvCacheProblem& p, const KvCacheTensors& t) {
  const AttentionProblem& a = p.attention;
  Mix keys = mix_of(p, t.k_new, t.attention.k, a.heads_kv, a.new_keys, a.head_dim, p.mixed() ? &t.w_k : nullptr);
  turn(p, t, keys);
  return keys;
}
inline Mix new_values(const KvCacheProblem& p, const KvCacheTensors& t) {
  const AttentionProblem& a = p.attention;
  return mix_of(p, t.v_new, t.attention.v, a.heads_kv, a.new_keys, a.head_dim_v, p.mixed() ? &t.w_v : nullptr);
}
inline Mix turned_queries(const KvCacheProblem& p, const KvCacheTensors& t, const CanonicalTensor& y) {
  const AttentionProblem& a = p.attention;
  Mix queries = mix_of(p, t.attention.q, y, a.heads_q, a.seqlen_q, a.head_dim, p.iha ? &t.w_q : nullptr);
  turn(p, t, queries);
  return queries;
}

}  // namespace plait::cuda
