// Weights as operands of mma.m16n8k16 in shared memory: one 16-byte read per lane and operand, fp32 as a sum of two.
// Called by the expand and contract kernels.
#pragma once

#include "cuda/iha/tokens.cuh"

namespace plait::cuda::iha {

template <class T>
__device__ __forceinline__ float load_weight(const WeightMatrix& w, int64_t at) {
  return w.is_float ? static_cast<const float*>(w.data)[at] : static_cast<float>(static_cast<const T*>(w.data)[at]);
}
template <class T>
__device__ __forceinline__ float load_weight(const WeightMatrix& w, int pseudo, int wide_row, int narrow_row) {
  return load_weight<T>(
      w, wide_row / pseudo * w.head_stride + wide_row % pseudo * w.pseudo_stride + narrow_row * w.narrow_stride);
}

// A number as a sum of two of type T: what is left has the relative error of twice the digits.
template <class T>
struct Halves {
  float high, low;
  __device__ __forceinline__ explicit Halves(float value)
      : high(static_cast<float>(static_cast<T>(value))), low(value - high) {}
};

// Fills fragments [m_tiles][k_steps][32 lanes] of the matrix `weight(row, k)`; all threads of the block.
template <class T, class Weight>
__device__ void fill_fragments(uint4* high, uint4* low, bool split, int m_tiles, int k_steps, Weight weight) {
  for (int i = static_cast<int>(threadIdx.x); i < m_tiles * k_steps * 32; i += static_cast<int>(blockDim.x)) {
    const int lane = i % 32, step = i / 32 % k_steps, tile = i / 32 / k_steps;
    uint32_t h[4], l[4];
    for (int r = 0; r < 4; ++r) {
      const int row = tile * 16 + lane / 4 + r % 2 * 8, k = step * 16 + lane % 4 * 2 + r / 2 * 8;
      const Halves<T> a(weight(row, k)), b(weight(row, k + 1));
      h[r] = ptx::pack<T>(a.high, b.high);
      l[r] = ptx::pack<T>(a.low, b.low);
    }
    high[i] = {h[0], h[1], h[2], h[3]};
    if (split) low[i] = {l[0], l[1], l[2], l[3]};
  }
}

// The address of a lane's 16 bytes in a block of 16 x 16 elements for ldmatrix_x4: rows lane % 16, tiles lane / 16.
// Rows at or past `rows` do not exist: they read the 16 zero bytes at `zeros`.
__device__ __forceinline__ uint32_t block_address(uint32_t base, int pitch, int first_row, int rows, int tile, int lane,
                                                  uint32_t zeros) {
  const int row = first_row + lane % 16;
  return row < rows ? base + row * pitch + (tile + lane / 16) * 16 : zeros;
}

}  // namespace plait::cuda::iha
