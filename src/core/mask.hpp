// Every mask of the library as one interval of keys per softmax row, and what that makes of a tile.
// Called by every backend but the reference, in CUDA kernels too (constexpr), and by flop_match.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/problem.hpp"

namespace plait {

struct Interval {
  int64_t lo = 0, hi = 0;  // keys [lo, hi)
  constexpr bool empty() const { return hi <= lo; }
  constexpr bool operator==(const Interval&) const = default;
};

enum class TileClass { kNone, kPartial, kFull };

// The mask of one sequence. Rows and keys are virtual rows in interleaved mode, positions otherwise. Int: what it
// counts in; 32 bits hold rows and keys up to kMostNarrowRows.
inline constexpr int64_t kMostNarrowRows = int64_t{1} << 28;

template <class Int>
class BasicRowMask {
 public:
  // rows, keys: of this sequence, already multiplied by P in interleaved mode.
  // token_group: P when the causal limit covers the row's whole token (PseudoMask::kToken), else 1.
  constexpr BasicRowMask(int64_t rows, int64_t keys, bool causal, int64_t left, int64_t right, int64_t token_group = 1)
      : keys_(static_cast<Int>(keys)),
        offset_(static_cast<Int>(keys - rows)),
        causal_(causal),
        left_(narrow(left)),
        right_(narrow(right)),
        group_(static_cast<Int>(token_group)) {}

  static constexpr BasicRowMask of(const AttentionProblem& problem, int64_t q_len, int64_t kv_len) {
    const int64_t per = problem.rows_per_position();
    const bool token = problem.mask == PseudoMask::kToken && problem.mode == HeadMode::kInterleaved;
    return {q_len * per, kv_len * per, problem.causal, problem.window_left, problem.window_right, token ? per : 1};
  }

  // Keys that row `row` sees.
  constexpr Interval row(Int row) const {
    const Int diagonal = row + offset_;
    Int lo = 0, hi = keys_;
    if (causal_) hi = std::min(hi, group_ == 1 ? diagonal + 1 : (floor_div(diagonal, group_) + 1) * group_);
    if (right_ >= 0) hi = std::min(hi, diagonal + right_ + 1);
    if (left_ >= 0) lo = std::max(lo, diagonal - left_);
    hi = std::max<Int>(hi, 0);
    lo = std::min(lo, keys_);
    return {lo, hi};
  }

  // Keys seen by at least one row of [row_begin, row_end): lo and hi never decrease from row to row.
  constexpr Interval rows(Int row_begin, Int row_end) const {
    if (row_end <= row_begin) return {};
    const Interval all{row(row_begin).lo, row(row_end - 1).hi};
    return all.empty() ? Interval{} : all;
  }

  // The tile rows [row_begin, row_end) x keys [key_begin, key_end): seen by no row, some, or all of it.
  constexpr TileClass classify(Int row_begin, Int row_end, Int key_begin, Int key_end) const {
    const Interval any = rows(row_begin, row_end);
    if (any.empty() || any.hi <= key_begin || any.lo >= key_end) return TileClass::kNone;
    const int64_t all_lo = row(row_end - 1).lo, all_hi = row(row_begin).hi;
    return all_lo <= key_begin && all_hi >= key_end ? TileClass::kFull : TileClass::kPartial;
  }

  constexpr Int row_count() const { return keys_ - offset_; }
  constexpr Int key_count() const { return keys_; }

 private:
  static constexpr Int floor_div(Int a, Int b) { return a >= 0 ? a / b : -((-a + b - 1) / b); }
  // No row is farther from a key than this, so a wider window is this one.
  static constexpr Int narrow(int64_t window) {
    constexpr int64_t kWidest = sizeof(Int) == 8 ? INT64_MAX : 4 * kMostNarrowRows - 2;
    return static_cast<Int>(std::min(window, kWidest));
  }

  Int keys_, offset_;
  bool causal_;
  Int left_, right_, group_;
};
using RowMask = BasicRowMask<int64_t>;
using NarrowRowMask = BasicRowMask<int32_t>;

// Key tiles that attention visits over all query tiles of one sequence (tile_m rows by tile_n keys).
int64_t visited_tiles(const RowMask& mask, int64_t tile_m, int64_t tile_n);

}  // namespace plait
