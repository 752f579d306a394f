// Tiles and descriptors of cuda_sm90 on the host: the copy engine's swizzle, operand steps, room on a multiprocessor.
#include "cuda/tile/wgmma_tile.hpp"

#include <gtest/gtest.h>

#include <set>

#include "catalog/sm90_tiles.hpp"
#include "cuda/sm90/prefill/tile.hpp"

namespace plait {
namespace {

constexpr int kRows = 128, kColumns = 128, kChunks = kColumns / 8;
using Tile = tile::WgmmaTile<kRows, kColumns>;

// As the hardware does it: bits 4 to 6 of the address change with bits 7 to 9.
constexpr uint32_t swizzled(uint32_t linear) { return linear ^ (linear >> 7 & 7) << 4; }

// Byte of an element before the swizzle: blocks of 64 columns, rows of 128 bytes.
constexpr uint32_t linear_bytes(int row, int column) {
  return static_cast<uint32_t>(column / 64 * kRows * 128 + row * 128 + column % 64 * 2);
}

// The descriptor's fields as the PTX manual numbers them.
struct Fields {
  uint32_t start, leading, stride, swizzle;
};
Fields fields(uint64_t d) {
  return {static_cast<uint32_t>(d & 0x3fff) << 4, static_cast<uint32_t>(d >> 16 & 0x3fff) << 4,
          static_cast<uint32_t>(d >> 32 & 0x3fff) << 4, static_cast<uint32_t>(d >> 62)};
}

TEST(WgmmaTile, ChunksLieWhereTheCopyEnginePutsThem) {
  std::set<int> places;
  for (int row = 0; row < kRows; ++row) {
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      EXPECT_EQ(static_cast<uint32_t>(Tile::chunk_bytes(row, chunk)), swizzled(linear_bytes(row, chunk * 8)));
      places.insert(Tile::chunk_bytes(row, chunk));
    }
  }
  EXPECT_EQ(places.size(), size_t{kRows * kChunks});
  EXPECT_EQ(*places.rbegin() + 16, Tile::kBytes);
}

TEST(WgmmaTile, EightRowsOfAChunkLieInDifferentBanks) {
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    std::set<int> groups;
    for (int row = 0; row < tile::kSwizzleRows; ++row) groups.insert(Tile::chunk_bytes(row, chunk) % 128);
    EXPECT_EQ(groups.size(), size_t{tile::kSwizzleRows});
  }
}

// Columns are k: a step is 16 columns on, patterns of 8 rows are 1024 bytes apart.
TEST(WgmmaTile, RowsOperandStepsAlongColumns) {
  constexpr uint32_t kAddress = 0x28400;
  for (const int row : {0, 64}) {
    for (int step = 0; step < kColumns / 16; ++step) {
      const Fields f = fields(Tile::rows_operand(kAddress, row) + Tile::rows_operand_step(step));
      EXPECT_EQ(f.start, kAddress + linear_bytes(row, 16 * step));
      EXPECT_EQ(f.stride, linear_bytes(8, 0));
      EXPECT_EQ(f.swizzle, 1u);
    }
  }
}

// Rows are k: a step is 16 rows on, patterns of 8 rows are 1024 bytes apart, of 64 columns a block apart.
TEST(WgmmaTile, ColumnsOperandStepsAlongRows) {
  constexpr uint32_t kAddress = 0x28400;
  for (int block = 0; block < Tile::kBlocks; ++block) {
    for (int step = 0; step < kRows / 16; ++step) {
      const Fields f = fields(Tile::columns_operand(kAddress, block) + Tile::columns_operand_step(step));
      EXPECT_EQ(f.start, kAddress + linear_bytes(16 * step, 64 * block));
      EXPECT_EQ(f.leading, linear_bytes(0, 64));
      EXPECT_EQ(f.stride, linear_bytes(8, 0));
      EXPECT_EQ(f.swizzle, 1u);
    }
  }
}

// Addresses of shared memory keep their place in the descriptor up to the last byte that a block may have.
TEST(WgmmaTile, StepsNeverCarryIntoOtherFields) {
  constexpr uint32_t kLast = 227 * 1024 - Tile::kBytes;
  const Fields rows = fields(Tile::rows_operand(kLast / 1024 * 1024) + Tile::rows_operand_step(kColumns / 16 - 1));
  const Fields columns =
      fields(Tile::columns_operand(kLast / 1024 * 1024) + Tile::columns_operand_step(kRows / 16 - 1));
  EXPECT_EQ(rows.leading, 16u);
  EXPECT_EQ(columns.leading, static_cast<uint32_t>(Tile::kBlockBytes));
}

// From slot to slot of a ring in 32 bits.
TEST(WgmmaTile, DescriptorsOfLaterSlotsDifferInTheLowWord) {
  constexpr uint32_t kAddress = 0x0c000;
  for (int slot = 0; slot < 4; ++slot) {
    const uint64_t steps = slot * tile::descriptor_step(Tile::kBytes);
    EXPECT_EQ(tile::advance_descriptor(Tile::rows_operand(kAddress), steps),
              Tile::rows_operand(kAddress + slot * Tile::kBytes));
    EXPECT_EQ(tile::advance_descriptor(Tile::columns_operand(kAddress), steps),
              Tile::columns_operand(kAddress + slot * Tile::kBytes));
  }
}

TEST(Sm90Tiles, FitAMultiprocessor) {
  constexpr int64_t kSmemLimit = 227 * 1024;
  constexpr int kMostThreads = 1024, kMostKeys = 256;
  for (const catalog::Sm90PrefillTile& tile : catalog::kSm90PrefillTiles) {
    EXPECT_LE(tile.smem_bytes(), kSmemLimit) << tile.head_dim;
    EXPECT_LE(tile.threads(), kMostThreads);
    // A warpgroup that asks for more than the block has waits for ever.
    EXPECT_LE(tile.warpgroups * tile.consumer_registers + tile.producer_registers,
              (tile.warpgroups + 1) * tile.start_registers())
        << tile.head_dim;
    EXPECT_LE(tile.tile_keys, kMostKeys) << "rows of a copy";
    EXPECT_LE(tile.rows(), kMostKeys) << "rows of a copy";
    EXPECT_EQ(tile.tile_keys % 16, 0);
    EXPECT_TRUE(tile.query_rows == tile.rows() || tile.query_rows == tile.kWarpgroupRows);
    EXPECT_GT(tile.query_slots, tile.query_parts());
    EXPECT_EQ(catalog::kSm90PrefillTiles[catalog::sm90_prefill_tile_index(tile.head_dim, tile.ragged)], tile);
    EXPECT_EQ(catalog::kSm90PrefillTiles[catalog::sm90_prefill_tile_index(tile.head_dim - 63, tile.ragged)], tile);
  }
}

// The wider head dim decides on the bucket; windows and packed sequences on the tile of bucket 128.
TEST(Sm90Tiles, OfAProblem) {
  AttentionProblem p;
  const auto tile = [&] { return cuda::sm90::prefill_tile(p); };
  p.head_dim = 64;
  p.head_dim_v = 100;
  p.seqlen_q = p.seqlen_kv = 1000;
  EXPECT_EQ(tile().head_dim, 128);
  EXPECT_EQ(tile().tile_keys, 128);
  for (int64_t AttentionProblem::* side : {&AttentionProblem::window_left, &AttentionProblem::window_right}) {
    p.*side = 100;
    EXPECT_EQ(tile().head_dim, 128);
    EXPECT_EQ(tile().tile_keys, 64);
    p.*side = -1;
  }
  p.causal = true;
  p.window_left = 999;
  p.window_right = 0;
  EXPECT_EQ(tile().tile_keys, 128) << "a window that hides nothing";
  p.window_left = 998;
  EXPECT_EQ(tile().tile_keys, 64);
  p.window_left = p.window_right = -1;
  p.packed = true;
  EXPECT_EQ(tile().tile_keys, 64);
  p.head_dim = 256;
  EXPECT_FALSE(tile().ragged) << "bucket 256 has one tile";
}

}  // namespace
}  // namespace plait
