// Accumulators to O and LSE.
// Called by kernel.cuh.
#pragma once

#include "cuda/mma/prefill/mainloop.cuh"

namespace plait::cuda::mma {

// The rows of one warp.
struct OutputRows {
  const PrefillParams& params;
  const PrefillWork& work;
  int64_t first_row;
  int rows;  // that exist, from first_row on; may be <= 0

  __device__ __forceinline__ int64_t offset(int row) const {
    const CanonicalTensor& out = params.tensors.out;
    const auto per = static_cast<unsigned>(params.problem.rows_per_position());
    const int64_t first = query_offset(params.problem, out, work.sequence, work.head, 0, 0);
    if (per == 1) return first + (first_row + row) * out.seq_stride;
    const auto of = static_cast<unsigned>(first_row + row), position = of / per;  // 64-bit division is slow
    return first + position * out.seq_stride + (of - position * per) * out.pseudo_stride;
  }
};

// Stores rows of 16-bit elements from a swizzled tile: 16 bytes at a time where O allows it, 64 or 128 bytes of a row
// by neighbouring lanes.
template <class T, int kRows, int kHeadDim>
__device__ inline void store_tile(const T* staged, const OutputRows& o, int lane) {
  const RowLayout& layout = o.params.out;
  constexpr int kChunks = kHeadDim / tile::kChunkElems, kWide = kChunks % 8 == 0 ? 8 : 4;
  T* out = static_cast<T*>(o.params.tensors.out.data);
  T* first = out + o.offset(0);
#pragma unroll 2
  for (int row = lane / kWide; row < min(kRows, o.rows); row += 32 / kWide) {
    T* to = layout.per == 1 ? first + row * layout.seq_stride : out + o.offset(row);
#pragma unroll
    for (int chunk = lane % kWide; chunk < kChunks; chunk += kWide) {
      const T* from = staged + tile::Swizzle<kHeadDim>::offset(row, chunk);
      const int column = chunk * tile::kChunkElems;
      if (layout.path == LoadPath::kAny) {
        for (int i = 0; i < min(tile::kChunkElems, layout.dim - column); ++i) {
          to[(column + i) * layout.dim_stride] = from[i];
        }
      } else if (column < layout.dim) {
        *reinterpret_cast<uint4*>(to + column) = *reinterpret_cast<const uint4*>(from);
      }
    }
  }
}

// `out` times factor[row] as fp32, straight from registers: the quad of a row writes 32 bytes next to each other.
template <int kBlocks, int kOutTiles>
__device__ inline void store_float(const float (&out)[kBlocks][kOutTiles][4], const float (&factor)[2 * kBlocks],
                                   const OutputRows& o, int lane) {
  const RowLayout& layout = o.params.out;
#pragma unroll
  for (int i = 0; i < 2 * kBlocks; ++i) {
    const int row = 8 * i + lane / 4;
    if (row >= o.rows) continue;
    float* to = static_cast<float*>(o.params.tensors.out.data) + o.offset(row);
#pragma unroll
    for (int n = 0; n < kOutTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int column = 8 * n + lane % 4 * 2 + e;
        if (column < layout.dim) to[column * layout.dim_stride] = out[i / 2][n][i % 2 * 2 + e] * factor[i];
      }
    }
  }
}

// `staging`: shared memory for the warp's rows, no longer read by anyone.
template <class T, int kHeadDim, int kBlocks>
__device__ inline void store_output(const float (&out)[kBlocks][kHeadDim / 8][4], const SoftmaxRows<2 * kBlocks>& rows,
                                    T* staging, const OutputRows& o, int lane) {
  const AttentionProblem& problem = o.params.problem;
  const AttentionTensors& tensors = o.params.tensors;
  const bool sink_counts = problem.has_sinks && !o.work.sequence.tail;
  const float sink =
      sink_counts ? static_cast<const float*>(tensors.sinks)[o.work.head * tensors.sinks_stride] : -CUDART_INF_F;
  float factor[2 * kBlocks];
  float* lse = static_cast<float*>(tensors.lse.data) +
               lse_offset(problem, tensors.lse, o.work.sequence, o.work.head, o.first_row);
#pragma unroll
  for (int i = 0; i < 2 * kBlocks; ++i) {
    const RowResult result = finish_row(rows.reference[i], quad_sum(rows.sum[i]), sink);
    factor[i] = result.out_factor;
    const int row = 8 * i + lane / 4;
    if (tensors.lse.data != nullptr && lane % 4 == 0 && row < o.rows) lse[row * tensors.lse.row_stride] = result.lse;
  }
  if (problem.out_dtype == DType::kFloat32) {
    store_float(out, factor, o, lane);
    return;
  }
#pragma unroll
  for (int i = 0; i < 2 * kBlocks; ++i) {
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n) {
      const float(&pair)[4] = out[i / 2][n];
      const int first = i % 2 * 2;
      T* to = staging + tile::Swizzle<kHeadDim>::offset(8 * i + lane / 4, n) + lane % 4 * 2;
      *reinterpret_cast<uint32_t*>(to) = ptx::pack<T>(pair[first] * factor[i], pair[first + 1] * factor[i]);
    }
  }
  __syncwarp();
  store_tile<T, 16 * kBlocks, kHeadDim>(staging, o, lane);
}

}  // namespace plait::cuda::mma
