// In which order blocks take row tiles.
// Called by launch.cuh.
#pragma once

#include "cuda/mma/prefill/schedule.cuh"
#include "cuda/sm90/prefill/tile.hpp"
#include "cuda/sm90/prefill/workspace.hpp"

namespace plait::cuda::sm90 {

struct RowTileOrder {
  mma::PrefillOrder sections;
  bool turns;  // see PrefillParams
};

// Rounds of all blocks that a section has at least. Two, so that every block takes a long and a short row tile. Where
// blocks take row tiles as they come, two ahead, three even out, by the mean length.
inline constexpr int64_t kSectionRounds = 2, kPackedSectionRounds = 3;
// Keys and values of a section that stay in the L2 cache until its last round, beside what else is read and written.
inline constexpr int64_t kSectionBytes = int64_t{15} << 20;

// How many units ahead of the last section may come one by one. Row tiles that are all alike: all of them. From long to
// short, a unit after the other: over `rounds` rounds, every other one backwards, all blocks get the same if the units
// fill these, or two of them, exactly. The last section, of 0.75 to 1.75 times as many, ends with short ones.
inline int64_t single_units(const AttentionProblem& p, int64_t unit_tiles, int64_t blocks) {
  const int64_t units = p.batch * p.heads_kv;
  if (windowed(p)) return 0;
  if (!p.causal) return units - 1;
  for (const int64_t rounds : {kSectionRounds, 2 * kSectionRounds}) {
    if (rounds * blocks % unit_tiles != 0) continue;
    const int64_t filling = rounds * blocks / unit_tiles;
    return std::max(int64_t{0}, 4 * units - 3 * filling) / (4 * filling) * filling;
  }
  return 0;
}

// Sections of two rounds, or where their keys and values are too many for the L2 cache, of one unit: then fewer units
// run at once, and are read once. `ranges`: row tiles are few, and go to several blocks each.
inline RowTileOrder row_tile_order(const AttentionProblem& p, int64_t tile_rows, int64_t cache_rows, int64_t blocks,
                                   bool ranges) {
  const int64_t rounds = p.packed ? kPackedSectionRounds : kSectionRounds;
  const mma::PrefillOrder sections = mma::prefill_order(p, tile_rows, cache_rows, 0, rounds * blocks);
  if (counts_row_tiles(p) || ranges) return {sections, !p.packed};
  const int64_t single = single_units(p, int64_t{sections.tiles} * sections.group, blocks);
  if (single <= 0 || sections.units_per_section * mma::unit_bytes(p) <= kSectionBytes) return {sections, true};
  return {mma::order_of_sections(p, tile_rows, cache_rows, 1, single), false};
}

}  // namespace plait::cuda::sm90
