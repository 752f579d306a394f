// Attention of both CUDA backends against the float64 reference: every option, length, head dim and layout.
#include <fmt/format.h>

#include <array>
#include <cmath>

#include "catalog/catalog.hpp"
#include "cuda/suite.hpp"

namespace plait::testing {
namespace {

struct Mask {
  bool causal;
  int64_t left, right;
};
constexpr Mask kMasks[] = {{false, -1, -1}, {true, -1, -1}, {true, 20, -1}, {false, 7, 30},
                           {false, -1, 0},  {true, 0, -1},  {true, 70, 3},  {false, 130, 130}};

void set(GpuCase& c, const Mask& mask) {
  AttentionProblem& p = c.problem.problem;
  p.causal = mask.causal, p.window_left = mask.left, p.window_right = mask.right;
  c.name += fmt::format(" causal {} window {},{}", mask.causal, mask.left, mask.right);
}

constexpr DType kDtypes[] = {DType::kBFloat16, DType::kFloat16, DType::kFloat32};
constexpr Strides kStrides[] = {Strides::kBhsd, Strides::kBshd, Strides::kRandom};

TEST(CudaAttention, LengthsAroundTileEdges) {
  std::vector<GpuCase> cases;
  uint64_t seed = 1;
  for (const auto& [q, k] : std::initializer_list<std::pair<int, int>>{
           {1, 1},   {1, 300},  {15, 17},   {31, 127}, {32, 128},  {33, 129},  {63, 64},
           {64, 64}, {65, 65},  {127, 128}, {128, 1},  {129, 129}, {130, 257}, {257, 40},
           {100, 1}, {70, 255}, {192, 192}, {1, 0},    {0, 5},     {0, 0}}) {
    for (const Mask& mask : kMasks) {
      const DType dtype = kDtypes[seed % 3];
      const int64_t dim = std::array{64, 128, 40}[seed % 3];
      GpuCase c = make(fmt::format("{} x {} D {}", q, k, dim), seed, dtype, sizes(1, 2, 1, q, k, dim, dim));
      set(c, mask);
      c.problem.problem.has_sinks = seed % 2 == 0;
      c.problem.problem.deterministic = seed % 4 < 2;
      c.problem.strides = seed % 5 == 0 ? Strides::kRandom : Strides::kBhsd;
      c.dlse = seed % 7 != 0;
      cases.push_back(c);
      ++seed;
    }
  }
  check_all(cases);
}

// No kernel reads beside a tensor, also not to throw away what it read: nothing is mapped there.
TEST(CudaAttention, TensorsAtTheEdgesOfMemory) {
  std::vector<GpuCase> cases;
  uint64_t seed = 500;
  for (const auto& [dim, dim_v] : std::initializer_list<std::pair<int, int>>{
           {128, 128}, {64, 64}, {72, 72}, {16, 128}, {256, 64}, {8, 8}, {192, 136}, {264, 512}, {33, 20}}) {
    for (const Edge edge : {Edge::kBegin, Edge::kEnd}) {
      for (const bool packed : {false, true}) {
        GpuCase c = make(fmt::format("D {} Dv {} edge {} packed {}", dim, dim_v, static_cast<int>(edge), packed), seed,
                         half_dtype(), sizes(2, 4, 2, 150, 170, dim, dim_v));
        if (packed) c.problem.q_lens = {100, 0, 33}, c.problem.kv_lens = {150, 20, 0};
        set(c, kMasks[seed % 4]);
        c.edge = edge, c.layout = seed % 3 == 0 ? Layout::kBshd : Layout::kBhsd;
        c.problem.strides = seed % 3 == 0 ? Strides::kBshd : Strides::kBhsd;
        cases.push_back(c);
        ++seed;
      }
    }
  }
  check_all(cases);
}

TEST(CudaAttention, HeadDims) {
  std::vector<GpuCase> cases;
  uint64_t seed = 1000;
  std::vector<std::pair<int, int>> dims{
      {1, 1},     {7, 5},     {17, 33},     {65, 64},   {129, 128}, {257, 130},   {8, 8},     {16, 16},   {24, 24},
      {32, 32},   {40, 40},   {64, 64},     {72, 72},   {80, 80},   {96, 96},     {104, 104}, {128, 128}, {136, 136},
      {160, 160}, {192, 192}, {200, 200},   {248, 248}, {256, 256}, {264, 264},   {192, 128}, {64, 128},  {128, 64},
      {32, 256},  {256, 32},  {96, 8},      {512, 512}, {576, 512}, {1024, 1024}, {320, 320}, {384, 384}, {520, 520},
      {640, 640}, {768, 768}, {1000, 1000}, {8, 1024},  {1024, 64}, {320, 640}};
  for (const auto& [dim, dim_v] : dims) {
    for (const DType dtype : kDtypes) {
      for (const bool deterministic : {false, true}) {
        GpuCase c = make(fmt::format("D {} Dv {}", dim, dim_v), seed, dtype, sizes(1, 2, 1, 75, 140, dim, dim_v));
        set(c, kMasks[seed % 3]);
        c.problem.problem.deterministic = deterministic;
        c.problem.out_float32 = dtype != DType::kFloat32 && seed % 3 == 0;
        c.layout = seed % 2 == 0 ? Layout::kBshd : Layout::kBhsd;
        c.problem.strides = seed % 2 == 0 ? Strides::kBshd : Strides::kBhsd;
        cases.push_back(c);
        ++seed;
      }
    }
  }
  check_all(cases);
}

// What split_d has kernels of its own for, beside head dims: masks, modes, packed sequences, grouped heads.
TEST(CudaAttention, LargeHeadDims) {
  std::vector<GpuCase> cases;
  uint64_t seed = 1500;
  for (const int64_t dim : {264, 320, 384, 512, 640, 768, 1024}) {
    for (const HeadMode mode : {HeadMode::kPlain, HeadMode::kJoint, HeadMode::kInterleaved}) {
      for (const Mask& mask : kMasks) {
        const int64_t pseudo = mode == HeadMode::kPlain ? 1 : 2;
        GpuCase c = make(fmt::format("D {} mode {}", dim, static_cast<int>(mode)), seed, kDtypes[seed % 2],
                         sizes(2, 4, 2, 131 / pseudo, 197 / pseudo, dim, dim));
        set(c, mask);
        AttentionProblem& p = c.problem.problem;
        p.mode = mode, p.pseudo_heads = pseudo;
        p.has_sinks = seed % 3 == 1, p.softcap = seed % 4 == 0 ? 3.0 : 0.0;
        if (seed % 5 == 2) c.problem.q_lens = {65, 0, 30, 1}, c.problem.kv_lens = {90, 12, 0, 33}, c.problem.q_tail = 5;
        c.problem.strides = kStrides[seed % 3], c.misaligned = seed % 7 == 0;
        c.external = seed % 6 == 0, c.dlse = seed % 8 != 1;
        cases.push_back(c);
        ++seed;
      }
    }
  }
  check_all(cases);
}

// Ranges of keys; one query whose heads are the rows of a tile.
TEST(CudaAttention, LargeHeadDimsWithFewQueries) {
  std::vector<GpuCase> cases;
  uint64_t seed = 1700;
  for (const auto& [dim, dim_v] : {std::pair{264, 264}, {512, 512}, {576, 512}, {1024, 1024}, {64, 320}}) {
    for (const int64_t q : {1, 3, 70}) {
      for (const Mask& mask : kMasks) {
        GpuCase c = make(fmt::format("D {} Dv {}, {} queries", dim, dim_v, q), seed, kDtypes[seed % 2],
                         sizes(2, 6, 2, q, 700, dim, dim_v));
        set(c, mask);
        AttentionProblem& p = c.problem.problem;
        p.has_sinks = seed % 3 != 0, p.softcap = seed % 4 == 0 ? 3.0 : 0.0;
        if (seed % 5 == 0) p.mode = HeadMode::kJoint, p.pseudo_heads = 2;
        c.problem.out_float32 = seed % 6 == 0;
        c.problem.strides = kStrides[seed % 3], c.misaligned = seed % 7 == 0;
        cases.push_back(c);
        ++seed;
      }
    }
  }
  check_all(cases);
}

TEST(CudaAttention, GroupedHeads) {
  std::vector<GpuCase> cases;
  uint64_t seed = 2000;
  for (const auto& [heads_q, heads_kv] :
       std::initializer_list<std::pair<int, int>>{{4, 4}, {6, 2}, {5, 1}, {8, 2}, {80, 1}, {12, 3}}) {
    for (const int64_t q : {1, 3, 50, 129}) {
      for (const DType dtype : kDtypes) {
        GpuCase c = make(fmt::format("{}/{} heads, {} queries", heads_q, heads_kv, q), seed, dtype,
                         sizes(2, heads_q, heads_kv, q, 150, 64, 64));
        if (heads_q == 80) c.problem.problem.batch = 1;
        c.problem.problem.causal = true, c.problem.problem.has_sinks = true;
        c.problem.problem.deterministic = ++seed % 2 == 0;
        cases.push_back(c);
      }
    }
  }
  check_all(cases);
}

TEST(CudaAttention, PseudoHeads) {
  std::vector<GpuCase> cases;
  uint64_t seed = 3000;
  for (const HeadMode mode : {HeadMode::kJoint, HeadMode::kInterleaved}) {
    for (const PseudoMask token : {PseudoMask::kFlat, PseudoMask::kToken}) {
      if (mode == HeadMode::kJoint && token == PseudoMask::kToken) continue;
      for (const Mask& mask : kMasks) {
        for (const int64_t pseudo : {1, 2, 3, 4}) {
          const int64_t dim = seed % 2 == 0 ? 32 : 64;
          GpuCase c = make(fmt::format("mode {} P {} token {} D {}", static_cast<int>(mode), pseudo,
                                       token == PseudoMask::kToken, dim),
                           seed, kDtypes[seed % 3], sizes(1, 4, 2, 45, 70, dim, dim));
          set(c, mask);
          AttentionProblem& p = c.problem.problem;
          p.mode = mode, p.mask = token, p.pseudo_heads = pseudo;
          p.has_sinks = seed % 3 == 1, p.softcap = seed % 4 == 0 ? 3.0 : 0.0, p.deterministic = seed % 2 == 0;
          c.problem.strides = kStrides[seed % 2];
          cases.push_back(c);
          ++seed;
        }
      }
    }
  }
  check_all(cases);
}

TEST(CudaAttention, PackedSequences) {
  std::vector<GpuCase> cases;
  uint64_t seed = 4000;
  for (const HeadMode mode : {HeadMode::kPlain, HeadMode::kJoint, HeadMode::kInterleaved}) {
    for (const DType dtype : kDtypes) {
      for (int round = 0; round < 8; ++round) {
        GpuCase c = make(fmt::format("mode {} round {}", static_cast<int>(mode), round), ++seed, dtype,
                         sizes(0, 4, 2, 0, 0, 64, 64));
        AttentionProblem& p = c.problem.problem;
        p.mode = mode, p.pseudo_heads = mode == HeadMode::kPlain ? 1 : 2;
        c.problem.q_lens = random_lengths(seed, 6, round < 4 ? 150 : 40);
        c.problem.kv_lens = round == 2 ? c.problem.q_lens : random_lengths(seed + 50, 6, 160);
        c.problem.q_tail = round, c.problem.kv_tail = 2 * round;
        if (round == 5) c.problem.q_lens = {0, 0, 0}, c.problem.kv_lens = {0, 12, 0};  // nothing but a tail
        set(c, kMasks[round % 4]);
        p.has_sinks = round >= 2, p.deterministic = round % 2 == 1, p.softcap = round == 6 ? 4.0 : 0.0;
        c.dlse = round != 3;
        cases.push_back(c);
      }
    }
  }
  check_all(cases);
}

TEST(CudaAttention, SoftcapScaleOutputsAndStrides) {
  std::vector<GpuCase> cases;
  uint64_t seed = 5000;
  for (const double softcap : {0.0, 2.0, 30.0}) {
    for (const Strides strides : kStrides) {
      for (const DType dtype : kDtypes) {
        for (const bool expanded : {false, true}) {
          for (const bool misaligned : {false, true}) {
            GpuCase c = make(fmt::format("softcap {} strides {} expanded {} misaligned {}", softcap,
                                         static_cast<int>(strides), expanded, misaligned),
                             seed, dtype, sizes(2, 2, 1, 70, 140, 64, 64));
            c.problem.problem.softcap = softcap, c.problem.scale = std::array{0.7, 0.05, -0.2}[seed % 3];
            c.problem.strides = strides, c.problem.expanded = expanded, c.misaligned = misaligned;
            c.problem.out_float32 = dtype != DType::kFloat32 && seed % 2 == 0;
            c.problem.problem.deterministic = ++seed % 2 == 0;
            set(c, kMasks[seed % 4]);
            cases.push_back(c);
          }
        }
      }
    }
  }
  check_all(cases);
}

// P = exp(S - LSE) with an LSE from outside, and an LSE of -inf that silences its row.
TEST(CudaAttention, ExternalOutAndLse) {
  std::vector<GpuCase> cases;
  uint64_t seed = 6000;
  for (const DType dtype : kDtypes) {
    for (const HeadMode mode : {HeadMode::kPlain, HeadMode::kJoint, HeadMode::kInterleaved}) {
      for (const bool deterministic : {false, true}) {
        for (const bool packed : {false, true}) {
          GpuCase c = make(fmt::format("mode {} packed {}", static_cast<int>(mode), packed), ++seed, dtype,
                           sizes(2, 4, 2, 90, 130, 64, 64));
          AttentionProblem& p = c.problem.problem;
          p.mode = mode, p.pseudo_heads = mode == HeadMode::kPlain ? 1 : 2;
          p.causal = true, p.has_sinks = seed % 2 == 0, p.deterministic = deterministic;
          if (packed) c.problem.q_lens = {90, 3}, c.problem.kv_lens = {100, 20};
          c.external = true, c.dlse = seed % 3 != 0;
          cases.push_back(c);
        }
      }
    }
  }
  check_all(cases);
}

// The contract's bars themselves, on N(0, 1) inputs and on peaky logits.
TEST(CudaAttention, AccuracyBars) {
  std::vector<GpuCase> cases;
  uint64_t seed = 7000;
  for (const DType dtype : kDtypes) {
    for (const double gain : {1.0, 4.0}) {
      for (const int64_t dim : {32, 64, 96, 128, 192, 256, 512, 1024}) {
        const bool large = dim > catalog::kMmaMaxHeadDim;  // the reference is slow there
        if (large && dtype == DType::kFloat32) continue;   // whose bar is that of shorter sums
        for (const bool causal : {false, true}) {
          GpuCase c = make(fmt::format("bars: gain {} D {} causal {}", gain, dim, causal), ++seed, dtype,
                           sizes(1, 2, 1, large ? 64 : 256, 2048, dim, dim));
          c.problem.problem.causal = causal, c.problem.q_gain = gain;
          c.problem.problem.deterministic = causal;
          // The bars come from head dims 64, 128 and 256. Below, a score is a sum of fewer terms; above, no peer gives
          // a figure, and Turing's shorter products are at 1.001 of the bar.
          c.slack = dim < 64 || large ? 1.1 : 1, c.floor = 0;
          cases.push_back(c);
        }
      }
    }
  }
  check_all(cases);
}

TEST(CudaAttention, FullyMaskedRowsAndSinks) {
  std::vector<GpuCase> cases;
  uint64_t seed = 8000;
  for (const DType dtype : kDtypes) {
    for (const bool sinks : {false, true}) {
      for (const bool deterministic : {false, true}) {
        GpuCase c = make(fmt::format("sinks {}", sinks), ++seed, dtype, sizes(2, 4, 2, 200, 30, 64, 64));
        c.problem.problem.causal = true, c.problem.problem.has_sinks = sinks;  // rows 0 to 169 see nothing
        c.problem.problem.deterministic = deterministic;
        cases.push_back(c);
      }
    }
  }
  check_all(cases);
}

}  // namespace
}  // namespace plait::testing
