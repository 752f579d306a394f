// Random problems of tests/api/fuzz_*.cpp on the CUDA backends: as many as --cases and --seconds allow.
// A failed case prints its fuzzer and seed: cuda_test --gtest_filter=CudaFuzz.* --seed N --cases 1
#include "api/fuzz.hpp"

#include <fmt/format.h>

#include <array>
#include <chrono>

#include "cuda/suite.hpp"

namespace plait::testing {
namespace {

struct Choice {
  const char* name;
  void (*run)(uint64_t seed, const Target& target);
  const CudaTarget& (*target)();
};
// Seed s runs kChoices[s % 12]. On Hopper, `automatic` takes cuda_sm90 where it serves.
constexpr std::array<Choice, 12> kChoices{{{"attention", fuzz_attention, mma},
                                           {"attention", fuzz_attention, naive},
                                           {"mix", fuzz_mix, mma},
                                           {"kv_cache", fuzz_kv_cache, naive},
                                           {"attention", fuzz_attention, mma},
                                           {"bad_contents", fuzz_bad_contents, mma},
                                           {"attention", fuzz_attention, naive},
                                           {"mix", fuzz_mix, naive},
                                           {"kv_cache", fuzz_kv_cache, mma},
                                           {"bad_contents", fuzz_bad_contents, naive},
                                           {"attention", fuzz_attention, automatic},
                                           {"kv_cache", fuzz_kv_cache, automatic}}};

TEST(CudaFuzz, RandomProblems) {
  const auto begin = std::chrono::steady_clock::now();
  const auto seed_of = [](int64_t i) { return settings().seed + static_cast<uint64_t>(i); };
  const auto choice_of = [&](int64_t i) -> const Choice& { return kChoices[seed_of(i) % kChoices.size()]; };
  std::atomic<int64_t> ran{0};
  in_parallel(
      settings().cases,
      [&](int64_t i) {
        const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - begin;
        if (spent.count() > settings().seconds) return;
        ++ran;
        choice_of(i).run(seed_of(i), choice_of(i).target());
      },
      [&](int64_t i) {
        const Choice& choice = choice_of(i);
        return fmt::format("--seed {} --cases 1 ({} on {})", seed_of(i), choice.name, choice.target().name());
      });
  fmt::print("{} of {} random problems\n", ran.load(), settings().cases);
  EXPECT_GT(ran.load(), 0);
}

}  // namespace
}  // namespace plait::testing
