// Tiles of the mma.sync forward attention kernels per head-dim bucket and shared memory, as plain data.
// Called by the kernels of cuda/mma/prefill (as template arguments), the planner and the tests.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace plait::catalog {

// One instantiation of the prefill kernel. A block of `warps` warps takes warps * warp_rows query rows through the
// keys, tile_keys at a time.
struct PrefillTile {
  int head_dim;  // bucket: covers max(head_dim, head_dim_v) by zero fill
  int warps, warp_rows, tile_keys;
  int blocks_per_multiprocessor;  // planned for: bounds the registers
  bool query_in_registers;

  static constexpr int kStages = 2;
  static constexpr int64_t kWorkBytes = 128;            // what a block knows of its work
  static constexpr int64_t kBlockReservedBytes = 1024;  // of shared memory, by the system
  constexpr int rows() const { return warps * warp_rows; }
  constexpr int threads() const { return warps * 32; }
  // Query tile, double-buffered key and value tiles of 16-bit elements, two pointers per thread, [lo, hi) per row, the
  // work.
  constexpr int64_t smem_bytes() const {
    return int64_t{2} * head_dim * (rows() + kStages * 2 * tile_keys) + int64_t{16} * threads() + int64_t{8} * rows() +
           kWorkBytes;
  }
  // All planned blocks at once on a multiprocessor, which has kBlockReservedBytes more than a block may ask for.
  constexpr bool fits(int64_t smem_per_block_bytes) const {
    return (smem_bytes() + kBlockReservedBytes) * blocks_per_multiprocessor <=
           smem_per_block_bytes + kBlockReservedBytes;
  }
  bool operator==(const PrefillTile&) const = default;
};

// Per bucket in order of preference. The last one's blocks run wherever mma.sync does: 64 KB (Turing) hold one.
inline constexpr int kPrefillTilesPerBucket = 2;
using PrefillTiles = std::array<PrefillTile, kPrefillTilesPerBucket>;
inline constexpr std::array<PrefillTiles, 6> kPrefillTiles{{
    // bucket, warps, rows of a warp, keys, blocks, query in registers
    {{{32, 4, 32, 64, 3, false}, {32, 4, 32, 32, 3, true}}},
    {{{64, 4, 32, 64, 2, true}, {64, 4, 32, 32, 2, true}}},
    {{{96, 4, 32, 64, 2, false}, {96, 4, 16, 32, 2, true}}},
    {{{128, 4, 32, 48, 2, false}, {128, 4, 16, 32, 2, true}}},
    {{{192, 8, 16, 96, 1, false}, {192, 4, 16, 16, 2, false}}},
    {{{256, 8, 16, 64, 1, false}, {256, 2, 16, 16, 2, false}}},
}};

constexpr const PrefillTiles& prefill_tiles(int64_t head_dim_bucket) {
  size_t index = 0;
  while (kPrefillTiles[index][0].head_dim != head_dim_bucket) ++index;
  return kPrefillTiles[index];
}

// The tile for a GPU with so much shared memory per block, at least 64 KB.
constexpr const PrefillTile& prefill_tile(int64_t head_dim_bucket, int64_t smem_per_block_bytes) {
  const PrefillTiles& tiles = prefill_tiles(head_dim_bucket);
  return tiles[0].fits(smem_per_block_bytes) ? tiles[0] : tiles[1];
}

}  // namespace plait::catalog
