// In which order blocks take row tiles: long ones first, and so that they share keys in the L2 cache. Plain C++.
// Called by the launch functions of the prefill kernels and split_d, which choose it, and by schedule.cuh; tested on
// the host.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/problem.hpp"
#include "core/rounding.hpp"
#include "cuda/common/divisor.hpp"
#include "cuda/common/tiles_bound.hpp"

namespace plait::cuda {

// Units are (batch, key head) pairs, or the key heads of a packed problem; the units of a section run together, longest
// tiles first, so that their keys and values stay in the L2 cache. Packed: sequence after sequence.
struct PrefillOrder {
  int group;  // query heads of a key head
  int units_per_section, units_in_last;
  int tiles;  // dense: row tiles of a sequence; packed: tiles_bound()
  int last_section;
  int64_t cache_rows;  // of a dense KV cache; 0 without one
  Divisor by_section_blocks, by_section_heads, by_last_heads, by_group, by_heads_kv;

  // Of a unit's query head `head_in_group`, the tile-th row tile of a sequence, or, packed, of all.
  struct Place {
    unsigned section, unit;
    int head_in_group, tile;
  };
  constexpr Place place(unsigned block) const {
    const auto per_section = static_cast<unsigned>(units_per_section), heads = static_cast<unsigned>(group);
    const auto last = static_cast<unsigned>(last_section);
    const unsigned section = std::min(by_section_blocks.divide(block), last);  // that one may be longer
    const unsigned in_section = block - section * (per_section * heads * static_cast<unsigned>(tiles));
    const unsigned heads_at_once = (section == last ? static_cast<unsigned>(units_in_last) : per_section) * heads;
    const unsigned rank = (section == last ? by_last_heads : by_section_heads).divide(in_section);
    const unsigned rest = in_section - rank * heads_at_once, in_section_unit = by_group.divide(rest);
    return {section, section * per_section + in_section_unit, static_cast<int>(rest - in_section_unit * heads),
            tiles - 1 - static_cast<int>(rank)};
  }
};

// Keys and values that blocks running at the same time should share: half of an H200's or an A100's L2 cache.
inline constexpr int64_t kSectionBytes = int64_t{32} << 20;
// Blocks in a section that keep its end short: eight times the multiprocessors of a large GPU, since the longest causal
// tile takes twice the average.
inline constexpr int64_t kSectionBlocks = 1056;

// Keys and values of a unit.
inline int64_t unit_bytes(const AttentionProblem& p) {
  return p.seqlen_kv * (p.mode == HeadMode::kPlain ? 1 : p.pseudo_heads) * (p.head_dim + p.head_dim_v) * 2;
}

// Row tiles of a sequence, or, packed, of all.
inline int64_t order_tiles(const AttentionProblem& p, int64_t tile_rows) {
  return tiles_bound(p, tile_rows, false) / (p.packed ? 1 : p.batch);
}

// per_section units in each section but the last, of number last_section, which has the others.
inline PrefillOrder order_of_sections(const AttentionProblem& p, int64_t tile_rows, int64_t cache_rows,
                                      int64_t per_section, int64_t last_section) {
  const int64_t tiles = order_tiles(p, tile_rows), group = p.heads_q / p.heads_kv;
  const int64_t units = (p.packed ? 1 : p.batch) * p.heads_kv, in_last = units - last_section * per_section;
  return {static_cast<int>(group),
          static_cast<int>(per_section),
          static_cast<int>(in_last),
          static_cast<int>(tiles),
          static_cast<int>(last_section),
          cache_rows,
          Divisor::of(per_section * group * tiles),
          Divisor::of(per_section * group),
          Divisor::of(in_last * group),
          Divisor::of(group),
          Divisor::of(p.heads_kv)};
}

// section_bytes, section_blocks: at least one of them in a section. Where section_bytes is not 0, packed problems have
// one section, the only way measured there.
inline PrefillOrder prefill_order(const AttentionProblem& p, int64_t tile_rows, int64_t cache_rows = 0,
                                  int64_t section_bytes = kSectionBytes, int64_t section_blocks = kSectionBlocks) {
  const int64_t tiles = order_tiles(p, tile_rows);
  const int64_t units = (p.packed ? 1 : p.batch) * p.heads_kv, group = p.heads_q / p.heads_kv;
  // The host does not know the lengths of packed sequences, but their mean.
  const int64_t sequence_tiles = p.packed ? tiles / std::max(p.batch, int64_t{1}) : tiles;
  const int64_t wanted = p.packed && section_bytes > 0
                             ? std::max(int64_t{1}, units)
                             : std::max({int64_t{1}, section_bytes / std::max(unit_bytes(p), int64_t{1}),
                                         section_blocks / std::max(sequence_tiles * group, int64_t{1})});
  const int64_t sections = std::max(int64_t{1}, units / wanted);
  const int64_t per_section = std::max(int64_t{1}, ceil_div(units, sections));
  return order_of_sections(p, tile_rows, cache_rows, per_section, units == 0 ? 0 : (units - 1) / per_section);
}

}  // namespace plait::cuda
