// Tiles of the tensor-core backward of cuda_mma, by head-dim bucket and shared memory per block.
// Called by the planner and by the kernels of cuda/mma/backward.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace plait::catalog {

inline constexpr int kBackwardStateBytes = 256;  // what a block knows of its work

// The resident tile stays in shared memory while stream tiles pass by. For dK and dV keys are resident and query rows
// stream; the separate dQ kernel of deterministic calls is the other way round.
struct BackwardTile {
  int head_dim;  // bucket: covers max(head_dim, head_dim_v) by zero fill
  int resident, stream;
  int warps_resident, warps_stream;  // how the warps divide the score tile
  int dq_warps;  // of all warps, how many divide the rows of the dQ tile; the rest divide its columns
  int stages;    // stream tiles in flight; 3: one barrier per tile instead of two
  int blocks_per_sm;
  bool resident_in_registers;

  constexpr int threads() const { return 32 * warps_resident * warps_stream; }
  constexpr int resident_bytes() const { return resident * head_dim * 2; }  // each of two tensors
  constexpr int stream_bytes() const { return stream * head_dim * 2; }      // each of two tensors, each stage
  constexpr int score_buffers() const { return stages > 2 ? 2 : 1; }
  constexpr int score_bytes() const { return resident * stream * 2; }  // P (when warps share keys) and dS, each buffer
  constexpr int row_bytes() const { return 8 * (stages * stream > resident ? stages * stream : resident); }
  constexpr int smem_bytes() const {
    return 2 * resident_bytes() + 2 * stages * stream_bytes() +
           (warps_stream > 1 ? 2 : 1) * score_buffers() * score_bytes() + row_bytes() + kBackwardStateBytes;
  }
  bool operator==(const BackwardTile&) const = default;
};

// Per bucket in order of preference: the first whose blocks fit together into the shared memory that a device gives one
// block, else the last.
inline constexpr int kBackwardTilesPerBucket = 4;
using BackwardTiles = std::array<BackwardTile, kBackwardTilesPerBucket>;
inline constexpr std::array<BackwardTiles, 6> kBackwardTiles{{
    // bucket, resident, stream, warps, dq_warps, stages, blocks, registers
    {{{32, 64, 64, 2, 2, 2, 3, 3, false},
      {32, 64, 64, 2, 2, 2, 2, 3, false},
      {32, 64, 64, 2, 2, 2, 2, 3, false},
      {32, 64, 64, 2, 2, 2, 2, 3, false}}},
    {{{64, 64, 64, 2, 2, 2, 3, 2, true},
      {64, 64, 64, 2, 2, 2, 2, 2, true},
      {64, 64, 64, 2, 2, 2, 1, 2, true},
      {64, 64, 64, 2, 2, 2, 1, 2, true}}},
    {{{96, 128, 64, 4, 2, 4, 3, 1, false},
      {96, 128, 64, 4, 2, 4, 2, 1, false},
      {96, 64, 64, 2, 2, 2, 1, 1, false},
      {96, 32, 64, 2, 2, 4, 1, 1, false}}},
    {{{128, 128, 64, 4, 2, 2, 3, 1, false},
      {128, 128, 32, 4, 2, 2, 3, 1, false},
      {128, 64, 64, 4, 2, 2, 1, 1, false},
      {128, 32, 64, 2, 2, 2, 1, 1, false}}},
    {{{192, 64, 64, 4, 2, 2, 2, 1, false},
      {192, 32, 64, 2, 2, 2, 1, 1, false},
      {192, 32, 32, 2, 2, 2, 1, 1, false},
      {192, 32, 32, 2, 2, 2, 1, 1, false}}},
    {{{256, 64, 64, 4, 2, 2, 2, 1, false},
      {256, 32, 32, 2, 2, 2, 1, 1, false},
      {256, 16, 32, 1, 2, 1, 1, 1, false},
      {256, 16, 32, 1, 2, 1, 1, 1, false}}},
}};

constexpr const BackwardTiles& backward_tiles(int64_t head_dim_bucket) {
  size_t index = 0;
  while (kBackwardTiles[index][0].head_dim != head_dim_bucket) ++index;
  return kBackwardTiles[index];
}

// The tile for a device with so much shared memory per block. The last of a bucket fits every supported device.
constexpr const BackwardTile& backward_tile(int64_t head_dim_bucket, int64_t smem_limit_bytes) {
  const BackwardTiles& tiles = backward_tiles(head_dim_bucket);
  size_t index = 0;
  while (index + 1 < tiles.size() && tiles[index].smem_bytes() * tiles[index].blocks_per_sm > smem_limit_bytes) ++index;
  return tiles[index];
}

// dQ's workspace is padded to this many rows per sequence, whatever the tile.
inline constexpr int64_t kBackwardMaxStreamRows = 128;

}  // namespace plait::catalog
