// Whether and how few alike units run in clusters of thread blocks (cluster.cuh), by a model of a call's time: plain
// C++, no CUDA call.
// Called by workspace.hpp.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "catalog/mma_decode_tiles.hpp"
#include "plait/device.hpp"

namespace plait::cuda::mma {

inline constexpr int kVector = 4;  // columns that a thread merges at a time
// Blocks of a cluster: at most; those of more than the portable number a kernel has to ask for. Clusters of a unit.
inline constexpr int kMostClusterLog2 = 4, kPortableClusterLog2 = 3, kMostClustersLog2 = 3;

inline constexpr int kLargeClusterMultiprocessors = 132;  // of a GPU that holds clusters of 16

// Bytes per clock: of a multiprocessor with all at work; of all in clusters of 2, 4, 8 and 16 blocks, as a share of
// that; of a block of each kind (light: over pages, or of narrow heads); of a cluster of 16, which lies in one group of
// multiprocessors.
inline constexpr double kBytesPerClock = 20, kClusterShares[kMostClusterLog2] = {1.0, 0.93, 0.98, 0.95};
inline constexpr std::array kBlockBytesPerClock{36.0, 38.7, 58.0}, kLightBlockBytesPerClock{23.0, 23.0, 37.0};
inline constexpr double kGroupBytesPerClock = 725;
// Clocks: for each round of vectors that the threads of a block merge; of wide blocks and of clusters of 16 more than
// of others; of merging through the workspace, and there for each row of 128 columns of a part that one block reads.
inline constexpr double kRoundClocks = 1000, kWideClocks = 900, kLargeClusterClocks = 500;
inline constexpr double kArrivalClocks = 4500, kPartRowClocks = 60;

// A unit has 2^clusters_log2 clusters of 2^blocks_log2 blocks. No blocks: even shares, merged through the workspace.
struct DecodeClusters {
  int blocks_log2 = 0, clusters_log2 = 0;
  catalog::ClusterBlock block = catalog::ClusterBlock::kShared;
  bool spread = false;  // every second cluster of the launch is of no unit and ends at once
  constexpr bool any() const { return blocks_log2 > 0; }
  constexpr int unit_log2() const { return blocks_log2 + clusters_log2; }
  bool operator==(const DecodeClusters&) const = default;
};

// What is to be done, as the model sees it.
struct ClusterWork {
  int64_t units, rows, bucket;  // rows of a unit
  double bytes;                 // of all keys and values
  bool light;
  int64_t blocks_without;  // even shares: blocks of a unit
  DeviceInfo device;

  double vectors() const { return static_cast<double>(rows * bucket) / kVector; }
  double all_bytes_per_clock() const { return kBytesPerClock * device.multiprocessors; }
  // A vector of each block for each item of a slice, of which there is a power of two (cluster.cuh), and statistics.
  int slice_log2(const DecodeClusters& c) const {
    int log2 = 0;
    while (rows * bucket / kVector > int64_t{1} << (c.blocks_log2 + log2)) ++log2;
    return log2;
  }
  int64_t smem_bytes(const DecodeClusters& c) const {
    const int64_t vectors = int64_t{1} << (c.blocks_log2 + slice_log2(c)), stats = rows << c.blocks_log2;
    return catalog::cluster_tile(bucket, c.block).smem_bytes() +
           int64_t{sizeof(float)} * (kVector * vectors + 2 * stats);
  }
  // Groups of multiprocessors differ in size: where each block has its own, the last eighth may not take a cluster.
  bool fits(const DecodeClusters& c) const {
    const int64_t all = device.multiprocessors, most = c.block == catalog::ClusterBlock::kShared ? all : all - all / 8;
    const catalog::DecodeTile tile = catalog::cluster_tile(bucket, c.block);
    return units << c.unit_log2() <= most &&
           (device.smem_per_block_bytes + tile.kBlockReservedBytes) / (smem_bytes(c) + tile.kBlockReservedBytes) >=
               tile.most_blocks_per_multiprocessor;
  }
  double clocks(const DecodeClusters& c) const {
    const double threads = catalog::cluster_tile(bucket, c.block).threads(), round = kRoundClocks / threads;
    if (!c.any()) {
      const double rows_read = static_cast<double>(blocks_without * rows * bucket) / 128;
      return bytes / all_bytes_per_clock() + round * vectors() + kArrivalClocks + kPartRowClocks * rows_read;
    }
    const double block = (light ? kLightBlockBytesPerClock : kBlockBytesPerClock)[static_cast<size_t>(c.block)];
    double rate = std::min(all_bytes_per_clock() * kClusterShares[c.blocks_log2 - 1],
                           block * static_cast<double>(units << c.unit_log2()));
    if (c.blocks_log2 == kMostClusterLog2) rate = std::min(rate, kGroupBytesPerClock * static_cast<double>(units));
    double clocks = bytes / rate + round * vectors() + (c.block == catalog::ClusterBlock::kWide ? kWideClocks : 0.0) +
                    (c.blocks_log2 == kMostClusterLog2 ? kLargeClusterClocks : 0.0);
    if (c.clusters_log2 > 0) {
      const double parts = vectors() * static_cast<double>(int64_t{1} << c.clusters_log2);
      clocks += kArrivalClocks + round * parts / static_cast<double>(int64_t{1} << c.blocks_log2);
    }
    return clocks;
  }
};

inline DecodeClusters fastest_clusters(const ClusterWork& work) {
  using enum catalog::ClusterBlock;
  DecodeClusters fastest;
  const auto consider = [&](const DecodeClusters& c) {
    if (work.fits(c) && work.clocks(c) < work.clocks(fastest)) fastest = c;
  };
  for (int log2 = 1; log2 <= kPortableClusterLog2; ++log2) consider({log2});
  consider({kPortableClusterLog2, 0, kLong});
  for (int more = 0; more <= kMostClustersLog2; ++more) consider({kPortableClusterLog2, more, kWide});
  // On smaller GPUs groups have fewer than 16 multiprocessors.
  if (work.device.multiprocessors < kLargeClusterMultiprocessors) return fastest;
  // Three or four clusters of 16, in neighbouring groups of multiprocessors, would share the way to one half of the
  // memory.
  const bool spread = work.units > 2 && 2 * work.units <= work.device.multiprocessors >> kMostClusterLog2;
  consider({kMostClusterLog2, 0, kWide, spread});
  return fastest;
}

}  // namespace plait::cuda::mma
