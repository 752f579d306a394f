// cuda_test: GoogleTest's options, and those of Settings (suite.hpp). Succeeds with a message where no GPU is.
// Called by ctest, scripts/gpu_test.sh and scripts/gpu_sanitize.sh.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "cuda/suite.hpp"

int main(int argc, char** argv) {
  using plait::testing::Settings;
  ::testing::InitGoogleTest(&argc, argv);
  Settings& settings = plait::testing::settings();
  for (int i = 1; i < argc; ++i) {
    const char* value = i + 1 < argc ? argv[i + 1] : "";
    const auto is = [&](const char* name) { return std::strcmp(argv[i], name) == 0; };
    if (is("--large")) {
      settings.large = true;
    } else if (is("--exact")) {
      settings.exact = true;
    } else if (is("--smem")) {
      settings.smem_kib = std::strtoll(value, nullptr, 10), ++i;
    } else if (is("--seed")) {
      settings.seed = std::strtoull(value, nullptr, 10), ++i;
    } else if (is("--cases")) {
      settings.cases = std::strtoll(value, nullptr, 10), ++i;
    } else if (is("--seconds")) {
      settings.seconds = std::strtod(value, nullptr), ++i;
    } else {
      std::fprintf(stderr,
                   "cuda_test: got '%s', expected --seed N, --cases N, --seconds S, --smem KIB, --large or --exact\n",
                   argv[i]);
      return 2;
    }
  }
  if (plait::DeviceInfo::cuda_count() == 0) {
    int count = 0;
    std::printf("cuda_test: skipped, plait finds no CUDA device (%s)\n",
                cudaGetErrorString(cudaGetDeviceCount(&count)));
    return 0;
  }
  return RUN_ALL_TESTS();
}
