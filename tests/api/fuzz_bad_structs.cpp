// The C API with nulls, wild enums, ranks, extents, numbers and struct sizes: a status and a text each time, and
// outputs untouched after a refusal. No corruption makes a tensor claim memory that it does not have. Called through
// fuzz.hpp.
#include <functional>

#include "api/fuzz.hpp"
#include "plait/plait.h"

namespace plait::testing {
namespace {

plait_tensor c_tensor(const TensorView& view) {
  plait_tensor tensor{};
  tensor.data = view.data, tensor.dtype = static_cast<int32_t>(view.dtype), tensor.rank = view.rank;
  std::copy(view.shape.begin(), view.shape.end(), tensor.shape);
  std::copy(view.stride.begin(), view.stride.end(), tensor.stride);
  return tensor;
}

int32_t wild_int(Random& random) { return random.pick({-1, 1, 2, 3, 7, 77, INT32_MIN, INT32_MAX}); }

// A sound call and what may be done to it.
struct BadCall {
  Random& random;
  Arena arena;
  std::vector<std::unique_ptr<plait_tensor>> tensors;
  std::vector<const void*> written;  // memory of the outputs
  std::vector<std::function<void()>> corruptions;
  plait_device device{"cpu", 2};
  int op = PLAIT_ATTENTION_FORWARD;
  bool null_workspace = false;

  explicit BadCall(Random& from) : random(from), arena(from.seed(), Strides::kBhsd) {
    corruptions = {[this] { device.name = random.pick<const char*>({nullptr, "", "abacus", "h200", "reference"}); },
                   [this] { device.workers = wild_int(random) % 64; }, [this] { op = random.pick({7, 8, 77, -1}); },
                   [this] { null_workspace = true; }};
  }

  // A tensor with memory of its own, at `slot`. Outputs start as NaN.
  void add(const plait_tensor*& slot, const TensorView& view, bool output = false) {
    tensors.push_back(std::make_unique<plait_tensor>(c_tensor(view)));
    plait_tensor* tensor = tensors.back().get();
    slot = tensor;
    if (output) written.push_back(view.data);
    corruptions.push_back([&slot] { slot = nullptr; });
    corruptions.push_back([tensor] { tensor->data = nullptr; });
    corruptions.push_back([this, tensor] { tensor->dtype = wild_int(random); });
    corruptions.push_back([this, tensor] { tensor->device_kind = wild_int(random); });
    corruptions.push_back([this, tensor] { tensor->device_index = wild_int(random); });
    corruptions.push_back([this, tensor] { tensor->rank = wild_int(random); });
    corruptions.push_back([this, tensor] { tensor->stride[random.below(PLAIT_MAX_RANK)] = 0; });
  }
  void add_floats(const plait_tensor*& slot, std::initializer_list<int64_t> shape, bool output = false) {
    TensorView view = TensorView::contiguous(nullptr, DType::kFloat32, shape);
    const int64_t count = view.numel();
    const Shape flat{1, 1, count, 1, 1};
    view.data = output ? arena.poisoned(DType::kFloat32, flat).data : arena.random(DType::kFloat32, flat, count).data;
    add(slot, view, output);
  }
  void add_indices(const plait_tensor*& slot, const std::vector<int32_t>& lengths,
                   std::initializer_list<int64_t> shape) {
    auto* offsets = const_cast<int32_t*>(arena.cumulative(lengths));
    add(slot, TensorView::contiguous(offsets, DType::kInt32, shape));
    const auto count = static_cast<int64_t>(lengths.size()) + 1;
    for (int weight = 0; weight < 4; ++weight) {
      corruptions.push_back([this, offsets, count] {
        offsets[random.below(count)] = random.pick({-1, INT32_MIN, INT32_MAX, static_cast<int>(random.below(20))});
      });
    }
  }
  // One tensor is given other extents; the others then contradict it, or it is smaller.
  void corrupt_extent() {
    plait_tensor& tensor = *tensors[random.below(static_cast<int64_t>(tensors.size()))];
    int64_t& extent = tensor.shape[random.below(std::clamp(tensor.rank, 1, PLAIT_MAX_RANK))];
    extent =
        random.pick<int64_t>({-1, 0, extent - 1, extent + 1, int64_t{1} << 40, INT64_MAX, INT64_MIN, INT64_MAX / 2});
  }
  void add_options(plait_options& o) {
    for (int32_t* field : {&o.mode, &o.mask, &o.layout, &o.causal, &o.deterministic, &o.strategy, &o.backend,
                           &o.out_dtype, &o.has_scale}) {
      corruptions.push_back([this, field] { *field = wild_int(random); });
    }
    for (double* field : {&o.scale, &o.softcap}) {
      corruptions.push_back([this, field, &o] {
        *field = random.pick<double>({NAN, HUGE_VAL, -HUGE_VAL, -1.0, 1e308, 0.0}), o.has_scale = 1;
      });
    }
    for (int64_t* field : {&o.window_left, &o.window_right, &o.split_size}) {
      corruptions.push_back(
          [this, field] { *field = random.pick<int64_t>({-2, INT64_MIN, INT64_MAX, 0, 1, 1 << 30}); });
    }
    add_size(o.struct_size);
  }
  void add_size(uint32_t& size) {
    corruptions.push_back(
        [this, &size] { size = random.pick<uint32_t>({0, 1, 4, 7, 8, size - 8, size + 8, UINT32_MAX}); });
  }

  void check(plait_status status, const plait_error& error, const char* where) const {
    if (status < PLAIT_OK || status > PLAIT_INTERNAL || status != error.status) {
      throw Failure(
          fmt::format("{}: status {} beside {}", where, static_cast<int>(status), static_cast<int>(error.status)));
    }
    if (status == PLAIT_INTERNAL) throw Failure(fmt::format("{}: {}", where, error.message));
    if (status == PLAIT_OK) return;
    const std::string argument = error.argument, message = error.message;
    expect_clear(argument, message, {error.argument});
    if (argument.empty()) throw Failure(fmt::format("{}: no argument named: {}", where, message));
    for (const void* data : written) expect_written(where, arena, data, 0);
  }

  void run(const void* params) {
    const bool sound = random.chance(10);
    for (int64_t i = sound ? 0 : random.between(1, 2); i > 0; --i) {
      corruptions[random.below(static_cast<int64_t>(corruptions.size()))]();
    }
    if (!sound && random.chance(40)) corrupt_extent();
    plait_error error;
    std::memset(&error, 0x5a, sizeof(error));
    plait_plan* plan = nullptr;
    const plait_status planned = plait_plan_create(&plan, static_cast<plait_op>(op), params, &device, &error);
    const std::unique_ptr<plait_plan, void (*)(plait_plan*)> owner(plan, plait_plan_destroy);
    check(planned, error, "plan");
    if ((plan != nullptr) != (planned == PLAIT_OK)) throw Failure("a plan without success, or success without a plan");
    if (sound && planned != PLAIT_OK) throw Failure(error.message);
    if (plan == nullptr) return;
    if (plait_plan_explain(plan, nullptr, 0) == 0) throw Failure("an empty explanation");
    constexpr int64_t kMostBytes = 1 << 26;
    if (plait_plan_workspace_bytes(plan) > kMostBytes) return;
    HostPlace place(1, false);
    void* workspace = place.workspace(plait_plan_workspace_bytes(plan));
    const plait_status ran = plait_run(plan, params, null_workspace ? nullptr : workspace, nullptr, &error);
    check(ran, error, "run");
    place.finish();
    if (!sound) return;
    if (ran != PLAIT_OK) throw Failure(error.message);
    for (const void* data : written) {
      if (arena.written(data) == 0) throw Failure("a sound call wrote nothing");
    }
  }
};

void fuzz_attention_struct(Random& random) {
  BadCall call(random);
  plait_attention params = PLAIT_ATTENTION_INIT;
  const bool packed = random.chance(40);
  if (packed) {
    call.add_floats(params.q, {9, 2, 8}), call.add_floats(params.k, {11, 1, 8}), call.add_floats(params.v, {11, 1, 5});
    call.add_indices(params.cu_seqlens_q, {3, 0, 5}, {4}), call.add_indices(params.cu_seqlens_k, {4, 2, 4}, {4});
    call.add_floats(params.out, {9, 2, 5}, true), call.add_floats(params.lse, {2, 9}, true);
  } else {
    call.add_floats(params.q, {2, 2, 5, 8}), call.add_floats(params.k, {2, 1, 7, 8});
    call.add_floats(params.v, {2, 1, 7, 5});
    call.add_floats(params.out, {2, 2, 5, 5}, true), call.add_floats(params.lse, {2, 2, 5}, true);
  }
  if (random.chance(50)) call.add_floats(params.sinks, {2});
  call.add_options(params.options);
  call.add_size(params.struct_size);
  call.run(&params);
}

void fuzz_cache_struct(Random& random) {
  BadCall call(random);
  call.op = PLAIT_KVCACHE_FORWARD;
  plait_kvcache params = PLAIT_KVCACHE_INIT;
  call.add_floats(params.q, {2, 2, 3, 8});
  if (random.chance(50)) {
    call.add_floats(params.k_cache, {7, 4, 1, 8}), call.add_floats(params.v_cache, {7, 4, 1, 6});
    call.add_indices(params.block_table, {1, 1, 1, 1, 1}, {2, 3});  // pages 0 to 5
  } else {
    call.add_floats(params.k_cache, {3, 1, 12, 8}), call.add_floats(params.v_cache, {3, 1, 12, 6});
    if (random.chance(50)) call.add_indices(params.cache_batch_idx, {2}, {2});  // rows 0 and 2
  }
  const bool append = random.chance(70);
  if (append) call.add_floats(params.k_new, {2, 1, 3, 8}), call.add_floats(params.v_new, {2, 1, 3, 6});
  call.add_indices(params.cache_seqlens, {5}, {2});  // 0 and 5 keys
  if (random.chance(30)) call.add_floats(params.sinks, {2});
  plait_rope rope{sizeof(plait_rope), 0, 0, {}, {}, 0};
  if (append && random.chance(40)) {  // without an append a query would stand before position 0
    for (plait_tensor* table : {&rope.cos, &rope.sin}) {
      *table = c_tensor(TensorView::contiguous(call.arena.random(DType::kFloat32, {1, 1, 12, 1, 4}, 12).data,
                                               DType::kFloat32, {12, 4}));
    }
    params.rope = &rope;
    call.add_size(rope.struct_size);
    call.corruptions.push_back([&] { rope.style = wild_int(random); });
    call.corruptions.push_back([&] { rope.index = wild_int(random); });
    call.corruptions.push_back([&] { rope.offset = random.pick<int64_t>({-1, 5, INT64_MIN, INT64_MAX}); });
  }
  // Caches are written in place and hold numbers from the start: only out and lse tell.
  call.add_floats(params.out, {2, 2, 3, 6}, true), call.add_floats(params.lse, {2, 2, 3}, true);
  call.add_options(params.options);
  call.add_size(params.struct_size);
  call.run(&params);
}

void fuzz_merge_struct(Random& random) {
  BadCall call(random);
  plait_merge params = PLAIT_MERGE_INIT;
  const plait_tensor *outs[2], *lses[2];
  for (int i = 0; i < 2; ++i) call.add_floats(outs[i], {2, 2, 5, 4}), call.add_floats(lses[i], {2, 2, 5});
  call.add_floats(params.out, {2, 2, 5, 4}, true), call.add_floats(params.lse, {2, 2, 5}, true);
  params.parts = 2;
  call.add_size(params.struct_size);
  call.corruptions.push_back([&] { params.parts = random.pick<int64_t>({0, -1, 1, INT64_MIN, INT64_MAX}); });
  call.corruptions.push_back([&] { params.layout = wild_int(random); });
  call.corruptions.push_back([&] { params.packed = wild_int(random); });
  call.corruptions.push_back([&] { params.workers = random.pick<int32_t>({0, -1, INT32_MIN, 3}); });
  for (int64_t i = random.between(0, 2); i > 0; --i) {
    call.corruptions[random.below(static_cast<int64_t>(call.corruptions.size()))]();
  }
  if (random.chance(40)) call.corrupt_extent();
  std::vector<plait_tensor> out_array, lse_array;
  for (int i = 0; i < 2; ++i) {
    if (outs[i] == nullptr || lses[i] == nullptr) continue;
    out_array.push_back(*outs[i]), lse_array.push_back(*lses[i]);
  }
  params.outs = out_array.data(), params.lses = lse_array.data();
  params.parts = std::min<int64_t>(params.parts, static_cast<int64_t>(out_array.size()));
  plait_error error;
  call.check(plait_merge_states(&params, nullptr, &error), error, "merge");
}

}  // namespace

void fuzz_bad_structs(uint64_t seed, const Target&) {
  Random random(seed);
  const int64_t which = random.below(5);
  if (which < 2) return fuzz_attention_struct(random);
  if (which < 4) return fuzz_cache_struct(random);
  fuzz_merge_struct(random);
}

}  // namespace plait::testing
