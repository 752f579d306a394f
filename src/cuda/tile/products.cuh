// The two products of a forward key loop, on fragments of mma.m16n8k16: scores = q k^T and O += P v.
// Called by the key loops of mma/prefill and mma/decode. `*_lanes`: a tile's address and the lane's bytes (Fragments).
#pragma once

#include "cuda/ptx/mma.cuh"
#include "cuda/tile/fragment.cuh"

namespace plait::tile {

// A warp's queries as operands, kBlocks x 16 rows, all kDepth x 16 columns.
template <int kHeadDim, int kDepth, int kBlocks>
__device__ __forceinline__ void read_queries(uint32_t (&queries)[kDepth][kBlocks][4], uint32_t query_lanes) {
#pragma unroll
  for (int d = 0; d < kDepth; ++d) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) Fragments<kHeadDim>::load(queries[d][block], query_lanes, block, d);
  }
}

// Columns [16 d, 16 d + 16) of q k^T. kHeld: q comes from `queries`, else from shared memory.
template <class T, int kHeadDim, bool kHeld, int kDepth, int kBlocks, int kKeyTiles>
__device__ __forceinline__ void multiply_keys(float (&scores)[kBlocks][kKeyTiles][4],
                                              const uint32_t (&queries)[kDepth][kBlocks][4], uint32_t key_lanes,
                                              uint32_t query_lanes, int d) {
  uint32_t a[kBlocks][4];
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    if constexpr (kHeld) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[block][i] = queries[d][block][i];
    } else {
      Fragments<kHeadDim>::load(a[block], query_lanes, block, d);
    }
  }
#pragma unroll
  for (int n = 0; n < kKeyTiles / 2; ++n) {
    uint32_t b[4];
    Fragments<kHeadDim>::load(b, key_lanes, n, d);
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      ptx::mma_m16n8k16<T>(scores[block][2 * n], a[block], b[0], b[1]);
      ptx::mma_m16n8k16<T>(scores[block][2 * n + 1], a[block], b[2], b[3]);
    }
  }
}

// Keys [16 n, 16 n + 16) of p v; probabilities become 16-bit operands where they lie: C fragments are A fragments.
template <class T, int kHeadDim, int kBlocks, int kOutTiles, int kKeyTiles>
__device__ __forceinline__ void multiply_values(float (&out)[kBlocks][kOutTiles][4],
                                                const float (&scores)[kBlocks][kKeyTiles][4], uint32_t value_lanes,
                                                int n) {
  uint32_t a[kBlocks][4];
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* pair = scores[block][2 * n + i / 2] + i % 2 * 2;
      a[block][i] = ptx::pack<T>(pair[0], pair[1]);
    }
  }
#pragma unroll
  for (int d = 0; d < kOutTiles / 2; ++d) {
    uint32_t b[4];
    Fragments<kHeadDim>::load_transposed(b, value_lanes, n, d);
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      ptx::mma_m16n8k16<T>(out[block][2 * d], a[block], b[0], b[1]);
      ptx::mma_m16n8k16<T>(out[block][2 * d + 1], a[block], b[2], b[3]);
    }
  }
}

}  // namespace plait::tile
