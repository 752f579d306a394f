// The C API: results equal the C++ ones, errors come back as text, structs of another size are handled.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "plait/plait.h"
#include "plait/plan.hpp"
#include "support/workspace.hpp"

namespace {

struct Call {
  std::vector<float> q = std::vector<float>(2 * 5 * 8), k = q, v = q, out = std::vector<float>(q.size(), NAN),
                     lse = std::vector<float>(10, NAN);
  plait_tensor q_view, k_view, v_view, out_view, lse_view;
  plait_attention params = PLAIT_ATTENTION_INIT;
  plait_device device{"cpu", 2};
  plait_error error{};

  Call() {
    for (size_t i = 0; i < q.size(); ++i) {
      q[i] = std::sin(static_cast<float>(i));
      k[i] = std::cos(static_cast<float>(3 * i));
      v[i] = static_cast<float>(i % 7) - 3;
    }
    const int64_t shape[] = {1, 2, 5, 8};
    for (const auto& [view, data] : {std::pair{&q_view, &q}, {&k_view, &k}, {&v_view, &v}, {&out_view, &out}}) {
      EXPECT_EQ(plait_tensor_contiguous(view, data->data(), PLAIT_FLOAT32, 4, shape, &error), PLAIT_OK);
    }
    EXPECT_EQ(plait_tensor_contiguous(&lse_view, lse.data(), PLAIT_FLOAT32, 3, shape, &error), PLAIT_OK);
    params.q = &q_view;
    params.k = &k_view;
    params.v = &v_view;
    params.out = &out_view;
    params.lse = &lse_view;
    params.options.causal = 1;
  }
  plait_status run(plait_op op = PLAIT_ATTENTION_FORWARD) {
    plait_plan* plan = nullptr;
    plait_status status = plait_plan_create(&plan, op, &params, &device, &error);
    if (status == PLAIT_OK) {
      plait::Plan bytes;
      bytes.workspace_bytes = plait_plan_workspace_bytes(plan);
      status = plait_run(plan, &params, plait::testing::workspace_of(bytes).get(), nullptr, &error);
    }
    plait_plan_destroy(plan);
    return status;
  }
};

TEST(CApi, CpuEqualsTheReference) {
  Call cpu, reference;
  reference.params.options.backend = PLAIT_BACKEND_REFERENCE;
  ASSERT_EQ(cpu.run(), PLAIT_OK) << cpu.error.message;
  ASSERT_EQ(reference.run(), PLAIT_OK) << reference.error.message;
  EXPECT_STREQ(cpu.error.message, "");
  for (size_t i = 0; i < cpu.out.size(); ++i) ASSERT_NEAR(cpu.out[i], reference.out[i], 1e-5);
  for (size_t i = 0; i < cpu.lse.size(); ++i) ASSERT_NEAR(cpu.lse[i], reference.lse[i], 1e-5);
}

TEST(CApi, BackwardRuns) {
  Call call;
  ASSERT_EQ(call.run(), PLAIT_OK);
  std::vector<float> dout(call.out.size(), 1.0f), dq(call.q.size(), NAN), dk = dq, dv = dq;
  plait_tensor views[4] = {call.out_view, call.q_view, call.k_view, call.v_view};
  views[0].data = dout.data(), views[1].data = dq.data(), views[2].data = dk.data(), views[3].data = dv.data();
  call.params.dout = &views[0], call.params.dq = &views[1], call.params.dk = &views[2], call.params.dv = &views[3];
  ASSERT_EQ(call.run(PLAIT_ATTENTION_BACKWARD), PLAIT_OK) << call.error.message;
  double sum = 0;  // with dout = 1 every row of probabilities adds its whole weight to dv
  for (const float x : dv) sum += x;
  EXPECT_NEAR(sum, static_cast<double>(call.out.size()), 1e-3);
}

TEST(CApi, ErrorsAreStatusesWithText) {
  Call call;
  call.params.options.window_left = -3;
  EXPECT_EQ(call.run(), PLAIT_INVALID_ARGUMENT);
  EXPECT_STREQ(call.error.argument, "window");
  EXPECT_NE(std::strstr(call.error.message, "-3"), nullptr);
  for (const float x : call.out) ASSERT_TRUE(std::isnan(x));

  Call missing;
  missing.params.k = nullptr;
  EXPECT_EQ(missing.run(), PLAIT_INVALID_ARGUMENT);
  EXPECT_STREQ(missing.error.argument, "k");

  Call backend;
  backend.params.options.backend = PLAIT_BACKEND_CUDA_SM90;
  EXPECT_EQ(backend.run(), PLAIT_UNSUPPORTED);
  backend.params.options.backend = 77;
  EXPECT_EQ(backend.run(), PLAIT_INVALID_ARGUMENT);

  Call device;
  device.device.name = "abacus";
  EXPECT_EQ(device.run(), PLAIT_INVALID_ARGUMENT);
  EXPECT_NE(std::strstr(device.error.message, "h200"), nullptr);
  Call index;
  index.k_view.device_index = 3;
  EXPECT_EQ(index.run(), PLAIT_INVALID_ARGUMENT);
  EXPECT_NE(std::strstr(index.error.message, "got device cpu:3, expected cpu"), nullptr) << index.error.message;
  device.device.name = nullptr;
  EXPECT_EQ(device.run(), PLAIT_INVALID_ARGUMENT);
}

TEST(CApi, FlagsAndEnumsAreChecked) {
  Call causal;
  causal.params.options.causal = 7;
  EXPECT_EQ(causal.run(), PLAIT_INVALID_ARGUMENT);
  EXPECT_STREQ(causal.error.argument, "causal");
  Call options;
  options.params.options.struct_size = 8;
  EXPECT_EQ(options.run(), PLAIT_INVALID_ARGUMENT);
  Call reserved;
  reserved.params.options.reserved[5] = 1;
  EXPECT_EQ(reserved.run(), PLAIT_INVALID_ARGUMENT);
  EXPECT_STREQ(reserved.error.argument, "reserved");
  Call overlap;  // lse inside the rows of a padded out
  std::vector<float> padded(2 * 5 * 16);
  overlap.out_view.data = padded.data();
  overlap.out_view.stride[1] = 80, overlap.out_view.stride[2] = 16;
  overlap.lse_view.data = padded.data() + 4;
  overlap.lse_view.stride[1] = 80, overlap.lse_view.stride[2] = 16;
  EXPECT_EQ(overlap.run(), PLAIT_INVALID_ARGUMENT);
  overlap.lse_view.data = padded.data() + 8;  // in the gaps
  EXPECT_EQ(overlap.run(), PLAIT_OK) << overlap.error.message;
  plait_tensor view;
  const int64_t one = 1;
  EXPECT_EQ(plait_tensor_contiguous(&view, nullptr, static_cast<plait_dtype>(99), 1, &one, nullptr),
            PLAIT_INVALID_ARGUMENT);
}

TEST(CApi, NullsAreRefusedEverywhere) {
  plait_error error{};
  EXPECT_EQ(plait_plan_create(nullptr, PLAIT_ATTENTION_FORWARD, nullptr, nullptr, &error), PLAIT_INVALID_ARGUMENT);
  EXPECT_EQ(plait_run(nullptr, nullptr, nullptr, nullptr, &error), PLAIT_INVALID_ARGUMENT);
  EXPECT_EQ(plait_run(nullptr, nullptr, nullptr, nullptr, nullptr), PLAIT_INVALID_ARGUMENT);
  EXPECT_EQ(plait_merge_states(nullptr, nullptr, &error), PLAIT_INVALID_ARGUMENT);
  EXPECT_EQ(plait_flop_matched_window(8192, 4, PLAIT_JOINT, 128, nullptr, &error), PLAIT_INVALID_ARGUMENT);
  EXPECT_EQ(plait_tensor_contiguous(nullptr, nullptr, PLAIT_FLOAT32, 1, nullptr, &error), PLAIT_INVALID_ARGUMENT);
  plait_plan_destroy(nullptr);
  EXPECT_EQ(plait_plan_workspace_bytes(nullptr), 0);
  EXPECT_EQ(plait_plan_explain(nullptr, nullptr, 0), 0u);
}

TEST(CApi, StructSizesAreVersions) {
  Call shorter;  // an older header: it ended before the backward's fields
  shorter.params.struct_size = offsetof(plait_attention, dout);
  EXPECT_EQ(shorter.run(), PLAIT_OK) << shorter.error.message;
  Call longer;
  longer.params.struct_size = sizeof(plait_attention) + 8;
  EXPECT_EQ(longer.run(), PLAIT_INVALID_ARGUMENT);
  EXPECT_STREQ(longer.error.argument, "struct_size");
  Call zero;
  zero.params.struct_size = 0;
  EXPECT_EQ(zero.run(), PLAIT_INVALID_ARGUMENT);
}

TEST(CApi, ExplainFollowsTheSnprintfConvention) {
  Call call;
  plait_plan* plan = nullptr;
  ASSERT_EQ(plait_plan_create(&plan, PLAIT_ATTENTION_FORWARD, &call.params, &call.device, &call.error), PLAIT_OK);
  const size_t needed = plait_plan_explain(plan, nullptr, 0);
  std::vector<char> text(needed + 1), cut(8);
  EXPECT_EQ(plait_plan_explain(plan, text.data(), text.size()), needed);
  EXPECT_NE(std::strstr(text.data(), "cpu"), nullptr);
  EXPECT_EQ(plait_plan_explain(plan, cut.data(), cut.size()), needed);
  EXPECT_EQ(std::strlen(cut.data()), 7u);
  plait_plan_destroy(plan);
}

TEST(CApi, WindowRule) {
  plait_flop_match match;
  ASSERT_EQ(plait_flop_matched_window(16384, 4, PLAIT_JOINT, 128, &match, nullptr), PLAIT_OK);
  EXPECT_EQ(match.left, 2049);
}

}  // namespace
