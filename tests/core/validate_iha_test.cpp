// Bad premix, collapse and merge arguments: one clear error each, naming the argument.
#include <gtest/gtest.h>

#include <functional>
#include <vector>

#include "core/validate.hpp"

namespace plait {
namespace {

struct Memory {
  std::vector<float> floats = std::vector<float>(1 << 14);
  std::vector<int32_t> offsets{0, 2, 6}, other{0, 1, 9};
  size_t used = 0;
  TensorView tensor(std::initializer_list<int64_t> shape) {
    TensorView view = TensorView::contiguous(floats.data() + used, DType::kFloat32, shape);
    used += static_cast<size_t>(view.numel());
    return view;
  }
};

struct PremixCall : Memory {
  PremixArgs args;
  TensorView y;
  PremixCall() {
    args.x = tensor({2, 3, 6, 8});
    args.w = tensor({3, 4, 3});
    args.rope = Rope{tensor({6, 4}), tensor({6, 4})};
    y = tensor({2, 3, 6, 4, 8});
  }
  void make_packed() {
    args.x = tensor({6, 3, 8});
    args.cu_seqlens = TensorView::contiguous(offsets.data(), DType::kInt32, {3});
    y = tensor({6, 3, 4, 8});
  }
};

template <class Run>
std::string refused(const Run& run) {
  try {
    run();
  } catch (const Error& error) {
    return error.argument();
  }
  return "";
}

TEST(ValidatePremix, RefusesEachBadArgumentByName) {
  const std::vector<std::pair<const char*, std::function<void(PremixCall&)>>> cases{
      {"", [](PremixCall&) {}},
      {"", [](PremixCall& c) { c.make_packed(); }},
      {"x", [](PremixCall& c) { c.args.x.rank = 3; }},
      {"w", [](PremixCall& c) { c.args.x = c.tensor({2, 0, 6, 8}); }},
      {"",
       [](PremixCall& c) {
         c.args.x = c.tensor({2, 0, 6, 8}), c.args.w = c.tensor({0, 4, 0}), c.y = c.tensor({2, 0, 6, 4, 8});
         c.args.rope->offset = -6;  // no head, so no row that would stand there
       }},
      {"",
       [](PremixCall& c) {
         c.args.x = c.tensor({0, 3, 6, 8}), c.y = c.tensor({0, 3, 6, 4, 8}), c.args.rope->offset = -6;
       }},
      {"w", [](PremixCall& c) { c.args.w = c.tensor({3, 4, 2}); }},
      {"w", [](PremixCall& c) { c.args.w = c.tensor({3, 0, 3}); }},
      {"w", [](PremixCall& c) { c.args.w = c.tensor({3, 4}); }},
      {"w", [](PremixCall& c) { c.args.w.dtype = DType::kBFloat16; }},
      {"y", [](PremixCall& c) { c.y = c.tensor({2, 3, 6, 5, 8}); }},
      {"y", [](PremixCall& c) { c.y.data = c.args.x.data; }},
      {"rope", [](PremixCall& c) { c.args.rope->cos.shape[0] = c.args.rope->sin.shape[0] = 5; }},
      {"rope", [](PremixCall& c) { c.args.rope->offset = 1; }},
      {"rope", [](PremixCall& c) { c.args.rope->offset = -1; }},
      {"rope", [](PremixCall& c) { c.args.rope->index = RopeIndex::kRow; }},
      {"rope", [](PremixCall& c) { c.args.rope = Rope{c.tensor({6, 5}), c.tensor({6, 5})}; }},
      {"rope sin", [](PremixCall& c) { c.args.rope->sin.shape[1] = 3; }},
      {"rope cos", [](PremixCall& c) { c.args.rope->cos.dtype = DType::kFloat64; }},
      {"cu_seqlens_other",
       [](PremixCall& c) { c.args.cu_seqlens_other = TensorView::contiguous(c.other.data(), DType::kInt32, {3}); }},
      {"cu_seqlens", [](PremixCall& c) { c.make_packed(), c.offsets[2] = 7; }},
      // Sequence 0: one key for two queries, so its first query would stand at position -1.
      {"rope",
       [](PremixCall& c) {
         c.make_packed(), c.args.cu_seqlens_other = TensorView::contiguous(c.other.data(), DType::kInt32, {3});
       }},
  };
  for (size_t i = 0; i < cases.size(); ++i) {
    PremixCall call;
    cases[i].second(call);
    EXPECT_EQ(refused([&] { validate(call.args, &call.y); }), cases[i].first) << "case " << i;
  }
}

TEST(ValidateCollapse, RefusesEachBadArgumentByName) {
  Memory memory;
  CollapseArgs args{.x = memory.tensor({2, 3, 6, 4, 8}), .r = memory.tensor({3, 4})};
  TensorView y = memory.tensor({2, 3, 6, 8});
  EXPECT_EQ(refused([&] { validate(args, &y); }), "");
  CollapseArgs bad = args;
  bad.r = memory.tensor({3, 3});
  EXPECT_EQ(refused([&] { validate(bad, &y); }), "collapse");
  bad.r = memory.tensor({3, 3, 3});
  EXPECT_EQ(refused([&] { validate(bad, &y); }), "collapse");
  bad.r = memory.tensor({3, 3, 4});
  EXPECT_EQ(refused([&] { validate(bad, &y); }), "");
  y.shape[2] = 5;
  EXPECT_EQ(refused([&] { validate(args, &y); }), "y");
}

TEST(ValidateMerge, RefusesEachBadArgumentByName) {
  Memory memory;
  std::vector<TensorView> outs{memory.tensor({1, 2, 3, 4}), memory.tensor({1, 2, 3, 4})};
  std::vector<TensorView> lses{memory.tensor({1, 2, 3}), memory.tensor({1, 2, 3})};
  AttentionOutputs outputs{memory.tensor({1, 2, 3, 4}), memory.tensor({1, 2, 3})};
  const MergeArgs args{outs.data(), lses.data(), 2};
  EXPECT_EQ(refused([&] { validate(args, outputs); }), "");
  EXPECT_EQ(refused([&] { validate(MergeArgs{}, outputs); }), "outs");
  lses[1].shape[2] = 2;
  EXPECT_EQ(refused([&] { validate(args, outputs); }), "lses");
  outs[1].dtype = DType::kFloat16;
  EXPECT_EQ(refused([&] { validate(args, outputs); }), "outs");
  // The parts are looked at first: what is wrong with all of them is not put down to the outputs.
  outs[0].rank = 3;
  EXPECT_EQ(refused([&] { validate(args, outputs); }), "outs");
  outs[0] = outs[1] = memory.tensor({1, 2, 3, 4});
  lses[0].shape[1] = lses[1].shape[1] = outputs.lse.shape[1] = 3;
  EXPECT_EQ(refused([&] { validate(args, outputs); }), "lses");
  lses[0] = memory.tensor({1, 2, 3}), lses[1] = memory.tensor({1, 2, 3});
  EXPECT_EQ(refused([&] { validate(args, outputs); }), "lse");
}

}  // namespace
}  // namespace plait
