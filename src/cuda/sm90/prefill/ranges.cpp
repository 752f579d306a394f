// Chooses ranges by a model of the kernel's time; see ranges.hpp.
#include "cuda/sm90/prefill/ranges.hpp"

#include <algorithm>
#include <cmath>

#include "core/mask.hpp"
#include "core/rounding.hpp"

namespace plait::cuda::sm90 {
namespace {

// By measurements on an H200, in clocks of a multiprocessor. A tile of keys takes the catalog's step_clocks; less by
// kShared where warpgroups have no rows, as far as they are missing. A launch, with the first keys from memory, and
// with a counter to clear; a row tile besides its tiles of keys; a merge: its launch, and bytes of partial results,
// written and read.
constexpr double kShared = 0.65;
constexpr double kStart = 10000, kCounterStart = 2200, kRowTile = 4400, kMergeStart = 4500, kMergeBytesPerClock = 10;
// Keys and values from memory: a multiprocessor's share with all at work, and what one block reads at most.
constexpr double kBytesPerClock = 18.5, kBlockBytesPerClock = 45;
// How much the shorter of products and reading adds.
constexpr double kBeside = 0.1;
constexpr int64_t kMostRanges = 256;
constexpr int64_t kMost = (int64_t{1} << 31) - 1;

// `group` heads as rows of a tile.
struct RowTiles {
  const catalog::Sm90PrefillTile& tile;
  int64_t of_head, count;  // row tiles
  int64_t most_tiles;      // tiles of keys that a row tile sees, and
  double mean_tiles;       // over the row tiles
  double step;             // clocks of a tile of keys

  RowTiles(const AttentionProblem& p, int64_t group) : tile(prefill_tile(p)) {
    constexpr int64_t kSamples = 64;
    const int64_t rows = p.seqlen_q * p.rows_per_position(), all = rows * group;
    const RowMask mask = RowMask::of(p, p.seqlen_q, p.seqlen_kv);
    of_head = ceil_div(all, tile.rows());
    count = p.batch * p.heads_q / group * of_head;
    const int64_t samples = std::min(of_head, kSamples);
    double sum = 0;
    most_tiles = 1;
    for (int64_t i = 0; i < samples; ++i) {
      const int64_t at = samples == 1 ? 0 : i * (of_head - 1) / (samples - 1), begin = at * tile.rows();
      const Interval seen = mask.rows(begin / group, (std::min(all, begin + tile.rows()) - 1) / group + 1);
      const int64_t tiles = ceil_div(seen.hi - seen.lo, tile.tile_keys);
      most_tiles = std::max(most_tiles, tiles), sum += static_cast<double>(tiles);
    }
    mean_tiles = sum / static_cast<double>(std::max<int64_t>(1, samples));
    const auto idle =
        static_cast<double>(tile.warpgroups - ceil_div(std::min<int64_t>(all, tile.rows()), tile.kWarpgroupRows));
    step = tile.step_clocks * (1 - kShared * idle / tile.warpgroups);
  }
};

// Without a merge, with each row tile's keys in `ranges` parts.
double clocks_of(const AttentionProblem& p, const DeviceInfo& device, const RowTiles& tiles, int64_t ranges) {
  const auto passes = static_cast<double>(p.joint_passes()),
             multiprocessors = static_cast<double>(device.multiprocessors);
  const auto part = [&](double keys) {
    return std::ceil(keys / static_cast<double>(ranges)) * passes * tiles.step + kRowTile;
  };
  const double works = static_cast<double>(tiles.count) * static_cast<double>(ranges);
  const double rounds = std::ceil(works / multiprocessors);
  const double products = std::max(part(static_cast<double>(tiles.most_tiles)), rounds * part(tiles.mean_tiles));
  // Each key head's keys once.
  const double keys = std::min(static_cast<double>(p.seqlen_kv * p.rows_per_position()),
                               static_cast<double>(tiles.most_tiles * tiles.tile.tile_keys));
  const double bytes = static_cast<double>(p.batch * p.heads_kv * (p.head_dim + p.head_dim_v) * 2) * keys * passes;
  const double rate = std::min(kBytesPerClock * multiprocessors, kBlockBytesPerClock * works);
  const double reading = bytes / rate, longer = std::max(products, reading), other = std::min(products, reading);
  return kStart + (counts_row_tiles(p) ? kCounterStart : 0) + longer + kBeside * other;
}

// The heads of a key head are rows of a tile where that saves tiles and each holds whole positions. Not with fixed
// ranges, whose results depend on nothing else: the copy engine may find some tensors' heads apart.
int group_of(const AttentionProblem& p) {
  if (p.heads_kv == 0 || p.mode != HeadMode::kPlain || p.split_size > 0) return 1;
  const catalog::Sm90PrefillTile& tile = prefill_tile(p);
  const int64_t group = p.heads_q / p.heads_kv, tile_rows = tile.rows();
  const bool saves = ceil_div(p.seqlen_q * group, tile_rows) < group * ceil_div(p.seqlen_q, tile_rows);
  return saves && tile.query_rows % group == 0 ? static_cast<int>(group) : 1;
}

// Keys of a range with a fixed split_size, in whole tokens.
int64_t fixed_keys(const AttentionProblem& p) {
  const int64_t per = p.rows_per_position(), keys = p.seqlen_kv * per;
  return std::min(p.split_size > keys ? keys : round_up(p.split_size, per), keys);
}

}  // namespace

RangeLayout::RangeLayout(const AttentionProblem& p, int64_t count) : group(group_of(p)) {
  const int64_t per = p.rows_per_position(), keys = p.seqlen_kv * per;
  rows = p.batch * p.heads_q * p.seqlen_q * per;
  if (rows > 0 && keys > 0 && p.split_size > 0) ranges.keys = static_cast<int>(std::min(fixed_keys(p), kMost));
  if (rows > kMost / count || keys > kMostNarrowRows) count = 0;
  ranges.count = static_cast<int>(count);
  counter_bytes = prefill_workspace_bytes(p);
  out_bytes = round_up(count * rows * p.head_dim_v * int64_t{sizeof(float)}, catalog::kWorkspaceAlignBytes);
  lse_bytes = round_up(count * rows * int64_t{sizeof(float)}, catalog::kWorkspaceAlignBytes);
}

RangeChoice::RangeChoice(const AttentionProblem& p, const DeviceInfo& device) {
  const int64_t keys = p.seqlen_kv * p.rows_per_position(), rows = p.batch * p.heads_q * p.seqlen_q;
  if (rows == 0 || keys == 0) return;
  const int group = group_of(p);
  const RowTiles tiles(p, group);
  whole_rows = clocks_of(p, device, group == 1 ? tiles : RowTiles(p, 1), 1);
  const auto multiprocessors = static_cast<double>(device.multiprocessors),
             row_tiles = static_cast<double>(tiles.count) / multiprocessors;
  const double merge =
      static_cast<double>(rows * p.rows_per_position() * p.head_dim_v) * 4 / multiprocessors / kMergeBytesPerClock;
  const auto clocks_with = [&](int64_t n) {
    return clocks_of(p, device, tiles, n) + kMergeStart + static_cast<double>(n) * merge;
  };
  if (p.split_size > 0) {
    count = ceil_div(keys, fixed_keys(p));
    clocks = clocks_with(count);
    return;
  }
  clocks = clocks_with(1);
  // No number of ranges does better than multiprocessors that work all the time.
  const double work = row_tiles * tiles.mean_tiles * static_cast<double>(p.joint_passes()) * tiles.step;
  const double start = kStart + kMergeStart + work, each = row_tiles * kRowTile + merge;
  for (int64_t n = 2; n <= std::min(tiles.most_tiles, kMostRanges); ++n) {
    if (start + static_cast<double>(n) * each >= clocks) break;
    if (const double with_n = clocks_with(n); with_n < clocks) clocks = with_n, count = n;
  }
}

}  // namespace plait::cuda::sm90
