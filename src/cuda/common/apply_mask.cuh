// What happens to score fragments of mma.m16n8k16 before the softmax: softcap, and the mask of a partial tile.
// Called by the attention kernels of mma and sm90.
#pragma once

#include <math_constants.h>

#include "core/problem.hpp"
#include "cuda/common/softmax.cuh"

namespace plait::cuda {

// Raw products to the base-2 exponent that softmax works in: score * to_log2. With a softcap, or a scale that does not
// keep the order of the scores, the products are turned into scores first.
struct ScoreScale {
  float scale, softcap, to_exponent, to_log2;  // to_exponent: 2 log2(e) / softcap
  bool transform;

  static ScoreScale of(const AttentionProblem& p) {
    const float scale = static_cast<float>(p.scale);
    const bool transform = p.softcap > 0.0 || !(scale > 0.0f);
    const float softcap = static_cast<float>(p.softcap);
    return {scale, softcap, 2.0f * kLog2e / softcap, transform ? kLog2e : scale * kLog2e, transform};
  }

  // tanh(x) = 1 - 2 / (1 + e^2x): absolute error below 2e-7, which the cap multiplies. `step`: to_exponent.
  __device__ __forceinline__ float capped(float product, float step) const {
    return softcap - __fdividef(2.0f * softcap, 1.0f + ptx::exp2_approx(product * scale * step));
  }
  __device__ __forceinline__ float score(float product) const {
    return softcap == 0.0f ? product * scale : capped(product, to_exponent);
  }
};

// One branch for eight: with one for each, no exponential would overlap another; of all at a time, registers are short.
template <int kBlocks, int kKeyTiles>
__device__ __forceinline__ void transform_scores(float (&scores)[kBlocks][kKeyTiles][4], const ScoreScale& scale) {
  static_assert(kKeyTiles % 2 == 0);
  const bool caps = scale.softcap > 0.0f;
  float step = scale.to_exponent;
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
    for (int n = 0; n < kKeyTiles; n += 2) {
      if (caps) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          scores[block][n][e] = scale.capped(scores[block][n][e], step);
          scores[block][n + 1][e] = scale.capped(scores[block][n + 1][e], step);
        }
        asm volatile("" : "+f"(step) : "f"(scores[block][n + 1][3]));
      } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          scores[block][n][e] *= scale.scale;
          scores[block][n + 1][e] *= scale.scale;
        }
      }
    }
  }
}

// Keys outside their row's [lo, hi) become -inf. `bounds`: of the warp's rows, from the warp's first row on;
// `first_key`: the key of the fragments' first column, in the same count as the bounds. kLower: some row's lo is above
// first_key.
template <bool kLower = true, int kBlocks, int kKeyTiles>
__device__ __forceinline__ void apply_bounds(float (&scores)[kBlocks][kKeyTiles][4], const int2* bounds, int first_key,
                                             int lane) {
#pragma unroll
  for (int i = 0; i < 2 * kBlocks; ++i) {
    const int2 row = bounds[8 * i + lane / 4];
    const int lo = row.x - first_key - lane % 4 * 2, hi = row.y - first_key - lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int column = 8 * n + e;
        float& score = scores[i / 2][n][i % 2 * 2 + e];
        score = (!kLower || column >= lo) && column < hi ? score : -CUDART_INF_F;
      }
    }
  }
}

}  // namespace plait::cuda
