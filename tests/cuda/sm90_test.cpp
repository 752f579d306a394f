// Attention of cuda_sm90 against the float64 reference where it does what no other backend does.
#include <fmt/format.h>

#include "catalog/catalog.hpp"
#include "cuda/suite.hpp"

namespace plait::testing {
namespace {

// Blocks of cuda_sm90 that take several row tiles, of which warpgroups leave out the first or last keys, or have no
// rows.
TEST(CudaAttention, ManyRowTiles) {
  if (!catalog::kSm90 || sm90().device().compute_capability != catalog::kHopper) GTEST_SKIP() << "no Hopper";
  std::vector<GpuCase> cases;
  uint64_t seed = 700;
  const auto add = [&](const AttentionProblem& p, bool causal, int64_t left) {
    GpuCase c = make(fmt::format("{} x {} heads of {} x {} D {} window {}", p.batch, p.heads_q, p.seqlen_q, p.seqlen_kv,
                                 p.head_dim, left),
                     seed++, half_dtype(), p);
    c.problem.problem.causal = causal, c.problem.problem.window_left = left;
    cases.push_back(c);
  };
  for (const int64_t keys : {384, 512, 768, 896}) add(sizes(8, 33, 33, 64, keys, 128, 128), false, -1);
  for (const int64_t keys : {512, 640}) add(sizes(8, 33, 33, 64, keys, 64, 64), false, -1);
  for (const int64_t left : {63, 127, 255}) add(sizes(8, 33, 33, 500, 500, 64, 64), true, left);
  add(sizes(4, 33, 33, 400, 400, 64, 64), true, -1);
  add(sizes(8, 33, 33, 64, 240, 256, 256), false, -1);
  add(sizes(8, 33, 33, 192, 768, 128, 128), false, -1);
  GpuCase packed = make("packed", seed, half_dtype(), sizes(1, 20, 20, 0, 0, 128, 128));
  packed.problem.problem.causal = true;
  for (int32_t i = 0; i < 24; ++i) {
    packed.problem.q_lens.push_back(1 + i * 37 % 300);
    packed.problem.kv_lens.push_back(1 + i * 53 % 500);
  }
  cases.push_back(packed);
  check_all(cases, &sm90());
}

// Row tiles of the heads of a key head, whose keys are dealt to blocks in ranges: even ones and, with odd seeds, of a
// fixed size.
TEST(CudaAttention, FewQueriesBesideManyKeys) {
  if (!catalog::kSm90 || sm90().device().compute_capability != catalog::kHopper) GTEST_SKIP() << "no Hopper";
  std::vector<GpuCase> cases;
  uint64_t seed = 900;
  for (const int64_t dim : {64, 128, 192, 256}) {
    for (const auto& [heads_q, heads_kv] :
         std::initializer_list<std::pair<int, int>>{{8, 2}, {6, 3}, {10, 2}, {3, 3}}) {
      for (const int64_t queries : {1, 9, 37, 130}) {
        const int64_t keys = 700 + 131 * (static_cast<int64_t>(seed) % 7);
        GpuCase c = make(fmt::format("{}/{} heads of {} x {} D {}", heads_q, heads_kv, queries, keys, dim), seed,
                         half_dtype(), sizes(2, heads_q, heads_kv, queries, keys, dim, seed % 5 == 0 ? dim - 24 : dim));
        AttentionProblem& p = c.problem.problem;
        p.causal = seed % 3 != 0, p.window_left = seed % 4 == 0 ? 300 : -1, p.has_sinks = seed % 2 == 0;
        p.softcap = seed % 6 == 0 ? 20.0 : 0.0, c.problem.out_float32 = seed % 7 == 0;
        c.layout = seed % 3 == 1 ? Layout::kBshd : Layout::kBhsd;
        c.problem.strides = seed % 3 == 1 ? Strides::kBshd : Strides::kBhsd;
        cases.push_back(c);
        ++seed;
      }
    }
  }
  check_all(cases, &sm90());
}

}  // namespace
}  // namespace plait::testing
