// Accumulators to O and LSE.
// Called by consumer.cuh, and by finder.cuh for rows that see no key.
#pragma once

#include "cuda/common/element.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/tma.cuh"
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
      if (8 * n < columns) ptx::store_global_16(at + 8 * n, {r[0], r[1], r[2], r[3]});
    }
  }
}

// fp32 rows, two elements a thread: the quad of a row writes 32 bytes next to each other.
template <int kOutTiles>
__device__ inline void store_rows(const float (&out)[kOutTiles][4], const float (&factor)[2],
                                  const OutputRows<float>& to, int lane) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = 8 * i + lane / 4, column = lane % 4 * 2;
    float* at = to.row(row) + column;
    const int columns = row < to.rows ? to.layout.dim - column : 0;
#pragma unroll
    for (int n = 0; n < kOutTiles; ++n) {
      const float2 two = make_float2(out[n][2 * i] * factor[i], out[n][2 * i + 1] * factor[i]);
      if (8 * n < columns) *reinterpret_cast<float2*>(at + 8 * n) = two;
    }
  }
}

// To where the queries of the warp were, rows from `slab` on of a Tile, for the copy engine.
template <class T, class Tile, int kOutTiles>
__device__ inline void stage_rows(const float (&out)[kOutTiles][4], const float (&factor)[2], uint32_t stage, int slab,
                                  int lane) {
#pragma unroll
  for (int n = 0; n < kOutTiles; n += 2) {
    uint32_t r[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float* pair = out[n + j / 2] + j % 2 * 2;
      r[j] = ptx::pack<T>(pair[0] * factor[j % 2], pair[1] * factor[j % 2]);
    }
    ptx::stmatrix_x4(stage + Tile::chunk_bytes(slab + lane % 16, n + lane / 16), r);
  }
  ptx::fence_async_copies();
}

// Element by element, where O does not lie in whole aligned chunks.
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

// The first `count` rows of a row tile that sees no key; `first_row`: of the sequence. By one warp. A range's O is not
// read then.
__device__ inline void store_nothing(const PrefillParams& params, const PrefillWork& work, int first_row, int count,
                                     int lane) {
  const AttentionTensors& t = params.tensors;
#pragma unroll 1
  for (int row = 0; row < (params.ranges.ranges.count > 0 ? 0 : count); ++row) {
    const int64_t out = work.out + row_offset(params.out, first_row + row);
#pragma unroll 1
    for (int column = lane; column < params.out.dim; column += 32) {
      store(t.out.data, t.out.dtype, out + column * params.out.dim_stride, 0.0f);
    }
  }
  if (t.lse.data == nullptr) return;
  float* lse = static_cast<float*>(t.lse.data) + work.lse;
#pragma unroll 1
  for (int row = lane; row < count; row += 32) lse[row * t.lse.row_stride] = work.sink;
}

// Ends the softmax of the rows of one warp, from `row` of the row tile on: LSE, and what O is multiplied by.
__device__ inline void finish_rows(float (&factor)[2], const SoftmaxRows<2>& softmax, const PrefillParams& params,
                                   const PrefillWork& work, int row, int lane) {
  const RowTensor& lse = params.tensors.lse;
  const float sink = work.sink;
  const RowResult upper = finish_row(softmax.reference[0], quad_sum(softmax.sum[0]), sink);
  const RowResult lower = finish_row(softmax.reference[1], quad_sum(softmax.sum[1]), sink);
  factor[0] = upper.out_factor;
  factor[1] = lower.out_factor;
  asm volatile("" : "+f"(factor[0]), "+f"(factor[1]));  // now, not behind the next wait
  const int own = row + lane % 4 * 8 + lane / 4;        // of a quad, one thread stores one row and another the other
  if (lse.data != nullptr && lane % 4 < 2 && own < work.rows) {
    static_cast<float*>(lse.data)[work.lse + own * lse.row_stride] = lane % 4 == 0 ? upper.lse : lower.lse;
  }
}

// O of a warp's rows, from `row` of the row tile and first_row of the sequence on. `stage`: the Tile of the row tile's
// queries, where those of the warp are done with if kStaged.
template <class T, class Tile, bool kStaged, int kOutTiles>
__device__ inline void store_output(const float (&out)[kOutTiles][4], const float (&factor)[2],
                                    const PrefillParams& params, const PrefillWork& work, int row, int first_row,
                                    uint32_t stage, int lane) {
  if (kStaged && params.copies_out) {
    stage_rows<T, Tile>(out, factor, stage, row, lane);
    return;
  }
  const CanonicalTensor& to = params.tensors.out;
  const int rows = work.rows - row;
  if (params.problem.out_dtype == DType::kFloat32 && params.out.path != LoadPath::kAny) {
    store_rows(out, factor, {static_cast<float*>(to.data) + work.out, first_row, rows, params.out}, lane);
  } else if (params.problem.out_dtype == DType::kFloat32) {
    store_elements<float>(out, factor, {static_cast<float*>(to.data) + work.out, first_row, rows, params.out}, lane);
  } else if (params.out.path == LoadPath::kAny) {
    store_elements<T>(out, factor, {static_cast<T*>(to.data) + work.out, first_row, rows, params.out}, lane);
  } else {
    store_rows<T>(out, factor, {static_cast<T*>(to.data) + work.out, first_row, rows, params.out}, lane);
  }
}

}  // namespace plait::cuda::sm90
