// Bad attention arguments: one clear error each, naming the argument.
#include "core/validate.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <vector>

namespace plait {
namespace {

// A legal call that owns its memory; each test spoils one thing.
struct Call {
  std::vector<float> memory = std::vector<float>(1 << 16);
  std::vector<int32_t> offsets{0, 3, 6};
  size_t used = 0;
  AttentionArgs args;
  AttentionOutputs outputs;

  TensorView tensor(std::initializer_list<int64_t> shape) {
    TensorView view = TensorView::contiguous(memory.data() + used, DType::kFloat32, shape);
    used += static_cast<size_t>(view.numel());
    return view;
  }
  Call() {
    args.q = tensor({2, 4, 6, 8});
    args.k = tensor({2, 2, 10, 8});
    args.v = tensor({2, 2, 10, 5});
    args.sinks = tensor({4});
    outputs = {tensor({2, 4, 6, 5}), tensor({2, 4, 6})};
  }
  void make_packed() {
    used = 0;
    args.q = tensor({6, 4, 8});
    args.k = tensor({6, 2, 8});
    args.v = tensor({6, 2, 5});
    args.cu_seqlens_q = TensorView::contiguous(offsets.data(), DType::kInt32, {3});
    args.cu_seqlens_k = args.cu_seqlens_q;
    outputs = {tensor({6, 4, 5}), tensor({4, 6})};
  }
};

// Runs the full validation and returns the argument that was refused, "" if none.
std::string refused(const Call& call) {
  try {
    validate(call.args, &call.outputs);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_GT(std::string(error.what()).size(), error.argument().size() + 10) << error.what();
    return error.argument();
  }
  return "";
}

TEST(ValidateAttention, AcceptsALegalCall) {
  EXPECT_EQ(refused(Call()), "");
  Call packed;
  packed.make_packed();
  EXPECT_EQ(refused(packed), "");
}

TEST(ValidateAttention, NormalisesBothLayouts) {
  Call call;
  const AttentionProblem bhsd = validate(call.args, &call.outputs).problem;
  EXPECT_EQ(bhsd.heads_q, 4);
  EXPECT_EQ(bhsd.seqlen_kv, 10);
  EXPECT_EQ(bhsd.head_dim_v, 5);
  EXPECT_DOUBLE_EQ(bhsd.scale, 1.0 / std::sqrt(8.0));
  Call other;
  other.used = 0;
  other.args.options.layout = Layout::kBshd;
  other.args.q = other.tensor({2, 6, 4, 8});
  other.args.k = other.tensor({2, 10, 2, 8});
  other.args.v = other.tensor({2, 10, 2, 5});
  other.args.sinks = other.tensor({4});
  other.outputs = {other.tensor({2, 6, 4, 5}), other.tensor({2, 4, 6})};
  const ValidatedAttention bshd = validate(other.args, &other.outputs);
  EXPECT_EQ(bshd.problem.fingerprint(), bhsd.fingerprint());
  EXPECT_EQ(bshd.tensors.q.head_stride, 8);
  EXPECT_EQ(bshd.tensors.q.seq_stride, 32);
}

TEST(ValidateAttention, RefusesEachBadArgumentByName) {
  using Spoil = std::function<void(Call&)>;
  const double inf = std::numeric_limits<double>::infinity(), nan = std::numeric_limits<double>::quiet_NaN();
  const std::vector<std::pair<const char*, Spoil>> cases{
      {"q", [](Call& c) { c.args.q = c.tensor({4, 6, 8}); }},
      {"q", [](Call& c) { c.args.q.rank = 5; }},
      {"q", [](Call& c) { c.args.q.shape[2] = -1; }},
      {"q", [](Call& c) { c.args.q.shape[2] = int64_t{1} << 60; }},
      {"q", [](Call& c) { c.args.q.dtype = DType::kInt32; }},
      {"q", [](Call& c) { c.args.q.data = nullptr; }},
      {"q", [](Call& c) { c.args.q.device.kind = DeviceKind::kOther; }},
      {"q", [](Call& c) { c.args.q.shape[3] = c.args.k.shape[3] = 0; }},
      {"q", [](Call& c) { c.args.q.shape[3] = c.args.k.shape[3] = 1032; }},
      {"k", [](Call& c) { c.args.k.dtype = DType::kBFloat16; }},
      {"k", [](Call& c) { c.args.k.device = {DeviceKind::kCuda, 0}; }},
      {"k", [](Call& c) { c.args.k.shape[0] = 3; }},
      {"k", [](Call& c) { c.args.k.shape[3] = 16; }},
      {"k", [](Call& c) { c.args.k.shape[1] = c.args.v.shape[1] = 3; }},
      {"k", [](Call& c) { c.args.k.shape[1] = c.args.v.shape[1] = 0; }},
      {"v", [](Call& c) { c.args.v.shape[1] = 4; }},
      {"v", [](Call& c) { c.args.v.shape[2] = 9; }},
      {"v", [](Call& c) { c.args.v.shape[3] = 2048; }},
      {"v", [](Call& c) { c.args.v.rank = 3; }},
      {"scale", [&](Call& c) { c.args.options.scale = inf; }},
      {"scale", [&](Call& c) { c.args.options.scale = nan; }},
      {"softcap", [](Call& c) { c.args.options.softcap = -1; }},
      {"softcap", [&](Call& c) { c.args.options.softcap = inf; }},
      {"window", [](Call& c) { c.args.options.window_left = -2; }},
      {"window", [](Call& c) { c.args.options.window_right = -7; }},
      {"split_size", [](Call& c) { c.args.options.split_size = -1; }},
      {"split_size", [](Call& c) { c.args.options.split_size = 64, c.args.options.strategy = Strategy::kSplitQ; }},
      {"mask", [](Call& c) { c.args.options.mask = PseudoMask::kToken; }},
      {"out_dtype", [](Call& c) { c.args.options.out_dtype = DType::kBFloat16; }},
      {"sinks", [](Call& c) { c.args.sinks = c.tensor({3}); }},
      {"sinks", [](Call& c) { c.args.sinks->dtype = DType::kBFloat16; }},
      {"cu_seqlens_k", [](Call& c) { c.make_packed(), c.args.cu_seqlens_k.reset(); }},
      {"cu_seqlens_q",
       [](Call& c) {
         c.make_packed(), c.args.cu_seqlens_q.reset(),
             c.args.q = c.tensor({2, 4, 6, 8}), c.args.k = c.tensor({2, 2, 10, 8}), c.args.v = c.tensor({2, 2, 10, 5});
       }},
      {"cu_seqlens_q", [](Call& c) { c.make_packed(), c.args.cu_seqlens_q->dtype = DType::kFloat32; }},
      {"cu_seqlens_k", [](Call& c) { c.make_packed(), c.args.cu_seqlens_k->shape[0] = 2; }},
      {"cu_seqlens_q", [](Call& c) { c.make_packed(), c.offsets[0] = 1; }},
      {"cu_seqlens_q", [](Call& c) { c.make_packed(), c.offsets[1] = 7; }},
      {"cu_seqlens_q", [](Call& c) { c.make_packed(), c.offsets[2] = 9; }},
      {"cu_seqlens_q",
       [](Call& c) { c.make_packed(), c.args.cu_seqlens_q->shape[0] = 0, c.args.cu_seqlens_k->shape[0] = 0; }},
      {"out", [](Call& c) { c.outputs.out = c.tensor({2, 4, 6, 8}); }},
      {"out", [](Call& c) { c.outputs.out.data = c.args.v.data; }},
      {"out", [](Call& c) { c.outputs.out.data = static_cast<float*>(c.args.q.data) + 8; }},
      {"out", [](Call& c) { c.outputs.out.stride[0] = 0; }},
      {"out", [](Call& c) { c.outputs.out.data = nullptr; }},
      {"out", [](Call& c) { c.outputs.lse.data = c.outputs.out.data; }},
      {"lse", [](Call& c) { c.outputs.lse.shape[2] = 5; }},
      {"lse", [](Call& c) { c.outputs.lse.dtype = DType::kFloat16; }},
  };
  for (size_t i = 0; i < cases.size(); ++i) {
    Call call;
    cases[i].second(call);
    EXPECT_EQ(refused(call), cases[i].first) << "case " << i;
  }
}

TEST(ValidateAttention, PseudoHeadsNeedEqualP) {
  Call call;
  call.used = 0;
  call.args.options.mode = HeadMode::kJoint;
  call.args.sinks.reset();
  call.args.q = call.tensor({1, 4, 6, 3, 8});
  call.args.k = call.tensor({1, 2, 6, 3, 8});
  call.args.v = call.tensor({1, 2, 6, 3, 5});
  call.outputs = {call.tensor({1, 4, 6, 5}), call.tensor({1, 4, 6})};
  EXPECT_EQ(refused(call), "");
  Call other = call;
  other.args.v.shape[3] = 2;
  EXPECT_EQ(refused(other), "v");
  other = call;
  other.args.q.shape[3] = other.args.k.shape[3] = other.args.v.shape[3] = 0;
  EXPECT_EQ(refused(other), "q");
  other = call;
  other.args.options.mode = HeadMode::kInterleaved;
  other.outputs = {other.tensor({1, 4, 6, 3, 5}), other.tensor({1, 4, 18})};
  EXPECT_EQ(refused(other), "");
}

TEST(ValidateAttention, OverlapsAreFoundWhereverTheyBegin) {
  Call expanded;  // k expanded from one row that lies inside out
  expanded.args.k.data = static_cast<float*>(expanded.outputs.out.data) + 40;
  expanded.args.k.stride[2] = 0;
  EXPECT_EQ(refused(expanded), "out");
  Call strided;  // k in the upper half of a padded buffer, v two elements into its rows
  const TensorView buffer = strided.tensor({2, 2, 10, 16});
  strided.args.k = buffer, strided.args.k.shape[3] = 8;
  strided.args.v = buffer, strided.args.v.shape[3] = 5;
  strided.args.v.data = static_cast<float*>(buffer.data) + 9;
  EXPECT_EQ(refused(strided), "");  // inputs may overlap
  AttentionBackwardArgs args{strided.args, strided.outputs.out, strided.outputs.lse, strided.tensor({2, 4, 6, 5}),
                             std::nullopt};
  AttentionGrads grads{strided.tensor({2, 4, 6, 8}), strided.tensor({2, 2, 10, 16}), {}, strided.tensor({4})};
  grads.dv = grads.dk;
  grads.dk.shape[3] = 8;
  grads.dv.shape[3] = 5;
  grads.dv.data = static_cast<float*>(grads.dk.data) + 8;
  EXPECT_NO_THROW(validate(args, &grads));
  grads.dv.data = static_cast<float*>(grads.dk.data) + 7;
  EXPECT_THROW(validate(args, &grads), Error);
}

TEST(ValidateAttention, StridedSlicesOfOneBufferAreNotAliases) {
  Call call;
  AttentionBackwardArgs args{call.args, call.outputs.out, call.outputs.lse, call.tensor({2, 4, 6, 5}), std::nullopt};
  // dk and dv interleave in one [2, 2, 10, 13] buffer.
  TensorView both = call.tensor({2, 2, 10, 13});
  AttentionGrads grads{call.tensor({2, 4, 6, 8}), both, both, call.tensor({4})};
  grads.dk.shape[3] = 8;
  grads.dv.shape[3] = 5;
  grads.dv.data = static_cast<float*>(both.data) + 8;
  EXPECT_NO_THROW(validate(args, &grads));
  grads.dv.data = both.data;
  EXPECT_THROW(validate(args, &grads), Error);
  grads.dsinks.reset();
  EXPECT_THROW(validate(args, &grads), Error);
}

}  // namespace
}  // namespace plait
