// Partial scores of several warps become whole ones: each warp gets some blocks of fragments from all others.
// Called by the split_d kernels.
#pragma once

#include <cstdint>

#include "catalog/mma_split_d_tiles.hpp"
#include "cuda/ptx/shared.cuh"

namespace plait::cuda::mma {

// kM x 16 rows by kN x 8 columns of scores, of which kSources warps have partial sums. Warp `self` of them keeps blocks
// [self * kKept, (self + 1) * kKept), counted row by row, if self < kTargets. Sums have a fixed order. put(), keep(), a
// barrier of the warps, add(), a barrier before the next put().
template <int kM, int kN, int kSources>
struct Exchange {
  static constexpr catalog::SplitDExchange kShape{kM * kN, kSources};
  static constexpr int kKept = kShape.kept(), kTargets = kShape.targets(), kTargetBytes = kShape.target_bytes();
  static constexpr int kParts = kShape.own_in_registers() ? 1 : kSources;  // in shared memory, of a target
  static constexpr int kBlockBytes = catalog::SplitDExchange::kBlockBytes;
  static_assert(kTargets * kKept == kM * kN && kTargets <= kSources && kN % kKept == 0, "kept blocks: of one row");
  using Partial = float[kM][kN][4];
  using Kept = float[kKept][4];

  // The first kept block: rows 16 row_block .., columns 8 column_block ...
  static __device__ __forceinline__ int row_block(int self) { return self * kKept / kN; }
  static __device__ __forceinline__ int column_block(int self) { return self * kKept % kN; }

  static __device__ __forceinline__ void put(uint32_t buffer, const Partial& partial, int self, int lane) {
    const uint32_t to = buffer + (kShape.own_in_registers() ? 0 : self * kKept * kBlockBytes) + lane * 16;
#pragma unroll
    for (int target = 0; target < kTargets; ++target) {
      if (kShape.own_in_registers() && target == self) continue;
#pragma unroll
      for (int b = 0; b < kKept; ++b) {
        const float(&v)[4] = partial[(target * kKept + b) / kN][(target * kKept + b) % kN];
        ptx::store_shared_16(
            to + target * kTargetBytes + b * kBlockBytes,
            {__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]), __float_as_uint(v[3])});
      }
    }
  }

  // kept = the warp's own part if that stays in registers, else 0.
  static __device__ __forceinline__ void keep(Kept& kept, const Partial& partial, int self) {
#pragma unroll
    for (int b = 0; b < kKept; ++b) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        kept[b][e] = 0.0f;
        if constexpr (kShape.own_in_registers()) {
          const float low = partial[b / kN][b % kN][e], high = partial[(kKept + b) / kN][(kKept + b) % kN][e];
          kept[b][e] = self == 0 ? low : high;
        }
      }
    }
  }

  // kept += parts first .. first + kCount of kParts, behind a barrier.
  template <int kCount>
  static __device__ __forceinline__ void add(Kept& kept, uint32_t buffer, int self, int first, int lane) {
    const uint32_t from = buffer + self * kTargetBytes + first * kKept * kBlockBytes + lane * 16;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
#pragma unroll
      for (int b = 0; b < kKept; ++b) {
        const float4 v = ptx::load_shared_float4(from + (i * kKept + b) * kBlockBytes);
        kept[b][0] += v.x, kept[b][1] += v.y, kept[b][2] += v.z, kept[b][3] += v.w;
      }
    }
  }
};

}  // namespace plait::cuda::mma
