// Tiles of any number of columns in shared memory, as swizzled chunks of 64: loads, and products that run over them.
// Called by the split_d kernels.
#pragma once

#include <numeric>

#include "catalog/mma_split_d_tiles.hpp"
#include "cuda/common/loader.cuh"
#include "cuda/mma/backward/config.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/tile/fragment.cuh"

namespace plait::cuda::mma {

// Element (row, column) of a tile of kRows rows: chunk column / 64, laid out like a tile of 64 columns.
inline constexpr int kChunkColumns = catalog::kSplitDChunk;
inline constexpr int kChunkRowBytes = kChunkColumns * 2;
using ChunkSwizzle = tile::Swizzle<kChunkColumns>;
using ChunkFragment = tile::Fragments<kChunkColumns>;

// Copies by `kThreads` threads, all of which call load(). Completion: cp_async_commit, cp_async_wait, then a barrier.
template <class T, int kRows, int kThreads>
struct ChunkLoader {
  // Threads side by side take a row of a chunk; kThreadRows rows of kAtOnce chunks at a time.
  static constexpr int kWide = kChunkColumns / tile::kChunkElems, kThreadRows = std::gcd(kThreads / kWide, kRows);
  static constexpr int kPasses = kRows / kThreadRows, kAtOnce = kThreads / kWide / kThreadRows;

  // `base`: element 0 of row 0 of the head. Rows first_row .. first_row + kRows, `chunks` chunks of columns. Rows at or
  // past `rows` (counted from first_row, may be <= 0) and columns at or past layout.dim become zeros and are not read.
  // kWholeChunks > 0: so many chunks of whole rows have a path of their own.
  template <int kWholeChunks = 0>
  static __device__ __forceinline__ void load(uint32_t target, const RowLayout& layout, const T* base, int first_row,
                                              int rows, int chunks, int thread) {
    if constexpr (kWholeChunks > 0 && kWholeChunks % kAtOnce == 0) {
      if (layout.path == LoadPath::kRows && rows >= kRows && chunks == kWholeChunks &&
          chunks * kChunkColumns <= layout.dim) {
        return load_whole<kWholeChunks>(target, layout, base, first_row, thread);
      }
    }
    if (layout.path == LoadPath::kRows) {
      load_rows(target, layout, base, first_row, rows, chunks, thread);
    } else {
      load_any(target, layout, base, first_row, rows, chunks, thread);
    }
  }

  // Straight code: no address is advanced.
  template <int kChunks>
  static __device__ __forceinline__ void load_whole(uint32_t target, const RowLayout& layout, const T* base,
                                                    int first_row, int thread) {
    const int row = thread / kWide % kThreadRows, chunk = kAtOnce == 1 ? 0 : thread / (kWide * kThreadRows);
    const T* from = base + int64_t{first_row + row} * layout.seq_stride + chunk * kChunkColumns +
                    thread % kWide * tile::kChunkElems;
    const uint32_t to = target + chunk * kRows * kChunkRowBytes + ChunkSwizzle::offset(row, thread % kWide) * 2;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
#pragma unroll
      for (int i = 0; i < kChunks; i += kAtOnce) {
        ptx::cp_async_16(to + (i * kRows + pass * kThreadRows) * kChunkRowBytes, from + i * kChunkColumns, true);
      }
      from += kThreadRows * layout.seq_stride;
    }
  }

  // Addresses advance once for kUnroll copies: an address register waits until the copy before has left the queue.
  static __device__ __forceinline__ void load_rows(uint32_t target, const RowLayout& layout, const T* base,
                                                   int first_row, int rows, int chunks, int thread) {
    constexpr int kUnroll = 4;
    const int row = thread / kWide % kThreadRows;
    const int column = thread % kWide * tile::kChunkElems;
    int chunk = kAtOnce == 1 ? 0 : thread / (kWide * kThreadRows);
    const T* from[kPasses];
    from[0] = base + int64_t{first_row + row} * layout.seq_stride + chunk * kChunkColumns + column;
#pragma unroll
    for (int pass = 1; pass < kPasses; ++pass) from[pass] = from[pass - 1] + kThreadRows * layout.seq_stride;
    uint32_t to = target + chunk * kRows * kChunkRowBytes + ChunkSwizzle::offset(row, thread % kWide) * 2;
#pragma unroll 1
    for (; chunk < chunks; chunk += kUnroll * kAtOnce) {
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        if (chunk + i * kAtOnce >= chunks) break;
        const bool inside = (chunk + i * kAtOnce) * kChunkColumns + column < layout.dim;
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass) {
          ptx::cp_async_16(to + (i * kAtOnce * kRows + pass * kThreadRows) * kChunkRowBytes,
                           from[pass] + i * kAtOnce * kChunkColumns, inside && row + pass * kThreadRows < rows);
        }
      }
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) from[pass] += kUnroll * kAtOnce * kChunkColumns;
      to += kUnroll * kAtOnce * kRows * kChunkRowBytes;
    }
  }

  static __device__ __noinline__ void load_any(uint32_t target, const RowLayout& layout, const T* base, int first_row,
                                               int rows, int chunks, int thread) {
#pragma unroll 1
    for (int index = thread; index < chunks * kRows * kWide; index += kThreads) {
      const int wide = index % kWide, row = index / kWide % kRows, chunk = index / (kWide * kRows);
      const int position = (first_row + row) / layout.per, pseudo = (first_row + row) % layout.per;
      const int column = chunk * kChunkColumns + wide * tile::kChunkElems;
      const T* from = base + position * layout.seq_stride + pseudo * layout.pseudo_stride + column * layout.dim_stride;
      const uint32_t to = target + (chunk * kRows * kChunkColumns + ChunkSwizzle::offset(row, wide)) * 2;
      if (layout.path != LoadPath::kAny) {
        ptx::cp_async_16(to, from, row < rows && column < layout.dim);
        continue;
      }
#pragma unroll 1
      for (int i = 0; i < tile::kChunkElems / 2; ++i) {
        uint32_t pair = 0;
        if (row < rows && column + 2 * i < layout.dim) pair = bits(from[2 * i * layout.dim_stride]);
        if (row < rows && column + 2 * i + 1 < layout.dim) pair |= bits(from[(2 * i + 1) * layout.dim_stride]) << 16;
        ptx::store_shared_4(to + 4 * i, pair);
      }
    }
  }

  // The same from fp32 rows, rounded.
  static __device__ __noinline__ void load_float(uint32_t target, const RowLayout& layout, const float* base,
                                                 int first_row, int rows, int chunks, int thread) {
#pragma unroll 1
    for (int index = thread; index < chunks * kRows * kChunkColumns / 2; index += kThreads) {
      const int pair = index % (kChunkColumns / 2), row = index / (kChunkColumns / 2) % kRows;
      const int chunk = index / (kChunkColumns / 2 * kRows), column = chunk * kChunkColumns + 2 * pair;
      const int position = (first_row + row) / layout.per, pseudo = (first_row + row) % layout.per;
      const float* from =
          base + position * layout.seq_stride + pseudo * layout.pseudo_stride + column * layout.dim_stride;
      const float low = row < rows && column < layout.dim ? from[0] : 0.0f;
      const float high = row < rows && column + 1 < layout.dim ? from[layout.dim_stride] : 0.0f;
      const int offset = chunk * kRows * kChunkColumns + ChunkSwizzle::offset(row, pair / 4) + pair % 4 * 2;
      ptx::store_shared_4(target + offset * 2, ptx::pack<T>(low, high));
    }
  }

 private:
  static __device__ __forceinline__ uint32_t bits(const T& value) { return reinterpret_cast<const uint16_t&>(value); }
};

// c += A B^T over every kSlices-th group of 32 columns from group `slice` on, of `groups`: kM x 16 rows of A,
// kColumnBlocks x 8 of B. `a`, `b`: addresses of the first row (a multiple of 16) in tiles of kRowsA and kRowsB rows.
template <class T, int kSlices, int kRowsA, int kRowsB, int kM, int kColumnBlocks>
__device__ __forceinline__ void multiply_slice(float (&c)[kM][kColumnBlocks][4], uint32_t a, uint32_t b, int slice,
                                               int groups, int lane) {
  static_assert(kSlices % 2 == 0, "a slice stays in the same half of its chunks");
  constexpr int kN = kColumnBlocks / 2;
  constexpr int kStepA = kSlices / 2 * kRowsA * kChunkRowBytes, kStepB = kSlices / 2 * kRowsB * kChunkRowBytes;
  const uint32_t half = slice % 2 * 64;
  a = ((a + ChunkFragment::lane_bytes(lane)) ^ half) + slice / 2 * kRowsA * kChunkRowBytes;
  b = ((b + ChunkFragment::lane_bytes_b(lane)) ^ half) + slice / 2 * kRowsB * kChunkRowBytes;
  uint32_t fa[2][kM][4], fb[2][kN][4];
  const auto read = [&](int buffer, uint32_t flip) {
#pragma unroll
    for (int i = 0; i < kM; ++i) ChunkFragment::load(fa[buffer][i], a ^ flip, i, 0);
#pragma unroll
    for (int n = 0; n < kN; ++n) ChunkFragment::load(fb[buffer][n], b ^ flip, n, 0);
  };
  const auto multiply = [&](int buffer) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int i = 0; i < kM; ++i) {
        ptx::mma_m16n8k16<T>(c[i][2 * n], fa[buffer][i], fb[buffer][n][0], fb[buffer][n][1]);
        ptx::mma_m16n8k16<T>(c[i][2 * n + 1], fa[buffer][i], fb[buffer][n][2], fb[buffer][n][3]);
      }
    }
  };
  if (slice >= groups) return;
  read(0, 0);
#pragma unroll 2
  for (int group = slice; group < groups; group += kSlices) {
    read(1, 32);
    multiply(0);
    const bool last = group + kSlices >= groups;  // reads something again rather than past the end
    a += last ? 0 : kStepA;
    b += last ? 0 : kStepB;
    read(0, 0);
    multiply(1);
  }
}

// c += A B over kDepth x 16 rows of B from tile `b` of kRowsB rows, every kWarps-th group of 16 columns from group
// `warp` on; c[i][2 n], c[i][2 n + 1]: group n of these. load_a(a, i, k): block (i, k) of A.
template <class T, int kDepth, int kRowsB, int kWarps, int kM, int kColumnBlocks, class LoadA>
__device__ __forceinline__ void multiply_groups(float (&c)[kM][kColumnBlocks][4], const LoadA& load_a, uint32_t b,
                                                int warp, int lane) {
  static_assert(kWarps % 4 == 0, "a warp's groups are at the same place of their chunks");
  constexpr int kN = kColumnBlocks / 2, kGroupBytes = kWarps / 4 * kRowsB * kChunkRowBytes;
  b = ((b + ChunkFragment::lane_bytes(lane)) ^ (warp % 4 * 32)) + warp / 4 * kRowsB * kChunkRowBytes;
  uint32_t fa[kM][4], fb[2][4];
  ptx::ldmatrix_x4_trans(fb[0], b);
#pragma unroll
  for (int k = 0; k < kDepth; ++k) {
#pragma unroll
    for (int i = 0; i < kM; ++i) load_a(fa[i], i, k);
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const int next = k * kN + n + 1, now = (k * kN + n) % 2;
      if (next < kDepth * kN) {
        ptx::ldmatrix_x4_trans(fb[next % 2], b + next % kN * kGroupBytes + next / kN * 16 * kChunkRowBytes);
      }
#pragma unroll
      for (int i = 0; i < kM; ++i) {
        ptx::mma_m16n8k16<T>(c[i][2 * n], fa[i], fb[now][0], fb[now][1]);
        ptx::mma_m16n8k16<T>(c[i][2 * n + 1], fa[i], fb[now][2], fb[now][3]);
      }
    }
  }
}

}  // namespace plait::cuda::mma
