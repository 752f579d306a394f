// The matrix products of the backward: ldmatrix from swizzled tiles into mma, accumulators in registers.
// Called by the backward kernels. Operand layouts: ptx/mma.cuh.
#pragma once

#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/tile/swizzle.hpp"

namespace plait::cuda::mma {

// Which row and chunk of a 16 x 16 block a lane gives to ldmatrix. mma takes B from neighbouring registers, so that the
// 8 x 8 matrices must come in the right order (else the compiler moves registers: 2 MOVs per mma).
enum class Lanes {
  kDown,    // matrices 1, 3 below 0, 2: A from its rows, B from rows that are k (transposed)
  kAcross,  // matrices 1, 3 right of 0, 2: B from rows that are its columns, A from rows that are k (transposed)
};

// The lane's address in the 16 x 16 blocks of a swizzled tile.
template <int kColumns, Lanes kLanes>
struct BlockAddress {
  static constexpr int kMixedBits = (kColumns / tile::kChunkElems) % 8 == 0 ? 7 : 3;
  uint32_t base;

  // `row`: a multiple of 16. `group`: of 16 columns.
  __device__ __forceinline__ BlockAddress(uint32_t tile_address, int row, int group) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int down = kLanes == Lanes::kDown ? lane % 16 : lane % 8 + lane / 16 * 8;
    const int across = kLanes == Lanes::kDown ? lane / 16 : lane / 8 % 2;
    base = tile_address + tile::Swizzle<kColumns>::offset(row + down, 2 * group + across) * 2;
  }
  // The block `rows` further down and `groups` further right: constants, and no bit of 2 * groups that the swizzle
  // mixes is set in 2 * group.
  __device__ __forceinline__ uint32_t at(int rows, int groups) const {
    const int chunk = 2 * groups;
    return (base ^ static_cast<uint32_t>((chunk & kMixedBits) * 16)) + (chunk & ~kMixedBits) * 16 + rows * kColumns * 2;
  }
};
template <int kColumns>
using DownAddress = BlockAddress<kColumns, Lanes::kDown>;
template <int kColumns>
using AcrossAddress = BlockAddress<kColumns, Lanes::kAcross>;

// Operand A of multiply_rows: from shared memory each time, or held in registers.
template <class C>
struct Held {
  uint32_t blocks[C::kHeadDim / 16][C::kScoreM][4];
};
template <int kColumns>
__device__ __forceinline__ void load_rows(uint32_t (&a)[4], const DownAddress<kColumns>& rows, int i, int k) {
  ptx::ldmatrix_x4(a, rows.at(16 * i, k));
}
template <class C>
__device__ __forceinline__ void load_rows(uint32_t (&a)[4], const Held<C>& held, int i, int k) {
#pragma unroll
  for (int r = 0; r < 4; ++r) a[r] = held.blocks[k][i][r];
}

// c += A B^T over 16 columns.
template <class T, int kM, int kN>
__device__ __forceinline__ void multiply_blocks(float (&c)[kM][2 * kN][4], const uint32_t (&a)[kM][4],
                                                const uint32_t (&b)[kN][4]) {
#pragma unroll
  for (int j = 0; j < kN; ++j) {
#pragma unroll
    for (int i = 0; i < kM; ++i) {
      ptx::mma_m16n8k16<T>(c[i][2 * j], a[i], b[j][0], b[j][1]);
      ptx::mma_m16n8k16<T>(c[i][2 * j + 1], a[i], b[j][2], b[j][3]);
    }
  }
}

// c += A B^T over the columns from 16 kFrom on: c[i][j] is the 16 x 8 block of A's rows 16 i.. and B's rows 8 j...
// `between(k)`: arithmetic of another kind, between the products of one k.
template <class T, int kFrom, int kM, int kN, int kColumns, class Rows, class Between>
__device__ __forceinline__ void multiply_rows(float (&c)[kM][2 * kN][4], const Rows& a,
                                              const AcrossAddress<kColumns>& b, const Between& between) {
#pragma unroll
  for (int k = kFrom; k < kColumns / 16; ++k) {
    uint32_t fa[kM][4], fb[kN][4];
#pragma unroll
    for (int i = 0; i < kM; ++i) load_rows(fa[i], a, i, k);
#pragma unroll
    for (int j = 0; j < kN; ++j) ptx::ldmatrix_x4(fb[j], b.at(16 * j, k));
    multiply_blocks<T>(c, fa, fb);
    between(k);
  }
}

// c += A B: A in registers, one 16-row block of B per k; c's column groups are every kStep-th of B's. `between(i)`: as
// above, once for each block of B.
template <class T, int kStep, int kM, int kK, int kN, int kColumns, class Between>
__device__ __forceinline__ void accumulate(float (&c)[kM][kN][4], const uint32_t (&a)[kM][kK][4],
                                           const DownAddress<kColumns>& b, const Between& between) {
#pragma unroll
  for (int k = 0; k < kK; ++k) {
#pragma unroll
    for (int n = 0; n < kN / 2; ++n) {
      uint32_t fb[4];
      ptx::ldmatrix_x4_trans(fb, b.at(16 * k, n * kStep));
#pragma unroll
      for (int i = 0; i < kM; ++i) {
        ptx::mma_m16n8k16<T>(c[i][2 * n], a[i][k], fb[0], fb[1]);
        ptx::mma_m16n8k16<T>(c[i][2 * n + 1], a[i][k], fb[2], fb[3]);
      }
      between(k * (kN / 2) + n);
    }
  }
}

// c = A^T B over kRows rows of both tiles.
template <class T, int kM, int kN, int kStep, int kRows, int kColumnsA, int kColumnsB>
__device__ __forceinline__ void multiply_columns(float (&c)[kM][2 * kN][4], const AcrossAddress<kColumnsA>& a,
                                                 const DownAddress<kColumnsB>& b) {
#pragma unroll
  for (int k = 0; k < kRows / 16; ++k) {
    uint32_t fa[kM][4];
#pragma unroll
    for (int i = 0; i < kM; ++i) ptx::ldmatrix_x4_trans(fa[i], a.at(16 * k, i));
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      uint32_t fb[4];
      ptx::ldmatrix_x4_trans(fb, b.at(16 * k, n * kStep));
#pragma unroll
      for (int i = 0; i < kM; ++i) {
        ptx::mma_m16n8k16<T>(c[i][2 * n], fa[i], fb[0], fb[1]);
        ptx::mma_m16n8k16<T>(c[i][2 * n + 1], fa[i], fb[2], fb[3]);
      }
    }
  }
}

// Writes accumulators, times `factor` and rounded to T, into a tile: rows from `row`, column groups group + n * kStep.
template <class T, int kM, int kN, int kStep, int kColumns>
__device__ void round_to_tile(uint32_t tile_address, int row, int group, const float (&c)[kM][2 * kN][4],
                              float factor) {
  const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
  for (int i = 0; i < kM; ++i) {
#pragma unroll
    for (int j = 0; j < 2 * kN; ++j) {
      const int chunk = 2 * (group + j / 2 * kStep) + j % 2, first = row + 16 * i + lane / 4;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t pair = ptx::pack<T>(c[i][j][2 * half] * factor, c[i][j][2 * half + 1] * factor);
        ptx::store_shared_4(tile_address + tile::Swizzle<kColumns>::offset(first + 8 * half, chunk) * 2 + lane % 4 * 4,
                            pair);
      }
    }
  }
}

}  // namespace plait::cuda::mma
