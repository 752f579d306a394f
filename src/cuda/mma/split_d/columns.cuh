// Accumulators of columns that warps take turns in (groups of 16) to rows of any strides.
// Called by the split_d kernels.
#pragma once

#include "cuda/common/loader.cuh"
#include "cuda/ptx/mma.cuh"

namespace plait::cuda::mma {

// A lane's values of one row: blocks[n][first], [first + 1] for all n, times `factor`, to the row at `to`; the warp has
// every kWarps-th group of columns from group `warp` on. Out: T or float. Pairs where the layout allows.
template <int kWarps, class Out, int kColumnBlocks>
__device__ __forceinline__ void store_columns(Out* to, const RowLayout& layout, const float (&blocks)[kColumnBlocks][4],
                                              int first, float factor, int warp, int lane) {
#pragma unroll
  for (int n = 0; n < kColumnBlocks; ++n) {
    const int column = (warp + n / 2 * kWarps) * 16 + n % 2 * 8 + lane % 4 * 2;
    const float low = blocks[n][first] * factor, high = blocks[n][first + 1] * factor;
    if (layout.path != LoadPath::kAny) {
      if (column >= layout.dim) continue;
      if constexpr (sizeof(Out) == 4) {
        *reinterpret_cast<float2*>(to + column) = {low, high};
      } else {
        *reinterpret_cast<uint32_t*>(to + column) = ptx::pack<Out>(low, high);
      }
      continue;
    }
    if (column < layout.dim) to[column * layout.dim_stride] = static_cast<Out>(low);
    if (column + 1 < layout.dim) to[(column + 1) * layout.dim_stride] = static_cast<Out>(high);
  }
}

}  // namespace plait::cuda::mma
