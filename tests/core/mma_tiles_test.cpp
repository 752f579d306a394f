// The tile tables of cuda_mma: every bucket runs on every class of GPU; and shared-memory swizzles have no bank
// conflicts.
#include "catalog/mma_tiles.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "catalog/catalog.hpp"
#include "catalog/mma_backward_tiles.hpp"
#include "catalog/mma_decode_tiles.hpp"
#include "catalog/mma_split_d_tiles.hpp"
#include "cuda/common/divisor.hpp"
#include "cuda/tile/swizzle.hpp"

namespace plait {
namespace {

// Shared memory of one block: Turing, consumer Ampere and Ada, A100, Hopper (CUDA programming guide).
constexpr int64_t kKib = 1024, kSmemLimits[] = {64 * kKib, 99 * kKib, 163 * kKib, 227 * kKib};
constexpr int kRegistersPerMultiprocessor = 65536, kMaxThreads = 1024;

TEST(MmaTiles, EveryBucketFitsEveryGpu) {
  for (const int bucket : {32, 64, 96, 128, 192, 256}) {
    for (const int64_t limit : kSmemLimits) {
      const catalog::PrefillTile& prefill = catalog::prefill_tile(bucket, limit);
      EXPECT_EQ(prefill.head_dim, bucket);
      EXPECT_LE(prefill.smem_bytes(), limit) << "prefill " << bucket;
      EXPECT_LE(prefill.threads(), kMaxThreads);
      const catalog::BackwardTile& backward = catalog::backward_tile(bucket, limit);
      EXPECT_EQ(backward.head_dim, bucket);
      EXPECT_LE(backward.smem_bytes(), limit) << "backward " << bucket;
      EXPECT_LE(backward.threads(), kMaxThreads);
      for (const int64_t rows : {1, 16, 17, 1000}) {
        const catalog::DecodeChoice choice = catalog::decode_choice(bucket, rows, limit);
        const catalog::DecodeTile& decode = catalog::decode_tiles(bucket)[choice.size][choice.gpu];
        EXPECT_EQ(decode.head_dim, bucket);
        EXPECT_LE(decode.smem_bytes(), limit) << "decode " << bucket;
        EXPECT_GE(decode.blocks_per_multiprocessor(limit), 1) << "decode " << bucket;
        EXPECT_GE(decode.rows(), std::min<int64_t>(rows, 16));
      }
    }
  }
}

TEST(MmaTiles, BlocksOfClustersFitHopper) {
  constexpr int64_t kHopper = kSmemLimits[3];
  for (const int bucket : {32, 64, 96, 128, 192, 256}) {
    for (const auto block :
         {catalog::ClusterBlock::kShared, catalog::ClusterBlock::kLong, catalog::ClusterBlock::kWide}) {
      const catalog::DecodeTile tile = catalog::cluster_tile(bucket, block);
      EXPECT_LE(tile.smem_bytes() + int64_t{16} * bucket * 4 + 16 * 16 * 8, kHopper) << bucket;
      EXPECT_EQ(tile.blocks_per_multiprocessor(kHopper), block == catalog::ClusterBlock::kShared ? 2 : 1) << bucket;
    }
  }
}

TEST(MmaTiles, LargerGpusNeverGetSmallerTiles) {
  for (const int bucket : {32, 64, 96, 128, 192, 256}) {
    for (size_t i = 1; i < std::size(kSmemLimits); ++i) {
      EXPECT_GE(catalog::prefill_tile(bucket, kSmemLimits[i]).rows(),
                catalog::prefill_tile(bucket, kSmemLimits[i - 1]).rows());
    }
  }
}

TEST(MmaTiles, BlocksPlannedForAMultiprocessorLeaveEnoughRegisters) {
  constexpr int kLeastRegisters = 128;
  for (const int bucket : {32, 64, 96, 128, 192, 256}) {
    const catalog::PrefillTile& tile = catalog::prefill_tile(bucket, kSmemLimits[3]);
    EXPECT_GE(kRegistersPerMultiprocessor / (tile.threads() * tile.blocks_per_multiprocessor), kLeastRegisters)
        << bucket;
  }
}

TEST(HeadDimBuckets, AreTheSmallestThatHoldTheHeadDim) {
  for (int64_t dim = 1; dim <= catalog::kMmaMaxHeadDim; ++dim) {
    const int bucket = catalog::head_dim_bucket(dim);
    EXPECT_GE(bucket, dim);
    for (const int other : catalog::kMmaHeadDims) EXPECT_TRUE(other < dim || other >= bucket);
  }
}

TEST(SplitDTiles, AreTheFirstThatFit) {
  for (const int64_t limit : kSmemLimits) {
    for (int64_t dim = 8; dim <= catalog::kSplitDMaxHeadDim; dim += 8) {
      for (const int64_t dim_v : {int64_t{64}, dim, catalog::kSplitDMaxHeadDim}) {
        const catalog::SplitDTile* tile = catalog::split_d_tile(dim, dim_v, limit);
        for (const catalog::SplitDTile& other : catalog::split_d_tiles(dim_v)) {
          if (tile != nullptr && other == *tile) break;
          EXPECT_GT(other.smem_bytes(dim), limit) << dim << " " << dim_v;
        }
        if (tile == nullptr) continue;
        EXPECT_GE(tile->out_dim, dim_v);
        EXPECT_LE(tile->smem_bytes(dim), limit);
        EXPECT_EQ(tile->row_warps() * tile->key_warps() * tile->slices(), catalog::kSplitDWarps);
      }
      const catalog::SplitDBackwardTilePair* backward = catalog::split_d_backward_tile(dim, limit);
      if (backward == nullptr) continue;
      EXPECT_GE(backward->head_dim(), dim);
      EXPECT_LE(backward->smem_bytes(), limit);
      for (const catalog::SplitDBackwardTile& side : {backward->keys, backward->rows}) {
        EXPECT_EQ(side.score_tiles() * side.warp_resident(), side.resident);
        EXPECT_LE(side.exchange().targets(), side.exchange().sources) << dim;
        EXPECT_TRUE(side.buffers >= 2 && side.buffers <= 4) << dim;
      }
    }
  }
}

TEST(SplitDTiles, ShareOutTheirScores) {
  for (const catalog::SplitDTiles& tiles : catalog::kSplitDTiles) {
    for (const catalog::SplitDTile& tile : tiles) {
      EXPECT_LE(tile.smem_bytes(tile.out_dim), 227 * kKib) << tile.out_dim;
      EXPECT_TRUE(tile.keys % tile.warp_keys == 0 && tile.rows % tile.warp_rows == 0) << tile.out_dim;
      EXPECT_TRUE(tile.keys % 16 == 0 && tile.probability_columns() % 32 == 0) << tile.out_dim;
      EXPECT_EQ(tile.slots() * tile.exchange().kept() * 8, tile.keys) << tile.out_dim;
    }
  }
}

TEST(SplitDTiles, CoverEveryHeadDimFromAmpereDataCentreGpusOn) {
  for (const int64_t limit : {163 * kKib, 227 * kKib}) {
    for (int64_t dim = 8; dim <= catalog::kSplitDMaxHeadDim; dim += 8) {
      EXPECT_NE(catalog::split_d_tile(dim, dim, limit), nullptr) << dim;
      EXPECT_NE(catalog::split_d_tile(dim, catalog::kSplitDMaxHeadDim, limit), nullptr) << dim;
      EXPECT_NE(catalog::split_d_backward_tile(dim, limit), nullptr) << dim;
    }
  }
  EXPECT_NE(catalog::split_d_tile(512, 512, 64 * kKib), nullptr);
  EXPECT_EQ(catalog::split_d_tile(1024, 1024, 99 * kKib), nullptr);
}

// ldmatrix reads 16 bytes at the same chunk of eight consecutive rows at once: they must lie in eight different groups
// of four banks. 16-byte copies write eight consecutive chunks of a row at once: the same.
template <int kColumns>
void expect_no_conflicts() {
  using Swizzle = tile::Swizzle<kColumns>;
  constexpr int kGroups = 8;
  const auto group = [](int row, int chunk) { return Swizzle::offset(row, chunk) / tile::kChunkElems % kGroups; };
  std::set<int> offsets;
  for (int row = 0; row < 2 * kGroups; ++row) {
    for (int chunk = 0; chunk < Swizzle::kChunks; ++chunk) {
      EXPECT_TRUE(offsets.insert(Swizzle::offset(row, chunk)).second) << "two chunks in one place";
      EXPECT_LT(Swizzle::offset(row, chunk), 2 * kGroups * kColumns);
    }
  }
  for (int first = 0; first < 2 * kGroups; first += kGroups) {
    for (int chunk = 0; chunk < Swizzle::kChunks; ++chunk) {
      std::set<int> groups;
      for (int row = first; row < first + kGroups; ++row) groups.insert(group(row, chunk));
      EXPECT_EQ(groups.size(), size_t{kGroups}) << kColumns << " columns, chunk " << chunk;
    }
  }
}

TEST(Swizzle, HasNoBankConflicts) {
  expect_no_conflicts<32>();
  expect_no_conflicts<64>();
  expect_no_conflicts<96>();
  expect_no_conflicts<128>();
  expect_no_conflicts<192>();
  expect_no_conflicts<256>();
}

TEST(Divisor, IsFloorOfTheQuotient) {
  constexpr int64_t kLast = (int64_t{1} << 31) - 1;
  for (const int64_t d :
       {int64_t{1}, int64_t{2}, int64_t{3}, int64_t{7}, int64_t{64}, int64_t{65}, int64_t{1000}, int64_t{1056},
        int64_t{46341}, int64_t{65535}, int64_t{65537}, kLast / 2, kLast / 2 + 1, kLast - 1, kLast, kLast + 1}) {
    const cuda::Divisor by = cuda::Divisor::of(d);
    for (int64_t quotient = 0; quotient <= kLast / d; quotient += 1 + kLast / d / 5000) {
      for (const int64_t n : {quotient * d - 1, quotient * d, quotient * d + 1, kLast - quotient}) {
        if (n < 0 || n > kLast) continue;
        ASSERT_EQ(by.divide(static_cast<unsigned>(n)), n / d) << n << " / " << d;
      }
    }
  }
}

}  // namespace
}  // namespace plait
