// The normalised, immutable problem: every shape proven, one canonical order of dimensions.
// Made by validate(), read by the planner and by every backend.
#pragma once

#include <cstdint>
#include <span>

#include "plait/kv_cache.hpp"

namespace plait {

// A tensor in canonical order [batch, heads, seqlen, pseudo, dim]; missing dimensions have stride 0 and extent 1.
// Packed tensors have batch 1 and seqlen = total rows.
struct CanonicalTensor {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  int64_t batch_stride = 0, head_stride = 0, seq_stride = 0, pseudo_stride = 0, dim_stride = 0;
};

// LSE-like: [batch, heads_q, rows], rows = seqlen_q * (interleaved ? pseudo_heads : 1). `data` null: absent.
struct RowTensor {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  int64_t batch_stride = 0, head_stride = 0, row_stride = 0;
};

struct AttentionProblem {
  Op op = Op::kAttentionForward;
  HeadMode mode = HeadMode::kPlain;
  PseudoMask mask = PseudoMask::kFlat;
  int64_t batch = 0;  // dense: B; packed: number of sequences
  int64_t heads_q = 0, heads_kv = 0;
  int64_t seqlen_q = 0;  // positions; packed: total_q
  int64_t seqlen_kv = 0;
  int64_t pseudo_heads = 1;
  int64_t head_dim = 0, head_dim_v = 0;
  DType dtype = DType::kFloat32, out_dtype = DType::kFloat32;
  Device device{};
  bool packed = false;
  // Keys come from a cache: batch sequences of their own lengths; seqlen_kv is the capacity of one.
  bool cached = false;
  int64_t new_keys = 0;   // appended by the call, already in the cache when attention runs
  int64_t page_size = 0;  // paged cache; 0: dense
  bool causal = false;
  int64_t window_left = -1, window_right = -1;
  double scale = 1.0;
  double softcap = 0.0;
  bool has_sinks = false;
  bool deterministic = false;
  int64_t split_size = 0;
  Strategy strategy = Strategy::kAuto;
  Backend backend = Backend::kAuto;

  // Softmax rows per (batch, head): positions, or virtual rows in interleaved mode.
  constexpr int64_t rows_per_position() const { return mode == HeadMode::kInterleaved ? pseudo_heads : 1; }
  // Passes over the keys that share one softmax: P in joint mode.
  constexpr int64_t joint_passes() const { return mode == HeadMode::kJoint ? pseudo_heads : 1; }
  uint64_t fingerprint() const;
};

// Where the keys of a cached problem lie; all null in an ordinary call. Contents are proven by validate().
struct KvCacheIndex {
  const int32_t* seqlens = nullptr;      // [batch]: keys before the append
  const int32_t* batch_idx = nullptr;    // [batch]: row of a dense cache; null: the sequence's own number
  const int32_t* block_table = nullptr;  // [batch, max_pages], row stride block_stride: pages of a sequence
  int64_t block_stride = 0;
};

// The pointers that belong to a problem. `dq` and the other gradients are set in a backward call only.
struct AttentionTensors {
  CanonicalTensor q, k, v;  // q [batch, heads_q, seqlen_q, pseudo, head_dim] ...
  CanonicalTensor out;      // [batch, heads_q, seqlen_q, pseudo (1 in joint), head_dim_v]
  RowTensor lse;
  const void* sinks = nullptr;  // [heads_q], element stride sinks_stride, fp32 (fp64 with fp64 inputs)
  int64_t sinks_stride = 1;
  const int32_t* cu_seqlens_q = nullptr;  // [batch + 1] when packed; contiguous
  const int32_t* cu_seqlens_kv = nullptr;
  KvCacheIndex cache;
  CanonicalTensor dout, dq, dk, dv;
  RowTensor dlse;          // data null: zero
  void* dsinks = nullptr;  // like sinks
  int64_t dsinks_stride = 1;
};

// One sequence of a dense, packed or cached problem.
struct Sequence {
  int64_t batch;                             // index for batch_stride of q, out and lse (0 when packed)
  int64_t q_begin, q_len, kv_begin, kv_len;  // positions
  int64_t kv_batch;                          // index for batch_stride of k and v; unused when paged
};

inline Sequence sequence_at(const AttentionProblem& problem, const AttentionTensors& tensors, int64_t index) {
  if (problem.cached) {
    const int64_t row = tensors.cache.batch_idx != nullptr ? tensors.cache.batch_idx[index] : index;
    return {index, 0, problem.seqlen_q, 0, tensors.cache.seqlens[index] + problem.new_keys, row};
  }
  if (!problem.packed) return {index, 0, problem.seqlen_q, 0, problem.seqlen_kv, index};
  const int64_t q_begin = tensors.cu_seqlens_q[index], kv_begin = tensors.cu_seqlens_kv[index];
  return {0, q_begin, tensors.cu_seqlens_q[index + 1] - q_begin, kv_begin, tensors.cu_seqlens_kv[index + 1] - kv_begin,
          0};
}

// Element offset of position `position` of a head's keys or values: through the block table when paged.
inline int64_t key_offset(const AttentionProblem& problem, const KvCacheIndex& cache, const CanonicalTensor& tensor,
                          const Sequence& sequence, int64_t head, int64_t position) {
  int64_t block = sequence.kv_batch, row = sequence.kv_begin + position;
  if (problem.page_size > 0) {
    block = cache.block_table[sequence.batch * cache.block_stride + row / problem.page_size];
    row %= problem.page_size;
  }
  return block * tensor.batch_stride + head * tensor.head_stride + row * tensor.seq_stride;
}

struct PremixProblem {
  Op op = Op::kPremixForward;
  int64_t batch = 0;                                              // dense: B; packed: number of sequences
  int64_t heads = 0, seqlen = 0, pseudo_heads = 1, head_dim = 0;  // packed: seqlen = total
  DType dtype = DType::kFloat32, weight_dtype = DType::kFloat32;
  Device device{};
  bool packed = false;
  bool has_rope = false;
  RopeStyle rope_style = RopeStyle::kHalf;
  RopeIndex rope_index = RopeIndex::kToken;
  int64_t rope_dim = 0;  // D_rot
  int64_t rope_offset = 0;
  int64_t rope_rows = 0;  // positions in the tables
  Backend backend = Backend::kAuto;
  uint64_t fingerprint() const;
};

uint64_t fingerprint(std::span<const PremixProblem> problems);

struct PremixTensors {
  CanonicalTensor x, y;  // x pseudo extent 1; y [batch, heads, seqlen, pseudo, dim]; dx and dy in a backward call:
  CanonicalTensor dx, dy;
  TensorView w, dw;     // [heads, pseudo, heads]
  TensorView cos, sin;  // [rope_rows, rope_dim / 2]
  const int32_t* cu_seqlens = nullptr;
  const int32_t* cu_seqlens_other = nullptr;  // null: offset 0 per sequence
};

struct CollapseProblem {
  Op op = Op::kCollapseForward;
  int64_t batch = 0, heads = 0, seqlen = 0, pseudo_heads = 1, head_dim = 0;
  DType dtype = DType::kFloat32, weight_dtype = DType::kFloat32;
  Device device{};
  bool global = false;  // r [heads, heads, pseudo] instead of [heads, pseudo]
  Backend backend = Backend::kAuto;
  uint64_t fingerprint() const;
};

struct CollapseTensors {
  CanonicalTensor x, y, dx, dy;
  TensorView r, dr;
};

// One step over a cache: append, rotate, mix (IHA), attend. `attention` is what runs last: plain, or joint with P.
struct KvCacheProblem {
  AttentionProblem attention;
  int64_t cache_rows = 0;  // rows of a dense cache, pages of a paged one
  bool has_rope = false;
  RopeStyle rope_style = RopeStyle::kHalf;
  int64_t rope_dim = 0, rope_rows = 0;
  bool iha = false;
  IhaCacheKind kind = IhaCacheKind::kMixed;
  DType weight_dtype = DType::kFloat32;
  bool mixed() const { return iha && kind == IhaCacheKind::kMixed; }
  bool raw() const { return iha && kind == IhaCacheKind::kRaw; }
  uint64_t fingerprint() const;
};

struct KvCacheTensors {
  AttentionTensors attention;    // q [batch, heads_q, seqlen_q, 1, head_dim]: source heads; k, v: the caches
  CanonicalTensor k_new, v_new;  // [batch, heads_kv, new_keys, 1, head_dim(_v)]: source heads; data null: none
  TensorView cos, sin;           // [rope_rows, rope_dim / 2]
  TensorView w_q, w_k, w_v;      // IHA
};

}  // namespace plait
