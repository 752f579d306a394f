// The order in which the blocks of cuda_sm90's prefill take row tiles: every one comes once, and all blocks get the
// same.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "catalog/sm90_tiles.hpp"
#include "core/rounding.hpp"
#include "cuda/sm90/prefill/order.hpp"

namespace plait::cuda::sm90 {
namespace {

constexpr int kMultiprocessors = 132;

AttentionProblem dense(int64_t batch, int64_t heads_q, int64_t heads_kv, int64_t seqlen, int64_t head_dim,
                       bool causal) {
  AttentionProblem p;
  p.batch = batch;
  p.heads_q = heads_q;
  p.heads_kv = heads_kv;
  p.seqlen_q = p.seqlen_kv = seqlen;
  p.head_dim = p.head_dim_v = head_dim;
  p.causal = causal;
  return p;
}

// The places of all row tiles, block by block.
std::vector<std::vector<PrefillOrder::Place>> places(const AttentionProblem& p, int rows, unsigned blocks) {
  const auto works = static_cast<unsigned>(tiles_bound(p, rows, false) * p.heads_q);
  const RowTileOrder order = row_tile_order(p, rows, 0, kMultiprocessors, false);
  std::vector<std::vector<PrefillOrder::Place>> found(blocks);
  for (unsigned block = 0; block < blocks; ++block) {
    for (unsigned round = 0; round * blocks < works; ++round) {
      const unsigned index = row_tile_of_round(round, block, blocks);
      if (index < works) found[block].push_back(order.place(index));
    }
  }
  return found;
}

TEST(RowTileOrder, EveryRowTileOfEveryHeadComesOnce) {
  std::mt19937 random(20);
  const auto any = [&](int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(random); };
  for (int i = 0; i < 400; ++i) {
    const int64_t group = any(1, 6), heads_kv = any(1, 9);
    AttentionProblem p =
        dense(any(1, 70), heads_kv * group, heads_kv, any(1, i % 2 == 0 ? 700 : 5000), 64 * any(1, 4), any(0, 1) == 1);
    if (i % 5 == 0) p.window_left = any(0, 600);
    p.packed = i % 7 == 0;  // then a place is a tile of all sequences
    p.cached = i % 7 == 1;
    const int rows = static_cast<int>(64 * any(1, 4));
    const int64_t batch = p.packed ? 1 : p.batch, tiles = tiles_bound(p, rows, false) / batch;
    std::vector<int> times(batch * p.heads_q * tiles);
    const auto blocks = static_cast<unsigned>(std::min<int64_t>(kMultiprocessors, batch * p.heads_q * tiles));
    for (const auto& block : places(p, rows, blocks)) {
      for (const PrefillOrder::Place& at : block) {
        ASSERT_LT(at.unit, batch * p.heads_kv);
        ASSERT_TRUE(at.head_in_group >= 0 && at.head_in_group < group && at.tile >= 0 && at.tile < tiles);
        ++times[(at.unit * group + at.head_in_group) * tiles + at.tile];
      }
    }
    for (const int n : times) {
      ASSERT_EQ(n, 1) << "batch " << p.batch << ", heads " << p.heads_q << "/" << heads_kv << ", " << p.seqlen_q
                      << " rows in tiles of " << rows << ", causal " << p.causal << ", window " << p.window_left
                      << ", packed " << p.packed << ", cached " << p.cached;
    }
  }
}

// Work of a causal row tile grows with its place in the sequence. Two rounds and more: no block may have much more than
// the mean. (Where row tiles are alike, blocks get the same if every row tile comes once.)
TEST(RowTileOrder, BlocksGetTheSame) {
  for (const catalog::Sm90PrefillTile& tile : catalog::kSm90PrefillTiles) {
    for (const int64_t seqlen : {512, 1024, 2048, 4096, 8192, 16384}) {
      const int64_t heads = 2048 / tile.head_dim;
      const AttentionProblem p = dense(16384 / seqlen, heads, heads, seqlen, tile.head_dim, true);
      double most = 0, sum = 0;
      for (const auto& block : places(p, tile.rows(), kMultiprocessors)) {
        double work = 0;
        for (const PrefillOrder::Place& at : block) work += at.tile + 1;
        most = std::max(most, work), sum += work;
      }
      const double rounds = static_cast<double>(tiles_bound(p, tile.rows(), false) * heads) / kMultiprocessors;
      const double whole = std::ceil(rounds) / rounds;  // what the last round costs where row tiles are alike
      EXPECT_LE(most / (sum / kMultiprocessors), std::max(1.05, whole))
          << "head dim " << tile.head_dim << ", " << tile.rows() << " rows, " << seqlen;
    }
  }
}

}  // namespace
}  // namespace plait::cuda::sm90
