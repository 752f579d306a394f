// Swizzled shared-memory tiles to rows of any strides, and fp32 rows to tiles (common/loader.cuh: 16-bit rows).
// Called by the backward kernels.
#pragma once

#include "cuda/common/loader.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/shared.cuh"

namespace plait::cuda::mma {

// The rows of one head of a sequence: row r of it is at data + base + offset(r).
struct HeadRows {
  void* data;
  int64_t base, seq_stride, pseudo_stride, dim_stride;
  int rows_per_position, rows, dim;

  __device__ int64_t offset(int row) const {
    if (rows_per_position == 1) return base + row * seq_stride;
    return base + row / rows_per_position * seq_stride + row % rows_per_position * pseudo_stride;
  }
};

__device__ inline HeadRows head_rows(const AttentionProblem& p, const CanonicalTensor& t, int64_t batch, int64_t begin,
                                     int64_t length, int64_t head, int64_t pass, int64_t dim) {
  const int per = static_cast<int>(p.rows_per_position());
  const int64_t base =
      batch * t.batch_stride + head * t.head_stride + begin * t.seq_stride + (per == 1 ? pass * t.pseudo_stride : 0);
  return {t.data,
          base,
          t.seq_stride,
          t.pseudo_stride,
          t.dim_stride,
          per,
          static_cast<int>(length) * per,
          static_cast<int>(dim)};
}
__device__ inline HeadRows query_rows(const AttentionProblem& p, const CanonicalTensor& t, const Sequence& s,
                                      int64_t head, int64_t pass, int64_t dim) {
  return head_rows(p, t, s.batch, s.q_begin, s.q_len, head, pass, dim);
}
__device__ inline HeadRows key_rows(const AttentionProblem& p, const CanonicalTensor& t, const Sequence& s,
                                    int64_t head, int64_t pass, int64_t dim) {
  return head_rows(p, t, s.kv_batch, s.kv_begin, s.kv_len, head, pass, dim);
}

// fp32 rows, from `first_row` of `base` on, to the tile at `target`, rounded; rows at or past `rows` and columns past
// dim become zero. Element by element: fp32 gradients of the output are rare.
template <class T, int kRows, int kColumns, int kThreads>
__device__ __forceinline__ void load_float_tile(uint32_t target, const RowLayout& layout, const float* base,
                                                int first_row, int rows) {
#pragma unroll 1
  for (int index = static_cast<int>(threadIdx.x); index < kRows * kColumns / 2; index += kThreads) {
    const int row = index / (kColumns / 2), column = index % (kColumns / 2) * 2;
    const int position = (first_row + row) / layout.per, pseudo = (first_row + row) % layout.per;
    const float* from =
        base + position * layout.seq_stride + pseudo * layout.pseudo_stride + column * layout.dim_stride;
    const float low = row < rows && column < layout.dim ? from[0] : 0.0f;
    const float high = row < rows && column + 1 < layout.dim ? from[layout.dim_stride] : 0.0f;
    const int chunk = column / tile::kChunkElems, inside = column % tile::kChunkElems;
    ptx::store_shared_4(target + (tile::Swizzle<kColumns>::offset(row, chunk) + inside) * 2, ptx::pack<T>(low, high));
  }
}

// The tile at `source` to rows first ..; rows past the end and columns past dim do not exist.
template <class T, int kRows, int kColumns, int kThreads>
__device__ void store_tile(uint32_t source, const HeadRows& rows, int first, bool vector) {
  constexpr int kChunks = kColumns / tile::kChunkElems;
  for (int index = static_cast<int>(threadIdx.x); index < kRows * kChunks; index += kThreads) {
    const int row = index / kChunks, chunk = index % kChunks, column = chunk * tile::kChunkElems;
    if (first + row >= rows.rows || column >= rows.dim) continue;
    const uint4 value = ptx::load_shared_16(source + tile::Swizzle<kColumns>::offset(row, chunk) * 2);
    T* to = static_cast<T*>(rows.data) + rows.offset(first + row) + column * rows.dim_stride;
    if (vector) {
      *reinterpret_cast<uint4*>(to) = value;
    } else {
      const uint32_t words[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
      for (int i = 0; i < tile::kChunkElems; ++i) {
        const uint16_t bits = static_cast<uint16_t>(words[i / 2] >> (16 * (i % 2)));
        if (column + i < rows.dim) reinterpret_cast<uint16_t*>(to)[i * rows.dim_stride] = bits;
      }
    }
  }
}

}  // namespace plait::cuda::mma
