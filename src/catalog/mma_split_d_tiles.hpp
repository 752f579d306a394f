// Tiles of cuda_mma's kernels for head dims of 257 to 1024 (split_d), as plain data.
// Called by the kernels of cuda/mma/split_d (as template arguments), the planner and the tests.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace plait::catalog {

inline constexpr int64_t kSplitDMaxHeadDim = 1024;
// Tiles of q, k, v lie in shared memory as chunks of so many columns; the scores' depth needs no other bucket.
inline constexpr int kSplitDChunk = 64;
inline constexpr int kSplitDWarps = 8;

constexpr int64_t split_d_chunks(int64_t head_dim) { return (head_dim + kSplitDChunk - 1) / kSplitDChunk; }
constexpr int64_t split_d_tile_bytes(int64_t rows, int64_t head_dim) {
  return rows * split_d_chunks(head_dim) * kSplitDChunk * 2;
}

// How `sources` warps with partial sums of the same scores (16 x 8 blocks of fragments) add them up: each of `targets`
// warps gets `kept` blocks from all others. Two warps keep their own part in registers; more let it go through shared
// memory with the rest, which spares choosing among registers.
struct SplitDExchange {
  int blocks, sources;

  static constexpr int kBlockBytes = 32 * 16;
  constexpr int kept() const { return blocks < sources ? 1 : blocks / sources; }
  constexpr int targets() const { return blocks / kept(); }
  constexpr bool own_in_registers() const { return sources == 2; }
  constexpr int target_bytes() const { return (own_in_registers() ? 1 : sources) * kept() * kBlockBytes; }
  constexpr int bytes() const { return targets() * target_bytes(); }
};

// One instantiation of the forward kernel: 8 warps take `rows` query rows through the keys, `keys` at a time.
struct SplitDTile {
  int out_dim;               // bucket of head_dim_v: columns of O in registers
  int rows, keys;            // of a block
  int warp_rows, warp_keys;  // scores of a warp; warps with the same scores share out the columns of q and k
  int out_row_warps;         // how many warps share out the rows of O; the others share out its columns

  static constexpr int64_t kWorkBytes = 128;  // what a block knows of its work
  constexpr int threads() const { return 32 * kSplitDWarps; }
  constexpr int row_warps() const { return rows / warp_rows; }
  constexpr int key_warps() const { return keys / warp_keys; }
  constexpr int slices() const { return kSplitDWarps / (row_warps() * key_warps()); }
  constexpr SplitDExchange exchange() const { return {warp_rows / 16 * (warp_keys / 8), slices()}; }
  constexpr int exchange_bytes() const { return row_warps() * key_warps() * exchange().bytes(); }
  constexpr int probability_columns() const { return (keys + 31) / 32 * 32; }  // of the tile in shared memory
  constexpr int slots() const { return keys / 8 / exchange().kept(); }         // warps that share a row of scores
  // v, probabilities, exchange, maxima, factors, [lo, hi) per row, the work; then k and q.
  constexpr int64_t fixed_bytes() const {
    const int64_t bytes = int64_t{2} * keys * out_dim + int64_t{2} * rows * probability_columns() + exchange_bytes() +
                          int64_t{4} * rows * slots() + int64_t{12} * rows;
    return (bytes + kWorkBytes - 1) / kWorkBytes * kWorkBytes + kWorkBytes;
  }
  constexpr int64_t smem_bytes(int64_t head_dim) const {
    return fixed_bytes() + split_d_tile_bytes(rows + keys, head_dim);
  }
  bool operator==(const SplitDTile&) const = default;
};

// Per bucket in order of preference: the first whose shared memory a device has. The last of a list may repeat.
inline constexpr int kSplitDTilesPerBucket = 4;
using SplitDTiles = std::array<SplitDTile, kSplitDTilesPerBucket>;
inline constexpr std::array<SplitDTiles, 6> kSplitDTiles{{
    {{{320, 64, 96, 32, 48, 2}, {320, 64, 32, 32, 32, 2}, {320, 32, 16, 32, 16, 2}, {320, 32, 16, 32, 16, 2}}},
    {{{384, 64, 64, 32, 32, 1}, {384, 64, 32, 32, 32, 1}, {384, 32, 16, 32, 16, 1}, {384, 16, 16, 16, 16, 1}}},
    {{{512, 64, 64, 32, 32, 1}, {512, 64, 32, 16, 32, 1}, {512, 32, 16, 32, 16, 1}, {512, 16, 16, 16, 16, 1}}},
    {{{640, 64, 48, 16, 48, 1}, {640, 64, 32, 32, 32, 1}, {640, 32, 16, 32, 16, 1}, {640, 16, 16, 16, 16, 1}}},
    {{{768, 64, 32, 16, 32, 1}, {768, 32, 16, 32, 16, 1}, {768, 16, 16, 16, 16, 1}, {768, 16, 16, 16, 16, 1}}},
    {{{1024, 32, 32, 32, 32, 1}, {1024, 32, 16, 32, 16, 1}, {1024, 16, 16, 16, 16, 1}, {1024, 16, 16, 16, 16, 1}}},
}};

inline constexpr std::array<int, kSplitDTiles.size()> kSplitDBuckets{320, 384, 512, 640, 768, 1024};
// Index of the first bucket that holds head_dim, at most kSplitDMaxHeadDim.
constexpr size_t split_d_bucket_index(int64_t head_dim) {
  size_t index = 0;
  while (kSplitDBuckets[index] < head_dim) ++index;
  return index;
}
constexpr const SplitDTiles& split_d_tiles(int64_t head_dim_v) {
  return kSplitDTiles[split_d_bucket_index(head_dim_v)];
}

// The tile for a GPU with so much shared memory per block; null: none fits.
constexpr const SplitDTile* split_d_tile(int64_t head_dim, int64_t head_dim_v, int64_t smem_per_block_bytes) {
  for (const SplitDTile& tile : split_d_tiles(head_dim_v)) {
    if (tile.smem_bytes(head_dim) <= smem_per_block_bytes) return &tile;
  }
  return nullptr;
}

// One instantiation of a backward kernel. Like BackwardTile of mma_backward_tiles.hpp, a resident tile (keys for dK and
// dV, query rows for dQ) stays while stream tiles pass. Half of the warps make the scores, half dP, parts of the head
// dim each; then the warps share out the gradients.
struct SplitDBackwardTile {
  int head_dim;  // bucket of max(head_dim, head_dim_v): columns of the gradients in registers
  int resident, stream;
  int buffers;         // of stream tiles: 2: one of each tensor; 3: two of the first (q or k); 4: two of each
  int row_warps;       // how many warps share out the rows of the gradients; the others share out their columns
  int warp_side = 32;  // a warp has at most so many resident rows of scores

  static constexpr int64_t kStateBytes = 256;  // what a block knows of its work
  constexpr int threads() const { return 32 * kSplitDWarps; }
  constexpr int stages() const { return (buffers + 1) / 2; }  // of the first tensor and of RowPairs
  constexpr int warp_resident() const { return resident < warp_side ? resident : warp_side; }
  constexpr int score_tiles() const { return resident / warp_resident(); }
  // Of one score tile. The blocks of P and dS take the place of the sums that they are made from.
  constexpr SplitDExchange exchange() const { return {warp_resident() * stream / 128, kSplitDWarps / score_tiles()}; }
  constexpr int row_bytes() const { return 8 * (stages() * stream > resident ? stages() * stream : resident); }
  // State, RowPairs, exchange; then the tiles.
  constexpr int fixed_bytes() const {
    return (static_cast<int>(kStateBytes) + row_bytes() + 127) / 128 * 128 + score_tiles() * exchange().bytes();
  }
  constexpr int64_t smem_bytes() const {
    return fixed_bytes() + split_d_tile_bytes(2 * resident + buffers * stream, head_dim);
  }
  bool operator==(const SplitDBackwardTile&) const = default;
};

// The two kernels of a call.
struct SplitDBackwardTilePair {
  SplitDBackwardTile keys, rows;
  constexpr int head_dim() const { return keys.head_dim; }
  constexpr int64_t smem_bytes() const {
    return keys.smem_bytes() > rows.smem_bytes() ? keys.smem_bytes() : rows.smem_bytes();
  }
  bool operator==(const SplitDBackwardTilePair&) const = default;
};
constexpr SplitDBackwardTilePair split_d_backward_pair(const SplitDBackwardTile& both) { return {both, both}; }

inline constexpr int kSplitDBackwardTilesPerBucket = 3;
using SplitDBackwardTiles = std::array<SplitDBackwardTilePair, kSplitDBackwardTilesPerBucket>;
inline constexpr std::array<SplitDBackwardTiles, 6> kSplitDBackwardTiles{{
    {{split_d_backward_pair({320, 64, 32, 4, 2}), split_d_backward_pair({320, 32, 16, 4, 2}),
      split_d_backward_pair({320, 32, 16, 2, 2})}},
    {{{{384, 32, 32, 4, 1}, {384, 64, 32, 4, 1}},
      split_d_backward_pair({384, 32, 16, 4, 1}),
      split_d_backward_pair({384, 16, 16, 2, 1})}},
    {{split_d_backward_pair({512, 32, 32, 4, 1}), split_d_backward_pair({512, 32, 16, 4, 1}),
      split_d_backward_pair({512, 16, 16, 2, 1})}},
    {{split_d_backward_pair({640, 32, 32, 3, 1, 16}), split_d_backward_pair({640, 16, 16, 4, 1}),
      split_d_backward_pair({640, 16, 16, 2, 1})}},
    {{split_d_backward_pair({768, 32, 16, 4, 1}), split_d_backward_pair({768, 16, 16, 4, 1}),
      split_d_backward_pair({768, 16, 16, 2, 1})}},
    {{split_d_backward_pair({1024, 16, 16, 4, 1}), split_d_backward_pair({1024, 16, 16, 2, 1}),
      split_d_backward_pair({1024, 16, 16, 2, 1})}},
}};
constexpr const SplitDBackwardTiles& split_d_backward_tiles(int64_t head_dim) {
  return kSplitDBackwardTiles[split_d_bucket_index(head_dim)];
}

// The tiles for a GPU with so much shared memory per block; null: none fit. head_dim: the larger of the two.
constexpr const SplitDBackwardTilePair* split_d_backward_tile(int64_t head_dim, int64_t smem_per_block_bytes) {
  for (const SplitDBackwardTilePair& tiles : split_d_backward_tiles(head_dim)) {
    if (tiles.smem_bytes() <= smem_per_block_bytes) return &tiles;
  }
  return nullptr;
}

}  // namespace plait::catalog
