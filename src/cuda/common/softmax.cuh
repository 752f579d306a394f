// Online softmax over score fragments of mma.m16n8k16: row maxima, probabilities, row sums, in log2 units.
// Called by the attention kernels of mma and sm90, and by aux/delta.cu.
#pragma once

#include <math_constants.h>

#include <cfloat>

#include "cuda/common/lanes.hpp"
#include "cuda/ptx/mma.cuh"

namespace plait::cuda {

inline constexpr float kLog2e = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;
// A reference is raised only when a score exceeds it by more than this, so probabilities reach at most 2^8: they keep
// their relative precision in both 16-bit types, and fp16 ends at 2^16.
inline constexpr float kSlackLog2 = 8.0f;

// The four threads of a quad hold one row.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, 1));
  return fmaxf(x, __shfl_xor_sync(kAllLanes, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(kAllLanes, x, 1);
  return x + __shfl_xor_sync(kAllLanes, x, 2);
}

// Rows of a warp, kRows per thread: row i of the thread is row lane / 4 + 8 i. All threads of a quad have the same
// reference; `sum` is the thread's own part. Without any key so far: reference -FLT_MAX, which no -inf score passes,
// sum 0.
template <int kRows>
struct SoftmaxRows {
  float reference[kRows];  // log2 units: probabilities are 2^(score * to_log2 - reference)
  float sum[kRows];

  __device__ __forceinline__ SoftmaxRows() {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      reference[i] = -FLT_MAX;
      sum[i] = 0.0f;
    }
  }

  // Raises references so that no score exceeds its row's by more than kSlackLog2, and rescales sums. Returns whether it
  // did, for the whole warp; the rows' accumulators are then to be multiplied by `factor`. `highest`: the thread's
  // highest score of each row; masked ones are -inf. The vote makes it one branch; no shuffle in the usual case.
  __device__ __forceinline__ bool raise_references(const float (&highest)[kRows], float to_log2,
                                                   float (&factor)[kRows]) {
    bool above = false;
#pragma unroll
    for (int i = 0; i < kRows; ++i) above |= highest[i] * to_log2 > reference[i] + kSlackLog2;
    if (!__any_sync(kAllLanes, above)) return false;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float raised = fmaxf(reference[i], quad_max(highest[i]) * to_log2);
      factor[i] = ptx::exp2_approx(reference[i] - raised);
      reference[i] = raised;
      sum[i] *= factor[i];
    }
    return true;
  }

  // The same, with the accumulators.
  template <int kBlocks, int kOutTiles>
  __device__ __forceinline__ void raise(const float (&highest)[kRows], float to_log2,
                                        float (&out)[kBlocks][kOutTiles][4]) {
    static_assert(kRows == 2 * kBlocks);
    float factor[kRows];
    if (raise_references(highest, to_log2, factor)) rescale(out, factor);
  }

  template <int kBlocks, int kOutTiles>
  static __device__ __forceinline__ void rescale(float (&out)[kBlocks][kOutTiles][4], const float (&factor)[kRows]) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int n = 0; n < kOutTiles; ++n) {
        out[i / 2][n][i % 2 * 2] *= factor[i];
        out[i / 2][n][i % 2 * 2 + 1] *= factor[i];
      }
    }
  }

  // Scores become probabilities, added to the sums.
  template <int kBlocks, int kKeyTiles>
  __device__ __forceinline__ void exponentiate(float (&scores)[kBlocks][kKeyTiles][4], float to_log2) {
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int i = 2 * block + e / 2;
          scores[block][n][e] = ptx::exp2_approx(fmaf(scores[block][n][e], to_log2, -reference[i]));
          sum[i] += scores[block][n][e];
        }
      }
    }
  }
};

// The thread's highest score of each row.
template <int kBlocks, int kKeyTiles>
__device__ __forceinline__ void find_highest(float (&highest)[2 * kBlocks],
                                             const float (&scores)[kBlocks][kKeyTiles][4]) {
#pragma unroll
  for (int i = 0; i < 2 * kBlocks; ++i) {
    float pair[2];  // two chains, for the latency
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
      const float* two = scores[i / 2][n] + i % 2 * 2;
      const float higher = fmaxf(two[0], two[1]);
      pair[n % 2] = n < 2 ? higher : fmaxf(pair[n % 2], higher);
    }
    highest[i] = fmaxf(pair[0], pair[1]);
  }
}

// A finished row: what its accumulators are multiplied by, and its LSE (natural log).
struct RowResult {
  float out_factor, lse;
};

// `sum`: of the whole row. `sink`: natural-log units, -inf without one. A row without keys: factor 0, LSE = sink. A
// sink above all scores keeps its digits, up to +inf. Without branches: several rows overlap.
__device__ __forceinline__ RowResult finish_row(float reference, float sum, float sink) {
  const float sink_log2 = sink * kLog2e;
  const bool above = sink_log2 >= reference;
  const float lower = ptx::exp2_approx(above ? reference - sink_log2 : sink_log2 - reference);
  const float total = above ? fmaf(sum, lower, 1.0f) : sum + lower, total_log2 = __log2f(total);
  const float factor = __fdividef(above ? lower : 1.0f, total);  // total < 2^126
  const float lse = above ? fmaf(kLn2, total_log2, sink) : kLn2 * (reference + total_log2);
  return sum == 0.0f ? RowResult{0.0f, sink} : RowResult{factor, lse};
}

}  // namespace plait::cuda
