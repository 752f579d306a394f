// Tiles of a 16-bit tensor from global to swizzled shared memory, zeros where the tensor ends.
// Called by the attention kernels of mma, sm90. Completion: cp_async_commit, cp_async_wait, then a barrier (all paths).
#pragma once

#include "cuda/common/rows.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/tile/swizzle.hpp"

namespace plait::cuda {

enum class LoadPath {
  kRows,    // 16-byte copies, one stride from row to row
  kGroups,  // 16-byte copies, rows in groups of `per` (interleaved pseudo-heads that do not lie back to back)
  kAny,     // any strides and alignment, element by element
};

inline constexpr int32_t kNoPeriod = INT32_MAX;

// How the rows of a head of q, k, v, out or dout lie: row r is at (r / per) * seq_stride + (r % per) * pseudo_stride.
// Made on the host and read from the kernel's parameters, where it costs no registers.
struct RowLayout {
  int64_t seq_stride, pseudo_stride, dim_stride;
  int32_t per;
  int32_t dim;  // columns that exist
  LoadPath path;
  // For 16-byte copies: rows that are a multiple of `period` (a power of two) apart are row_stride times that apart, so
  // a thread whose passes are never leaves its pseudo-head. kNoPeriod: there is no such period, or no such copies.
  int32_t period = kNoPeriod;
  int64_t row_stride = 0;
};

// `bytes`: of an element.
inline RowLayout row_layout(const AttentionProblem& p, const CanonicalTensor& t, int64_t dim, int64_t bytes = 2) {
  RowLayout layout{t.seq_stride,
                   t.pseudo_stride,
                   t.dim_stride,
                   static_cast<int32_t>(p.rows_per_position()),
                   static_cast<int32_t>(dim),
                   LoadPath::kAny};
  if (layout.per > 1 && t.seq_stride == layout.per * t.pseudo_stride) {
    layout.seq_stride = t.pseudo_stride;
    layout.per = 1;
  }
  const int64_t steps = t.batch_stride | t.head_stride | t.seq_stride | t.pseudo_stride | dim;
  const bool vectors = t.dim_stride == 1 && steps * bytes % 16 == 0 && reinterpret_cast<uintptr_t>(t.data) % 16 == 0;
  if (!vectors) return layout;
  layout.path = layout.per == 1 ? LoadPath::kRows : LoadPath::kGroups;
  if ((layout.per & (layout.per - 1)) == 0 && layout.seq_stride % layout.per == 0) {
    layout.period = layout.per;
    layout.row_stride = layout.seq_stride / layout.per;
  }
  return layout;
}

// Eight elements from column `column` on of the row at `from`, one by one, to 16 bytes of shared memory. Columns at or
// past layout.dim, and all of a row that is not `inside`, become zeros and are not read.
template <class T>
__device__ __forceinline__ void store_chunk(uint32_t to, const T* from, int column, const RowLayout& layout,
                                            bool inside) {
  const auto bits = [&](int c) -> uint32_t {
    return inside && c < layout.dim ? reinterpret_cast<const uint16_t&>(from[c * layout.dim_stride]) : 0;
  };
  uint32_t words[tile::kChunkElems / 2];
#pragma unroll
  for (int i = 0; i < tile::kChunkElems / 2; ++i) words[i] = bits(column + 2 * i) | bits(column + 2 * i + 1) << 16;
  ptx::store_shared_16(to, {words[0], words[1], words[2], words[3]});
}

// Copies by `kThreads` threads, all of which call load() with their number `thread`.
template <class T, int kRows, int kColumns, int kThreads>
struct TileLoader {
  // One pass: kWide neighbouring threads copy 16 bytes each of one row, at most 128 bytes. A thread's chunks of one row
  // have the same swizzle; with 64 threads or more the passes have it too, so that addresses differ by constants.
  static constexpr int kChunks = kColumns / tile::kChunkElems;
  static constexpr int kWide = kChunks % 8 == 0 ? 8 : 4;
  static constexpr int kGroups = kChunks / kWide;
  static constexpr int kRowsPerPass = kThreads / kWide;
  static constexpr int kPasses = kRows / kRowsPerPass;
  static_assert(kChunks % kWide == 0 && kRows % kRowsPerPass == 0 && kPasses > 0);

  // `base`: element 0 of row 0 of the head. Rows first_row .. first_row + kRows to the tile at shared-memory address
  // `target`. Rows at or past `rows` (counted from first_row, may be <= 0) and columns at or past layout.dim become
  // zeros and are not read. Rows count in 32 bits.
  static __device__ __forceinline__ void load(uint32_t target, const RowLayout& layout, const T* base,
                                              int64_t first_row, int rows, int thread) {
    if (steps_evenly(layout)) {
      load_rows(target, layout, own_chunk(layout, base, first_row, thread), rows, thread);
    } else {
      load_any(target, layout, base, first_row, rows, thread);
    }
  }

  // Whether every pass of a thread, and every tile, is a multiple of row_stride further: paths kRows and, with few
  // enough pseudo-heads, kGroups.
  static constexpr bool steps_evenly(const RowLayout& layout) { return layout.period <= kRowsPerPass; }

  // The same for such a layout in two parts, so that a loop over tiles keeps a pointer: where the thread starts in the
  // tile at first_row, and the copies.
  static __device__ __forceinline__ const T* own_chunk(const RowLayout& layout, const T* base, int64_t first_row,
                                                       int thread) {
    const int64_t row = first_row + thread / kWide;
    const T* from = base + row * layout.row_stride + thread % kWide * tile::kChunkElems;
    if (layout.period == 1) return from;
    return from + (static_cast<int>(row) & (layout.period - 1)) * (layout.pseudo_stride - layout.row_stride);
  }
  // Returns where the next tile's copies start.
  static __device__ __forceinline__ const T* load_rows(uint32_t target, const RowLayout& layout, const T* from,
                                                       int rows, int thread) {
    const int row = thread / kWide, chunk = thread % kWide;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int r = row + pass * kRowsPerPass;
      copy_row(address(target, r, chunk), from, chunk, layout.dim, r < rows);
      from += kRowsPerPass * layout.row_stride;
    }
    return from;
  }

  // One of the kCopies that load_rows() makes, for a tile without zeros. In order, since `from` moves along;
  // `chunk_at`: own_target().
  static constexpr int kCopies = kPasses * kGroups;
  static __device__ __forceinline__ uint32_t own_target(uint32_t target, int thread) {
    return address(target, thread / kWide, thread % kWide);
  }
  static __device__ __forceinline__ void copy_whole(uint32_t chunk_at, const RowLayout& layout, const T*& from,
                                                    int copy) {
    static_assert(kRowsPerPass % 8 == 0, "all passes have the same swizzle");
    const int pass = copy / kGroups, group = copy % kGroups;
    ptx::cp_async_16(chunk_at + (pass * kRowsPerPass * kColumns + group * kGroupElems) * sizeof(T),
                     from + group * kGroupElems, true);
    if (group == kGroups - 1) from += kRowsPerPass * layout.row_stride;
  }

  // The same for any layout.path.
  static __device__ void load_any(uint32_t target, const RowLayout& layout, const T* base, int64_t first_row, int rows,
                                  int thread) {
    const int row = thread / kWide, chunk = thread % kWide;
    const int first_position = static_cast<int>(first_row) / layout.per;
    const int first_pseudo = static_cast<int>(first_row) - first_position * layout.per;
#pragma unroll 1
    for (int pass = 0; pass < kPasses; ++pass) {
      const int r = row + pass * kRowsPerPass;
      const int step = (first_pseudo + r) / layout.per;
      const T* from = base + int64_t{first_position + step} * layout.seq_stride +
                      (first_pseudo + r - step * layout.per) * layout.pseudo_stride;
      if (layout.path != LoadPath::kAny) {
        copy_row(address(target, r, chunk), from + chunk * tile::kChunkElems, chunk, layout.dim, r < rows);
        continue;
      }
#pragma unroll 1
      for (int group = 0; group < kGroups; ++group) {
        const int column = group * kGroupElems + chunk * tile::kChunkElems;
        store_chunk(address(target, r, chunk) + group * kGroupElems * sizeof(T), from, column, layout, r < rows);
      }
    }
  }

 private:
  static constexpr int kGroupElems = kWide * tile::kChunkElems;

  static __device__ __forceinline__ uint32_t address(uint32_t target, int row, int chunk) {
    return target + tile::Swizzle<kColumns>::offset(row, chunk) * sizeof(T);
  }

  // This thread's chunks of one row.
  static __device__ __forceinline__ void copy_row(uint32_t to, const T* from, int chunk, int dim, bool inside) {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const int column = group * kGroupElems + chunk * tile::kChunkElems;
      ptx::cp_async_16(to + group * kGroupElems * sizeof(T), from + group * kGroupElems, inside && column < dim);
    }
  }
};

}  // namespace plait::cuda
