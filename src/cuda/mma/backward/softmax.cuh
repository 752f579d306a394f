// From scores and dP to P and dS, in registers, as operands of the next products.
// Called by step.cuh.
#pragma once

#include "core/mask.hpp"
#include "cuda/common/softmax.cuh"
#include "cuda/mma/backward/products.cuh"

namespace plait::cuda::mma {

// The RowPairs of the two softmax rows of this lane in block (i, j) of its scores: columns 2 t, 2 t + 1 (kKeys), or
// rows g, g + 8 (kRows).
struct TwoRows {
  float lse_log2[2], delta[2];
};
template <class C>
__device__ __forceinline__ TwoRows two_rows(uint32_t rows, int i, int j) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  if constexpr (C::kKeysResident) {
    const float4 pair = ptx::load_shared_float4(rows + (8 * j + lane % 4 * 2) * 8);
    return {{pair.x, pair.z}, {pair.y, pair.w}};
  } else {
    const float2 upper = ptx::load_shared_float2(rows + (16 * i + lane / 4) * 8);
    const float2 lower = ptx::load_shared_float2(rows + (16 * i + 8 + lane / 4) * 8);
    return {{upper.x, lower.x}, {upper.y, lower.y}};
  }
}
// Which of the two rows element e of a block belongs to.
template <class C>
__host__ __device__ constexpr int row_of(int e) {
  return C::kKeysResident ? e % 2 : e / 2;
}

template <class C>
using Scores = float[C::kScoreM][2 * C::kScoreK][4];
template <class C>
using Packed = uint32_t[C::kScoreM][C::kScoreK][4];

// dP is summed up from -delta.
template <class C>
__device__ __forceinline__ void start_dp(Scores<C>& dp, uint32_t rows) {
#pragma unroll
  for (int i = 0; i < C::kScoreM; ++i) {
#pragma unroll
    for (int j = 0; j < 2 * C::kScoreK; ++j) {
      const TwoRows row = two_rows<C>(rows, i, j);
#pragma unroll
      for (int e = 0; e < 4; ++e) dp[i][j][e] = -row.delta[row_of<C>(e)];
    }
  }
}

// Without mask and softcap: scores become P in block (i, j).
template <class C>
__device__ __forceinline__ void exponentiate_block(Scores<C>& s, uint32_t rows, const ScoreFactor& factor, int i,
                                                   int j) {
  const TwoRows row = two_rows<C>(rows, i, j);
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    s[i][j][e] = ptx::exp2_approx(fmaf(s[i][j][e], factor.log2, -row.lse_log2[row_of<C>(e)]));
  }
}

// Block (i, j) of accumulators as part of an A operand.
template <class C>
__device__ __forceinline__ void pack_block(Packed<C>& packed, const Scores<C>& values, int i, int j) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    packed[i][j / 2][j % 2 * 2 + half] = ptx::pack<typename C::T>(values[i][j][2 * half], values[i][j][2 * half + 1]);
  }
}
template <class C>
__device__ __forceinline__ void pack_all(Packed<C>& packed, const Scores<C>& values) {
#pragma unroll
  for (int i = 0; i < C::kScoreM; ++i) {
#pragma unroll
    for (int j = 0; j < 2 * C::kScoreK; ++j) pack_block<C>(packed, values, i, j);
  }
}

// The keys that the softmax rows of a warp see: lane l holds rows l, l + 32, ...
template <class C>
struct WarpIntervals {
  static constexpr int kRows = C::kKeysResident ? C::kWarpStream : C::kWarpRows;
  static constexpr int kPerLane = (kRows + 31) / 32;
  int lo[kPerLane], length[kPerLane];

  __device__ WarpIntervals(const RowMask& mask, int first_row) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int64_t row = first_row + 32 * i + static_cast<int>(threadIdx.x % 32);
      const Interval keys = row < mask.row_count() ? mask.row(row) : Interval{};
      lo[i] = static_cast<int>(keys.lo);
      length[i] = keys.empty() ? 0 : static_cast<int>(keys.hi - keys.lo);
    }
  }
};

// Scores become tanh(score / softcap).
template <class C>
__device__ __forceinline__ void cap_scores(Scores<C>& s, const ScoreFactor& factor) {
#pragma unroll
  for (int i = 0; i < C::kScoreM; ++i) {
#pragma unroll
    for (int j = 0; j < 2 * C::kScoreK; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float power = ptx::exp2_approx(s[i][j][e] * factor.inverse_softcap * (2.0f * kLog2e));
        s[i][j][e] = 1.0f - __fdividef(2.0f, power + 1.0f);
      }
    }
  }
}

// With mask, softcap or both: scores (capped: tanh) become P, dP - delta becomes dS. What a row does not see becomes 0,
// whatever it was. `first_key`: of the warp's scores.
template <class C>
__device__ __forceinline__ void differentiate(Scores<C>& s, Scores<C>& dp, uint32_t rows, const ScoreFactor& factor,
                                              const WarpIntervals<C>& seen, int first_key) {
  const int lane = static_cast<int>(threadIdx.x % 32), g = lane / 4, t = lane % 4;
  const float capped = factor.inverse_softcap == 0.0f ? 0.0f : 1.0f;
#pragma unroll
  for (int j = 0; j < 2 * C::kScoreK; ++j) {
#pragma unroll
    for (int i = 0; i < C::kScoreM; ++i) {
      const TwoRows row = two_rows<C>(rows, i, j);
      int lo[2], length[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int index = C::kKeysResident ? 8 * j + 2 * t + r : 16 * i + g + 8 * r;
        const int slot = C::kKeysResident ? j / 4 : 0;
        lo[r] = __shfl_sync(kAllLanes, seen.lo[slot], index % 32);
        length[r] = __shfl_sync(kAllLanes, seen.length[slot], index % 32);
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int r = row_of<C>(e);
        const int key = first_key + (C::kKeysResident ? 16 * i + g + 8 * (e / 2) : 8 * j + 2 * t + e % 2);
        const bool visible = static_cast<unsigned>(key - lo[r]) < static_cast<unsigned>(length[r]);
        const float x = s[i][j][e], slope = fmaf(-capped * x, x, 1.0f);  // of the softcap
        const float p = ptx::exp2_approx(fmaf(x, factor.log2, -row.lse_log2[r]));
        s[i][j][e] = visible ? p : 0.0f;
        dp[i][j][e] = visible ? p * dp[i][j][e] * slope : 0.0f;
      }
    }
  }
}

}  // namespace plait::cuda::mma
