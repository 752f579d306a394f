// 16 x 16 blocks of a swizzled shared-memory tile as operands of mma.m16n8k16.
// Called by the attention kernels of mma.
#pragma once

#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/tile/swizzle.hpp"

namespace plait::tile {

// A tile of rows of kColumns elements, at an address that is a multiple of 128 bytes. mma's B operand is a pair of
// neighbouring registers: which 8 x 8 matrix goes to which register is therefore chosen per use, by the lane's row.
template <int kColumns>
struct Fragments {
  // Blocks side by side differ in `kPhases` patterns of the swizzle, by bits 5 and 6 of the address.
  static constexpr int kPhases = Swizzle<kColumns>::kChunks % 8 == 0 ? 4 : 2;

  // What a lane adds to the tile's address for operand A, and for B from rows that are k (transposed).
  static __device__ __forceinline__ uint32_t lane_bytes(int lane) {
    return Swizzle<kColumns>::offset(lane % 16, lane / 16) * 2;
  }
  // The same for operand B from rows that are its columns n.
  static __device__ __forceinline__ uint32_t lane_bytes_b(int lane) {
    return Swizzle<kColumns>::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2) * 2;
  }

  // Address of the lane's row of block (row_block, column_block), `lane_address` = tile address + lane bytes.
  static __device__ __forceinline__ uint32_t address(uint32_t lane_address, int row_block, int column_block) {
    return (lane_address ^ (column_block % kPhases * 32)) + row_block * 16 * kColumns * 2 +
           column_block / kPhases * kPhases * 32;
  }

  // With lane_bytes: A (a0..a3). With lane_bytes_b: B, (r[0], r[1]) of n 0..7 and (r[2], r[3]) of n 8..15.
  static __device__ __forceinline__ void load(uint32_t (&r)[4], uint32_t lane_address, int row_block,
                                              int column_block) {
    ptx::ldmatrix_x4(r, address(lane_address, row_block, column_block));
  }

  // With lane_bytes: B, rows are k: (r[0], r[1]) of columns 0..7 of the block and (r[2], r[3]) of 8..15.
  // With lane_bytes_b: A of the transposed block, whose rows are the block's columns.
  static __device__ __forceinline__ void load_transposed(uint32_t (&r)[4], uint32_t lane_address, int row_block,
                                                         int column_block) {
    ptx::ldmatrix_x4_trans(r, address(lane_address, row_block, column_block));
  }
};

}  // namespace plait::tile
