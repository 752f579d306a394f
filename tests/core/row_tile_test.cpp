// Tensor maps of row tiles on the host: which elements a copy brings, for all modes and layouts.
#include "cuda/sm90/row_tile.hpp"

#include <gtest/gtest.h>

#include <array>
#include <climits>
#include <random>
#include <vector>

#include "cuda/sm90/prefill/key_ranges.hpp"
#include "cuda/sm90/prefill/layouts.hpp"

namespace plait {
namespace {

using cuda::sm90::kMapRank;
using cuda::sm90::row_tile_layout;
using cuda::sm90::RowTileLayout;

constexpr int kNothing = -1;

struct Case {
  AttentionProblem problem;
  CanonicalTensor tensor;
  int64_t rows, heads, batch;
};

// A layout of [batch, heads, rows, P, 64] by `kind`: bhsd, bshd, or bhsd with gaps.
Case make_case(HeadMode mode, int64_t pseudo_heads, int64_t rows, int64_t heads, int64_t batch, int kind) {
  static char data alignas(16);
  Case c{{}, {}, rows, heads, batch};
  c.problem.mode = mode, c.problem.pseudo_heads = pseudo_heads;
  CanonicalTensor& t = c.tensor;
  t.data = &data, t.dim_stride = 1, t.pseudo_stride = kind == 2 ? 72 : 64;
  const int64_t token = pseudo_heads * t.pseudo_stride, gap = kind == 2 ? 16 : 0;
  t.seq_stride = kind == 1 ? heads * token : token + gap;
  t.head_stride = kind == 1 ? token : rows * t.seq_stride + gap;
  t.batch_stride = kind == 1 ? rows * t.seq_stride : heads * t.head_stride;
  return c;
}

int64_t offset_of(const Case& c, int64_t batch, int64_t head, int64_t row, int64_t pass) {
  const int64_t per = c.problem.rows_per_position();
  const CanonicalTensor& t = c.tensor;
  return batch * t.batch_stride + head * t.head_stride + row / per * t.seq_stride +
         (per > 1 ? row % per : pass) * t.pseudo_stride;
}

// Offsets of the rows that a copy brings, in the order in which it writes them; kNothing: zeros.
std::vector<int64_t> copied(const RowTileLayout& layout, const int (&from)[kMapRank]) {
  std::vector<int64_t> rows;
  std::array<int, kMapRank> at{};
  const auto step = [&] {
    for (size_t d = 1; d < at.size(); ++d) {
      if (++at[d] < layout.box[d]) return true;
      at[d] = 0;
    }
    return false;
  };
  do {
    int64_t offset = from[0] - layout.ahead;
    bool inside = true;
    for (size_t d = 1; d < at.size(); ++d) {
      const int64_t x = from[d] + at[d];
      inside &= x >= 0 && x < layout.extents[d];
      offset += x * layout.strides[d - 1];
    }
    rows.push_back(inside ? offset : kNothing);
  } while (step());
  return rows;
}

void check(const Case& c, int tile_rows, std::mt19937& random) {
  const AttentionProblem& p = c.problem;
  const auto layout = row_tile_layout(p, c.tensor, 64, c.rows, c.heads, c.batch, tile_rows);
  ASSERT_TRUE(layout.has_value());
  const int per = layout->index.per, all = static_cast<int>(c.rows * p.rows_per_position());
  const auto pick = [&](int64_t low, int64_t high) {
    return static_cast<int>(std::uniform_int_distribution<int64_t>(low, high)(random));
  };
  for (int i = 0; i < 50; ++i) {
    const int batch = pick(0, c.batch - 1), head = pick(0, c.heads - 1);
    const int pass = pick(0, p.joint_passes() - 1);
    const int end = pick(1, all / per) * per, rows = pick(1, std::min(end, tile_rows) / per) * per;
    const auto got = copied(*layout, layout->index.coordinates(0, rows, end, head, batch, pass).at);
    ASSERT_EQ(got.size(), static_cast<size_t>(tile_rows));
    for (int row = 0; row < tile_rows; ++row) {
      const int64_t wanted = row < rows ? offset_of(c, batch, head, end - rows + row, pass) : kNothing;
      ASSERT_EQ(got[static_cast<size_t>(row)], wanted) << row << " of " << rows << " before " << end;
    }
  }
}

TEST(RowTile, CopiesBringTheRowsAndZeros) {
  std::mt19937 random(1);
  for (const int64_t pseudo_heads : {1, 2, 3, 4, 5, 8, 16}) {
    for (const HeadMode mode : {HeadMode::kPlain, HeadMode::kJoint, HeadMode::kInterleaved}) {
      if (mode == HeadMode::kPlain && pseudo_heads > 1) continue;
      for (const int64_t rows : {1, 2, 37, 300}) {
        for (const int64_t heads : {1, 3}) {
          for (const int64_t batch : {1, 2, 5}) {
            for (const int kind : {0, 1, 2}) {
              for (const int tile_rows : {128, 192, 80}) {
                const bool gaps = kind == 2 || (kind == 1 && heads > 1);
                const bool apart = mode == HeadMode::kInterleaved && pseudo_heads > 1 && rows > 1 && gaps;
                const bool folds = batch > 1 && pseudo_heads > 1 && (apart || mode == HeadMode::kJoint);
                if ((apart && tile_rows % pseudo_heads != 0) || (folds && kind == 2)) continue;
                SCOPED_TRACE(testing::Message()
                             << "P " << pseudo_heads << " mode " << static_cast<int>(mode) << " rows " << rows
                             << " heads " << heads << " batch " << batch << " kind " << kind << " tile " << tile_rows);
                check(make_case(mode, pseudo_heads, rows, heads, batch, kind), tile_rows, random);
              }
            }
          }
        }
      }
    }
  }
}

// Heads of a key head as rows of one tile, position by position.
TEST(RowTile, HeadsAreRows) {
  std::mt19937 random(2);
  for (const int64_t group : {2, 4, 8}) {
    for (const int kind : {0, 1}) {
      for (const int64_t batch : {1, 3}) {
        const Case c = make_case(HeadMode::kPlain, 1, 37, 2 * group, batch, kind);
        AttentionProblem p = c.problem;
        p.batch = batch, p.heads_q = 2 * group, p.heads_kv = 2, p.seqlen_q = c.rows, p.seqlen_kv = 100;
        p.head_dim = p.head_dim_v = 64;
        AttentionTensors t;
        t.q = t.k = t.v = c.tensor;
        const auto layouts = cuda::sm90::PrefillLayouts::of(p, t, 0, static_cast<int>(group));
        ASSERT_TRUE(layouts.complete());
        ASSERT_EQ(layouts.group, group);
        const int tile_rows = layouts.q->index.tile_rows, all = static_cast<int>(c.rows * group);
        for (int begin = 0; begin < all; begin += tile_rows) {
          const int rows = std::min(tile_rows, all - begin);
          const auto index = static_cast<int64_t>(std::uniform_int_distribution<int>(0, 1)(random));
          const int last = static_cast<int>(batch) - 1;
          const auto got = copied(
              *layouts.q, layouts.q->index.coordinates(0, rows, begin + rows, static_cast<int>(index), last, 0).at);
          for (int row = 0; row < tile_rows; ++row) {
            const int64_t at = begin + row;
            const int64_t wanted =
                row < rows ? offset_of(c, last, index * group + at % group, at / group, 0) : kNothing;
            ASSERT_EQ(got[static_cast<size_t>(row)], wanted) << row << " of " << rows << " from " << begin;
          }
        }
      }
    }
  }
}

// Every key of a row tile is in one range; even ranges are whole tiles and differ by one; fixed ones depend on the
// sequence's keys alone.
TEST(RowTile, RangesCutTheKeys) {
  constexpr int kTileKeys = 80;
  AttentionProblem p;
  p.batch = 1, p.heads_q = 2, p.heads_kv = 1, p.seqlen_q = 64, p.head_dim_v = 64;
  for (const int begin : {0, 7, 1000}) {
    for (const int keys : {1, 79, 80, 81, 800, 12345}) {
      for (const int fixed : {0, 1, 33, 80, 1000}) {
        for (int count : {1, 2, 3, 7, 132}) {
          if (fixed > 0) count = (begin + keys + fixed - 1) / fixed;
          const auto params = cuda::sm90::range_params(p, {count, fixed}, 1, 2);
          int64_t next = begin;
          int least = INT_MAX, most = 0;
          for (int range = 0; range < count; ++range) {
            int64_t from = begin;
            int rest = keys;
            params.cut(range, kTileKeys, from, rest);
            if (rest == 0) {
              least = 0;
              continue;
            }
            ASSERT_EQ(from, next) << range << " of " << count << " of " << fixed;
            next = from + rest;
            if (fixed > 0) {
              ASSERT_EQ(from / fixed, range);
              ASSERT_EQ((next - 1) / fixed, range);
            } else {
              ASSERT_EQ((from - begin) % kTileKeys, 0);
              const int tiles = (rest + kTileKeys - 1) / kTileKeys;
              least = std::min(least, tiles), most = std::max(most, tiles);
            }
          }
          ASSERT_EQ(next, begin + keys) << count << " of " << fixed;
          if (fixed == 0) {
            ASSERT_LE(most - least, 1);
          }
        }
      }
    }
  }
}

// Where the copy engine cannot read them so, each head has row tiles of its own.
TEST(RowTile, HeadsThatCannotBeRowsStayApart) {
  Case c = make_case(HeadMode::kPlain, 1, 37, 8, 2, 0);
  c.tensor.batch_stride += 8;  // no whole number of rows
  AttentionProblem p = c.problem;
  p.batch = 2, p.heads_q = 8, p.heads_kv = 2, p.seqlen_q = c.rows, p.seqlen_kv = 37, p.head_dim = p.head_dim_v = 64;
  AttentionTensors t;
  t.q = t.k = t.v = c.tensor;
  const auto layouts = cuda::sm90::PrefillLayouts::of(p, t, 0, 4);
  EXPECT_TRUE(layouts.complete());
  EXPECT_EQ(layouts.group, 1);
}

TEST(RowTile, NoCopyLiesBesideTheColumns) {
  const Case c = make_case(HeadMode::kPlain, 1, 300, 3, 2, 0);
  for (const auto& [dim, blocks] : {std::pair{8, 1}, {64, 1}, {72, 2}, {128, 2}, {136, 3}, {256, 4}}) {
    const auto layout = row_tile_layout(c.problem, c.tensor, dim, c.rows, c.heads, c.batch, 128);
    ASSERT_TRUE(layout.has_value());
    EXPECT_EQ(layout->index.column_blocks, blocks) << dim;
    EXPECT_EQ(layout->extents[0], dim);
  }
}

TEST(RowTile, RefusesWhatTheCopyEngineCannotRead) {
  const auto maps = [](const Case& c, int tile_rows = 128) {
    return row_tile_layout(c.problem, c.tensor, 64, c.rows, c.heads, c.batch, tile_rows).has_value();
  };
  const Case plain = make_case(HeadMode::kPlain, 1, 300, 3, 2, 0);
  EXPECT_TRUE(maps(plain));
  Case c = plain;
  c.tensor.data = nullptr;
  EXPECT_FALSE(maps(c));
  c = plain, c.tensor.dim_stride = 2;
  EXPECT_FALSE(maps(c));
  c = plain, c.tensor.seq_stride = 60;
  EXPECT_FALSE(maps(c));
  c = plain, c.tensor.head_stride = 0;
  EXPECT_FALSE(maps(c));
  c.heads = 1;  // then its stride says nothing
  EXPECT_TRUE(maps(c));
  c = plain, c.tensor.batch_stride = -64;
  EXPECT_FALSE(maps(c));
  c = make_case(HeadMode::kJoint, 4, 300, 3, 2, 0);
  EXPECT_TRUE(maps(c));
  c.tensor.batch_stride += 64;  // not a whole number of rows
  EXPECT_FALSE(maps(c));
  c = make_case(HeadMode::kInterleaved, 3, 300, 3, 1, 1);
  EXPECT_TRUE(maps(c, 192));
  EXPECT_FALSE(maps(c, 128));  // tokens of three rows, apart
  EXPECT_TRUE(maps(make_case(HeadMode::kInterleaved, 3, 300, 3, 1, 0)));
}

}  // namespace
}  // namespace plait
