// Which keys of a row tile a work has: plain C++, for the host and the kernel's finder.
// Called by ranges.hpp, launch.cuh (range_params) and finder.cuh; tested on the host.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/problem.hpp"
#include "cuda/common/divisor.hpp"

namespace plait::cuda::sm90 {

// count 0: none; O and LSE are final. keys 0: a row tile's range r has tiles [r n / count, (r + 1) n / count) of the n
// tiles of keys that its rows see, so ranges follow masks, and lengths that only the device knows; else keys
// [r keys, (r + 1) keys) of the sequence.
struct KeyRanges {
  int count = 0, keys = 0;
};

// KeyRanges as the finder needs them. A work's number is its range's times `works`, plus its row tile's.
struct RangeParams {
  KeyRanges ranges;
  int group;                                       // heads that are rows of a tile; problem has as many rows more
  unsigned works;                                  // row tiles of all heads
  unsigned heads;                                  // of all sequences
  int64_t out_stride, lse_stride;                  // elements from one range's results to the next one's
  Divisor by_works, by_count, by_group, by_tiles;  // the last: row tiles of a head

  // Of a row of a head: where heads are rows, several share one.
  constexpr int position(int row) const { return static_cast<int>(by_group.divide(static_cast<unsigned>(row))); }

  // Leaves of `key_count` keys from `key_begin` on those of range `range`.
  constexpr void cut(int range, int tile_keys, int64_t& key_begin, int& key_count) const {
    const int begin = static_cast<int>(key_begin), end = begin + key_count;
    int from = range * ranges.keys, to = from + ranges.keys;
    if (ranges.keys == 0) {
      const auto part = static_cast<unsigned>(range);
      const unsigned tiles = static_cast<unsigned>(key_count + tile_keys - 1) / static_cast<unsigned>(tile_keys);
      from = begin + static_cast<int>(by_count.divide(tiles * part)) * tile_keys;
      to = begin + static_cast<int>(by_count.divide(tiles * (part + 1))) * tile_keys;
    }
    key_begin = std::max(begin, from);
    key_count = std::max(std::min(end, to) - std::max(begin, from), 0);
  }
};

// `works`: row tiles of all heads of `p`, at least one.
inline RangeParams range_params(const AttentionProblem& p, const KeyRanges& ranges, int group, int64_t works) {
  const int64_t heads = p.batch * p.heads_q, rows = heads * p.seqlen_q * p.rows_per_position();
  return {ranges,
          group,
          static_cast<unsigned>(works),
          static_cast<unsigned>(heads),
          rows * p.head_dim_v,
          rows,
          Divisor::of(works),
          Divisor::of(ranges.count),
          Divisor::of(group),
          Divisor::of(p.packed ? 1 : works / heads)};
}

}  // namespace plait::cuda::sm90
