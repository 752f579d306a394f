// A small fixed set of the fuzzers' problems, and what they found; plait_fuzz (fuzz_main.cpp) runs as many as asked
// for.
#include "api/fuzz.hpp"

#include <gtest/gtest.h>

#include "plait/iha.hpp"

namespace plait::testing {
namespace {

constexpr uint64_t kCases = 300;

TEST(Fuzz, FixedSeeds) {
  for (uint64_t seed = 0; seed < kCases; ++seed) {
    const Fuzzer& fuzzer = fuzzer_of(seed);
    EXPECT_NO_THROW(fuzzer.run(seed, CpuTarget()))
        << "plait_fuzz --only " << fuzzer.name << " --seed " << seed << " --cases 1";
  }
}

// Queries of a packed sequence without keys are not turned, whatever the offset: their positions were once read past
// the end of the rotary tables.
TEST(Fuzz, QueriesWithoutKeysAreNotTurned) {
  const int64_t heads = 2, length = 4, dim = 6, pseudo = 2, rows = 3;
  const std::vector<int32_t> offsets{0, static_cast<int32_t>(length)}, none{0, 0};
  for (const RopeIndex index : {RopeIndex::kToken, RopeIndex::kRow}) {
    for (const Backend backend : {Backend::kCpu, Backend::kReference}) {
      Arena arena(1, Strides::kBhsd);
      const Shape x_shape{1, heads, length, 1, dim}, y_shape{1, heads, length, pseudo, dim};
      PremixArgs args;
      args.x = view_of(arena.random(DType::kFloat32, x_shape, length), x_shape, Layout::kBhsd, true, false);
      args.w = arena.view(DType::kFloat32, heads, pseudo, heads, true);
      args.cu_seqlens = index_view(offsets);
      args.cu_seqlens_other = index_view(none);
      args.backend = backend;
      std::vector<std::vector<double>> results;
      for (const bool turned : {false, true}) {
        if (turned) {
          const auto table = [&] { return arena.view(DType::kFloat32, rows, dim / 2, 0, true); };
          args.rope = Rope{table(), table(), RopeStyle::kHalf, index, 4};
        }
        const CanonicalTensor y = arena.poisoned(DType::kFloat32, y_shape);
        HostPlace place(1, false);
        run(place, args, view_of(y, y_shape, Layout::kBhsd, true, true));
        results.push_back(values(y, y_shape));
      }
      EXPECT_EQ(results[0], results[1]);
    }
  }
}

}  // namespace
}  // namespace plait::testing
