// How decode cuts a problem and what it keeps in its workspace: plain C++, no CUDA call.
// Called by the planner (plan.cpp) and by launch.cuh.
#pragma once

#include <algorithm>
#include <cstdint>

#include "catalog/catalog.hpp"
#include "catalog/mma_decode_tiles.hpp"
#include "core/mask.hpp"
#include "core/problem.hpp"
#include "plait/device.hpp"

namespace plait::cuda::mma {

inline constexpr int kVector = 4;  // columns that a thread merges at a time

// With so many blocks for a unit, leaving some blocks idle costs less than blocks with parts of two units.
inline constexpr int64_t kWholeShares = 8;
// Fewer steps of keys than this are not worth a block of their own.
inline constexpr int64_t kFewestSteps = 8;
// Blocks of a cluster at most; more than kPortableCluster a kernel has to ask for.
inline constexpr int kMostClusterLog2 = 4, kPortableCluster = 8;

// A model of a call, in clocks, by measurements on an H200: bytes per clock of a multiprocessor with all at work; of a
// block of a cluster at most (light: over pages, or of narrow heads); the share of the bandwidth that clusters of 2, 4,
// 8 and 16 blocks reach together; what merging through the workspace takes longer, and for each row of a part of 128
// columns.
inline constexpr double kBytesPerClock = 20, kBlockBytesPerClock = 38, kLightBlockBytesPerClock = 22;
inline constexpr double kClusterShares[kMostClusterLog2] = {1.0, 0.93, 0.96, 0.9};
inline constexpr double kArrivalClocks = 4500, kPartRowClocks = 60;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t aligned(int64_t bytes) {
  return ceil_div(bytes, catalog::kWorkspaceAlignBytes) * catalog::kWorkspaceAlignBytes;
}

// A unit is a tile of the rows that share a key head's keys: position-major, the heads of the group within a position.
struct DecodeLayout {
  catalog::DecodeTile tile;
  catalog::DecodeChoice choice;
  int bucket;
  int64_t group, rows, row_tiles;  // rows: of a key head in one sequence
  int64_t tile_rows;               // of a unit, at most
  int64_t units;                   // of a sequence
  int64_t keys;                    // of a sequence, at most
  int64_t workers;                 // blocks of the launch
  // Few alike units, on a GPU with clusters: each unit has 2^cluster_log2 blocks, and each finishes 2^slice_log2
  // vectors of its result (cluster.cuh). 0: the blocks merge through the workspace.
  int cluster_log2 = 0, slice_log2 = 0;
  bool deep = false;   // blocks of a cluster have a multiprocessor each (catalog::cluster_tile)
  int64_t split_keys;  // keys of a split in fixed-split mode, else 0
  int64_t splits;      // of a sequence, at most
  int64_t partials;    // places for a unit's partial result
  int64_t arrivals;    // counters
  int64_t out_bytes, stats_bytes, arrivals_bytes;

  DecodeLayout(const AttentionProblem& p, const DeviceInfo& device)
      : bucket(catalog::head_dim_bucket(std::max(p.head_dim, p.head_dim_v))),
        group(p.heads_kv > 0 ? p.heads_q / p.heads_kv : 0),
        rows(p.seqlen_q * p.rows_per_position() * group),
        keys(p.seqlen_kv * p.rows_per_position()),
        split_keys(std::min(p.split_size, std::max<int64_t>(1, keys))) {
    choice = catalog::decode_choice(bucket, rows, device.smem_per_block_bytes);
    tile = catalog::decode_tiles(bucket)[choice.size][choice.gpu];
    row_tiles = ceil_div(rows, tile.rows());
    tile_rows = std::min<int64_t>(rows, tile.rows());
    units = p.heads_kv * row_tiles;
    const int64_t all_units = p.batch * units;
    const int64_t resident =
        device.multiprocessors * std::max(1, tile.blocks_per_multiprocessor(device.smem_per_block_bytes));
    if (all_units > 0) choose_cluster(p, device, resident);
    if (cluster_log2 > 0) {
      splits = int64_t{1} << cluster_log2;
      workers = all_units << cluster_log2;
      partials = arrivals = 0;
    } else if (split_keys > 0) {
      splits = std::max<int64_t>(1, ceil_div(keys, split_keys));
      workers = std::min(resident, all_units * splits);
      partials = splits > 1 ? all_units * splits : 0;
      arrivals = splits > 1 ? all_units : 0;
    } else {
      const int64_t steps = all_units * std::max<int64_t>(1, ceil_div(keys, tile.step_keys));
      workers = std::min(resident, ceil_div(steps, kFewestSteps));
      // A multiple of the units, so that no block has parts of two.
      if (all_units > 0 && workers >= kWholeShares * all_units) workers -= workers % all_units;
      splits = all_units > 0 ? std::max<int64_t>(1, ceil_div(workers, all_units)) : 1;
      partials = 2 * workers;
      arrivals = workers;
    }
    out_bytes = aligned(partials * tile_rows * p.head_dim_v * static_cast<int64_t>(sizeof(float)));
    stats_bytes = aligned(partials * tile_rows * 2 * static_cast<int64_t>(sizeof(float)));
    arrivals_bytes = aligned(arrivals * static_cast<int64_t>(sizeof(int32_t)));
  }
  int64_t workspace_bytes() const { return out_bytes + stats_bytes + arrivals_bytes; }
  // Of a block of a cluster: its DecodeStorage, and what it is sent.
  int64_t cluster_smem_bytes() const {
    const int64_t items = int64_t{1} << (cluster_log2 + slice_log2), stats = tile_rows << cluster_log2;
    return tile.smem_bytes() + 4 * int64_t{sizeof(float)} * items + 2 * int64_t{sizeof(float)} * stats;
  }
  // Rows, keys and steps are counted in 32 bits; so are partial results.
  bool in_limits(const AttentionProblem& p) const {
    constexpr int64_t kMostRows = kMostNarrowRows, kMostSteps = (int64_t{1} << 31) - 1;
    const int64_t steps = split_keys > 0 ? splits : std::max<int64_t>(1, ceil_div(keys, tile.step_keys));
    return rows <= kMostRows && keys <= kMostRows && split_keys <= kMostRows && p.batch <= kMostRows &&
           p.batch * units <= kMostSteps / std::max<int64_t>(1, steps);
  }

 private:
  // Clusters of 2^log2 blocks, if their shared memory fits.
  void set_cluster(int log2, bool deep_blocks, int64_t smem_per_block_bytes) {
    const catalog::DecodeTile before = tile;
    tile = catalog::cluster_tile(bucket, deep_blocks);
    deep = deep_blocks, cluster_log2 = log2, slice_log2 = 0;
    while (tile_rows * bucket / kVector > int64_t{1} << (cluster_log2 + slice_log2)) ++slice_log2;
    const int64_t blocks =
        (smem_per_block_bytes + tile.kBlockReservedBytes) / (cluster_smem_bytes() + tile.kBlockReservedBytes);
    if (blocks < tile.most_blocks_per_multiprocessor) tile = before, cluster_log2 = 0;
  }

  // A block for each multiprocessor at most, though there is room for two: clusters lie within groups of
  // multiprocessors whose sizes differ, so clusters of 16 are fewer still, lest two share a group's bandwidth. Blocks
  // of 8 on half of the multiprocessors are deep. Light blocks have to be many.
  void choose_cluster(const AttentionProblem& p, const DeviceInfo& device, int64_t resident) {
    const int64_t all_units = p.batch * units, most = device.multiprocessors;
    const bool alike = !p.cached || p.batch == 1, light = p.page_size > 0 || bucket < 128;
    if (!catalog::kClusters || device.compute_capability != catalog::kHopper || !alike || split_keys > 0 ||
        row_tiles != 1 || choice.size != 0 || choice.gpu != 0) {
      return;
    }
    int log2 = 16 * all_units <= (light ? most : most - most / 8) ? kMostClusterLog2 : kMostClusterLog2 - 1;
    while (log2 > 0 && all_units << log2 > most) --log2;
    if (log2 == 0) return;
    // Half of a cache is taken to be full.
    const double bytes = static_cast<double>(all_units) * static_cast<double>(keys * p.joint_passes()) *
                         static_cast<double>(p.head_dim + p.head_dim_v) * (p.cached ? 1.0 : 2.0);
    const double all = kBytesPerClock * static_cast<double>(most);
    const double own =
        (light ? kLightBlockBytesPerClock : kBlockBytesPerClock) * static_cast<double>(all_units << log2);
    const double parts = static_cast<double>(resident) / static_cast<double>(all_units);
    const double gain = kArrivalClocks + kPartRowClocks * parts * static_cast<double>(tile_rows * p.head_dim_v) / 128;
    if (bytes / std::min(own, all * kClusterShares[log2 - 1]) > bytes / all + gain) return;
    set_cluster(log2, !light && log2 == 3 && 2 * (all_units << log2) <= most, device.smem_per_block_bytes);
  }
};

}  // namespace plait::cuda::mma
