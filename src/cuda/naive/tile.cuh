// What the naive attention kernels share: any dtype to and from fp32, staged tiles, and the two tile products.
// Included by the kernels of this folder. 64 x 64 tiles, 256 threads: thread (tx, ty) owns rows 4 ty .. 4 ty + 3 of a
// tile; in a score tile columns 4 tx .. 4 tx + 3, in an output tile these and the four that stand 64 further right.
#pragma once

#include <cstdint>

#include "cuda/common/element.cuh"
#include "cuda/common/rows.cuh"
#include "cuda/naive/workspace.hpp"

namespace plait::cuda::naive {

inline constexpr int kThreads = 256;  // 16 x 16
inline constexpr int kSide = 16;
inline constexpr int kPerThread = kTile / kSide;  // rows, and score columns, of a thread
inline constexpr int kDepth = 16;                 // dims staged at a time for a score product
inline constexpr int kColumns = 128;              // output columns of a block
inline constexpr int kColumnsPerThread = kColumns / kSide;
inline constexpr int kStageRows = 32;          // rows staged at a time for an output product
inline constexpr int kTilePadded = kTile + 4;  // keeps float4 alignment, spreads the transposed stores over the banks
static_assert(kSide * kSide == kThreads && kPerThread == 4 && kColumnsPerThread == 8 && kTile % kStageRows == 0);

// Calls body with a pointer of the tensor's element type: the branch stands outside the loops.
template <class Body>
__device__ __forceinline__ void with_type(const CanonicalTensor& tensor, Body body) {
  switch (tensor.dtype) {
    case DType::kFloat16:
      body(static_cast<const __half*>(tensor.data));
      return;
    case DType::kBFloat16:
      body(static_cast<const __nv_bfloat16*>(tensor.data));
      return;
    default:
      body(static_cast<const float*>(tensor.data));
  }
}

// Rows that are read as sums over source heads: row[d] = sum_s weights[s * stride] * tensor[offset + s * head_stride +
// d] (a raw IHA cache). heads 0: the row as it stands.
struct SourceMix {
  const void* weights = nullptr;
  DType dtype = DType::kFloat32;
  int64_t stride = 0, heads = 0;
};

// Up to kTile rows of a tensor; offsets in shared memory, kNoRow reads as zeros.
struct RowSet {
  const CanonicalTensor& tensor;
  const int64_t* offsets;
  SourceMix mix;
};

template <class T>
__device__ __forceinline__ float element(const T* data, const RowSet& rows, int64_t offset, int64_t column) {
  const int64_t at = offset + column * rows.tensor.dim_stride;
  if (rows.mix.heads == 0) return to_float(data[at]);
  float sum = 0.0f;
  for (int64_t s = 0; s < rows.mix.heads; ++s) {
    sum = fmaf(load(rows.mix.weights, rows.mix.dtype, s * rows.mix.stride),
               to_float(data[at + s * rows.tensor.head_stride]), sum);
  }
  return sum;
}

struct ScoreStage {
  alignas(16) float left[kDepth][kTilePadded];
  alignas(16) float right[kDepth][kTilePadded];
};

// to[d][row] = dims begin .. begin + kDepth of the rows, zero past `dim`.
__device__ inline void stage_depth(const RowSet& rows, int64_t begin, int64_t dim, float (*to)[kTilePadded]) {
  with_type(rows.tensor, [&](const auto* data) {
    const int d = threadIdx.x % kDepth;
    float values[kTile * kDepth / kThreads];
#pragma unroll
    for (int i = 0; i < kTile * kDepth / kThreads; ++i) {
      const int64_t offset = rows.offsets[threadIdx.x / kDepth + i * (kThreads / kDepth)];
      values[i] = offset != kNoRow && begin + d < dim ? element(data, rows, offset, begin + d) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kTile * kDepth / kThreads; ++i) {
      to[d][threadIdx.x / kDepth + i * (kThreads / kDepth)] = values[i];
    }
  });
}

// to[row][column] = columns begin .. begin + kColumns of rows first .. first + kStageRows, zero past `dim`.
__device__ inline void stage_columns(const RowSet& rows, int first, int64_t begin, int64_t dim, float (*to)[kColumns]) {
  with_type(rows.tensor, [&](const auto* data) {
    constexpr int kBatch = 8, kStep = kThreads / kColumns;
    const int column = threadIdx.x % kColumns;
#pragma unroll 1
    for (int row = threadIdx.x / kColumns; row < kStageRows; row += kBatch * kStep) {
      float batch[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int64_t offset = rows.offsets[first + row + i * kStep];
        batch[i] = offset != kNoRow && begin + column < dim ? element(data, rows, offset, begin + column) : 0.0f;
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) to[row + i * kStep][column] = batch[i];
    }
  });
}

__device__ __forceinline__ void read4(const float* from, float* to) {
  const float4 value = *reinterpret_cast<const float4*>(from);
  to[0] = value.x, to[1] = value.y, to[2] = value.z, to[3] = value.w;
}

// acc[i][j] += the staged dims of left row 4 ty + i times right row 4 tx + j.
__device__ __forceinline__ void depth_product(const ScoreStage& stage, float (&acc)[kPerThread][kPerThread]) {
  const int tx = threadIdx.x % kSide, ty = threadIdx.x / kSide;
#pragma unroll
  for (int d = 0; d < kDepth; ++d) {
    float a[kPerThread], b[kPerThread];
    read4(&stage.left[d][kPerThread * ty], a);
    read4(&stage.right[d][kPerThread * tx], b);
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
#pragma unroll
      for (int j = 0; j < kPerThread; ++j) acc[i][j] = fmaf(a[i], b[j], acc[i][j]);
    }
  }
}

// acc += left rows times right rows over all dims. Whole block; begins after and ends with a barrier.
__device__ inline void score_product(const RowSet& left, const RowSet& right, int64_t dim, ScoreStage& stage,
                                     float (&acc)[kPerThread][kPerThread]) {
  for (int64_t begin = 0; begin < dim; begin += kDepth) {
    stage_depth(left, begin, dim, stage.left);
    stage_depth(right, begin, dim, stage.right);
    __syncthreads();
    depth_product(stage, acc);
    __syncthreads();
  }
}

// acc[i] += sum over the tile's rows k of weights[k][4 ty + i] * row k, over the block's columns. A pair that seen(k,
// i) denies adds nothing, even if the row holds NaN. Whole block; ends with a barrier.
template <class Seen>
__device__ inline void output_product(const float (*weights)[kTilePadded], const RowSet& rows, int count,
                                      int64_t column, int64_t dim, float (*values)[kColumns], Seen seen,
                                      float (&acc)[kPerThread][kColumnsPerThread]) {
  const int tx = threadIdx.x % kSide, ty = threadIdx.x / kSide;
  for (int first = 0; first < count; first += kStageRows) {
    stage_columns(rows, first, column, dim, values);
    __syncthreads();
#pragma unroll 4
    for (int k = 0; k < kStageRows; ++k) {
      float weight[kPerThread], value[kColumnsPerThread];
      read4(&weights[first + k][kPerThread * ty], weight);
      read4(&values[k][kPerThread * tx], value);
      read4(&values[k][kTile + kPerThread * tx], value + kPerThread);
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) {
        if (!seen(first + k, i)) continue;
#pragma unroll
        for (int j = 0; j < kColumnsPerThread; ++j) acc[i][j] = fmaf(weight[i], value[j], acc[i][j]);
      }
    }
    __syncthreads();
  }
}

// Column of acc[.][j], counted from the first of the block.
__device__ __forceinline__ int output_column(int j) {
  return kPerThread * static_cast<int>(threadIdx.x % kSide) + j % kPerThread + kTile * (j / kPerThread);
}

// Stores one row of an output tile times `factor`; columns past `dim` do not exist.
__device__ inline void store_row(const CanonicalTensor& tensor, int64_t offset, int64_t column, int64_t dim,
                                 const float (&values)[kColumnsPerThread], float factor) {
#pragma unroll
  for (int j = 0; j < kColumnsPerThread; ++j) {
    const int64_t at = column + output_column(j);
    if (at < dim) store(tensor.data, tensor.dtype, offset + at * tensor.dim_stride, values[j] * factor);
  }
}

// Scores in natural units: scale times the product, capped.
struct ScoreScale {
  float scale, cap;  // cap 0: none

  __device__ explicit ScoreScale(const AttentionProblem& problem)
      : scale(static_cast<float>(problem.scale)), cap(static_cast<float>(problem.softcap)) {}
  __device__ float score(float product) const {
    const float logit = scale * product;
    return cap > 0.0f ? cap * tanhf(logit / cap) : logit;
  }
  // d score / d (product), of a score.
  __device__ float slope(float score) const {
    const float ratio = cap > 0.0f ? score / cap : 0.0f;
    return scale * (1.0f - ratio * ratio);
  }
};

// Keys that a row sees, counted from the first of a key tile.
struct TileRange {
  int lo, hi;
  __device__ bool holds(int key) const { return key >= lo && key < hi; }
};

__device__ __forceinline__ TileRange tile_range(int64_t lo, int64_t hi, int64_t key_begin) {
  return {static_cast<int>(clamped(lo - key_begin, 0, kTile)), static_cast<int>(clamped(hi - key_begin, 0, kTile))};
}

// Where the delta of aux.hpp holds a row.
__device__ __forceinline__ int64_t delta_offset(const AttentionProblem& p, const Sequence& s, int64_t head,
                                                int64_t row) {
  const int64_t per = p.rows_per_position();
  return (s.batch * p.heads_q + head) * p.seqlen_q * per + s.q_begin * per + row;
}

__host__ __device__ inline int64_t column_blocks(int64_t dim) { return (dim + kColumns - 1) / kColumns; }

}  // namespace plait::cuda::naive
