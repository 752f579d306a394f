// Blocks of 16 wide rows by 64 columns: product, rotation, rounding, stores.
// Called by expand.cuh.
#pragma once

#include "cuda/iha/fragments.cuh"
#include "cuda/iha/rotation.cuh"
#include "cuda/ptx/shared.cuh"

namespace plait::cuda::iha {

// What a warp works with.
struct ExpandWarp {
  int lane, first_tile, first, count, table_rows;  // first, count: the lane's columns of a row
};

// One block of 16 wide rows times 64 columns.
template <class T, int kSteps>
struct WideBlock {
  static constexpr int kTiles = ExpandLayout::kTiles, kPairs = kTiles * kTileElems / 2;
  float acc[kTiles][4];

  __device__ __forceinline__ void multiply(const uint32_t (&b)[kSteps][kTiles][2], uint32_t high, uint32_t low,
                                           bool split) {
#pragma unroll
    for (int i = 0; i < kTiles * 4; ++i) acc[i / 4][i % 4] = 0.0f;
    add(b, high);
    if (split) add(b, low);
  }

  // Turns rows g and g + 8 by their rows of a table [cos, sin][kPairs]; `left` pairs from the first on turn, columns of
  // others are not touched. A thread holds columns 2t and 2t + 1 of every tile.
  __device__ __forceinline__ void turn(const float* upper, const float* lower, bool pairs, int left, int lane) {
    if (pairs) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const int pair = n * (kTileElems / 2) + lane % 4;
        if (pair >= left) continue;
        turn_pair(acc[n][0], acc[n][1], upper[pair], upper[kPairs + pair]);
        turn_pair(acc[n][2], acc[n][3], lower[pair], lower[kPairs + pair]);
      }
      return;
    }
#pragma unroll
    for (int n = 0; n < kTiles; n += 2) {
      const int pair = n * (kTileElems / 2) + lane % 4 * 2;
      if (n * (kTileElems / 2) >= left) break;
      float2 c = *reinterpret_cast<const float2*>(upper + pair),
             s = *reinterpret_cast<const float2*>(upper + kPairs + pair);
      turn_pair(acc[n][0], acc[n + 1][0], c.x, s.x);
      turn_pair(acc[n][1], acc[n + 1][1], c.y, s.y);
      if (lower != upper) {
        c = *reinterpret_cast<const float2*>(lower + pair), s = *reinterpret_cast<const float2*>(lower + kPairs + pair);
      }
      turn_pair(acc[n][2], acc[n + 1][2], c.x, s.x);
      turn_pair(acc[n][3], acc[n + 1][3], c.y, s.y);
    }
  }

  // Rounds the block into staging [16][kPitch]. Called by whole warps.
  __device__ __forceinline__ void put(uint32_t staging, int lane) const {
#pragma unroll
    for (int n = 0; n < kTiles; n += 2) {
      const uint32_t r[4] = {ptx::pack<T>(acc[n][0], acc[n][1]), ptx::pack<T>(acc[n][2], acc[n][3]),
                             ptx::pack<T>(acc[n + 1][0], acc[n + 1][1]), ptx::pack<T>(acc[n + 1][2], acc[n + 1][3])};
      if constexpr (ptx::kStoresMatrices) {
        ptx::stmatrix_x4(staging + lane % 16 * ExpandLayout::kPitch + (n + lane / 16) * 16, r);
      } else {
        const uint32_t to = staging + lane / 4 * ExpandLayout::kPitch + n * 16 + lane % 4 * 4;
        ptx::store_shared_4(to, r[0]), ptx::store_shared_4(to + 8 * ExpandLayout::kPitch, r[1]);
        ptx::store_shared_4(to + 16, r[2]), ptx::store_shared_4(to + 8 * ExpandLayout::kPitch + 16, r[3]);
      }
    }
  }

 private:
  __device__ __forceinline__ void add(const uint32_t (&b)[kSteps][kTiles][2], uint32_t fragments) {
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const uint4 w = ptx::load_shared_16(fragments + k * kFragmentBytes);
      const uint32_t a[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
      for (int n = 0; n < kTiles; ++n) ptx::mma_m16n8k16<T>(acc[n], a, b[k][n][0], b[k][n][1]);
    }
  }
};

// Stores up to 16 rows from staging, row i at out + offsets[i] bytes.
template <class T>
__device__ __forceinline__ void store_rows(const TokenRows& rows, bool vector, uint64_t out, const int64_t* offsets,
                                           uint32_t staging, int count, const ExpandWarp& warp) {
  constexpr int kRows = 32 / ExpandLayout::kTiles;
  const int first_row = warp.lane / ExpandLayout::kTiles;
  const uint32_t from = staging + first_row * ExpandLayout::kPitch + warp.lane % ExpandLayout::kTiles * 16;
  if (vector) {
    out += warp.first * sizeof(T);
    if (warp.count == 0) count = 0;
#pragma unroll
    for (int pass = 0; pass < 16 / kRows; ++pass) {
      const int row = pass * kRows + first_row;
      store_16(out + offsets[row], ptx::load_shared_16(from + pass * kRows * ExpandLayout::kPitch), row < count);
    }
    return;
  }
#pragma unroll 1
  for (int row = first_row; row < min(count, 16); row += kRows) {
    store_tile(reinterpret_cast<T*>(out + offsets[row]), rows, warp.first, warp.count,
               ptx::load_shared_16(from + (row - first_row) * ExpandLayout::kPitch));
  }
}

}  // namespace plait::cuda::iha
