// The CPU backend against the float64 oracle: modes, masks, dtypes, lengths, head dims, strides, instruction sets.
#include <cmath>

#include "cpu/run.hpp"

namespace plait::testing {
namespace {

AttentionCase base_case(uint64_t seed, int64_t q, int64_t k, int64_t dim, int64_t dim_v) {
  AttentionCase c;
  c.problem = attention_problem(1, 2, 1, q, k, dim, dim_v);
  c.strides = Strides::kRandom;
  c.seed = seed;
  return c;
}

struct MaskChoice {
  bool causal;
  int64_t left, right;
};
constexpr MaskChoice kMasks[] = {{false, -1, -1}, {true, -1, -1}, {true, 20, -1},
                                 {false, 7, 30},  {false, -1, 0}, {true, 0, -1}};

// Tiny problems can have gradients that cancel to nothing, hence the floor.
constexpr double kSlack = 2.0, kFloor = 0.5;

TEST(CpuAttention, LengthsAroundTileEdges) {
  uint64_t seed = 1;
  for (const auto& [q, k] : std::initializer_list<std::pair<int, int>>{{1, 1},
                                                                       {1, 300},
                                                                       {31, 127},
                                                                       {32, 128},
                                                                       {33, 129},
                                                                       {63, 64},
                                                                       {65, 257},
                                                                       {130, 40},
                                                                       {100, 1},
                                                                       {70, 255},
                                                                       {1, 0},
                                                                       {0, 5},
                                                                       {0, 0}}) {
    for (const MaskChoice& mask : kMasks) {
      SCOPED_TRACE(::testing::Message() << q << " x " << k << " causal " << mask.causal << " window " << mask.left
                                        << ", " << mask.right);
      AttentionCase c = base_case(seed++, q, k, 17, 12);
      c.problem.causal = mask.causal, c.problem.window_left = mask.left, c.problem.window_right = mask.right;
      c.problem.has_sinks = seed % 2 == 0;
      check_case(c, {}, kSlack, kFloor);
    }
  }
}

TEST(CpuAttention, HeadDims) {
  uint64_t seed = 100;
  for (const auto& [dim, dim_v] : std::initializer_list<std::pair<int, int>>{
           {1, 1}, {7, 5}, {16, 33}, {64, 64}, {80, 48}, {128, 128}, {257, 130}, {1024, 1024}}) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
      SCOPED_TRACE(::testing::Message() << dim << ", " << dim_v << " " << static_cast<int>(dtype));
      AttentionCase c = base_case(seed++, 40, 70, dim, dim_v);
      c.problem.dtype = dtype;
      c.problem.causal = true;
      c.out_float32 = seed % 2 == 0;
      check_case(c, {}, kSlack, kFloor);
    }
  }
}

TEST(CpuAttention, GroupedHeads) {
  uint64_t seed = 200;
  for (const auto& [heads_q, heads_kv] : std::initializer_list<std::pair<int, int>>{{4, 4}, {6, 2}, {5, 1}, {80, 1}}) {
    for (const int64_t q : {1, 3, 50}) {
      SCOPED_TRACE(::testing::Message() << heads_q << "/" << heads_kv << " q " << q);
      AttentionCase c = base_case(seed++, q, 150, 24, 24);
      c.problem.batch = 2, c.problem.heads_q = heads_q, c.problem.heads_kv = heads_kv;
      c.problem.causal = true;
      c.problem.has_sinks = true;
      check_case(c, {}, kSlack, kFloor);
    }
  }
}

TEST(CpuAttention, PseudoHeads) {
  uint64_t seed = 300;
  for (const HeadMode mode : {HeadMode::kJoint, HeadMode::kInterleaved}) {
    for (const PseudoMask token : {PseudoMask::kFlat, PseudoMask::kToken}) {
      for (const MaskChoice& mask : kMasks) {
        for (const int64_t pseudo : {1, 3}) {
          SCOPED_TRACE(::testing::Message() << "mode " << static_cast<int>(mode) << " P " << pseudo << " token "
                                            << static_cast<int>(token) << " causal " << mask.causal);
          AttentionCase c = base_case(seed++, 45, 60, 20, 20);
          c.problem.mode = mode, c.problem.mask = token, c.problem.pseudo_heads = pseudo;
          c.problem.causal = mask.causal, c.problem.window_left = mask.left, c.problem.window_right = mask.right;
          c.problem.has_sinks = seed % 3 == 0, c.problem.softcap = seed % 4 == 0 ? 3.0 : 0.0;
          c.problem.dtype = seed % 5 == 0 ? DType::kBFloat16 : DType::kFloat32;
          check_case(c, {}, kSlack, kFloor);
        }
      }
    }
  }
}

TEST(CpuAttention, PackedSequences) {
  uint64_t seed = 400;
  for (const HeadMode mode : {HeadMode::kPlain, HeadMode::kJoint, HeadMode::kInterleaved}) {
    for (int round = 0; round < 4; ++round) {
      SCOPED_TRACE(::testing::Message() << "mode " << static_cast<int>(mode) << " round " << round);
      AttentionCase c = base_case(++seed, 0, 0, 16, 8);
      c.problem.heads_q = 4, c.problem.heads_kv = 2;
      c.problem.mode = mode, c.problem.pseudo_heads = mode == HeadMode::kPlain ? 1 : 2;
      c.q_lens = random_lengths(seed, 5, 90), c.kv_lens = random_lengths(seed + 50, 5, 200);
      c.q_tail = round, c.kv_tail = 2 * round;
      c.problem.causal = round % 2 == 1, c.problem.has_sinks = round >= 2;
      c.problem.dtype = round == 3 ? DType::kFloat16 : DType::kFloat32;
      check_case(c, {}, kSlack, kFloor);
      check_case(c, {.strategy = Strategy::kSplitKv}, kSlack, kFloor);
    }
  }
}

TEST(CpuAttention, SoftcapScaleAndExpandedInputs) {
  for (const double softcap : {0.0, 2.0, 30.0}) {
    for (const Strides strides : {Strides::kBhsd, Strides::kBshd, Strides::kRandom}) {
      SCOPED_TRACE(::testing::Message() << "softcap " << softcap << " strides " << static_cast<int>(strides));
      AttentionCase c = base_case(500, 70, 140, 32, 32);
      c.problem.batch = 2, c.problem.softcap = softcap;
      c.scale = 0.7;
      c.strides = strides, c.expanded = true;
      check_case(c, {}, kSlack, kFloor);
    }
  }
}

// The contract's bars, on N(0, 1) inputs and on peaky logits.
TEST(CpuAttention, AccuracyBars) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const double gain : {1.0, 4.0}) {
      for (const int64_t dim : {64, 128, 1024}) {
        SCOPED_TRACE(::testing::Message() << static_cast<int>(dtype) << " gain " << gain << " dim " << dim);
        AttentionCase c = base_case(600 + static_cast<uint64_t>(dim), 192, 320, dim, dim);
        c.problem.dtype = dtype;
        c.problem.causal = true;
        c.q_gain = gain;
        check_case(c);
        check_case(c, {.strategy = Strategy::kSplitKv});
      }
    }
  }
}

TEST(CpuAttention, EveryInstructionSet) {
  for (const int64_t target : targets()) {
    const ChosenTarget chosen(target);
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
      SCOPED_TRACE(::testing::Message() << hwy::TargetName(target) << " " << static_cast<int>(dtype));
      AttentionCase c = base_case(700, 83, 150, 72, 40);
      c.problem.dtype = dtype;
      c.problem.causal = true, c.problem.has_sinks = true, c.problem.softcap = 5.0;
      check_case(c, {}, kSlack, kFloor);
      c.problem.softcap = 0.0, c.problem.split_size = 50;
      check_case(c, {}, kSlack, kFloor);
    }
  }
}

}  // namespace
}  // namespace plait::testing
