// How a tensor map cuts the rows of a tensor into tiles that end at any row. Plain C++.
// Called by tensor_map.cu (extents and strides), prefill/layouts.hpp, the kernels (coordinates) and the tests.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>

#include "core/problem.hpp"
#include "cuda/common/divisor.hpp"
#include "cuda/tile/wgmma_tile.hpp"

namespace plait::cuda::sm90 {

inline constexpr int kMapRank = 5;

// Rows have two dimensions in the map, one inside a tile and one that says where it ends; what a tile lacks of its
// tile_rows lies ahead of the map, so that the copy engine fills it with zeros.
struct RowTileIndex {
  int tile_rows;
  int column_blocks;  // of tile::kBlockColumns; a copy wholly beside the tensor's columns may fault, so nobody makes
                      // one
  int per;            // virtual rows of a token, where tokens do not lie back to back (interleaved mode); else 1
  int batch_rows;     // rows (tokens) from one batch to the next; 0: batches are a dimension of the map
  Divisor by_per;

  struct Coordinates {
    int at[kMapRank];
  };
  // Of `rows` rows that end before row `end` of a head; multiples of `per` both. `pass`: the pseudo-head in joint mode.
  constexpr Coordinates coordinates(int column, int rows, int end, int head, int batch, int pass) const {
    const int missing = tile_rows - rows, from = batch * batch_rows;
    if (per == 1) return {{column, missing, batch_rows > 0 ? pass : batch + pass, head, end + from}};
    const auto divided = [this](int x) { return static_cast<int>(by_per.divide(static_cast<unsigned>(x))); };
    return {{column, 0, divided(missing), head, divided(end) + from}};
  }
};

// Elements; dimensions as in RowTileIndex::coordinates().
struct RowTileLayout {
  std::array<int64_t, kMapRank> extents;
  std::array<int64_t, kMapRank - 1> strides;  // of all dimensions but the first
  std::array<int, kMapRank> box;
  int64_t ahead;  // from the map's first element to the tensor's; nothing there is ever read
  RowTileIndex index;
};

// Of q, k or v with `rows` positions; nullopt: the copy engine cannot read it so. It wants unit strides and steps that
// are multiples of 16 bytes above zero. Three of the map's dimensions are for what is not columns or the rows of a
// tile, so with pseudo-heads batches have to be whole numbers of rows apart, and virtual rows of which a token's do
// not lie behind the last token's need whole tokens in a tile.
inline std::optional<RowTileLayout> row_tile_layout(const AttentionProblem& p, const CanonicalTensor& t, int64_t dim,
                                                    int64_t rows, int64_t heads, int64_t batch, int tile_rows) {
  constexpr int64_t kElementBytes = 2, kAlign = 16 / kElementBytes;
  constexpr int64_t kMostStep = (int64_t{1} << 40) / kElementBytes, kMostRows = int64_t{1} << 30;
  // Where there is one of them, its stride says nothing: any legal step will do.
  const auto step = [](int64_t count, int64_t stride) { return count > 1 ? stride : kAlign; };
  const int64_t per = p.rows_per_position(), passes = p.joint_passes();
  const bool together = per == 1 || rows == 1 || t.seq_stride == per * t.pseudo_stride;
  const int64_t count = together ? rows * per : rows;  // of what `end` counts
  const int64_t row_step = step(count, together && per > 1 ? t.pseudo_stride : t.seq_stride);
  const int64_t head_step = step(heads, t.head_stride), pseudo_step = step(p.pseudo_heads, t.pseudo_stride);
  const int64_t batch_step = step(batch, t.batch_stride);
  const auto maps = [](int64_t x) { return x > 0 && x < kMostStep && x % kAlign == 0; };
  if (t.data == nullptr || reinterpret_cast<uintptr_t>(t.data) % 16 != 0 || t.dim_stride != 1) return {};
  if (!maps(row_step) || !maps(head_step) || !maps(pseudo_step) || !maps(batch_step)) return {};
  batch = std::max(batch, int64_t{1});
  const bool folds = batch > 1 && (passes > 1 || !together);
  if (folds && batch_step % row_step != 0) return {};
  const int64_t batch_rows = folds ? batch_step / row_step : 0, all = (batch - 1) * batch_rows + count + 1;
  if (all > kMostRows || (!together && tile_rows % per != 0)) return {};
  const int inner = together ? 1 : static_cast<int>(per);
  const int column_blocks = static_cast<int>((dim + tile::kBlockColumns - 1) / tile::kBlockColumns);
  const RowTileIndex index{tile_rows, column_blocks, inner, static_cast<int>(batch_rows), Divisor::of(inner)};
  const int64_t tile = tile_rows / inner, ahead = tile * row_step;
  if (!together) {
    return RowTileLayout{{dim, per, tile, heads, all},
                         {pseudo_step, row_step, head_step, row_step},
                         {tile::kBlockColumns, inner, static_cast<int>(tile), 1, 1},
                         ahead,
                         index};
  }
  return RowTileLayout{{dim, tile, passes > 1 ? passes : batch, heads, all},
                       {row_step, passes > 1 ? pseudo_step : batch_step, head_step, row_step},
                       {tile::kBlockColumns, tile_rows, 1, 1, 1},
                       ahead,
                       index};
}

}  // namespace plait::cuda::sm90
