// The warps that sum the weight gradient, sum_{token, column} wide[r] * narrow_in[s]: mma of wide rows (m) by narrow
// heads (n) over 16 columns (k). Each warp keeps the sums of all its columns in registers.
// Called by contract.cuh.
#pragma once

#include "cuda/iha/stage.cuh"

namespace plait::cuda::iha {

template <class T, int kNarrowTiles, int kColumns>
class GradientRole {
  static constexpr int kPitch = Block<kColumns>::kPitch, kUnits = kColumns / 16;
  static constexpr int kWideTiles = contract_wide_tiles(kNarrowTiles), kPairs = (kNarrowTiles + 1) / 2;

 public:
  // Warps that share the wide tiles of one column.
  static __device__ __forceinline__ int groups(int wide) {
    int groups = 1;
    while (groups * kWideTiles * 16 < wide) groups *= 2;
    return groups;
  }

  static __device__ __forceinline__ int slices(int wide) { return ContractLayout::kGradientWarps / groups(wide); }

  __device__ __forceinline__ GradientRole(const Job& job, const Block<kColumns>& block, int warp, int lane)
      : lane_(lane),
        slice_(warp / groups(block.wide)),
        first_(warp % groups(block.wide) * kWideTiles),
        tiles_((block.wide + 15) / 16 - first_) {
    // Rows past the last are whatever follows them (narrow ones: the last again): their products are dropped.
    const int row = lane % 16, side = lane / 16 * 16;
    from_ = (first_ * 16 + row) * kPitch + side;
#pragma unroll
    for (int n = 0; n < kPairs; ++n) {
      narrow_from_[n] = (block.wide + min(n * 16 + row, block.heads - 1)) * kPitch + side;
    }
    clear();
  }

  __device__ __forceinline__ void work(const Job& job, const ContractLayout& layout, const Block<kColumns>& block,
                                       int slices, const unsigned char* stage) {
    const int left = job.rotary.by_row ? 0 : job.rotary.dim / 2 - block.first_tile * (kTileElems / 2);  // pairs
#pragma unroll 1
    for (int unit = slice_; unit < layout.tokens * kUnits; unit += slices) {
      const int token = unit / kUnits, column = unit % kUnits;
      const unsigned char* from = stage + token * block.token_bytes;
      const uint32_t base = ptx::shared_address(from) + column * 32;
      uint32_t b[2 * kPairs][2];
#pragma unroll
      for (int n = 0; n < kPairs; ++n) {
        uint32_t r[4];
        ptx::ldmatrix_x4(r, base + narrow_from_[n]);
        b[2 * n][0] = r[0], b[2 * n][1] = r[2], b[2 * n + 1][0] = r[1], b[2 * n + 1][1] = r[3];
      }
      if (left > column * kTileElems) {
        const float* cos = reinterpret_cast<const float*>(from + block.table_offset) + column * kTileElems;
        turn(b, cos, cos + kColumns / 2, job.rotary.pairs, left - column * kTileElems);
      }
      multiply(base, b);
    }
  }

  // Moves the sums of slice `slice` to sums [rows][kNarrowTiles * 8] in shared memory.
  __device__ __forceinline__ void flush(float* sums, int slice, int rows) {
    if (slice != slice_) return;
#pragma unroll
    for (int m = 0; m < kWideTiles; ++m) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = (first_ + m) * 16 + lane_ / 4 + i * 8;
        if (row >= rows) continue;
#pragma unroll
        for (int n = 0; n < kNarrowTiles; ++n) {
          float* at = sums + (row * kNarrowTiles + n) * kTileElems + lane_ % 4 * 2;
          at[0] += acc_[m][n][2 * i];
          at[1] += acc_[m][n][2 * i + 1];
        }
      }
    }
    clear();
  }

 private:
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kWideTiles * kNarrowTiles * 4; ++i) {
      acc_[i / (kNarrowTiles * 4)][i / 4 % kNarrowTiles][i % 4] = 0.0f;
    }
  }

  __device__ __forceinline__ void multiply(uint32_t base, const uint32_t (&b)[2 * kPairs][2]) {
    uint32_t a[2][4];
    if (tiles_ >= kWideTiles) {  // no conditions; a tile is loaded while the one before it is multiplied
      constexpr int kAhead = kNarrowTiles <= 4 ? 1 : 0;
      if (kAhead > 0) ptx::ldmatrix_x4(a[0], base + from_);
#pragma unroll
      for (int m = 0; m < kWideTiles; ++m) {
        if (m + kAhead < kWideTiles) {
          ptx::ldmatrix_x4(a[(m + kAhead) % 2], base + from_ + (m + kAhead) * 16 * kPitch);
        }
        add(acc_[m], a[m % 2], b);
      }
      return;
    }
#pragma unroll
    for (int m = 0; m < kWideTiles; ++m) {
      if (m >= tiles_) break;
      ptx::ldmatrix_x4(a[0], base + from_ + m * 16 * kPitch);
      add(acc_[m], a[0], b);
    }
  }
  static __device__ __forceinline__ void add(float (&acc)[kNarrowTiles][4], const uint32_t (&a)[4],
                                             const uint32_t (&b)[2 * kPairs][2]) {
#pragma unroll
    for (int n = 0; n < kNarrowTiles; ++n) ptx::mma_m16n8k16<T>(acc[n], a, b[n][0], b[n][1]);
  }

  // A thread holds columns 2 (lane % 4) and + 1 of both tiles of the unit.
  __device__ __forceinline__ void turn(uint32_t (&b)[2 * kPairs][2], const float* cos, const float* sin, bool pairs,
                                       int left) {
    const int t = lane_ % 4, first = pairs ? t : 2 * t, second = pairs ? t + 4 : 2 * t + 1;
    const float cos0 = cos[first], cos1 = cos[second], sin0 = sin[first], sin1 = sin[second];
    // Of style pairs the tiles are turned one by one: `left` counts from their pairs.
#pragma unroll
    for (int n = 0; n < kNarrowTiles; ++n) {
      uint32_t x = b[n][0], y = b[n][1];
      turn_packed<T>(x, y, cos0, cos1, sin0, sin1, pairs, 2);
      if (!pairs || first < left) b[n][0] = x;
      if (!pairs || second < left) b[n][1] = y;
    }
  }

  float acc_[kWideTiles][kNarrowTiles][4];
  int narrow_from_[kPairs];
  int lane_, slice_, first_, tiles_, from_;
};

}  // namespace plait::cuda::iha
