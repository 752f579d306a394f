// Tiles of the mma.sync decode kernels per head-dim bucket, rows and shared memory, as plain data.
// Called by the kernels of cuda/mma/decode (as template arguments), the planner and the tests.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace plait::catalog {

// One instantiation of the decode kernel. The warps of a block share 16 * row_blocks query rows and take turns at steps
// of step_keys keys, each through a ring of its own with `slots` places for a step's keys or values.
struct DecodeTile {
  int head_dim;  // bucket: covers max(head_dim, head_dim_v) by zero fill
  int row_blocks, warps, step_keys, slots;
  int most_blocks_per_multiprocessor;  // bounds the registers

  static constexpr int kBlockRows = 16;
  static constexpr int64_t kBlockReservedBytes = 1024;  // of shared memory, by the system
  static constexpr int64_t kStateBytes = 512;           // of a block, beside what counts rows and warps
  constexpr int rows() const { return kBlockRows * row_blocks; }
  constexpr int threads() const { return 32 * warps; }
  constexpr int slot_elems() const { return step_keys * head_dim; }
  // Steps whose keys or values may be under way at once, as a power of two.
  constexpr int steps_under_way() const {
    int steps = 1;
    while (steps < slots / 2 + 2) steps *= 2;
    return steps;
  }
  constexpr bool query_in_registers() const { return row_blocks * head_dim <= 128; }
  // Queries and rings of 16-bit elements; bounds and place of each row; maximum and sum of each row of a row block per
  // warp; masks of steps per warp.
  constexpr int64_t smem_bytes() const {
    const int64_t bytes = int64_t{2} * rows() * head_dim + int64_t{2} * warps * slots * slot_elems() +
                          int64_t{32} * rows() + int64_t{8} * kBlockRows * warps +
                          int64_t{4} * warps * steps_under_way() + kStateBytes;
    return (bytes + 127) / 128 * 128;
  }
  // Blocks that run at once on a multiprocessor, which has kBlockReservedBytes more than a block may ask for; 0: none.
  constexpr int blocks_per_multiprocessor(int64_t smem_per_block_bytes) const {
    const int64_t blocks = (smem_per_block_bytes + kBlockReservedBytes) / (smem_bytes() + kBlockReservedBytes);
    return static_cast<int>(blocks < most_blocks_per_multiprocessor ? blocks : most_blocks_per_multiprocessor);
  }
  bool operator==(const DecodeTile&) const = default;
};

// Per bucket: [more than 16 rows][GPU: two blocks of a Hopper multiprocessor, or wherever mma.sync runs (64 KB)].
// Accumulators of 32 rows fit the registers up to head dim 128; wider buckets take 16 rows at a time.
inline constexpr int kDecodeTilesPerSize = 2;
using DecodeTiles = std::array<std::array<DecodeTile, kDecodeTilesPerSize>, 2>;
inline constexpr std::array<DecodeTiles, 6> kDecodeTiles{{
    // bucket, row blocks, warps, keys, slots, blocks
    {{{{{32, 1, 4, 32, 10, 2}, {32, 1, 4, 32, 6, 2}}}, {{{32, 2, 4, 32, 10, 2}, {32, 2, 4, 32, 6, 2}}}}},
    {{{{{64, 1, 4, 32, 6, 2}, {64, 1, 4, 32, 3, 2}}}, {{{64, 2, 4, 32, 6, 2}, {64, 2, 4, 32, 3, 2}}}}},
    {{{{{96, 1, 4, 16, 8, 2}, {96, 1, 4, 16, 4, 2}}}, {{{96, 2, 4, 16, 8, 2}, {96, 2, 4, 16, 4, 2}}}}},
    {{{{{128, 1, 4, 32, 3, 2}, {128, 1, 4, 16, 3, 2}}}, {{{128, 2, 4, 16, 6, 2}, {128, 2, 4, 16, 3, 2}}}}},
    {{{{{192, 1, 4, 16, 4, 2}, {192, 1, 2, 16, 4, 2}}}, {{{192, 1, 4, 16, 4, 2}, {192, 1, 2, 16, 4, 2}}}}},
    {{{{{256, 1, 4, 16, 3, 2}, {256, 1, 2, 16, 3, 2}}}, {{{256, 1, 4, 16, 3, 2}, {256, 1, 2, 16, 3, 2}}}}},
}};

// Which of a bucket's tiles serve `rows` query rows of a key head on a GPU with so much shared memory per block.
struct DecodeChoice {
  int size, gpu;  // indices of DecodeTiles
};
constexpr const DecodeTiles& decode_tiles(int64_t head_dim_bucket) {
  size_t index = 0;
  while (kDecodeTiles[index][0][0].head_dim != head_dim_bucket) ++index;
  return kDecodeTiles[index];
}
constexpr DecodeChoice decode_choice(int64_t head_dim_bucket, int64_t rows, int64_t smem_per_block_bytes) {
  const DecodeTiles& tiles = decode_tiles(head_dim_bucket);
  const int size = rows > DecodeTile::kBlockRows && tiles[1][0].row_blocks > 1 ? 1 : 0;
  const DecodeTile& large = tiles[size][0];
  const bool both = large.blocks_per_multiprocessor(smem_per_block_bytes) == large.most_blocks_per_multiprocessor;
  return {size, both ? 0 : 1};
}

// The blocks of a cluster, for up to 16 rows: two share a multiprocessor, or each has one and with it longer rings, or
// twice the warps.
enum class ClusterBlock { kShared, kLong, kWide };
constexpr DecodeTile cluster_tile(int64_t head_dim_bucket, ClusterBlock block) {
  DecodeTile tile = decode_tiles(head_dim_bucket)[0][0];
  if (block == ClusterBlock::kLong) tile.slots = 2 * tile.slots - 1;
  if (block == ClusterBlock::kWide) tile.warps *= 2;
  if (block != ClusterBlock::kShared) tile.most_blocks_per_multiprocessor = 1;
  return tile;
}

}  // namespace plait::catalog
