// Which few alike units decode runs in clusters of thread blocks: what is chosen fits the GPU, and is what was measured
// to be fast.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "cuda/mma/decode/clusters.hpp"
#include "cuda/mma/decode/workspace.hpp"

namespace plait::cuda::mma {
namespace {

using enum catalog::ClusterBlock;

DeviceInfo h200() { return DeviceInfo::by_name("h200"); }

struct Sizes {
  int64_t heads_q, heads_kv, keys, head_dim = 128, page_size = 0, seqlen_q = 1, batch = 1;
};

AttentionProblem problem(const Sizes& s) {
  AttentionProblem p;
  p.batch = s.batch, p.heads_q = s.heads_q, p.heads_kv = s.heads_kv;
  p.seqlen_q = s.seqlen_q, p.seqlen_kv = s.keys, p.head_dim = p.head_dim_v = s.head_dim;
  p.cached = s.page_size > 0, p.page_size = s.page_size;
  return p;
}
DecodeLayout layout(const Sizes& s) { return {problem(s), h200()}; }

TEST(DecodeClusters, FitWhatWasAskedFor) {
  for (const int64_t head_dim : {32, 40, 64, 96, 128, 192, 256}) {
    for (int64_t heads_kv = 1; heads_kv <= 140; heads_kv += heads_kv < 20 ? 1 : 30) {
      for (const int64_t group : {1, 3, 4, 7, 16}) {
        for (int64_t keys = 1; keys <= 1 << 20; keys *= 8) {
          for (const int64_t page_size : {0, 16}) {
            const DecodeLayout l = layout({group * heads_kv, heads_kv, keys, head_dim, page_size});
            const DecodeClusters c = l.clusters;
            if (!c.any()) continue;
            const int64_t several = c.clusters_log2 > 0 ? 1 : 0;
            EXPECT_EQ(l.workers, heads_kv * l.splits);
            EXPECT_LE(l.workers, h200().multiprocessors);
            EXPECT_LE(l.cluster_smem_bytes, h200().smem_per_block_bytes);
            EXPECT_GE(int64_t{1} << (c.blocks_log2 + l.slice_log2), group * l.bucket / kVector);
            EXPECT_EQ(l.arrivals, several * heads_kv << c.blocks_log2);
            EXPECT_EQ(l.partials, several * heads_kv << c.clusters_log2);
            EXPECT_EQ(l.out_bytes, aligned(l.partials * group * l.bucket * 4));
            EXPECT_EQ(l.stats_bytes, aligned(l.partials * group * l.bucket / kVector * 8));
            EXPECT_LE(c.spread ? 2 * heads_kv : 0, 8);  // of 16 blocks, each in its own group of multiprocessors
          }
        }
      }
    }
  }
}

// Up to 16 rows: a block with a multiprocessor of its own has room for all it is sent.
TEST(DecodeClusters, OfWideBlocksAlwaysFit) {
  for (const int64_t bucket : {32, 64, 96, 128, 192, 256}) {
    for (int64_t rows = 1; rows <= catalog::DecodeTile::kBlockRows; ++rows) {
      const ClusterWork work{1, rows, bucket, 1e6, false, 264, h200()};
      for (const DecodeClusters c : {DecodeClusters{3, 0, kWide}, {4, 0, kWide}}) {
        EXPECT_TRUE(work.fits(c)) << bucket << " " << rows;
      }
    }
  }
}

// Microseconds of calls with one query (README of mma/decode), by clusters: what is chosen was the fastest, or all but.
// Long rings at the version before, whose four warps were 0.1 us faster.
struct Measured {
  DecodeClusters clusters;
  double us;
};
constexpr DecodeClusters kOf8{3}, kLong8{3, 0, kLong}, kWide8{3, 0, kWide}, kWide8Twice{3, 1, kWide},
    kWide8Times4{3, 2, kWide}, kWide8Times8{3, 3, kWide}, kWide16{4, 0, kWide}, kWide16Spread{4, 0, kWide, true};

TEST(DecodeClusters, AreTheFastestOfThoseMeasured) {
  constexpr double kAllBut = 1.03;
  constexpr int64_t k1K = 1024;
  const std::vector<std::pair<Sizes, std::vector<Measured>>> cases = {
      {{32, 8, k1K}, {{kOf8, 4.71}, {kLong8, 4.53}, {kWide8, 4.91}}},
      {{32, 8, 2 * k1K}, {{kOf8, 5.88}, {kLong8, 5.62}, {kWide8, 6.02}}},
      {{32, 8, 8 * k1K}, {{kOf8, 12.16}, {kLong8, 11.46}, {kWide8, 11.35}}},
      {{32, 8, 32 * k1K}, {{kOf8, 36.65}, {kLong8, 34.55}, {kWide8, 33.46}}},
      {{28, 4, k1K},
       {{kOf8, 4.87}, {kLong8, 4.82}, {kWide8, 4.66}, {kWide16, 4.90}, {kWide16Spread, 4.89}, {kWide8Twice, 7.12}}},
      {{28, 4, 2 * k1K}, {{kOf8, 5.95}, {kWide8, 5.44}, {kWide16, 5.38}, {kWide16Spread, 5.36}}},
      {{28, 4, 4 * k1K}, {{kOf8, 7.88}, {kWide8, 6.94}, {kWide16, 6.79}, {kWide16Spread, 6.50}}},
      {{28, 4, 8 * k1K}, {{kWide8, 9.55}, {kWide16, 8.90}, {kWide16Spread, 8.13}, {kWide8Twice, 10.29}}},
      {{28, 4, 32 * k1K}, {{kWide8, 24.84}, {kWide16, 23.65}, {kWide16Spread, 19.35}, {kWide8Twice, 21.68}}},
      {{24, 3, 32 * k1K}, {{kWide16, 23.59}, {kWide16Spread, 17.92}, {kWide8Twice, 18.58}, {kWide8Times4, 18.62}}},
      {{16, 2, 8 * k1K}, {{kWide8, 9.26}, {kWide16, 7.76}, {kWide8Twice, 9.57}, {kWide8Times4, 9.00}}},
      {{16, 2, 16 * k1K}, {{kWide8, 14.35}, {kWide16, 11.05}, {kWide8Twice, 12.20}, {kWide8Times4, 10.47}}},
      {{16, 2, 128 * k1K}, {{kWide8, 84.42}, {kWide16, 57.98}, {kWide8Twice, 47.65}, {kWide8Times4, 36.49}}},
      {{16, 1, k1K}, {{kWide8, 5.38}, {kWide16, 5.85}, {kWide8Twice, 7.58}}},
      {{16, 1, 8 * k1K}, {{kWide16, 8.37}, {kWide8Twice, 10.14}, {kWide8Times4, 8.93}, {kWide8Times8, 9.38}}},
      {{16, 1, 32 * k1K}, {{kWide16, 18.00}, {kWide8Twice, 17.67}, {kWide8Times4, 13.03}, {kWide8Times8, 12.10}}},
      {{16, 1, 128 * k1K}, {{kWide16, 57.42}, {kWide8Times4, 28.29}, {kWide8Times8, 23.58}}},
      {{30, 5, 8 * k1K}, {{kOf8, 11.83}, {kWide8, 9.72}, {kWide16, 9.02}, {kWide8Twice, 11.43}}},
      {{42, 7, 8 * k1K}, {{kOf8, 12.25}, {kLong8, 11.79}, {kWide8, 10.81}, {kWide16, 10.87}, {kWide8Twice, 12.77}}},
      {{56, 14, 8 * k1K}, {{kOf8, 16.95}, {kWide8, 16.74}}},
      {{32, 8, 8 * k1K, 64}, {{kOf8, 9.50}, {kLong8, 9.76}, {kWide8, 8.01}}},
      {{28, 4, 8 * k1K, 64}, {{kOf8, 9.47}, {kWide8, 7.72}, {kWide16, 6.57}, {kWide16Spread, 6.54}}},
      {{28, 4, 8 * k1K, 256}, {{kWide8, 17.11}, {kWide16, 14.72}, {kWide16Spread, 13.62}, {kWide8Twice, 15.67}}},
      {{32, 8, 8 * k1K, 128, 16}, {{kOf8, 16.62}, {kLong8, 16.72}, {kWide8, 13.32}}},
      {{28, 4, 32 * k1K, 128, 16}, {{kWide8, 37.07}, {kWide16, 24.95}, {kWide16Spread, 22.18}, {kWide8Twice, 24.46}}},
      {{32, 8, 8 * k1K, 128, 0, 4}, {{kOf8, 13.80}, {kLong8, 13.05}, {kWide8, 12.39}}},
      {{32, 8, k1K, 128, 0, 4}, {{kOf8, 6.32}, {kWide8, 5.99}}},
  };
  for (const auto& [sizes, measured] : cases) {
    const DecodeClusters chosen = layout(sizes).clusters;
    const auto found = std::ranges::find(measured, chosen, &Measured::clusters);
    ASSERT_NE(found, measured.end()) << sizes.heads_q << "/" << sizes.heads_kv << " " << sizes.keys << ": "
                                     << chosen.blocks_log2 << " " << chosen.clusters_log2 << " "
                                     << static_cast<int>(chosen.block);
    EXPECT_LE(found->us, kAllBut * std::ranges::min(measured, {}, &Measured::us).us)
        << sizes.heads_q << "/" << sizes.heads_kv << " " << sizes.keys;
  }
}

// Many units, and parts of the keys so large that a cluster more or less idle costs more than merging.
TEST(DecodeClusters, AreLeftOutWhereEvenSharesAreFaster) {
  EXPECT_EQ(layout({32, 32, 8192}).clusters, DecodeClusters{2});
  EXPECT_FALSE(layout({32, 32, 1 << 20}).clusters.any());
  EXPECT_FALSE(layout({32, 8, 8192, 128, 0, 1, 64}).clusters.any());
  EXPECT_FALSE((DecodeLayout{problem({32, 8, 8192}), DeviceInfo::by_name("a100")}).clusters.any());
}

}  // namespace
}  // namespace plait::cuda::mma
