// What the fuzzers share: random choices with a taste for edges, views of test tensors, comparison, a failed case.
// Called by tests/api/fuzz_*.cpp. Every fuzzer makes one problem from one seed and throws where plait is wrong.
// The backend under test is a Target: the CPU, or a CUDA backend (tests/cuda).
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "catalog/catalog.hpp"
#include "plait/attention.hpp"
#include "support/calls.hpp"

namespace plait::testing {

// Plain, joint and interleaved; dense and packed; forward and backward.
void fuzz_attention(uint64_t seed, const Target& target);
// Premix, collapse and merge_states with their gradients.
void fuzz_mix(uint64_t seed, const Target& target);
// Dense, re-indexed, paged, IHA mixed and raw.
void fuzz_kv_cache(uint64_t seed, const Target& target);
// Wrong cu_seqlens, lengths, pages, rows: refused where the host sees them, else never met.
void fuzz_bad_contents(uint64_t seed, const Target& target);
// The C API with nulls, wild enums, ranks, sizes and struct sizes; CPU only.
void fuzz_bad_structs(uint64_t seed, const Target& target);

struct Fuzzer {
  const char* name;
  void (*run)(uint64_t seed, const Target& target);
  int weight;  // of 10 cases
};
inline constexpr Fuzzer kFuzzers[] = {{"attention", fuzz_attention, 4},
                                      {"mix", fuzz_mix, 1},
                                      {"kv_cache", fuzz_kv_cache, 3},
                                      {"bad_contents", fuzz_bad_contents, 1},
                                      {"bad_structs", fuzz_bad_structs, 1}};

// The fuzzer of case number `seed`.
inline const Fuzzer& fuzzer_of(uint64_t seed) {
  int64_t place = static_cast<int64_t>(seed % 10);
  const Fuzzer* fuzzer = kFuzzers;
  while (place >= fuzzer->weight) place -= (fuzzer++)->weight;
  return *fuzzer;
}

class Random {
 public:
  // tensor_cores: dtypes and head dims that they take.
  explicit Random(uint64_t seed, bool tensor_cores = false) : engine_(seed), tensor_cores_(tensor_cores) {}
  int64_t below(int64_t bound) { return static_cast<int64_t>(engine_() % static_cast<uint64_t>(bound)); }
  int64_t between(int64_t low, int64_t high) { return low + below(high - low + 1); }
  bool chance(int percent) { return below(100) < percent; }
  double uniform(double low, double high) {
    return low + (high - low) * static_cast<double>(below(1 << 20)) / (1 << 20);
  }
  template <class T>
  T pick(std::initializer_list<T> choices) {
    return choices.begin()[below(static_cast<int64_t>(choices.size()))];
  }
  // Up to `longest`: half of the time beside a tile edge.
  int64_t length(int64_t longest) {
    const int64_t edge = pick<int64_t>({0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 127, 128, 129, 257});
    return chance(50) ? std::min(edge, longest) : between(0, longest);
  }
  int64_t head_dim() {
    if (tensor_cores_) return chance(20) ? 8 * between(1, 32) : pick<int64_t>({16, 32, 64, 64, 96, 128, 128, 192, 256});
    const int64_t usual = pick<int64_t>({8, 16, 32, 40, 64, 80, 96, 128}),
                  odd = pick<int64_t>({1, 2, 3, 7, 17, 33, 65});
    return chance(10) ? pick<int64_t>({129, 192, 256, 257, 512, 576, 1024}) : chance(40) ? odd : usual;
  }
  DType dtype() {
    const bool both = catalog::kMmaFloat16 && catalog::kMmaBFloat16;
    if (tensor_cores_ && !both) return catalog::kMmaFloat16 ? DType::kFloat16 : DType::kBFloat16;
    if (tensor_cores_) return pick({DType::kFloat16, DType::kBFloat16});
    return pick({DType::kFloat32, DType::kFloat32, DType::kFloat16, DType::kBFloat16});
  }
  Strides strides() { return pick({Strides::kBhsd, Strides::kBshd, Strides::kRandom}); }
  uint64_t seed() { return engine_(); }

 private:
  std::mt19937_64 engine_;
  bool tensor_cores_;
};

inline DType row_dtype_of(DType dtype) { return dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32; }

inline TensorView index_view(const std::vector<int32_t>& values) {
  return vector_view(values.data(), DType::kInt32, static_cast<int64_t>(values.size()));
}

// Largest relative error of one rounding to `dtype`, with room for a tie that falls the other way.
inline double roundoff(DType dtype) {
  return dtype == DType::kFloat16 ? 0x1.1p-11 : dtype == DType::kBFloat16 ? 0x1.1p-8 : 0x1p-23;
}

// Each element within one rounding to `dtype` and `absolute`; infinities alike, NaN nowhere.
inline void expect_near(const char* what, const std::vector<double>& got, const std::vector<double>& expected,
                        DType dtype, double absolute) {
  if (got.size() != expected.size())
    throw Failure(fmt::format("{}: {} of {} elements", what, got.size(), expected.size()));
  const double least = dtype == DType::kFloat16 ? 0x1p-24 : 0.0;  // subnormal steps
  for (size_t i = 0; i < got.size(); ++i) {
    if (got[i] == expected[i]) continue;
    const double error = std::abs(got[i] - expected[i]),
                 bar = roundoff(dtype) * std::abs(expected[i]) + absolute + least;
    if (!(error <= bar)) {
      throw Failure(fmt::format("{}[{}]: got {}, expected {}, off by {:.3g}, bar {:.3g}", what, i, got[i], expected[i],
                                error, bar));
    }
  }
}

// A call that fills `tensor` writes its elements, all of them and nothing beside them.
inline void expect_written(const char* what, const Arena& arena, const void* data, int64_t expected) {
  const int64_t written = arena.written(data);
  if (written != expected) throw Failure(fmt::format("{}: {} elements written, expected {}", what, written, expected));
}

// A refusal that a user can read: names an argument of `legal`, one line, says what was got or expected.
inline void expect_clear(const std::string& argument, const std::string& message,
                         std::initializer_list<const char*> legal) {
  const bool known = std::any_of(legal.begin(), legal.end(), [&](const char* name) { return argument == name; });
  if (!known) throw Failure(fmt::format("the refusal names '{}': {}", argument, message));
  if (message.rfind(argument + ": ", 0) != 0 || message.find('\n') != std::string::npos || message.size() > 1000) {
    throw Failure(fmt::format("an unclear refusal: {}", message));
  }
}

}  // namespace plait::testing
