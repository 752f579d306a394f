// Which rows, head and keys a block works on, in an order that starts long tiles first and shares keys in the L2 cache.
// Called by the prefill kernels of mma and sm90; the order is chosen by their launch functions.
#pragma once

#include "cuda/common/divisor.hpp"
#include "cuda/common/rows.cuh"

namespace plait::cuda::mma {

// Units are (batch, key head) pairs, or the key heads of a packed problem; the units of a section run together, longest
// tiles first, so that their keys and values stay in the L2 cache. Packed: sequence after sequence.
struct PrefillOrder {
  int group;  // query heads of a key head
  int units_per_section, units_in_last;
  int tiles;  // dense: row tiles of a sequence; packed: tiles_bound()
  int last_section;
  int64_t cache_rows;  // of a dense KV cache; 0 without one
  Divisor by_section_blocks, by_section_heads, by_last_heads, by_group, by_heads_kv;
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
  const int64_t per_section = std::max(int64_t{1}, (units + sections - 1) / sections);
  return order_of_sections(p, tile_rows, cache_rows, per_section, units == 0 ? 0 : (units - 1) / per_section);
}

// A row tile of one head. Kept in shared memory: only the key loop is short of registers.
struct PrefillWork {
  DeviceSequence sequence;
  int head, head_kv;
  int tile;                    // of the sequence's rows; < 0: nothing to do
  int key_count;               // keys that any row sees ...
  int64_t key_begin;           // ... from this one on
  int64_t k_offset, v_offset;  // elements: key 0 of the head's first pass
};

// Which sequence, heads and tile the block-th piece of work is; the keys are found later. Called by whole warps.
__device__ inline PrefillWork find_work(const AttentionProblem& p, const AttentionTensors& t, const PrefillOrder& order,
                                        unsigned block, int tile_rows) {
  const unsigned heads_kv = static_cast<unsigned>(p.heads_kv), per_section = order.units_per_section;
  const unsigned group = order.group, last_section = order.last_section;
  const unsigned section = min(order.by_section_blocks.divide(block), last_section);  // that one may be longer
  const unsigned in_section = block - section * (per_section * group * order.tiles);
  const bool last = section == last_section;
  const unsigned heads_at_once = (last ? order.units_in_last : per_section) * group;
  const unsigned rank = (last ? order.by_last_heads : order.by_section_heads).divide(in_section);
  const unsigned rest = in_section - rank * heads_at_once, in_group = order.by_group.divide(rest);
  const unsigned unit = section * per_section + in_group;
  PrefillWork work{};
  work.tile = order.tiles - 1 - static_cast<int>(rank);
  if (p.packed) {
    const TileOfSequence found = find_tile(p, t, work.tile, tile_rows, false);
    work.tile = found.sequence < 0 ? -1 : static_cast<int>(found.tile);
    if (found.sequence < 0) return work;
    work.sequence = device_sequence(p, t, found.sequence);
    work.head_kv = static_cast<int>(unit);
  } else {
    const unsigned batch = order.by_heads_kv.divide(unit);
    work.sequence = device_sequence(p, t, batch, order.cache_rows);
    work.head_kv = static_cast<int>(unit - batch * heads_kv);
  }
  work.head = work.head_kv * static_cast<int>(group) + static_cast<int>(rest - in_group * group);
  return work;
}

template <class Int>
__device__ inline void find_keys(PrefillWork& work, const BasicRowMask<Int>& mask, int64_t row_begin, int64_t row_end) {
  const Interval keys =
      work.sequence.tail ? Interval{} : mask.rows(static_cast<Int>(row_begin), static_cast<Int>(row_end));
  work.key_begin = keys.lo;
  work.key_count = static_cast<int>(keys.hi - keys.lo);
}

// [lo, hi) of a row relative to the block's first key; rows past the last one are like it, so that they mask nothing.
// Both limits never decrease from row to row.
template <class Int>
__device__ inline int2 row_bounds(const BasicRowMask<Int>& mask, const PrefillWork& work, int64_t row,
                                  int64_t row_end) {
  const Interval seen = mask.row(static_cast<Int>(row < row_end ? row : row_end - 1));
  const int lo = static_cast<int>(clamped(seen.lo - work.key_begin, 0, work.key_count));
  const int hi = static_cast<int>(clamped(seen.hi - work.key_begin, 0, work.key_count));
  return {lo, max(lo, hi)};
}

}  // namespace plait::cuda::mma
