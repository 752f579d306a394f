// Which keys a row sees, against tables written by hand: zero keys make the softmax uniform, one-hot values show it.
// Called by ctest.
#include <string>
#include <vector>

#include "oracle.hpp"

namespace plait::testing {
namespace {

// One string per softmax row: 'x' for a key that it sees, '.' for one that it does not.
std::vector<std::string> seen(const AttentionProblem& options, int64_t rows, int64_t keys) {
  AttentionCase c{options, {}, false, {}, {}};
  const int64_t per = options.rows_per_position();
  c.problem.dtype = DType::kFloat64;
  c.problem.batch = c.problem.heads_q = c.problem.heads_kv = c.problem.head_dim = 1;
  c.problem.seqlen_q = rows, c.problem.seqlen_kv = keys, c.problem.head_dim_v = keys * per;
  Attention attention(c);
  assign(attention.inputs.k, attention.k_shape, std::vector<double>(static_cast<size_t>(keys * per), 0.0));
  for_each_index(attention.v_shape, [&](const reference::Index& i) {
    reference::store(attention.inputs.v, i, i.dim == i.seq * per + i.pseudo ? 1.0 : 0.0);
  });
  const AttentionTensors t = attention.with_outputs();
  reference::attention_forward(attention.problem, t);
  std::vector<std::string> table;
  for (int64_t row = 0; row < rows * per; ++row) {
    table.emplace_back();
    for (int64_t key = 0; key < keys * per; ++key) {
      table.back() += reference::load(t.out, {0, 0, row / per, row % per, key}) > 0.0 ? 'x' : '.';
    }
    const auto count = static_cast<double>(std::count(table.back().begin(), table.back().end(), 'x'));
    expect_near({reference::load(t.lse, 0, 0, row)}, {std::log(count)}, 1e-15, "lse");
  }
  return table;
}

AttentionProblem masked(bool causal, int64_t left, int64_t right) {
  AttentionProblem problem;
  problem.causal = causal, problem.window_left = left, problem.window_right = right;
  return problem;
}

AttentionProblem interleaved(PseudoMask mask, bool causal, int64_t left, int64_t right) {
  AttentionProblem problem = masked(causal, left, right);
  problem.mode = HeadMode::kInterleaved, problem.mask = mask, problem.pseudo_heads = 2;
  return problem;
}

using Table = std::vector<std::string>;

TEST(Mask, None) { EXPECT_EQ(seen(masked(false, -1, -1), 2, 3), (Table{"xxx", "xxx"})); }

TEST(Mask, CausalIsBottomRightAligned) {
  EXPECT_EQ(seen(masked(true, -1, -1), 3, 3), (Table{"x..", "xx.", "xxx"}));
  EXPECT_EQ(seen(masked(true, -1, -1), 2, 4), (Table{"xxx.", "xxxx"}));
}

TEST(Mask, CausalWithMoreQueriesThanKeys) {
  EXPECT_EQ(seen(masked(true, -1, -1), 5, 2), (Table{"..", "..", "..", "x.", "xx"}));
}

TEST(Mask, Window) {
  EXPECT_EQ(seen(masked(false, 1, 0), 4, 4), (Table{"x...", "xx..", ".xx.", "..xx"}));
  EXPECT_EQ(seen(masked(false, 0, 1), 3, 4), (Table{".xx.", "..xx", "...x"}));
  EXPECT_EQ(seen(masked(false, 1, -1), 3, 3), (Table{"xxx", "xxx", ".xx"}));
  EXPECT_EQ(seen(masked(false, -1, 0), 3, 3), (Table{"x..", "xx.", "xxx"}));
  EXPECT_EQ(seen(masked(false, 0, 0), 4, 2), (Table{"..", "..", "x.", ".x"}));
}

TEST(Mask, CausalTakesBothLimitsOfAWindow) {
  EXPECT_EQ(seen(masked(true, 1, 2), 3, 4), (Table{"xx..", ".xx.", "..xx"}));
}

TEST(Mask, HugeWindowsDoNotOverflow) {
  constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(seen(masked(false, kHuge, kHuge), 2, 2), (Table{"xx", "xx"}));
}

TEST(Mask, InterleavedFlat) {
  EXPECT_EQ(seen(interleaved(PseudoMask::kFlat, true, -1, -1), 2, 2), (Table{"x...", "xx..", "xxx.", "xxxx"}));
  EXPECT_EQ(seen(interleaved(PseudoMask::kFlat, true, 1, -1), 2, 2), (Table{"x...", "xx..", ".xx.", "..xx"}));
  EXPECT_EQ(seen(interleaved(PseudoMask::kFlat, true, -1, -1), 1, 2), (Table{"xxx.", "xxxx"}));
}

TEST(Mask, InterleavedToken) {
  EXPECT_EQ(seen(interleaved(PseudoMask::kToken, true, -1, -1), 2, 2), (Table{"xx..", "xx..", "xxxx", "xxxx"}));
  EXPECT_EQ(seen(interleaved(PseudoMask::kToken, true, 1, -1), 2, 2), (Table{"xx..", "xx..", ".xxx", "..xx"}));
  EXPECT_EQ(seen(interleaved(PseudoMask::kToken, true, -1, 0), 2, 2), (Table{"x...", "xx..", "xxx.", "xxxx"}));
  EXPECT_EQ(seen(interleaved(PseudoMask::kToken, true, -1, -1), 2, 1), (Table{"..", "..", "xx", "xx"}));
  EXPECT_EQ(seen(interleaved(PseudoMask::kToken, false, -1, -1), 1, 1), (Table{"xx", "xx"}));
  EXPECT_EQ(seen(interleaved(PseudoMask::kToken, false, 0, 0), 1, 1), (Table{"x.", ".x"}));
}

}  // namespace
}  // namespace plait::testing
