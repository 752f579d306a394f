// The C API: plans and calls for versioned structs, exceptions turned into statuses.
// Called from C; holds no state of its own.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <string>
#include <vector>

#include "api/c_structs.hpp"
#include "plait/version.hpp"

struct plait_plan {
  plait_op op;
  plait::Plan plan;
};

namespace plait {
namespace {

using c_api::any_kvcache_args;
using c_api::attention_args;
using c_api::backward_args;
using c_api::collapse_args;
using c_api::invalid;
using c_api::optional_tensor;
using c_api::premix_args;
using c_api::read;
using c_api::tensor;

void set_text(char* to, size_t size, const char* text) {
  const size_t length = std::min(std::strlen(text), size - 1);
  std::memcpy(to, text, length);
  to[length] = '\0';
}

plait_status report(plait_error* error, plait_status status, const char* argument, const char* message) {
  if (error != nullptr) {
    error->status = status;
    set_text(error->argument, sizeof(error->argument), argument);
    set_text(error->message, sizeof(error->message), message);
  }
  return status;
}

// Runs `body`; nothing that it throws leaves this file.
template <class Body>
plait_status guarded(plait_error* error, const Body& body) noexcept {
  try {
    body();
    return report(error, PLAIT_OK, "", "");
  } catch (const Error& refused) {
    return report(error, static_cast<plait_status>(refused.code()), refused.argument().c_str(), refused.what());
  } catch (const std::bad_alloc&) {
    return report(error, PLAIT_INTERNAL, "memory", "memory: none is left for the plan");
  } catch (const std::exception& unexpected) {
    return report(error, PLAIT_INTERNAL, "internal", unexpected.what());
  } catch (...) {
    return report(error, PLAIT_INTERNAL, "internal", "internal: an unknown exception");
  }
}

// The number in an enum argument: C passes any, and reading a wild one as the enum would be undefined.
template <class Enum>
int32_t number_of(const Enum& value) {
  static_assert(sizeof(Enum) == sizeof(int32_t));
  int32_t number = 0;
  std::memcpy(&number, &value, sizeof(number));
  return number;
}

Plan make(plait_op op, const void* params, const DeviceInfo& device) {
  switch (op) {
    case PLAIT_ATTENTION_FORWARD:
      return plan_attention_forward(attention_args(read<plait_attention>(params, "params")), device);
    case PLAIT_ATTENTION_BACKWARD:
      return plan_attention_backward(backward_args(read<plait_attention>(params, "params")), device);
    case PLAIT_PREMIX_FORWARD:
      return plan_premix_forward(premix_args(read<plait_premix>(params, "params")), device);
    case PLAIT_PREMIX_BACKWARD:
      return plan_premix_backward(premix_args(read<plait_premix>(params, "params")), device);
    case PLAIT_COLLAPSE_FORWARD:
      return plan_collapse_forward(collapse_args(read<plait_collapse>(params, "params")), device);
    case PLAIT_COLLAPSE_BACKWARD:
      return plan_collapse_backward(collapse_args(read<plait_collapse>(params, "params")), device);
    case PLAIT_KVCACHE_FORWARD: {
      const auto args = any_kvcache_args(read<plait_kvcache>(params, "params"));
      if (const auto* iha = std::get_if<IhaKvCacheArgs>(&args)) return plan_iha_attention_with_kvcache(*iha, device);
      return plan_attention_with_kvcache(std::get<KvCacheArgs>(args), device);
    }
  }
  invalid("op", fmt::format("got {}, expected a plait_op", static_cast<int>(op)));
}

void run_attention(const plait_plan& planned, const void* params, void* workspace, const Executor& executor) {
  const auto c = read<plait_attention>(params, "params");
  if (planned.op == PLAIT_ATTENTION_FORWARD) {
    return attention_forward(attention_args(c), {tensor(c.out, "out"), tensor(c.lse, "lse")}, planned.plan, workspace,
                             executor);
  }
  const AttentionGrads grads{tensor(c.dq, "dq"), tensor(c.dk, "dk"), tensor(c.dv, "dv"),
                             optional_tensor(c.dsinks, "dsinks")};
  attention_backward(backward_args(c), grads, planned.plan, workspace, executor);
}

void run_premix(const plait_plan& planned, const void* params, void* workspace, const Executor& executor) {
  const auto c = read<plait_premix>(params, "params");
  if (planned.op == PLAIT_PREMIX_FORWARD) {
    return premix_forward(premix_args(c), tensor(c.y, "y"), planned.plan, workspace, executor);
  }
  premix_backward(premix_args(c), tensor(c.dy, "dy"), tensor(c.dx, "dx"), tensor(c.dw, "dw"), planned.plan, workspace,
                  executor);
}

void run_collapse(const plait_plan& planned, const void* params, void* workspace, const Executor& executor) {
  const auto c = read<plait_collapse>(params, "params");
  if (planned.op == PLAIT_COLLAPSE_FORWARD) {
    return collapse_forward(collapse_args(c), tensor(c.y, "y"), planned.plan, workspace, executor);
  }
  collapse_backward(collapse_args(c), tensor(c.dy, "dy"), tensor(c.dx, "dx"), tensor(c.dr, "dr"), planned.plan,
                    workspace, executor);
}

void run_kvcache(const plait_plan& planned, const void* params, void* workspace, const Executor& executor) {
  const auto c = read<plait_kvcache>(params, "params");
  const AttentionOutputs outputs{tensor(c.out, "out"), tensor(c.lse, "lse")};
  const auto args = any_kvcache_args(c);
  if (const auto* iha = std::get_if<IhaKvCacheArgs>(&args)) {
    return iha_attention_with_kvcache(*iha, outputs, planned.plan, workspace, executor);
  }
  attention_with_kvcache(std::get<KvCacheArgs>(args), outputs, planned.plan, workspace, executor);
}

}  // namespace
}  // namespace plait

extern "C" {

plait_status plait_tensor_contiguous(plait_tensor* tensor, void* data, plait_dtype dtype, int32_t rank,
                                     const int64_t* shape, plait_error* error) {
  return plait::guarded(error, [&] {
    if (tensor == nullptr) plait::c_api::invalid("tensor", "got null");
    if (rank < 0 || rank > PLAIT_MAX_RANK)
      plait::c_api::invalid("rank", fmt::format("got {}, expected 0 to {}", rank, PLAIT_MAX_RANK));
    if (shape == nullptr && rank > 0) plait::c_api::invalid("shape", "got null");
    const int32_t known_dtype = plait::c_api::checked(plait::number_of(dtype), PLAIT_INT32, "dtype");
    *tensor = {};
    tensor->data = data;
    tensor->dtype = known_dtype;
    tensor->rank = rank;
    int64_t stride = 1;
    for (int32_t i = rank - 1; i >= 0; --i) {
      tensor->shape[i] = shape[i];
      tensor->stride[i] = stride;
      if (shape[i] < 0 || __builtin_mul_overflow(stride, std::max<int64_t>(shape[i], 1), &stride)) {
        plait::c_api::invalid(
            "shape",
            fmt::format("got {} in dimension {}, expected sizes >= 0 whose product fits 63 bits", shape[i], i));
      }
    }
  });
}

plait_status plait_plan_create(plait_plan** plan, plait_op op, const void* params, const plait_device* device,
                               plait_error* error) {
  if (plan != nullptr) *plan = nullptr;
  return plait::guarded(error, [&] {
    if (plan == nullptr) plait::c_api::invalid("plan", "got null, expected where to put the plan");
    const plait_op known = plait::c_api::checked(plait::number_of(op), PLAIT_KVCACHE_FORWARD, "op");
    *plan = new plait_plan{known, plait::make(known, params, plait::c_api::device_info(device))};
  });
}

void plait_plan_destroy(plait_plan* plan) { delete plan; }

int64_t plait_plan_workspace_bytes(const plait_plan* plan) { return plan == nullptr ? 0 : plan->plan.workspace_bytes; }

size_t plait_plan_explain(const plait_plan* plan, char* buffer, size_t size) {
  std::string text;
  plait::guarded(nullptr, [&] { text = plan == nullptr ? "" : plan->plan.explain(); });
  if (buffer != nullptr && size > 0) plait::set_text(buffer, size, text.c_str());
  return text.size();
}

plait_status plait_run(const plait_plan* plan, const void* params, void* workspace, const plait_executor* executor,
                       plait_error* error) {
  return plait::guarded(error, [&] {
    if (plan == nullptr) plait::c_api::invalid("plan", "got null; make one with plait_plan_create");
    const plait::Executor run_on = plait::c_api::executor_of(executor);
    switch (plan->op) {
      case PLAIT_ATTENTION_FORWARD:
      case PLAIT_ATTENTION_BACKWARD:
        return plait::run_attention(*plan, params, workspace, run_on);
      case PLAIT_PREMIX_FORWARD:
      case PLAIT_PREMIX_BACKWARD:
        return plait::run_premix(*plan, params, workspace, run_on);
      case PLAIT_COLLAPSE_FORWARD:
      case PLAIT_COLLAPSE_BACKWARD:
        return plait::run_collapse(*plan, params, workspace, run_on);
      case PLAIT_KVCACHE_FORWARD:
        return plait::run_kvcache(*plan, params, workspace, run_on);
    }
  });
}

plait_status plait_merge_states(const plait_merge* params, const plait_executor* executor, plait_error* error) {
  return plait::guarded(error, [&] {
    const auto c = plait::c_api::read<plait_merge>(params, "params");
    if (c.parts < 1 || c.parts > 1'000'000)
      plait::c_api::invalid("parts", fmt::format("got {}, expected 1 to 1000000", c.parts));
    if (c.outs == nullptr || c.lses == nullptr)
      plait::c_api::invalid(c.outs == nullptr ? "outs" : "lses", "is missing (null)");
    std::vector<plait::TensorView> outs, lses;
    for (int64_t i = 0; i < c.parts; ++i) {
      outs.push_back(plait::c_api::tensor(c.outs + i, "outs"));
      lses.push_back(plait::c_api::tensor(c.lses + i, "lses"));
    }
    const plait::MergeArgs args{outs.data(), lses.data(), c.parts,
                                plait::c_api::checked(c.layout, plait::Layout::kBshd, "layout"),
                                plait::c_api::flag(c.packed, "packed")};
    plait::merge_states(args, {plait::c_api::tensor(c.out, "out"), plait::c_api::tensor(c.lse, "lse")},
                        plait::c_api::executor_of(executor), c.workers);
  });
}

plait_status plait_flop_matched_window(int64_t seqlen, int64_t pseudo_heads, plait_head_mode mode, int64_t tile,
                                       plait_flop_match* match, plait_error* error) {
  return plait::guarded(error, [&] {
    if (match == nullptr) plait::c_api::invalid("match", "got null, expected where to put the result");
    const auto found = plait::flop_matched_window(
        seqlen, pseudo_heads, plait::c_api::checked(plait::number_of(mode), plait::HeadMode::kInterleaved, "mode"),
        tile);
    *match = {found.left, found.formula_left, found.visits, found.causal_visits, found.visit_ratio};
  });
}

const char* plait_version(void) { return plait::version(); }

}  // extern "C"
