// plait_fuzz: as many random problems as asked for, each from its own seed; prints those that fail.
// Called by developers, also under sanitizers: plait_fuzz --cases 10000 --seed 1 [--only attention]
#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>

#include "api/fuzz.hpp"

int main(int argc, char** argv) {
  using namespace plait::testing;
  uint64_t seed = 1, cases = 1000;
  std::string only;
  CLI::App app{"Random problems against the float64 reference, and random bad input"};
  app.add_option("--cases", cases, "how many problems (default 1000)");
  app.add_option("--seed", seed, "seed of the first; each next one is one more (default 1)");
  app.add_option("--only", only, "attention, mix, kv_cache, bad_contents or bad_structs (default all, mixed)");
  CLI11_PARSE(app, argc, argv);
  uint64_t ran = 0, failed = 0;
  for (uint64_t i = seed; i < seed + cases; ++i) {
    const Fuzzer* fuzzer = &fuzzer_of(i);
    if (!only.empty()) {
      fuzzer = std::find_if(std::begin(kFuzzers), std::end(kFuzzers), [&](const Fuzzer& f) { return only == f.name; });
      if (fuzzer == std::end(kFuzzers)) {
        fmt::print(stderr, "--only: got '{}' (see --help)\n", only);
        return 2;
      }
    }
    ++ran;
    try {
      fuzzer->run(i, CpuTarget());
    } catch (const std::exception& error) {
      ++failed;
      fmt::print("--only {} --seed {} --cases 1: {}\n", fuzzer->name, i, error.what());
      std::fflush(stdout);  // a sanitizer may end the next case
    }
  }
  fmt::print("{} cases, {} failed\n", ran, failed);
  return failed == 0 ? 0 : 1;
}
