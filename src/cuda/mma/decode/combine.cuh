// From the warps' accumulators to a block's result, and from the results of all blocks of a unit to O and LSE.
// Called by kernel.cuh and cluster.cuh. Always in one order, so that a result has the same bits every time.
#pragma once

#include "cuda/mma/decode/mainloop.cuh"
#include "cuda/mma/decode/workspace.hpp"
#include "cuda/ptx/grid.cuh"

namespace plait::cuda::mma {

// A row's reference and sum, and kVector columns of its accumulators.
struct MergedRow {
  float reference = -FLT_MAX, sum = 0.0f;
  float4 out{};

  // What was merged so far in terms of a reference that is not lower.
  __device__ __forceinline__ void raise(float to) {
    const float factor = ptx::exp2_approx(reference - to);
    reference = to;
    sum *= factor;
    out = make_float4(out.x * factor, out.y * factor, out.z * factor, out.w * factor);
  }
  // Adds a part whose reference is not higher.
  __device__ __forceinline__ void add(float2 stats, const float4& v) {
    const float weight = ptx::exp2_approx(stats.x - reference);
    sum = fmaf(stats.y, weight, sum);
    out = make_float4(fmaf(v.x, weight, out.x), fmaf(v.y, weight, out.y), fmaf(v.z, weight, out.z),
                      fmaf(v.w, weight, out.w));
  }
};

// Columns [column, column + kVector) of a finished row of a unit; the thread of column 0 also writes the LSE.
template <class T>
__device__ __forceinline__ void write_row(const DecodeParams& p, const RowPlace& place, int column,
                                          const MergedRow& merged) {
  const RowResult result = finish_row(merged.reference, merged.sum, place.sink);
  if (column == 0 && p.lse != nullptr) p.lse[place.lse] = result.lse;
  const int64_t offset = place.out + column * p.out.dim_stride;
  const float out[kVector] = {merged.out.x * result.out_factor, merged.out.y * result.out_factor,
                              merged.out.z * result.out_factor, merged.out.w * result.out_factor};
  if (p.out_float) {
    float* to = static_cast<float*>(p.out.data) + offset;
    if (p.out.path != LoadPath::kAny) {
      *reinterpret_cast<float4*>(to) = make_float4(out[0], out[1], out[2], out[3]);
      return;
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) to[i * p.out.dim_stride] = out[i];
    return;
  }
  T* to = static_cast<T*>(p.out.data) + offset;
  const uint2 words = make_uint2(ptx::pack<T>(out[0], out[1]), ptx::pack<T>(out[2], out[3]));
  if (p.out.path != LoadPath::kAny) {
    *reinterpret_cast<uint2*>(to) = words;
    return;
  }
#pragma unroll
  for (int i = 0; i < kVector; ++i) to[i * p.out.dim_stride] = reinterpret_cast<const T*>(&words)[i];
}

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
  __device__ __forceinline__ void finish(const DecodeSegment& s, const DecodePart& part,
                                         const typename Loop::Output& out, SoftmaxRows<Loop::kRows>& rows) const {
    const int column_groups = p.out.dim / kVector;
    sum_quads(rows);
#pragma unroll
    for (int block = 0; block < kTile.row_blocks; ++block) {
      __syncthreads();  // first: every warp has left its ring; then: the stage of the row block before has been read
      stage(s.rows, out[block], rows, block);
      __syncthreads();
      const int rows_here = min(kBlockRows, s.rows - block * kBlockRows);
#pragma unroll 1
      for (int i = threadIdx.x; i < rows_here * column_groups; i += kTile.threads()) {
        const int r = i / column_groups, column = (i - r * column_groups) * kVector, row = block * kBlockRows + r;
        const MergedRow merged = merge_warps(r, column);
        if (part.parts == 1) {
          write_row<T>(p, storage.places[row], column, merged);
          continue;
        }
        const int64_t at = int64_t{part.slot(part.part)} * p.tile_rows + row;
        *reinterpret_cast<float4*>(p.partial_out + at * p.out.dim + column) = merged.out;
        if (column == 0) p.partial_stats[at] = make_float2(merged.reference, merged.sum);
      }
    }
  }

  // Behind finish(): the last block of a split unit to come here merges all its partial results. Called by the whole
  // block.
  __device__ __forceinline__ void arrive(const DecodeSegment& s, const DecodePart& part) const {
    if (part.parts == 1 || !is_last(part.arrival, part.parts)) return;
    const int column_groups = p.out.dim / kVector;
#pragma unroll 1
    for (int i = threadIdx.x; i < s.rows * column_groups; i += kTile.threads()) {
      const int row = i / column_groups, column = (i - row * column_groups) * kVector;
      write_row<T>(p, storage.places[row], column, merge_parts(part, row, column));
    }
  }

  // Whether the block is the last of `parts` that count at `arrival`, which is zero at the launch: it then sees what
  // the others wrote. Called by the whole block.
  __device__ __forceinline__ bool is_last(int arrival, int parts) const {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) storage.last = atomicAdd(p.arrivals + arrival, 1) == parts - 1;
    __syncthreads();
    if (storage.last == 0) return false;
    __threadfence();
    return true;
  }

  // The parts of finish(): a row's sum from the threads that share it; a row block of the warp's accumulators to shared
  // memory; the warps' results there as one.
  __device__ __forceinline__ static void sum_quads(SoftmaxRows<Loop::kRows>& rows) {
#pragma unroll
    for (int i = 0; i < Loop::kRows; ++i) rows.sum[i] = quad_sum(rows.sum[i]);
  }
  __device__ __forceinline__ void stage(int unit_rows, const float (&out)[2 * Loop::kDepth][4],
                                        const SoftmaxRows<Loop::kRows>& rows, int block) const {
    float* to = storage.stage(warp);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = 8 * half + lane / 4;
      if (block * kBlockRows + r >= unit_rows) continue;
#pragma unroll
      for (int n = 0; n < 2 * Loop::kDepth; ++n) {
        *reinterpret_cast<float2*>(to + r * Storage::kStagePitch + 8 * n + lane % 4 * 2) =
            make_float2(out[n][2 * half], out[n][2 * half + 1]);
      }
      if (lane % 4 == 0)
        storage.stats[warp][r] = make_float2(rows.reference[2 * block + half], rows.sum[2 * block + half]);
    }
  }

  __device__ __forceinline__ MergedRow merge_warps(int r, int column) const {
    MergedRow whole;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) whole.reference = fmaxf(whole.reference, storage.stats[w][r].x);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      whole.add(storage.stats[w][r],
                *reinterpret_cast<const float4*>(storage.stage(w) + r * Storage::kStagePitch + column));
    }
    return whole;
  }

 private:
  __device__ __forceinline__ MergedRow merge_parts(const DecodePart& part, int row, int column) const {
    MergedRow whole;
#pragma unroll 1
    for (int first = 0; first < part.parts; first += kPartsAtOnce) {
      float4 v[kPartsAtOnce];
      float2 stats[kPartsAtOnce];
      float highest = whole.reference;
#pragma unroll
      for (int i = 0; i < kPartsAtOnce; ++i) {
        stats[i] = make_float2(-FLT_MAX, 0.0f);
        v[i] = {};
        if (first + i >= part.parts) continue;
        const int64_t at = int64_t{part.slot(first + i)} * p.tile_rows + row;
        stats[i] = __ldcg(p.partial_stats + at);
        v[i] = __ldcg(reinterpret_cast<const float4*>(p.partial_out + at * p.out.dim + column));
      }
#pragma unroll
      for (int i = 0; i < kPartsAtOnce; ++i) highest = fmaxf(highest, stats[i].x);
      whole.raise(highest);
#pragma unroll
      for (int i = 0; i < kPartsAtOnce; ++i) whole.add(stats[i], v[i]);
    }
    return whole;
  }
};

}  // namespace plait::cuda::mma
