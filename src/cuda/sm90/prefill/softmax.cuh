// Scores to probabilities, with fewer instructions than common/softmax.cuh where no reference is raised.
// Called by scores.cuh.
#pragma once

#include <climits>

#include "cuda/common/softmax.cuh"

namespace plait::cuda::sm90 {

// SoftmaxRows::raise_references(), after a look that takes half the instructions: as integers, floats compare in their
// order if one of them is positive. Negative ones raise no reference above -kSlackLog2.
template <int kKeyTiles>
__device__ __forceinline__ bool raise_references(const float (&scores)[1][kKeyTiles][4], float to_log2,
                                                 SoftmaxRows<2>& rows, float (&factor)[2]) {
  bool above = false, negative = false;
  float highest[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    int chain[2] = {INT_MIN, INT_MIN};  // two, for the latency
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
      const float* two = scores[0][n] + 2 * i;
      chain[n % 2] = __vimax3_s32(chain[n % 2], __float_as_int(two[0]), __float_as_int(two[1]));
    }
    const int bits = max(chain[0], chain[1]);
    highest[i] = __int_as_float(bits);
    negative |= bits < 0;
    above |= highest[i] * to_log2 > rows.reference[i] + kSlackLog2;
    above |= bits < 0 && rows.reference[i] < -kSlackLog2;
  }
  if (!__any_sync(kAllLanes, above)) return false;
  if (__any_sync(kAllLanes, negative)) find_highest(highest, scores);  // no positive one
  return rows.raise_references(highest, to_log2, factor);
}

// Scores of the key tiles [kFrom, kTo) become probabilities, added to `sum`.
template <int kFrom, int kTo, int kKeyTiles>
__device__ __forceinline__ void exponentiate(float (&scores)[1][kKeyTiles][4], float to_log2,
                                             const SoftmaxRows<2>& rows, float (&sum)[2]) {
#pragma unroll
  for (int n = kFrom; n < kTo; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      scores[0][n][e] = ptx::exp2_approx(fmaf(scores[0][n][e], to_log2, -rows.reference[e / 2]));
      sum[e / 2] += scores[0][n][e];
    }
  }
  // Sums are made here, between the exponentials: the compiler would leave them for later.
  asm volatile("" : "+f"(sum[0]), "+f"(sum[1]));
}

// A thread's probabilities of a row, of one tile of keys, sum up to no more than this: then no reference is raised.
inline constexpr float kMostSum = 1 << static_cast<int>(kSlackLog2);
// Up to this a reference is raised by the sum; exponents keep six digits.
inline constexpr float kMostRaise = 0x1p64f;

// Raises the references of rows of which some thread's sum is higher than kMostSum, none than kMostRaise: to about 1.
// Probabilities and sums go along, and accumulators are to be multiplied by `factor`.
template <int kKeyTiles>
__device__ __forceinline__ void raise_by_sums(float (&probabilities)[1][kKeyTiles][4], float (&sum)[2],
                                              SoftmaxRows<2>& rows, float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float highest = quad_max(sum[i]), reference = rows.reference[i];
    rows.reference[i] = highest > kMostSum ? reference + __log2f(highest) : reference;
    factor[i] = ptx::exp2_approx(reference - rows.reference[i]);
    rows.sum[i] *= factor[i];
    sum[i] *= factor[i];
  }
  SoftmaxRows<2>::rescale(probabilities, factor);
}

}  // namespace plait::cuda::sm90
