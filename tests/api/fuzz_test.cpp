// A small fixed set of the fuzzers' problems; plait_fuzz (fuzz_main.cpp) runs as many as asked for.
#include "api/fuzz.hpp"

#include <gtest/gtest.h>

namespace plait::testing {
namespace {

constexpr uint64_t kCases = 300;

TEST(Fuzz, FixedSeeds) {
  for (uint64_t seed = 0; seed < kCases; ++seed) {
    const Fuzzer& fuzzer = fuzzer_of(seed);
    EXPECT_NO_THROW(fuzzer.run(seed)) << "plait_fuzz --only " << fuzzer.name << " --seed " << seed << " --cases 1";
  }
}

}  // namespace
}  // namespace plait::testing
