// Scores by one warp, where the warpgroup's are gone.
// Called by consumer.cuh.
#pragma once

#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/tile/wgmma_tile.hpp"

namespace plait::cuda::sm90 {

// scores = q k^T of the 16 rows of QueryTile from `row` on and all rows of KeyTile.
template <class T, class QueryTile, class KeyTile, int kHeadDim, int kKeyTiles>
__device__ __forceinline__ void multiply_keys_by_warp(float (&scores)[kKeyTiles][4], uint32_t q, int row, uint32_t k,
                                                      int lane) {
#pragma unroll
  for (int n = 0; n < kKeyTiles; ++n) scores[n][0] = scores[n][1] = scores[n][2] = scores[n][3] = 0.0f;
#pragma unroll 1
  for (int d = 0; d < kHeadDim / 16; ++d) {
    uint32_t queries[4];
    ptx::ldmatrix_x4(queries, q + QueryTile::chunk_bytes(row + lane % 16, 2 * d + lane / 16));
    const uint32_t first = k + KeyTile::chunk_bytes(lane / 16 * 8 + lane % 8, 2 * d + lane / 8 % 2);
#pragma unroll
    for (int n = 0; n < kKeyTiles; n += 2) {
      uint32_t keys[4];
      ptx::ldmatrix_x4(keys, first + n * tile::kSwizzleAlignBytes);
      ptx::mma_m16n8k16<T>(scores[n], queries, keys[0], keys[1]);
      ptx::mma_m16n8k16<T>(scores[n + 1], queries, keys[2], keys[3]);
    }
  }
}

}  // namespace plait::cuda::sm90
