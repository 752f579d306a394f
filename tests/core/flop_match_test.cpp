// The FLOP-matched window against published numbers and a brute-force tile count.
#include <gtest/gtest.h>

#include "plait/error.hpp"
#include "plait/iha.hpp"

namespace plait {
namespace {

// Tiles that hold at least one visible (row, key) pair, counted pair by pair along tile borders.
int64_t brute_visits(int64_t rows, int64_t left, int64_t tile) {
  int64_t visits = 0;
  for (int64_t r0 = 0; r0 < rows; r0 += tile) {
    for (int64_t j0 = 0; j0 <= r0; j0 += tile) {
      bool seen = false;
      for (int64_t r = r0; r < std::min(r0 + tile, rows) && !seen; ++r) {
        const int64_t lo = left < 0 ? 0 : std::max<int64_t>(0, r - left);
        seen = std::max(lo, j0) <= std::min(r, std::min(j0 + tile, rows) - 1);
      }
      visits += seen;
    }
  }
  return visits;
}

TEST(FlopMatch, PublishedWindows) {
  const int64_t lengths[] = {8192, 16384, 32768, 65536};
  const int64_t joint[] = {1023, 2049, 4225, 8577}, interleaved[] = {1023, 2047, 4095, 8193};
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(flop_matched_window(lengths[i], 4).left, joint[i]);
    EXPECT_EQ(flop_matched_window(lengths[i], 4, HeadMode::kInterleaved).left, interleaved[i]);
  }
}

TEST(FlopMatch, EqualsTheRuleByBruteForce) {
  for (const HeadMode mode : {HeadMode::kJoint, HeadMode::kInterleaved}) {
    for (const int64_t pseudo : {1, 2, 4, 8}) {
      for (const int64_t tile : {64, 128}) {
        for (const int64_t n : {100, 640, 1000, 2048, 2500}) {
          SCOPED_TRACE(testing::Message()
                       << "P " << pseudo << " tile " << tile << " N " << n << " mode " << static_cast<int>(mode));
          const FlopMatch match = flop_matched_window(n, pseudo, mode, tile);
          const int64_t rounded = (n + tile - 1) / tile * tile;
          const int64_t causal = brute_visits(rounded, -1, tile);
          EXPECT_EQ(match.causal_visits, causal);
          if (pseudo == 1) {
            EXPECT_EQ(match.left, -1);
            EXPECT_EQ(match.visit_ratio, 1.0);
            continue;
          }
          const bool joint = mode == HeadMode::kJoint;
          const int64_t rows = joint ? rounded : rounded * pseudo, passes = joint ? pseudo : 1;
          int64_t expected = rounded / (2 * pseudo) - 1;
          if (passes * brute_visits(rows, expected, tile) < causal) {
            int64_t t = 0;
            while (passes * brute_visits(rows, tile * t + 1, tile) < causal) ++t;
            expected = tile * t + 1;
          }
          EXPECT_EQ(match.left, expected);
          EXPECT_EQ(match.visits, passes * brute_visits(rows, expected, tile));
          EXPECT_GE(match.visit_ratio, 1.0);
        }
      }
    }
  }
}

TEST(FlopMatch, RefusesWhatHasNoWindow) {
  EXPECT_THROW(flop_matched_window(0, 4), Error);
  EXPECT_THROW(flop_matched_window(8192, 0), Error);
  EXPECT_THROW(flop_matched_window(7, 4), Error);
  EXPECT_THROW(flop_matched_window(8192, 4, HeadMode::kPlain), Error);
  EXPECT_THROW(flop_matched_window(8192, 4, HeadMode::kJoint, 0), Error);
  EXPECT_THROW(flop_matched_window(INT64_MAX, 4), Error);
  EXPECT_NO_THROW(flop_matched_window(8, 4));
  EXPECT_NO_THROW(flop_matched_window(1, 1));
}

}  // namespace
}  // namespace plait
