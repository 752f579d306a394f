// Accumulators to O and LSE.
// Called by consumer.cuh, and by producer.cuh for rows that see no key.
#pragma once

#include "cuda/common/element.cuh"
#include "cuda/sm90/prefill/storage.cuh"

namespace plait::cuda::sm90 {

// Elements from row 0 of a sequence to another one.
__device__ __forceinline__ int64_t row_offset(const RowLayout& layout, int row) {
  if (layout.per == 1) return row * layout.seq_stride;
  const auto at = static_cast<unsigned>(row), per = static_cast<unsigned>(layout.per), position = at / per;
  return position * layout.seq_stride + (at - position * per) * layout.pseudo_stride;
}

// Where the 16 rows of one warp go.
template <class Out>
struct OutputRows {
  Out* head;      // column 0 of row 0 of the sequence
  int first_row;  // of the sequence
  int rows;       // that exist; may be <= 0
  const RowLayout& layout;

  __device__ __forceinline__ Out* row(int row) const { return head + row_offset(layout, first_row + row); }
};

// The four threads of a quad hold 4 x 4 registers: thread t gets register t of each of them, in their order.
__device__ __forceinline__ void transpose_quad(uint32_t (&r)[4], int lane) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    const bool upper = (lane & bit) != 0;
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const int low = bit == 1 ? 2 * pair : pair;
      const uint32_t other = __shfl_xor_sync(kAllLanes, upper ? r[low] : r[low + bit], bit);
      (upper ? r[low] : r[low + bit]) = other;
    }
  }
}

// Rows of 16-bit elements, 16 bytes a thread: the quad of a row writes 64 bytes next to each other.
template <class T, int kOutTiles>
__device__ inline void store_rows(const float (&out)[kOutTiles][4], const float (&factor)[2], const OutputRows<T>& to,
                                  int lane) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = 8 * i + lane / 4;
    T* at = to.row(row) + lane % 4 * tile::kChunkElems;
    const int columns = row < to.rows ? to.layout.dim - lane % 4 * tile::kChunkElems : 0;
#pragma unroll
    for (int n = 0; n < kOutTiles; n += 4) {
      uint32_t r[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        r[j] = ptx::pack<T>(out[n + j][2 * i] * factor[i], out[n + j][2 * i + 1] * factor[i]);
      }
      transpose_quad(r, lane);
      if (8 * n < columns) *reinterpret_cast<uint4*>(at + 8 * n) = {r[0], r[1], r[2], r[3]};
    }
  }
}

// The same element by element: fp32, or where O does not lie in whole aligned chunks.
template <class Out, int kOutTiles>
__device__ inline void store_elements(const float (&out)[kOutTiles][4], const float (&factor)[2],
                                      const OutputRows<Out>& to, int lane) {
  const int64_t step = to.layout.dim_stride;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = 8 * i + lane / 4, column = lane % 4 * 2;
    Out* at = to.row(row) + column * step;
    const int columns = row < to.rows ? to.layout.dim - column : 0;
#pragma unroll
    for (int n = 0; n < kOutTiles; ++n, at += 8 * step) {
      if (8 * n < columns) at[0] = Out(out[n][2 * i] * factor[i]);
      if (8 * n + 1 < columns) at[step] = Out(out[n][2 * i + 1] * factor[i]);
    }
  }
}

__device__ __forceinline__ float sink_of(const PrefillParams& params, const PrefillWork& work) {
  const AttentionTensors& t = params.tensors;
  if (!params.problem.has_sinks || work.sequence.tail) return -CUDART_INF_F;
  return static_cast<const float*>(t.sinks)[work.head * t.sinks_stride];
}

// Element offset of row 0 of a sequence in O.
__device__ __forceinline__ int64_t out_offset(const CanonicalTensor& out, const PrefillWork& work) {
  return work.sequence.batch * out.batch_stride + work.head * out.head_stride + work.sequence.q_begin * out.seq_stride;
}

// Softmax rows of a sequence.
__device__ __forceinline__ int row_count(const AttentionProblem& problem, const PrefillWork& work) {
  return static_cast<int>(work.sequence.q_len) * static_cast<int>(problem.rows_per_position());
}

// Up to `rows` rows from `first_row` on that see no key, by one warp.
__device__ inline void store_nothing(const PrefillParams& params, const PrefillWork& work, int first_row, int rows,
                                     int lane) {
  const AttentionTensors& t = params.tensors;
  const int count = min(row_count(params.problem, work) - first_row, rows);
#pragma unroll 1
  for (int row = 0; row < count; ++row) {
    const int64_t out = out_offset(t.out, work) + row_offset(params.out, first_row + row);
#pragma unroll 1
    for (int column = lane; column < params.out.dim; column += 32) {
      store(t.out.data, t.out.dtype, out + column * params.out.dim_stride, 0.0f);
    }
  }
  if (t.lse.data == nullptr) return;
  float* lse = static_cast<float*>(t.lse.data) + lse_offset(params.problem, t.lse, work.sequence, work.head, first_row);
#pragma unroll 1
  for (int row = lane; row < count; row += 32) lse[row * t.lse.row_stride] = sink_of(params, work);
}

// The rows of one warp from accumulators and softmax.
template <class T, int kHeadDim>
__device__ inline void store_output(const float (&out)[kHeadDim / 8][4], const SoftmaxRows<2>& softmax,
                                    const PrefillParams& params, const PrefillWork& work, int first_row, int lane) {
  const AttentionProblem& problem = params.problem;
  const AttentionTensors& tensors = params.tensors;
  const int rows = min(row_count(problem, work) - first_row, 16);
  const float sink = sink_of(params, work);
  float* lse =
      static_cast<float*>(tensors.lse.data) + lse_offset(problem, tensors.lse, work.sequence, work.head, first_row);
  float factor[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const RowResult result = finish_row(softmax.reference[i], quad_sum(softmax.sum[i]), sink);
    factor[i] = result.out_factor;
    const int row = 8 * i + lane / 4;
    if (tensors.lse.data != nullptr && lane % 4 == 0 && row < rows) lse[row * tensors.lse.row_stride] = result.lse;
  }
  const int64_t offset = out_offset(tensors.out, work);
  void* data = tensors.out.data;
  if (problem.out_dtype == DType::kFloat32) {
    store_elements<float>(out, factor, {static_cast<float*>(data) + offset, first_row, rows, params.out}, lane);
  } else if (params.out.path == LoadPath::kAny) {
    store_elements<T>(out, factor, {static_cast<T*>(data) + offset, first_row, rows, params.out}, lane);
  } else {
    store_rows<T>(out, factor, {static_cast<T*>(data) + offset, first_row, rows, params.out}, lane);
  }
}

}  // namespace plait::cuda::sm90
