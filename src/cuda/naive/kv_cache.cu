// One step over a cache: append the new keys in place, rotate and mix (IHA), then the attention of
// attention_forward.cu. Called through naive.hpp. Raw IHA caches are mixed as the attention reads them, so no step
// needs memory per key.
#include "cuda/naive/forward.hpp"
#include "cuda/naive/mix.cuh"
#include "cuda/naive/naive.hpp"
#include "cuda/runtime/launch.cuh"

namespace plait::cuda::naive {
namespace {

constexpr int kElementsPerBlock = 1024;  // of one row

// Where the rows of a mix stand in the sequences of a cached problem.
struct CacheRows {
  AttentionProblem problem;
  KvCacheIndex cache;
  int64_t cache_rows;
  bool append;  // to the cache, after the keys that it holds; else y is an ordinary tensor
};

// Position of row n of a sequence, whose last row is its last key; -1 for a length that the cache cannot hold.
__device__ int64_t row_position(const CacheRows& rows, const Mix& m, int64_t batch, int64_t n) {
  const int64_t keys = rows.cache.seqlens[batch] + rows.problem.new_keys;
  return keys < 0 || keys > rows.problem.seqlen_kv ? -1 : keys - m.seqlen + n;
}

// Offset of a new key's place; kNoRow where the cache has none.
__device__ int64_t cache_place(const CacheRows& rows, const Mix& m, int64_t batch, int64_t n) {
  const int64_t position = rows.cache.seqlens[batch] + n;
  if (position < 0 || position >= rows.problem.seqlen_kv) return kNoRow;
  const int64_t row = rows.cache.batch_idx != nullptr ? rows.cache.batch_idx[batch] : batch;
  if (rows.problem.page_size == 0 && (row < 0 || row >= rows.cache_rows)) return kNoRow;
  const Sequence sequence{batch, 0, 0, 0, 0, row};
  return cache_row_offset(rows.problem, rows.cache, m.y, sequence, /*head=*/0, position, /*pass=*/0, rows.cache_rows);
}

// Block: one row of one sequence, kElementsPerBlock elements of y.
__global__ void __launch_bounds__(kThreads, 3)
    cache_mix_kernel(const __grid_constant__ Mix m, const __grid_constant__ CacheRows rows, int64_t blocks) {
  const int64_t place = blockIdx.x / blocks, batch = place / m.seqlen, n = place % m.seqlen;
  const int64_t x_base = position_offset(m.x, batch, n);
  const int64_t y_base = rows.append ? cache_place(rows, m, batch, n) : position_offset(m.y, batch, n);
  if (y_base == kNoRow) return;
  const int64_t position = rows.append ? rows.cache.seqlens[batch] + n : row_position(rows, m, batch, n);
  const int first = static_cast<int>(blockIdx.x % blocks) * kElementsPerBlock;
  for (int e = first + threadIdx.x; e < min(first + kElementsPerBlock, m.out() * m.dim); e += kThreads) {
    const int out = e / m.dim, d = e % m.dim;
    store(m.y.data, m.y.dtype, y_base + head_offset(m.y, m.y_pseudo, out) + d * m.y.dim_stride,
          mixed(m, x_base, position, out, d));
  }
}

// Rows of `heads` source heads, each copied, or mixed by `w` into P pseudo-heads.
Mix mix_of(const KvCacheProblem& p, const CanonicalTensor& x, const CanonicalTensor& y, int64_t heads, int64_t rows,
           int64_t dim, const TensorView* w) {
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

void turn(const KvCacheProblem& p, const KvCacheTensors& t, Mix& m) {
  if (!p.has_rope) return;
  m.rope = {true,  false, p.rope_style == RopeStyle::kPairs, static_cast<int>(p.rope_dim / 2), p.rope_rows, 0,
            t.cos, t.sin};
}

void run_mix(const KvCacheProblem& p, const KvCacheTensors& t, const Mix& m, bool append, cudaStream_t stream) {
  const int64_t blocks = (int64_t{m.out()} * m.dim + kElementsPerBlock - 1) / kElementsPerBlock;
  launch(cache_mix_kernel, m.batch * m.seqlen * blocks, kThreads, 0, stream, m,
         CacheRows{p.attention, t.attention.cache, p.cache_rows, append}, blocks);
}

void append(const KvCacheProblem& p, const KvCacheTensors& t, cudaStream_t stream) {
  const AttentionProblem& a = p.attention;
  Mix keys = mix_of(p, t.k_new, t.attention.k, a.heads_kv, a.new_keys, a.head_dim, p.mixed() ? &t.w_k : nullptr);
  turn(p, t, keys);
  run_mix(p, t, keys, true, stream);
  const Mix values =
      mix_of(p, t.v_new, t.attention.v, a.heads_kv, a.new_keys, a.head_dim_v, p.mixed() ? &t.w_v : nullptr);
  run_mix(p, t, values, true, stream);
}

// fp32 [batch, heads_q, seqlen_q, pseudo, head_dim]: the queries after rotation and mix.
CanonicalTensor turned_queries(const KvCacheProblem& p, void* data) {
  const AttentionProblem& a = p.attention;
  const int64_t pseudo = p.iha ? a.pseudo_heads : 1, row = pseudo * a.head_dim;
  return {data, DType::kFloat32, a.heads_q * a.seqlen_q * row, a.seqlen_q * row, row, a.head_dim, 1};
}

}  // namespace

void attention_with_kvcache(const KvCacheProblem& p, const KvCacheTensors& t, void* workspace, cudaStream_t stream) {
  const AttentionProblem& a = p.attention;
  AttentionTensors attention = t.attention;
  if (copies_queries(p)) {
    attention.q = turned_queries(p, workspace);
    Mix queries = mix_of(p, t.attention.q, attention.q, a.heads_q, a.seqlen_q, a.head_dim, p.iha ? &t.w_q : nullptr);
    turn(p, t, queries);
    run_mix(p, t, queries, false, stream);
  }
  if (a.new_keys > 0) append(p, t, stream);
  CacheSource source;
  source.rows = p.cache_rows;
  source.raw = p.raw();
  if (source.raw) source.w_k = t.w_k, source.w_v = t.w_v;
  launch_forward(a, attention, source, stream);
}

}  // namespace plait::cuda::naive
