// From the warps' accumulators to a block's result, and from the results of all blocks of a unit to O and LSE.
// Called by kernel.cuh. Always in one order, so that a result has the same bits every time.
#pragma once

#include "cuda/mma/decode/mainloop.cuh"
#include "cuda/ptx/grid.cuh"

namespace plait::cuda::mma {

inline constexpr int kVector = 4;  // columns that a thread merges at a time

// The weighted sum of partial accumulators of one row, each with its own reference.
struct MergedRow {
  float reference, sum;  // of the whole row
};

// Writes finished rows of a unit.
template <class T>
struct RowWriter {
  const DecodeParams& p;
  const DecodeSegment& s;

  __device__ __forceinline__ RowResult result(const MergedRow& row, int head) const {
    const float sink =
        p.problem.has_sinks ? static_cast<const float*>(p.tensors.sinks)[head * p.tensors.sinks_stride] : -CUDART_INF_F;
    return finish_row(row.reference, row.sum, sink);
  }

  // Columns [column, column + kVector) of row `row`; the thread of column 0 also writes the LSE.
  __device__ __forceinline__ void write(int row, int column, const MergedRow& merged,
                                        const float (&out)[kVector]) const {
    const int at = (s.row_begin + row) / p.group, h = s.head_kv * p.group + s.row_begin + row - at * p.group;
    const RowResult r = result(merged, h);
    if (column == 0 && p.tensors.lse.data != nullptr) {
      const RowTensor& lse = p.tensors.lse;
      static_cast<float*>(lse.data)[s.sequence.batch * lse.batch_stride + h * lse.head_stride + at * lse.row_stride] =
          r.lse;
    }
    const int64_t offset = row_offset(p, p.tensors.out, s, row, 0);
    if (p.problem.out_dtype == DType::kFloat32) {
      float* to = static_cast<float*>(p.tensors.out.data) + offset;
      if (p.out.path == LoadPath::kAny) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) to[(column + i) * p.out.dim_stride] = out[i] * r.out_factor;
      } else {
        *reinterpret_cast<float4*>(to + column) =
            make_float4(out[0] * r.out_factor, out[1] * r.out_factor, out[2] * r.out_factor, out[3] * r.out_factor);
      }
      return;
    }
    T* to = static_cast<T*>(p.tensors.out.data) + offset;
    const uint32_t words[2] = {ptx::pack<T>(out[0] * r.out_factor, out[1] * r.out_factor),
                               ptx::pack<T>(out[2] * r.out_factor, out[3] * r.out_factor)};
    if (p.out.path == LoadPath::kAny) {
      const T* values = reinterpret_cast<const T*>(words);
#pragma unroll
      for (int i = 0; i < kVector; ++i) to[(column + i) * p.out.dim_stride] = values[i];
    } else {
      *reinterpret_cast<uint2*>(to + column) = make_uint2(words[0], words[1]);
    }
  }
};

template <class T, catalog::DecodeTile kTile>
struct Combine {
  static constexpr int kWarps = kTile.warps, kBlockRows = catalog::DecodeTile::kBlockRows;
  static constexpr int kPartsAtOnce = 8;  // partial results that a thread has under way
  using Loop = DecodeMainloop<T, kTile>;
  using Storage = DecodeStorage<T, kTile>;

  const DecodeParams& p;
  Storage& storage;
  int warp, lane;

  // Merges the warps; writes O and LSE if the segment is the whole unit, else the block's partial result. Called by the
  // whole block.
  __device__ __forceinline__ void finish(const DecodeSegment& s, const typename Loop::Output& out,
                                         SoftmaxRows<Loop::kRows>& rows) const {
    const int column_groups = p.out.dim / kVector;
#pragma unroll
    for (int i = 0; i < Loop::kRows; ++i) rows.sum[i] = quad_sum(rows.sum[i]);
#pragma unroll
    for (int block = 0; block < kTile.row_blocks; ++block) {
      __syncthreads();  // first: every warp has left its ring; then: the stage of the row block before has been read
      stage(s, out[block], rows, block);
      __syncthreads();
      const int rows_here = min(kBlockRows, s.rows - block * kBlockRows);
#pragma unroll 1
      for (int i = threadIdx.x; i < rows_here * column_groups; i += kTile.threads()) {
        const int r = i / column_groups, column = (i - r * column_groups) * kVector, row = block * kBlockRows + r;
        float merged[kVector];
        const MergedRow whole = merge_warps(r, column, merged);
        if (s.parts == 1) {
          RowWriter<T>{p, s}.write(row, column, whole, merged);
          continue;
        }
        const int64_t at = place(s, s.part, row);
        *reinterpret_cast<float4*>(p.partial_out + at * p.out.dim + column) =
            make_float4(merged[0], merged[1], merged[2], merged[3]);
        if (column == 0) p.partial_stats[at] = make_float2(whole.reference, whole.sum);
      }
    }
  }

  // Behind finish(): the last block of a split unit to come here merges all its partial results. The counter is zero at
  // the launch. Called by the whole block.
  __device__ __forceinline__ void arrive(const DecodeSegment& s) const {
    if (s.parts == 1) return;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) storage.last = atomicAdd(p.arrivals + s.arrival, 1) == s.parts - 1;
    __syncthreads();
    if (storage.last == 0) return;
    __threadfence();
#pragma unroll 1
    for (int row = warp; row < s.rows; row += kWarps) merge_stats(s, row);
    __syncthreads();
    const int column_groups = p.out.dim / kVector;
#pragma unroll 1
    for (int i = threadIdx.x; i < s.rows * column_groups; i += kTile.threads()) {
      const int row = i / column_groups, column = (i - row * column_groups) * kVector;
      const float2 result = storage.results[row];
      float merged[kVector];
      merge_parts(s, row, column, result.x, merged);
      RowWriter<T>{p, s}.write(row, column, {result.x, result.y}, merged);
    }
  }

 private:
  __device__ __forceinline__ void stage(const DecodeSegment& s, const float (&out)[2 * Loop::kDepth][4],
                                        const SoftmaxRows<Loop::kRows>& rows, int block) const {
    float* to = storage.stage(warp);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = 8 * half + lane / 4;
      if (block * kBlockRows + r >= s.rows) continue;
#pragma unroll
      for (int n = 0; n < 2 * Loop::kDepth; ++n) {
        *reinterpret_cast<float2*>(to + r * Storage::kStagePitch + 8 * n + lane % 4 * 2) =
            make_float2(out[n][2 * half], out[n][2 * half + 1]);
      }
      if (lane % 4 == 0)
        storage.stats[warp][r] = make_float2(rows.reference[2 * block + half], rows.sum[2 * block + half]);
    }
  }

  __device__ __forceinline__ MergedRow merge_warps(int r, int column, float (&merged)[kVector]) const {
    MergedRow whole{-FLT_MAX, 0.0f};
#pragma unroll
    for (int w = 0; w < kWarps; ++w) whole.reference = fmaxf(whole.reference, storage.stats[w][r].x);
#pragma unroll
    for (int i = 0; i < kVector; ++i) merged[i] = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float2 stats = storage.stats[w][r];
      const float weight = ptx::exp2_approx(stats.x - whole.reference);
      whole.sum = fmaf(stats.y, weight, whole.sum);
      const float4 v = *reinterpret_cast<const float4*>(storage.stage(w) + r * Storage::kStagePitch + column);
      merged[0] = fmaf(v.x, weight, merged[0]);
      merged[1] = fmaf(v.y, weight, merged[1]);
      merged[2] = fmaf(v.z, weight, merged[2]);
      merged[3] = fmaf(v.w, weight, merged[3]);
    }
    return whole;
  }

  __device__ __forceinline__ int64_t place(const DecodeSegment& s, int part, int row) const {
    return int64_t{s.slot(part)} * p.tile_rows + row;
  }

  // Reference and sum of a row over all parts. Called by a whole warp.
  __device__ __forceinline__ void merge_stats(const DecodeSegment& s, int row) const {
    float reference = -FLT_MAX, sum = 0.0f;
    for (int part = lane; part < s.parts; part += 32) {
      const float2 stats = __ldcg(p.partial_stats + place(s, part, row));
      const float raised = fmaxf(reference, stats.x);
      sum = sum * ptx::exp2_approx(reference - raised) + stats.y * ptx::exp2_approx(stats.x - raised);
      reference = raised;
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      const float other = __shfl_xor_sync(kAllLanes, reference, step);
      const float other_sum = __shfl_xor_sync(kAllLanes, sum, step), raised = fmaxf(reference, other);
      sum = sum * ptx::exp2_approx(reference - raised) + other_sum * ptx::exp2_approx(other - raised);
      reference = raised;
    }
    if (lane == 0) storage.results[row] = make_float2(reference, sum);
  }

  __device__ __forceinline__ void merge_parts(const DecodeSegment& s, int row, int column, float reference,
                                              float (&merged)[kVector]) const {
#pragma unroll
    for (int i = 0; i < kVector; ++i) merged[i] = 0.0f;
#pragma unroll 1
    for (int first = 0; first < s.parts; first += kPartsAtOnce) {
      float4 v[kPartsAtOnce];
      float of[kPartsAtOnce];
#pragma unroll
      for (int i = 0; i < kPartsAtOnce; ++i) {
        const int64_t at = place(s, min(first + i, s.parts - 1), row);
        v[i] = __ldcg(reinterpret_cast<const float4*>(p.partial_out + at * p.out.dim + column));
        of[i] = __ldcg(&p.partial_stats[at].x);
      }
#pragma unroll
      for (int i = 0; i < kPartsAtOnce; ++i) {
        const float weight = first + i < s.parts ? ptx::exp2_approx(of[i] - reference) : 0.0f;
        merged[0] = fmaf(v[i].x, weight, merged[0]);
        merged[1] = fmaf(v[i].y, weight, merged[1]);
        merged[2] = fmaf(v[i].z, weight, merged[2]);
        merged[3] = fmaf(v[i].w, weight, merged[3]);
      }
    }
  }
};

}  // namespace plait::cuda::mma
