// How premix and collapse are cut into tiles, shared memory, blocks and workspace: plain C++, no CUDA call.
// Called by iha.cu and by the planner (plan.cpp).
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "core/problem.hpp"
#include "core/rounding.hpp"
#include "plait/device.hpp"

namespace plait::cuda::iha {

inline constexpr int kMaxJobs = 3;          // Q, K and V
inline constexpr int kMaxHeads = 64;        // four k16 steps of mma
inline constexpr int kTileElems = 8;        // columns of an mma tile: 16 bytes
inline constexpr int kFragmentBytes = 512;  // one m16 k16 operand: 16 bytes per lane
inline constexpr int kMaxWarps = 8;

struct Limits {
  int compute_capability, multiprocessors;
  int64_t shared_bytes;  // per block
  static Limits of(const DeviceInfo& device) {
    return {device.compute_capability, device.multiprocessors, device.smem_per_block_bytes};
  }
};

// The order in which columns become mma tiles. Style half puts the two ends of every rotated pair at the same place of
// neighbouring tiles 2j and 2j + 1, where one thread holds both; the columns that do not turn follow.
struct ColumnMap {
  int dim = 0;
  int half = 0;  // D_rot / 2 of style half, else 0

  constexpr int turned_tiles() const { return 2 * ((half + kTileElems - 1) / kTileElems); }
  constexpr int tiles() const { return turned_tiles() + (dim - 2 * half + kTileElems - 1) / kTileElems; }
  // Columns [first, first + count) of a tile; the others are zeros.
  constexpr int first(int tile) const {
    if (tile >= turned_tiles()) return 2 * half + kTileElems * (tile - turned_tiles());
    return kTileElems * (tile / 2) + tile % 2 * half;
  }
  constexpr int count(int tile) const {
    const int left = tile >= turned_tiles() ? dim - first(tile) : half - kTileElems * (tile / 2);
    return left < 0 ? 0 : left > kTileElems ? kTileElems : left;
  }
  constexpr bool whole() const { return dim % kTileElems == 0 && half % kTileElems == 0; }
};

// The numbers of a premix or collapse that decide its layout.
struct MixShape {
  int heads = 0, pseudo = 0;
  int wide = 0;  // rows: heads * pseudo, or a run of them
  int64_t tokens = 0;
  ColumnMap columns;
  bool float_weights = false;
  int table_rows = 0;  // rows of the rotary tables per token: 0, 1 (token index) or P (row index)

  static MixShape of(const PremixProblem& p) {
    const int heads = static_cast<int>(p.heads), pseudo = static_cast<int>(p.pseudo_heads);
    const bool turns = p.has_rope && p.rope_dim > 0, half = turns && p.rope_style == RopeStyle::kHalf;
    return {heads,
            pseudo,
            heads * pseudo,
            p.packed ? p.seqlen : p.batch * p.seqlen,
            {static_cast<int>(p.head_dim), half ? static_cast<int>(p.rope_dim / 2) : 0},
            p.weight_dtype == DType::kFloat32,
            turns ? (p.rope_index == RopeIndex::kRow ? pseudo : 1) : 0};
  }
  static MixShape of(const CollapseProblem& p) {
    const int heads = static_cast<int>(p.heads), pseudo = static_cast<int>(p.pseudo_heads);
    return {heads,
            pseudo,
            heads * pseudo,
            p.batch * p.seqlen,
            {static_cast<int>(p.head_dim), 0},
            p.weight_dtype == DType::kFloat32,
            0};
  }
  // A shape that needs at least as much as either: one layout serves all jobs of a launch.
  static MixShape widest(const MixShape& a, const MixShape& b) {
    return {std::max(a.heads, b.heads),
            std::max(a.pseudo, b.pseudo),
            std::max(a.wide, b.wide),
            std::max(a.tokens, b.tokens),
            a.columns.tiles() >= b.columns.tiles() ? a.columns : b.columns,
            a.float_weights || b.float_weights,
            std::max(a.table_rows, b.table_rows)};
  }
  // What a job's share of the blocks goes by: elements read and written, and a quarter more where rows turn.
  int64_t work() const { return tokens * (wide + heads) * (table_rows == 0 ? 4 : 5); }
};

// expand: wide rows from narrow ones. A warp owns items of one token and 64 columns: a stage holds the narrow rows and
// then the angles [table_rows][cos, sin][32 pairs] fp32.
struct ExpandLayout {
  static constexpr int kTiles = 8, kStages = 2;
  static constexpr int kPitch = kTiles * 16 + 16;  // bytes per row: an odd number of 16-byte units, no bank conflicts
  static constexpr int kTablePitch = kTiles * kTileElems * 4, kWalkBytes = 64;
  static constexpr int kHeaderBytes = 528;  // 16 zero bytes and the job
  int warps, blocks_per_multiprocessor, steps;
  int wide_step;  // wide rows whose weights a block holds
  int low_offset, offsets_offset, warp_offset, warp_bytes, stage_bytes, shared_bytes;
};

inline ExpandLayout expand_layout(const MixShape& s, int per, int warps, int wide_step) {
  ExpandLayout l{};
  l.warps = warps, l.blocks_per_multiprocessor = per, l.wide_step = wide_step;
  l.steps = static_cast<int>(ceil_div(s.heads, 16));
  const int fragments = wide_step / 16 * l.steps * kFragmentBytes;
  l.low_offset = ExpandLayout::kHeaderBytes + fragments;  // after the high halves
  l.offsets_offset = l.low_offset + (s.float_weights ? fragments : 0);
  l.warp_offset = l.offsets_offset + static_cast<int>(round_up((wide_step + s.heads) * 8, 16));
  l.stage_bytes = s.heads * ExpandLayout::kPitch + s.table_rows * ExpandLayout::kTablePitch;
  l.warp_bytes = ExpandLayout::kStages * l.stage_bytes + 16 * ExpandLayout::kPitch + ExpandLayout::kWalkBytes;
  l.shared_bytes = l.warp_offset + warps * l.warp_bytes;
  return l;
}

// The first of these that fits: two blocks per multiprocessor, many warps, all weights in one block.
inline std::optional<ExpandLayout> find_expand_layout(const MixShape& s, int64_t shared_bytes) {
  constexpr int kReserved = 1024;  // shared memory that every resident block costs on top
  const int wide = static_cast<int>(round_up(s.wide, 16));
  for (const int per : {2, 1}) {
    if (per == 2 && s.heads > 32) continue;  // needs more than 128 registers
    const int64_t limit = per == 2 ? (shared_bytes + kReserved) / 2 - kReserved : shared_bytes;
    for (int warps = kMaxWarps; warps >= (per == 2 ? kMaxWarps : 1); warps /= 2) {
      for (int step = wide; step >= std::min(wide, 128); step = static_cast<int>(round_up(step / 2, 16))) {
        const ExpandLayout l = expand_layout(s, per, warps, step);
        if (l.shared_bytes <= limit) return l;
        if (step == 16) break;
      }
    }
  }
  return std::nullopt;
}

// contract: narrow rows and the weight gradient from one read of the wide rows. A block owns `columns` columns of
// stages of `tokens` tokens. Eight of its warps make narrow rows, in units of 32 columns of one token, four sum the
// gradient, and four move rows in and out.
struct ContractLayout {
  static constexpr int kUnit = 32, kRowsWarps = 8, kGradientWarps = 4, kMoverWarps = 4;
  static constexpr int kThreads = 32 * (kRowsWarps + kGradientWarps + kMoverWarps);
  static constexpr int kHeaderBytes = 640;  // 16 zero bytes, what a block works with, its job
  static constexpr int pitch(int columns) { return columns * 2 + 16; }
  int columns, tokens, stages, narrow_tiles;
  int stage_bytes, staging_bytes;
  int offsets_offset, sums_offset, stage_offset, staging_offset, shared_bytes;
};

// What a block knows of one token: addresses of its rows, and its position in the rotary tables.
struct TokenEntry {
  uint64_t wide, narrow, out;  // 0: rows that read as zeros, or are not written
  int64_t position;            // -1: does not turn
};

// n8 tiles of narrow heads that kernels exist for.
constexpr int contract_narrow_tiles(int heads) {
  return heads <= 8 ? 1 : heads <= 16 ? 2 : heads <= 24 ? 3 : heads <= 32 ? 4 : 8;
}
// m16 tiles of wide rows whose gradient one warp accumulates: as many as its registers hold.
constexpr int contract_wide_tiles(int narrow_tiles) {
  return narrow_tiles == 1 ? 8 : narrow_tiles == 2 ? 6 : 16 / narrow_tiles;
}
// Wide rows of a job with a weight gradient.
constexpr int contract_max_wide(int heads) {
  return ContractLayout::kGradientWarps * 16 * contract_wide_tiles(contract_narrow_tiles(heads));
}

// What a launch makes of the rows it reads.
struct Products {
  bool rows, gradient;
};

inline ContractLayout contract_layout(const MixShape& s, Products makes, int columns, int tokens, int stages) {
  ContractLayout l{};
  const int pitch = ContractLayout::pitch(columns);
  l.columns = columns, l.tokens = tokens, l.stages = stages;
  l.narrow_tiles = contract_narrow_tiles(s.heads);
  l.stage_bytes = tokens * ((s.wide + s.heads) * pitch + s.table_rows * columns * 4);
  l.staging_bytes = makes.rows ? tokens * s.heads * pitch : 0;
  const int fragments = makes.rows ? static_cast<int>(ceil_div(s.wide, 16)) * l.narrow_tiles * kFragmentBytes : 0;
  const int entries = (stages + 2) * tokens * static_cast<int>(sizeof(TokenEntry));
  l.offsets_offset = ContractLayout::kHeaderBytes + fragments + entries;
  l.sums_offset = l.offsets_offset + static_cast<int>(round_up((s.wide + 2 * s.heads) * 8, 16));
  l.stage_offset = l.sums_offset + (makes.gradient ? s.wide * l.narrow_tiles * kTileElems * 4 : 0);
  l.staging_offset = l.stage_offset + stages * l.stage_bytes;
  // The last m16 tile of wide rows is read whole.
  l.shared_bytes = l.staging_offset + std::max(2 * l.staging_bytes, 16 * pitch);
  return l;
}

// Eight units keep all warps busy; then as many stages as fit.
inline std::optional<ContractLayout> find_contract_layout(const MixShape& s, Products makes, int64_t shared_bytes) {
  constexpr int kTries[][2] = {{8, 4}, {8, 3}, {4, 4}, {4, 3}, {8, 2}, {4, 2}, {2, 2}};
  const int width = static_cast<int>(round_up(s.columns.tiles() * kTileElems, ContractLayout::kUnit));
  for (const auto& [units, stages] : kTries) {
    for (const int columns : {128, 64}) {
      const int tokens = units * ContractLayout::kUnit / columns;
      if (tokens == 0 || columns / 2 >= std::max(width, 64)) continue;
      const ContractLayout l = contract_layout(s, makes, columns, tokens, stages);
      if (l.shared_bytes <= shared_bytes) return l;
    }
  }
  return std::nullopt;
}

}  // namespace plait::cuda::iha
