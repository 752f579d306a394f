// RowMask against the contract's definition, key by key, over thousands of shapes and options.
#include "core/mask.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace plait {
namespace {

struct Case {
  int64_t q_len, kv_len;
  bool causal;
  int64_t left, right, pseudo;
  HeadMode mode;
  PseudoMask mask;

  AttentionProblem problem() const {
    AttentionProblem problem;
    problem.mode = mode;
    problem.mask = mask;
    problem.pseudo_heads = pseudo;
    problem.causal = causal;
    problem.window_left = left;
    problem.window_right = right;
    return problem;
  }
  int64_t per() const { return mode == HeadMode::kInterleaved ? pseudo : 1; }
};

// The definition: does virtual row r see virtual key j? Written from the contract's text alone.
bool sees(const Case& c, int64_t r, int64_t j) {
  const int64_t off = (c.kv_len - c.q_len) * c.per();
  if (c.causal) {
    if (c.mode == HeadMode::kInterleaved && c.mask == PseudoMask::kToken) {
      int64_t token = 0;  // floor((r + off) / P) by counting
      while ((token + 1) * c.pseudo <= r + off) ++token;
      while (token * c.pseudo > r + off) --token;
      if (j >= (token + 1) * c.pseudo) return false;
    } else if (j > r + off) {
      return false;
    }
  }
  if (c.left >= 0 && j < r + off - c.left) return false;
  if (c.right >= 0 && j > r + off + c.right) return false;
  return true;
}

void check(const Case& c) {
  const RowMask mask = RowMask::of(c.problem(), c.q_len, c.kv_len);
  const NarrowRowMask narrow = NarrowRowMask::of(c.problem(), c.q_len, c.kv_len);
  const int64_t rows = c.q_len * c.per(), keys = c.kv_len * c.per();
  ASSERT_EQ(mask.row_count(), rows);
  std::vector<std::vector<bool>> visible(rows, std::vector<bool>(keys));
  for (int64_t r = 0; r < rows; ++r) {
    const Interval interval = mask.row(r);
    ASSERT_EQ(narrow.row(static_cast<int32_t>(r)), interval);
    for (int64_t j = 0; j < keys; ++j) {
      visible[r][j] = sees(c, r, j);
      ASSERT_EQ(visible[r][j], interval.lo <= j && j < interval.hi) << "row " << r << " key " << j;
    }
  }
  for (const int64_t tile : {3, 4, 8}) {
    int64_t visits = 0;
    for (int64_t r0 = 0; r0 < rows; r0 += tile) {
      const int64_t r1 = std::min(r0 + tile, rows);
      const Interval any = mask.rows(r0, r1);
      for (int64_t j0 = 0; j0 < keys; j0 += tile) {
        const int64_t j1 = std::min(j0 + tile, keys);
        int64_t seen = 0;
        for (int64_t r = r0; r < r1; ++r) {
          for (int64_t j = j0; j < j1; ++j) seen += visible[r][j];
        }
        const TileClass expected = seen == 0                       ? TileClass::kNone
                                   : seen == (r1 - r0) * (j1 - j0) ? TileClass::kFull
                                                                   : TileClass::kPartial;
        ASSERT_EQ(mask.classify(r0, r1, j0, j1), expected) << r0 << " " << j0 << " tile " << tile;
        ASSERT_EQ(seen > 0, !any.empty() && any.lo < j1 && any.hi > j0);
        visits += seen > 0;
      }
    }
    ASSERT_EQ(visited_tiles(mask, tile, tile), visits);
  }
}

TEST(RowMask, EqualsTheDefinitionEverywhere) {
  int cases = 0;
  const int64_t lengths[] = {0, 1, 2, 5, 8, 13};
  const int64_t windows[] = {-1, 0, 1, 3, 7, 100};
  for (const int64_t q_len : lengths) {
    for (const int64_t kv_len : lengths) {
      for (const bool causal : {false, true}) {
        for (const int64_t left : windows) {
          for (const int64_t right : {int64_t{-1}, int64_t{0}, int64_t{2}}) {
            const auto run = [&](int64_t pseudo, HeadMode mode, PseudoMask mask) {
              const Case c{q_len, kv_len, causal, left, right, pseudo, mode, mask};
              SCOPED_TRACE(testing::Message() << "Sq " << q_len << " Sk " << kv_len << " causal " << causal
                                              << " window " << left << "," << right << " P " << pseudo << " mode "
                                              << static_cast<int>(mode) << " mask " << static_cast<int>(mask));
              check(c);
              ++cases;
            };
            run(1, HeadMode::kPlain, PseudoMask::kFlat);
            run(3, HeadMode::kJoint, PseudoMask::kFlat);
            for (const PseudoMask mask : {PseudoMask::kFlat, PseudoMask::kToken}) {
              run(2, HeadMode::kInterleaved, mask);
              run(3, HeadMode::kInterleaved, mask);
            }
            if (testing::Test::HasFatalFailure()) return;
          }
        }
      }
    }
  }
  EXPECT_GT(cases, 5000);
}

TEST(RowMask, WindowOf1KAt32KVisitsAtMostAnEighthOfTheCausalTiles) {
  const int64_t n = 32768;
  const int64_t causal = visited_tiles(RowMask(n, n, true, -1, -1), 128, 128);
  const int64_t windowed = visited_tiles(RowMask(n, n, true, 1023, -1), 128, 128);
  EXPECT_EQ(causal, 256 * 257 / 2);
  EXPECT_LE(windowed * 8, causal);
}

TEST(RowMask, HugeLengthsStayInside64Bits) {
  const int64_t n = int64_t{1} << 40;
  const RowMask mask(n, n, true, int64_t{1} << 48, int64_t{1} << 48);
  EXPECT_EQ(mask.row(n - 1), (Interval{0, n}));
  EXPECT_EQ(mask.row(0), (Interval{0, 1}));
}

TEST(RowMask, TheLargestNarrowMaskStaysInside32Bits) {
  const auto n = static_cast<int32_t>(kMostNarrowRows);
  for (const auto& [rows, keys] : {std::pair(n, n), {n, 1}, {1, n}}) {
    for (const int64_t window : {int64_t{0}, int64_t{n}, int64_t{1} << 40, INT64_MAX}) {
      const NarrowRowMask narrow(rows, keys, false, window, window);
      const RowMask wide(rows, keys, false, std::min(window, int64_t{1} << 50), std::min(window, int64_t{1} << 50));
      for (const int32_t row : {0, rows / 2, rows - 1}) EXPECT_EQ(narrow.row(row), wide.row(row)) << window;
    }
  }
}

}  // namespace
}  // namespace plait
