// In which order blocks take row tiles. Plain C++.
// Called by launch.cuh, which chooses it, and finder.cuh; tested on the host.
#pragma once

#include "cuda/common/prefill_order.hpp"
#include "cuda/sm90/prefill/tile.hpp"
#include "cuda/sm90/prefill/workspace.hpp"

namespace plait::cuda::sm90 {

struct RowTileOrder {
  PrefillOrder sections;
  bool turns;  // sections run from long to short and from short to long in turn; the last from long to short

  constexpr PrefillOrder::Place place(unsigned index) const {
    PrefillOrder::Place place = sections.place(index);
    const unsigned to_last = static_cast<unsigned>(sections.last_section) - place.section;
    if (turns && to_last % 2 != 0) place.tile = sections.tiles - 1 - place.tile;
    return place;
  }
};

// The number of a block's row tile in a round, where blocks take them in a fixed order. Every other round backwards:
// over two rounds all blocks get the same of a list that runs from long to short.
constexpr unsigned row_tile_of_round(unsigned round, unsigned block, unsigned blocks) {
  return round * blocks + (round % 2 == 0 ? block : blocks - 1 - block);
}

// Rounds of all blocks that a section has at least. Two, so that every block takes a long and a short row tile. Where
// blocks take row tiles as they come, two ahead, three even out, by the mean length.
inline constexpr int64_t kSectionRounds = 2, kPackedSectionRounds = 3;
// Keys and values of a section that stay in the L2 cache until its last round, beside what else is read and written.
inline constexpr int64_t kMostSectionBytes = int64_t{15} << 20;

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
  const PrefillOrder sections = prefill_order(p, tile_rows, cache_rows, 0, rounds * blocks);
  if (counts_row_tiles(p) || ranges) return {sections, !p.packed};
  const int64_t single = single_units(p, int64_t{sections.tiles} * sections.group, blocks);
  if (single <= 0 || sections.units_per_section * unit_bytes(p) <= kMostSectionBytes) return {sections, true};
  return {order_of_sections(p, tile_rows, cache_rows, 1, single), false};
}

}  // namespace plait::cuda::sm90
