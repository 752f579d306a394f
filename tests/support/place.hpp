// Where a call under test runs: on the host's own tensors, or on copies of them on a device.
// Called by the fuzzers and by tests/cuda (through device_mirror.hpp), so that both backends meet the same problems.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <vector>

#include "plait/kv_cache.hpp"

namespace plait::testing {

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Place {
 public:
  virtual ~Place() = default;
  // A host tensor as the call reads it there, and one that the call may also write.
  virtual TensorView in(const TensorView& host) = 0;
  virtual TensorView out(const TensorView& host) = 0;
  // Exactly `bytes`, filled with 0xff (NaN, and -1 as an index), guarded; valid until the place is gone.
  virtual void* workspace(int64_t bytes) = 0;
  virtual DeviceInfo device() const = 0;
  virtual Executor executor() const = 0;
  // Waits for the call and brings its results to the host tensors. Throws Failure where it wrote beside them.
  virtual void finish() = 0;
};

inline void run_in_order(void*, int32_t workers, void (*body)(void*, int32_t), void* arg) {
  for (int32_t worker = 0; worker < workers; ++worker) body(arg, worker);
}

class HostPlace final : public Place {
 public:
  // sequential: the workers run one after the other.
  HostPlace(int32_t workers, bool sequential) : workers_(workers), sequential_(sequential) {}

  TensorView in(const TensorView& host) override { return host; }
  TensorView out(const TensorView& host) override { return host; }
  void* workspace(int64_t bytes) override {
    const auto size = static_cast<size_t>(bytes), whole = (size + 2 * kGuard - 1) / kGuard * kGuard;
    Block& block = blocks_.emplace_back(
        Block{size, std::unique_ptr<unsigned char, Free>(static_cast<unsigned char*>(std::aligned_alloc(64, whole)))});
    std::memset(block.memory.get(), 0xff, size);
    std::memset(block.memory.get() + size, kMark, whole - size);
    return block.memory.get();
  }
  DeviceInfo device() const override { return DeviceInfo::host(workers_); }
  Executor executor() const override {
    return sequential_ ? Executor{run_in_order, nullptr, nullptr} : Executor::threads();
  }
  void finish() override {
    for (const Block& block : blocks_) {
      for (size_t i = 0; i < kGuard; ++i) {
        if (block.memory.get()[block.bytes + i] != kMark) throw Failure("a run wrote past its workspace");
      }
    }
  }

 private:
  static constexpr size_t kGuard = 64;
  static constexpr unsigned char kMark = 0x5a;
  struct Free {
    void operator()(unsigned char* memory) const { std::free(memory); }
  };
  struct Block {
    size_t bytes;
    std::unique_ptr<unsigned char, Free> memory;
  };
  int32_t workers_;
  bool sequential_;
  std::vector<Block> blocks_;
};

// What a fuzzer tests.
class Target {
 public:
  virtual ~Target() = default;
  virtual Backend backend() const = 0;
  // Whether it has split_kv and split_size, and whether it reads index tensors before a call (and refuses wrong ones).
  virtual bool splits() const = 0;
  virtual bool reads_indices() const = 0;
  virtual std::unique_ptr<Place> place(int32_t workers, bool sequential) const = 0;
  // Tensor cores take 16-bit head dims in multiples of 8, and round what they multiply.
  bool tensor_cores() const { return backend() != Backend::kCpu && backend() != Backend::kCudaNaive; }
};

class CpuTarget final : public Target {
 public:
  Backend backend() const override { return Backend::kCpu; }
  bool splits() const override { return true; }
  bool reads_indices() const override { return true; }
  std::unique_ptr<Place> place(int32_t workers, bool sequential) const override {
    return std::make_unique<HostPlace>(workers, sequential);
  }
};

// ---- every op: prepare(place, ...) plans it and gives the launch; run(place, ...) also finishes.

using Launch = std::function<void()>;

inline std::optional<TensorView> in(Place& place, const std::optional<TensorView>& host) {
  return host ? std::optional(place.in(*host)) : std::nullopt;
}
inline std::optional<Rope> in(Place& place, std::optional<Rope> rope) {
  if (rope) rope->cos = place.in(rope->cos), rope->sin = place.in(rope->sin);
  return rope;
}
inline AttentionArgs in(Place& place, const AttentionArgs& a) {
  return {place.in(a.q),
          place.in(a.k),
          place.in(a.v),
          in(place, a.sinks),
          in(place, a.cu_seqlens_q),
          in(place, a.cu_seqlens_k),
          a.options};
}
inline AttentionOutputs out(Place& place, const AttentionOutputs& o) { return {place.out(o.out), place.out(o.lse)}; }

inline Launch prepare(Place& place, const AttentionArgs& host, const AttentionOutputs& results) {
  const AttentionArgs args = in(place, host);
  const AttentionOutputs outputs = out(place, results);
  const Plan plan = plan_attention_forward(args, place.device());
  return [=, workspace = place.workspace(plan.workspace_bytes), executor = place.executor()] {
    attention_forward(args, outputs, plan, workspace, executor);
  };
}

inline Launch prepare(Place& place, const AttentionBackwardArgs& host, const AttentionGrads& results) {
  const AttentionBackwardArgs args{in(place, host.forward), place.in(host.out), place.in(host.lse), place.in(host.dout),
                                   in(place, host.dlse)};
  AttentionGrads grads{place.out(results.dq), place.out(results.dk), place.out(results.dv), {}};
  if (results.dsinks) grads.dsinks = place.out(*results.dsinks);
  const Plan plan = plan_attention_backward(args, place.device());
  return [=, workspace = place.workspace(plan.workspace_bytes), executor = place.executor()] {
    attention_backward(args, grads, plan, workspace, executor);
  };
}

inline PremixArgs in(Place& place, PremixArgs args) {
  args.x = place.in(args.x), args.w = place.in(args.w), args.rope = in(place, args.rope);
  args.cu_seqlens = in(place, args.cu_seqlens), args.cu_seqlens_other = in(place, args.cu_seqlens_other);
  return args;
}
inline Launch prepare(Place& place, const PremixArgs& host, const TensorView& result) {
  const PremixArgs args = in(place, host);
  const TensorView y = place.out(result);
  const Plan plan = plan_premix_forward(args, place.device());
  return [=, workspace = place.workspace(plan.workspace_bytes), executor = place.executor()] {
    premix_forward(args, y, plan, workspace, executor);
  };
}
inline Launch prepare(Place& place, const PremixArgs& host, const TensorView& gradient, const TensorView& x_result,
                      const TensorView& w_result) {
  const PremixArgs args = in(place, host);
  const TensorView dy = place.in(gradient), dx = place.out(x_result), dw = place.out(w_result);
  const Plan plan = plan_premix_backward(args, place.device());
  return [=, workspace = place.workspace(plan.workspace_bytes), executor = place.executor()] {
    premix_backward(args, dy, dx, dw, plan, workspace, executor);
  };
}

using Premixes = std::vector<PremixArgs>;
inline Launch prepare(Place& place, Premixes args, std::vector<TensorView> ys) {
  for (PremixArgs& one : args) one = in(place, one);
  for (TensorView& y : ys) y = place.out(y);
  const Plan plan = plan_premix_forward(args, place.device());
  return [=, workspace = place.workspace(plan.workspace_bytes), executor = place.executor()] {
    premix_forward(args, ys, plan, workspace, executor);
  };
}
inline Launch prepare(Place& place, Premixes args, std::vector<PremixGradients> gradients) {
  for (PremixArgs& one : args) one = in(place, one);
  for (auto& [dy, dx, dw] : gradients) dy = place.in(dy), dx = place.out(dx), dw = place.out(dw);
  const Plan plan = plan_premix_backward(args, place.device());
  return [=, workspace = place.workspace(plan.workspace_bytes), executor = place.executor()] {
    premix_backward(args, gradients, plan, workspace, executor);
  };
}

inline CollapseArgs in(Place& place, CollapseArgs args) {
  args.x = place.in(args.x), args.r = place.in(args.r);
  return args;
}
inline Launch prepare(Place& place, const CollapseArgs& host, const TensorView& result) {
  const CollapseArgs args = in(place, host);
  const TensorView y = place.out(result);
  const Plan plan = plan_collapse_forward(args, place.device());
  return [=, workspace = place.workspace(plan.workspace_bytes), executor = place.executor()] {
    collapse_forward(args, y, plan, workspace, executor);
  };
}
inline Launch prepare(Place& place, const CollapseArgs& host, const TensorView& gradient, const TensorView& x_result,
                      const TensorView& r_result) {
  const CollapseArgs args = in(place, host);
  const TensorView dy = place.in(gradient), dx = place.out(x_result), dr = place.out(r_result);
  const Plan plan = plan_collapse_backward(args, place.device());
  return [=, workspace = place.workspace(plan.workspace_bytes), executor = place.executor()] {
    collapse_backward(args, dy, dx, dr, plan, workspace, executor);
  };
}

// The caches are written only by a step that appends.
inline KvCacheArgs in(Place& place, KvCacheArgs args) {
  const bool appends = args.k_new.has_value();
  args.q = place.in(args.q);
  args.k_cache = appends ? place.out(args.k_cache) : place.in(args.k_cache);
  args.v_cache = appends ? place.out(args.v_cache) : place.in(args.v_cache);
  for (std::optional<TensorView>* tensor :
       {&args.k_new, &args.v_new, &args.block_table, &args.cache_batch_idx, &args.sinks}) {
    *tensor = in(place, *tensor);
  }
  args.cache_seqlens = place.in(args.cache_seqlens), args.rope = in(place, args.rope);
  return args;
}
inline Launch prepare(Place& place, const KvCacheArgs& host, const AttentionOutputs& results) {
  const KvCacheArgs args = in(place, host);
  const AttentionOutputs outputs = out(place, results);
  const Plan plan = plan_attention_with_kvcache(args, place.device());
  return [=, workspace = place.workspace(plan.workspace_bytes), executor = place.executor()] {
    attention_with_kvcache(args, outputs, plan, workspace, executor);
  };
}
inline Launch prepare(Place& place, const IhaKvCacheArgs& host, const AttentionOutputs& results) {
  const IhaKvCacheArgs args{in(place, host.attention), place.in(host.w_q), place.in(host.w_k), place.in(host.w_v),
                            host.kind};
  const AttentionOutputs outputs = out(place, results);
  const Plan plan = plan_iha_attention_with_kvcache(args, place.device());
  return [=, workspace = place.workspace(plan.workspace_bytes), executor = place.executor()] {
    iha_attention_with_kvcache(args, outputs, plan, workspace, executor);
  };
}

// Copies of the lists of tensors that MergeArgs points to.
struct MergeParts {
  std::vector<TensorView> outs, lses;
  MergeParts(Place& place, const MergeArgs& args) {
    for (int64_t i = 0; i < args.parts; ++i) {
      outs.push_back(place.in(args.outs[i])), lses.push_back(place.in(args.lses[i]));
    }
  }
  MergeArgs args(const MergeArgs& host) const {
    return {outs.data(), lses.data(), host.parts, host.layout, host.packed};
  }
};
inline Launch prepare(Place& place, const MergeArgs& host, const AttentionOutputs& results) {
  const MergeParts parts(place, host);
  const AttentionOutputs outputs = out(place, results);
  return [=, executor = place.executor(), workers = place.device().workers] {
    merge_states(parts.args(host), outputs, executor, workers);
  };
}
inline Launch prepare(Place& place, const MergeArgs& host, const AttentionOutputs& merged, const TensorView& gradient,
                      const std::optional<TensorView>& lse_gradient, const std::vector<TensorView>& out_results,
                      const std::vector<TensorView>& lse_results) {
  const MergeParts parts(place, host);
  const AttentionOutputs outputs{place.in(merged.out), place.in(merged.lse)};
  const TensorView dout = place.in(gradient);
  const std::optional<TensorView> dlse = in(place, lse_gradient);
  std::vector<TensorView> douts, dlses;
  for (const TensorView& result : out_results) douts.push_back(place.out(result));
  for (const TensorView& result : lse_results) dlses.push_back(place.out(result));
  return [=, executor = place.executor(), workers = place.device().workers] {
    merge_states_backward(parts.args(host), outputs, dout, dlse, douts.data(), dlses.data(), executor, workers);
  };
}

template <class... Arguments>
void run(Place& place, const Arguments&... arguments) {
  prepare(place, arguments...)();
  place.finish();
}

}  // namespace plait::testing
