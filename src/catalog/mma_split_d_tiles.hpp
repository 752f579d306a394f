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
// warps gets `kept` blocks from all others.
struct SplitDExchange {
  int blocks, sources;

  static constexpr int kBlockBytes = 32 * 16;
  constexpr int kept() const { return blocks < sources ? 1 : blocks / sources; }
  constexpr int targets() const { return blocks / kept(); }
  constexpr int bytes() const { return targets() * (sources - 1) * kept() * kBlockBytes; }
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
  constexpr int probability_columns() const { return keys < 32 ? 32 : keys; }  // of the tile in shared memory
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
    {{{512, 64, 64, 32, 32, 1}, {512, 64, 32, 32, 32, 1}, {512, 32, 16, 32, 16, 1}, {512, 16, 16, 16, 16, 1}}},
    {{{640, 64, 32, 32, 32, 1}, {640, 32, 16, 32, 16, 1}, {640, 16, 16, 16, 16, 1}, {640, 16, 16, 16, 16, 1}}},
    {{{768, 64, 32, 16, 32, 1}, {768, 32, 16, 32, 16, 1}, {768, 16, 16, 16, 16, 1}, {768, 16, 16, 16, 16, 1}}},
    {{{1024, 32, 32, 32, 32, 1}, {1024, 32, 16, 32, 16, 1}, {1024, 16, 16, 16, 16, 1}, {1024, 16, 16, 16, 16, 1}}},
}};

// Index of the first bucket that holds head_dim, at most kSplitDMaxHeadDim.
template <size_t kCount>
constexpr size_t split_d_bucket_index(const std::array<int, kCount>& buckets, int64_t head_dim) {
  size_t index = 0;
  while (buckets[index] < head_dim) ++index;
  return index;
}
inline constexpr std::array<int, kSplitDTiles.size()> kSplitDBuckets{320, 384, 512, 640, 768, 1024};  // of head_dim_v
constexpr const SplitDTiles& split_d_tiles(int64_t head_dim_v) {
  return kSplitDTiles[split_d_bucket_index(kSplitDBuckets, head_dim_v)];
}

// The tile for a GPU with so much shared memory per block; null: none fits.
constexpr const SplitDTile* split_d_tile(int64_t head_dim, int64_t head_dim_v, int64_t smem_per_block_bytes) {
  for (const SplitDTile& tile : split_d_tiles(head_dim_v)) {
    if (tile.smem_bytes(head_dim) <= smem_per_block_bytes) return &tile;
  }
  return nullptr;
}

// One instantiation of the backward kernels. Like BackwardTile of mma_backward_tiles.hpp, a resident tile (keys for dK
// and dV, query rows for dQ) stays while stream tiles pass. Four warps make the scores, four dP, a quarter of the head
// dim each; then each warp makes every eighth group of 16 columns of the gradients.
struct SplitDBackwardTile {
  int head_dim;  // bucket of max(head_dim, head_dim_v): columns of the gradients in registers
  int resident, stream, stages;

  static constexpr int64_t kStateBytes = 256;  // what a block knows of its work
  constexpr int threads() const { return 32 * kSplitDWarps; }
  constexpr SplitDExchange exchange() const { return {resident * stream / 128, kSplitDWarps}; }
  // P and dS, rows of softmax by keys.
  constexpr int score_bytes(bool keys_resident) const {
    const int rows = keys_resident ? stream : resident, keys = keys_resident ? resident : stream;
    return rows * (keys < 32 ? 32 : keys) * 2;
  }
  constexpr int row_bytes() const { return 8 * (stages * stream > resident ? stages * stream : resident); }
  // State, RowPairs, P, dS, exchange; then the tiles.
  constexpr int fixed_bytes(bool keys_resident) const {
    const int bytes = kStateBytes + row_bytes() + 2 * score_bytes(keys_resident) + exchange().bytes();
    return (bytes + 127) / 128 * 128;
  }
  constexpr int64_t smem_bytes(bool keys_resident) const {
    return fixed_bytes(keys_resident) + 2 * split_d_tile_bytes(resident + stages * stream, head_dim);
  }
  bool operator==(const SplitDBackwardTile&) const = default;
};

inline constexpr int kSplitDBackwardTilesPerBucket = 3;
using SplitDBackwardTiles = std::array<SplitDBackwardTile, kSplitDBackwardTilesPerBucket>;
inline constexpr std::array<SplitDBackwardTiles, 5> kSplitDBackwardTiles{{
    {{{384, 32, 32, 2}, {384, 32, 16, 2}, {384, 16, 16, 1}}},
    {{{512, 32, 32, 2}, {512, 32, 16, 2}, {512, 16, 16, 1}}},
    {{{640, 32, 16, 2}, {640, 16, 16, 2}, {640, 16, 16, 1}}},
    {{{768, 32, 16, 2}, {768, 16, 16, 2}, {768, 16, 16, 1}}},
    {{{1024, 16, 16, 2}, {1024, 16, 16, 1}, {1024, 16, 16, 1}}},
}};
inline constexpr std::array<int, kSplitDBackwardTiles.size()> kSplitDBackwardBuckets{384, 512, 640, 768, 1024};
constexpr const SplitDBackwardTiles& split_d_backward_tiles(int64_t head_dim) {
  return kSplitDBackwardTiles[split_d_bucket_index(kSplitDBackwardBuckets, head_dim)];
}

// The tile for a GPU with so much shared memory per block; null: none fits. head_dim: the larger of the two.
constexpr const SplitDBackwardTile* split_d_backward_tile(int64_t head_dim, int64_t smem_per_block_bytes) {
  for (const SplitDBackwardTile& tile : split_d_backward_tiles(head_dim)) {
    if (tile.smem_bytes(true) <= smem_per_block_bytes && tile.smem_bytes(false) <= smem_per_block_bytes) return &tile;
  }
  return nullptr;
}

}  // namespace plait::catalog
