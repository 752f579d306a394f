// split_kv for head dims above 256: the split_d kernel over ranges of keys, whose results are merged. How a problem is
// cut and what lies where in the workspace: plain C++, no CUDA call.
// Called by the planner (cuda/plan.cpp) and by the launch functions.
#pragma once

#include <algorithm>
#include <cstdint>

#include "catalog/catalog.hpp"
#include "catalog/mma_split_d_tiles.hpp"
#include "core/problem.hpp"
#include "cuda/mma/decode/workspace.hpp"
#include "plait/device.hpp"

namespace plait::cuda::mma {

constexpr int64_t larger_head_dim(const AttentionProblem& p) { return std::max(p.head_dim, p.head_dim_v); }
constexpr bool is_split_d(const AttentionProblem& p) { return larger_head_dim(p) >= catalog::kMmaSplitDMinHeadDim; }

// A range has at least so many tiles of keys: fewer are not worth a block of their own.
inline constexpr int64_t kFewestRangeTiles = 4;

// count 1, keys 0: one range, all keys.
struct KeyRanges {
  int count = 1, keys = 0;
};

// The problem that the kernel runs: fp32 results of each range, without sinks. One query per sequence that sees all
// keys is a row tile of the query heads that share a key head.
struct KeyRangeLayout {
  AttentionProblem problem;
  bool heads_are_rows;
  KeyRanges ranges;
  int64_t rows;  // of all sequences and heads: of a range's result
  int64_t out_bytes, lse_bytes;

  KeyRangeLayout(const AttentionProblem& p, const DeviceInfo& device) : problem(p) {
    heads_are_rows = p.seqlen_q == 1 && p.rows_per_position() == 1 && p.window_left < 0 && p.heads_kv > 0;
    problem.has_sinks = false, problem.out_dtype = DType::kFloat32;
    if (heads_are_rows) {
      problem.seqlen_q = p.heads_q / p.heads_kv, problem.heads_q = p.heads_kv;
      problem.causal = false, problem.window_right = -1;
    }
    rows = p.batch * p.heads_q * p.seqlen_q * p.rows_per_position();
    const catalog::SplitDTile* tile = catalog::split_d_tile(p.head_dim, p.head_dim_v, device.smem_per_block_bytes);
    const int64_t keys = p.seqlen_kv * p.rows_per_position();
    if (tile != nullptr && p.split_size > 0) {
      ranges = ranges_of(keys, std::min(p.split_size, std::max<int64_t>(1, keys)));
    } else if (tile != nullptr) {
      const int64_t tile_rows = tile->rows, head_rows = problem.seqlen_q * p.rows_per_position();
      const int64_t blocks = p.batch * problem.heads_q * ceil_div(head_rows, tile_rows);
      const int64_t wanted = std::max<int64_t>(1, device.multiprocessors / std::max<int64_t>(1, blocks));
      const int64_t tiles = std::max(kFewestRangeTiles, ceil_div(ceil_div(keys, wanted), tile->keys));
      ranges = ranges_of(keys, tiles * tile->keys);
    }
    out_bytes = aligned(ranges.count * rows * p.head_dim_v * static_cast<int64_t>(sizeof(float)));
    lse_bytes = aligned(ranges.count * rows * static_cast<int64_t>(sizeof(float)));
  }
  int64_t workspace_bytes() const { return out_bytes + lse_bytes; }
  // Ranges, keys and the blocks of a launch are counted in 32 bits.
  bool in_limits() const { return ranges.count > 0 && rows < kMost / ranges.count; }

 private:
  static constexpr int64_t kMost = int64_t{1} << 31;
  static KeyRanges ranges_of(int64_t keys, int64_t of_range) {
    const int64_t count = std::max<int64_t>(1, ceil_div(keys, of_range));
    if (count >= kMost || of_range >= kMost) return {0, 0};
    return {static_cast<int>(count), static_cast<int>(of_range)};
  }
};

}  // namespace plait::cuda::mma
