// One description of premix and collapse: y[out] = sum over in of w[out, in] x[in] at every position, with RoPE.
// Included by naive/mix.cu and cache_mix.cuh. A rotation acts on the dims, a mix on the heads: they commute, so one
// element of y needs the sums of its own dim and of the dim that turns with it.
#pragma once

#include "core/problem.hpp"
#include "cuda/common/element.cuh"

namespace plait::cuda {

// Weight of (out head, out pseudo, in head, in pseudo): a stride each. Null data: 1 (rows are copied).
struct MixWeights {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  int64_t out_head = 0, out_pseudo = 0, in_head = 0, in_pseudo = 0;
};

struct MixRope {
  bool on = false;
  bool rows = false;  // a table row for each (position, out pseudo), else for each position
  bool pairs = false;
  int half = 0;  // D_rot / 2
  int64_t table_rows = 0, offset = 0;
  TensorView cos, sin;
};

struct Mix {
  int64_t batch = 0, seqlen = 0;
  int heads = 0, x_pseudo = 1, y_pseudo = 1, dim = 0;
  bool per_head = false;  // out heads see their own in head only
  CanonicalTensor x, y;   // [batch, heads, seqlen, x_pseudo | y_pseudo, dim]
  MixWeights w;
  MixRope rope;
  const int32_t* cu_seqlens = nullptr;  // packed: [sequences + 1]; batch is 1
  const int32_t* cu_seqlens_other = nullptr;
  int64_t sequences = 0;

  __host__ __device__ int in() const { return heads * x_pseudo; }
  __host__ __device__ int out() const { return heads * y_pseudo; }
};

__device__ __forceinline__ int64_t weight_offset(const Mix& m, const MixWeights& w, int out, int in) {
  return out / m.y_pseudo * w.out_head + out % m.y_pseudo * w.out_pseudo + in / m.x_pseudo * w.in_head +
         in % m.x_pseudo * w.in_pseudo;
}
__device__ __forceinline__ float weight(const Mix& m, int out, int in) {
  return m.w.data == nullptr ? 1.0f : load(m.w.data, m.w.dtype, weight_offset(m, m.w, out, in));
}

// Offset of row `index` = (head, pseudo) of a position at `base`.
__device__ __forceinline__ int64_t head_offset(const CanonicalTensor& t, int pseudo, int index) {
  return index / pseudo * t.head_stride + index % pseudo * t.pseudo_stride;
}
__device__ __forceinline__ int64_t position_offset(const CanonicalTensor& t, int64_t batch, int64_t n) {
  return batch * t.batch_stride + n * t.seq_stride;
}

// How one dim turns: value * cos + partner's value * sin, the sign in `sin`. partner -1: it stays.
struct Turn {
  float cos = 1.0f, sin = 0.0f;
  int partner = -1;
};

// `position` outside the tables (queries that see nothing, malformed lengths): nothing turns. direction -1: back.
__device__ inline Turn turn_of(const Mix& m, int64_t position, int pseudo, int d, float direction) {
  const MixRope& r = m.rope;
  if (!r.on || d >= 2 * r.half) return {};
  const int64_t row = r.rows ? position * m.y_pseudo + pseudo : position;
  if (position < 0 || row >= r.table_rows) return {};
  const bool second = r.pairs ? d % 2 != 0 : d >= r.half;
  const int angle = r.pairs ? d / 2 : second ? d - r.half : d, step = r.pairs ? 1 : r.half;
  const float c = static_cast<const float*>(r.cos.data)[row * r.cos.stride[0] + angle * r.cos.stride[1]];
  const float s = static_cast<const float*>(r.sin.data)[row * r.sin.stride[0] + angle * r.sin.stride[1]];
  return {c, second ? direction * s : -direction * s, second ? d - step : d + step};
}

// Dim d of a row at `offset`, turned.
__device__ __forceinline__ float turned(const CanonicalTensor& t, int64_t offset, int d, const Turn& turn) {
  const float value = load(t.data, t.dtype, offset + d * t.dim_stride);
  if (turn.partner < 0) return value;
  return value * turn.cos + load(t.data, t.dtype, offset + turn.partner * t.dim_stride) * turn.sin;
}

// Dim d of y[out] at a position whose x row 0 stands at x_base.
__device__ inline float mixed(const Mix& m, int64_t x_base, int64_t position, int out, int d) {
  const Turn turn = turn_of(m, position, out % m.y_pseudo, d, 1.0f);
  const int first = m.per_head ? out / m.y_pseudo * m.x_pseudo : 0, end = m.per_head ? first + m.x_pseudo : m.in();
  float sum = 0.0f;
  for (int in = first; in < end; ++in) {
    sum = fmaf(weight(m, out, in), turned(m.x, x_base + head_offset(m.x, m.x_pseudo, in), d, turn), sum);
  }
  return sum;
}

}  // namespace plait::cuda
