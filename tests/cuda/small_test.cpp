// A few small problems for every kernel, each option at least once: what scripts/gpu_sanitize.sh runs.
// Tests are named after kernels, so that KERNEL=x is a filter.
#include <fmt/format.h>

#include "api/fuzz.hpp"
#include "cuda/suite.hpp"

namespace plait::testing {
namespace {

// Lengths that are no multiple of a tile.
std::vector<GpuCase> small_cases(const std::vector<std::pair<DType, int64_t>>& kinds) {
  std::vector<GpuCase> cases;
  uint64_t seed = 1;
  for (const auto& [dtype, dim] : kinds) {
    for (const bool deterministic : {false, true}) {
      for (const HeadMode mode : {HeadMode::kPlain, HeadMode::kJoint, HeadMode::kInterleaved}) {
        GpuCase c;
        c.problem.problem = sizes(1, 2, 1, 70, 90, dim, dim);
        AttentionProblem& p = c.problem.problem;
        p.dtype = dtype, p.mode = mode, p.pseudo_heads = mode == HeadMode::kPlain ? 1 : 2;
        p.deterministic = deterministic, p.causal = seed % 2 == 0, p.window_left = seed % 3 == 0 ? 20 : -1;
        p.has_sinks = seed % 2 == 1, p.softcap = seed % 3 == 1 ? 5.0 : 0.0;
        if (seed % 3 == 2) c.problem.q_lens = {40, 0, 23}, c.problem.kv_lens = {50, 9, 0}, c.problem.q_tail = 3;
        c.problem.strides = seed % 4 == 0 ? Strides::kRandom : Strides::kBhsd;
        c.misaligned = seed % 5 == 0;
        c.problem.seed = seed++;
        c.name = fmt::format("{} D {} mode {} deterministic {}", dtype_name(dtype), dim, static_cast<int>(mode),
                             deterministic);
        cases.push_back(c);
      }
    }
  }
  return cases;
}

TEST(CudaSmall, naive_attention) {
  check_all(small_cases({{DType::kFloat32, 24}, {DType::kBFloat16, 65}, {DType::kFloat16, 300}}), &naive());
}

TEST(CudaSmall, mma_attention) {
  check_all(small_cases({{DType::kFloat16, 32},
                         {DType::kBFloat16, 64},
                         {DType::kFloat16, 96},
                         {DType::kBFloat16, 128},
                         {DType::kFloat16, 192},
                         {DType::kBFloat16, 256},
                         {DType::kBFloat16, 72}}),
            &mma());
}

// Several row tiles and key tiles, of which one block takes more than one.
TEST(CudaSmall, sm90_attention) {
  std::vector<GpuCase> cases = small_cases({{DType::kFloat16, 64},
                                            {DType::kBFloat16, 128},
                                            {DType::kFloat16, 72},
                                            {DType::kBFloat16, 32},
                                            {DType::kFloat16, 192},
                                            {DType::kBFloat16, 256}});
  std::erase_if(cases, [](const GpuCase& c) { return c.problem.problem.deterministic; });
  for (GpuCase& c : cases) c.problem.strides = Strides::kBhsd, c.misaligned = false;
  check_all(cases, &sm90());
}

// Few rows, so that split_kv takes them on tensor cores.
TEST(CudaSmall, mma_decode) {
  std::vector<GpuCase> cases = small_cases({{DType::kFloat16, 32},
                                            {DType::kBFloat16, 64},
                                            {DType::kFloat16, 96},
                                            {DType::kBFloat16, 128},
                                            {DType::kFloat16, 192},
                                            {DType::kBFloat16, 256}});
  std::erase_if(cases, [](const GpuCase& c) { return !c.problem.q_lens.empty(); });
  for (GpuCase& c : cases) c.problem.problem.seqlen_q = 3, c.problem.problem.seqlen_kv = 150;
  check_all(cases, &mma());
}

// Fewer: large head dims take long under the tools, and split_d is deterministic always.
TEST(CudaSmall, mma_split_d) {
  std::vector<GpuCase> cases = small_cases({{DType::kFloat16, 264},
                                            {DType::kBFloat16, 384},
                                            {DType::kFloat16, 512},
                                            {DType::kBFloat16, 640},
                                            {DType::kFloat16, 768},
                                            {DType::kBFloat16, 1024}});
  std::erase_if(cases, [](const GpuCase& c) { return c.problem.problem.deterministic; });
  for (GpuCase& c : cases) c.problem.problem.heads_q = 1;
  check_all(cases, &mma());
}

void fuzz(void (*fuzzer)(uint64_t, const Target&), const CudaTarget& target, int64_t count) {
  in_parallel(
      count, [&](int64_t seed) { fuzzer(static_cast<uint64_t>(seed), target); },
      [&](int64_t seed) { return fmt::format("{} seed {}", target.name(), seed); });
}

TEST(CudaSmall, naive_mix) { fuzz(fuzz_mix, naive(), 30); }
TEST(CudaSmall, mma_mix) { fuzz(fuzz_mix, mma(), 30); }
TEST(CudaSmall, mma_cache) { fuzz(fuzz_kv_cache, mma(), 40); }
TEST(CudaSmall, auto_cache) { fuzz(fuzz_kv_cache, automatic(), 40); }
TEST(CudaSmall, naive_cache) { fuzz(fuzz_kv_cache, naive(), 20); }
TEST(CudaSmall, naive_bad_contents) { fuzz(fuzz_bad_contents, naive(), 60); }
TEST(CudaSmall, mma_bad_contents) { fuzz(fuzz_bad_contents, mma(), 60); }

}  // namespace
}  // namespace plait::testing
