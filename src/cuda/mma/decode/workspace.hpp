// How decode cuts a problem and what it keeps in its workspace: plain C++, no CUDA call.
// Called by the planner (plan.cpp) and by launch.cuh.
#pragma once

#include <algorithm>
#include <cstdint>

#include "catalog/catalog.hpp"
#include "catalog/mma_decode_tiles.hpp"
#include "core/mask.hpp"
#include "core/problem.hpp"
#include "cuda/mma/decode/clusters.hpp"
#include "plait/device.hpp"

namespace plait::cuda::mma {

// With so many blocks for a unit, leaving some blocks idle costs less than blocks with parts of two units.
inline constexpr int64_t kWholeShares = 8;
// Fewer steps of keys than this are not worth a block of their own.
inline constexpr int64_t kFewestSteps = 8;
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
  // Few alike units, on a GPU with clusters: each of a cluster's blocks finishes 2^slice_log2 vectors of its result.
  DecodeClusters clusters;
  int slice_log2 = 0;
  int64_t cluster_smem_bytes = 0;  // of a block of a cluster: its DecodeStorage, and what it is sent
  int64_t split_keys;              // keys of a split in fixed-split mode, else 0
  int64_t splits;                  // of a sequence, at most
  int64_t partials;                // places for a unit's partial result
  int64_t arrivals;                // counters
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
    if (all_units > 0) choose_clusters(p, device, resident);
    if (clusters.any()) {
      splits = int64_t{1} << clusters.unit_log2();
      workers = all_units * splits;
      partials = clusters.clusters_log2 > 0 ? all_units << clusters.clusters_log2 : 0;
      arrivals = clusters.clusters_log2 > 0 ? all_units << clusters.blocks_log2 : 0;
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
    // A cluster's partial result has all columns of the bucket, and reference and sum beside each kVector of them.
    const int64_t columns = clusters.any() ? bucket : p.head_dim_v, stats = clusters.any() ? bucket / kVector : 1;
    out_bytes = aligned(partials * tile_rows * columns * int64_t{sizeof(float)});
    stats_bytes = aligned(partials * tile_rows * stats * 2 * int64_t{sizeof(float)});
    arrivals_bytes = aligned(arrivals * static_cast<int64_t>(sizeof(int32_t)));
  }
  int64_t workspace_bytes() const { return out_bytes + stats_bytes + arrivals_bytes; }
  // Rows, keys and steps are counted in 32 bits; so are partial results.
  bool in_limits(const AttentionProblem& p) const {
    constexpr int64_t kMostRows = kMostNarrowRows, kMostSteps = (int64_t{1} << 31) - 1;
    const int64_t steps = split_keys > 0 ? splits : std::max<int64_t>(1, ceil_div(keys, tile.step_keys));
    return rows <= kMostRows && keys <= kMostRows && split_keys <= kMostRows && p.batch <= kMostRows &&
           p.batch * units <= kMostSteps / std::max<int64_t>(1, steps);
  }

 private:
  // Half of a cache is taken to be full.
  void choose_clusters(const AttentionProblem& p, const DeviceInfo& device, int64_t resident) {
    const bool alike = !p.cached || p.batch == 1;
    if (!catalog::kClusters || device.compute_capability != catalog::kHopper || !alike || split_keys > 0 ||
        row_tiles != 1 || choice.size != 0 || choice.gpu != 0) {
      return;
    }
    const int64_t all_units = p.batch * units;
    const double bytes = static_cast<double>(all_units) * static_cast<double>(keys * p.joint_passes()) *
                         static_cast<double>(p.head_dim + p.head_dim_v) * (p.cached ? 1.0 : 2.0);
    const ClusterWork work{all_units, tile_rows, bucket, bytes, p.page_size > 0 || bucket < 128, resident / all_units,
                           device};
    clusters = fastest_clusters(work);
    if (!clusters.any()) return;
    tile = catalog::cluster_tile(bucket, clusters.block);
    slice_log2 = work.slice_log2(clusters), cluster_smem_bytes = work.smem_bytes(clusters);
  }
};

}  // namespace plait::cuda::mma
