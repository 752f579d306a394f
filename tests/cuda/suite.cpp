// The shared part of the CUDA tests.
// Called through suite.hpp.
#include "cuda/suite.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <mutex>
#include <thread>

#include "catalog/catalog.hpp"
#include "catalog/mma_split_d_tiles.hpp"

namespace plait::testing {

Settings& settings() {
  static Settings all;
  return all;
}

namespace {

const CudaTarget& target_of(Backend backend) {
  const int64_t smem = settings().smem_kib * 1024;
  static const CudaTarget naive_target(Backend::kCudaNaive, 0, {.exact = settings().exact}, smem);
  static const CudaTarget mma_target(Backend::kCudaMma, 0, {.exact = settings().exact}, smem);
  static const CudaTarget sm90_target(Backend::kCudaSm90, 0, {.exact = settings().exact}, smem);
  static const CudaTarget auto_target(Backend::kAuto, 0, {.exact = settings().exact}, smem);
  switch (backend) {
    case Backend::kCudaMma:
      return mma_target;
    case Backend::kCudaSm90:
      return sm90_target;
    case Backend::kAuto:
      return auto_target;
    default:
      return naive_target;
  }
}

}  // namespace

const CudaTarget& naive() { return target_of(Backend::kCudaNaive); }
const CudaTarget& mma() { return target_of(Backend::kCudaMma); }
const CudaTarget& automatic() { return target_of(Backend::kAuto); }
const CudaTarget& sm90() { return target_of(Backend::kCudaSm90); }

bool tensor_cores_take(DType dtype, int64_t head_dim, int64_t head_dim_v) {
  const bool dtype_fits =
      (catalog::kMmaFloat16 && dtype == DType::kFloat16) ||
      (catalog::kMmaBFloat16 && dtype == DType::kBFloat16 && mma().device().compute_capability >= catalog::kAmpere);
  const int64_t larger = std::max(head_dim, head_dim_v), smem = mma().device().smem_per_block_bytes;
  if (!dtype_fits || head_dim % catalog::kMmaHeadDimMultiple != 0 || head_dim_v % catalog::kMmaHeadDimMultiple != 0)
    return false;
  if (larger <= catalog::kMmaMaxHeadDim) return true;
  return larger >= catalog::kMmaSplitDMinHeadDim && catalog::split_d_tile(head_dim, head_dim_v, smem) != nullptr &&
         catalog::split_d_backward_tile(larger, smem) != nullptr;
}

DType half_dtype() { return catalog::kMmaFloat16 ? DType::kFloat16 : DType::kBFloat16; }

void in_parallel(int64_t count, const std::function<void(int64_t)>& body,
                 const std::function<std::string(int64_t)>& name) {
  std::atomic<int64_t> next{0};
  std::mutex mutex;
  std::vector<std::string> failures;
  const auto work = [&] {
    for (int64_t i = next++; i < count; i = next++) {
      try {
        body(i);
      } catch (const std::exception& error) {
        const std::lock_guard lock(mutex);
        failures.push_back(fmt::format("{}: {}", name(i), error.what()));
      }
    }
  };
  const unsigned cores = settings().exact ? 1 : std::max(1u, std::thread::hardware_concurrency());
  std::vector<std::thread> threads;
  for (int64_t i = 0; i < std::min<int64_t>(cores, count); ++i) threads.emplace_back(work);
  for (std::thread& thread : threads) thread.join();
  constexpr size_t kShown = 25;
  std::sort(failures.begin(), failures.end());
  for (size_t i = 0; i < std::min(kShown, failures.size()); ++i) ADD_FAILURE() << failures[i];
  if (failures.size() > kShown) ADD_FAILURE() << "... " << failures.size() << " of " << count << " cases failed";
}

double rms(const std::vector<double>& x) {
  double sum = 0;
  for (const double value : x) sum += value * value;
  return x.empty() ? 0.0 : std::sqrt(sum / static_cast<double>(x.size()));
}

void expect_close(const std::string& what, const std::vector<double>& got, const std::vector<double>& expected,
                  double bar, double floor) {
  std::vector<double> error, finite;
  size_t worst = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    if (got[i] == expected[i] && std::isinf(expected[i])) continue;
    error.push_back(got[i] - expected[i]), finite.push_back(expected[i]);
    const double mine = std::abs(got[i] - expected[i]), most = std::abs(got[worst] - expected[worst]);
    if (!(mine <= most)) worst = i;  // also NaN
  }
  const double norm = std::max(rms(finite), floor), relative = error.empty() ? 0 : rms(error) / (norm > 0 ? norm : 1);
  if (relative <= bar) return;
  throw Failure(fmt::format("{}: rms error {:.2e} of {:.2e}, bar {:.1e}; worst [{}] of {}: got {:.5g}, expected {:.5g}",
                            what, relative, norm, bar, worst, expected.size(), got[worst], expected[worst]));
}

void expect_equal(const std::string& what, const std::vector<double>& got, const std::vector<double>& expected) {
  for (size_t i = 0; i < expected.size(); ++i) {
    if (got[i] == expected[i] || (std::isnan(got[i]) && std::isnan(expected[i]))) continue;
    throw Failure(fmt::format("{}[{}] of {}: got {}, expected the same bits as {}", what, i, expected.size(), got[i],
                              expected[i]));
  }
}

void expect_all_written(const std::string& what, const Arena& arena, const void* data, const Shape& shape) {
  const int64_t written = arena.written(data), expected = elements(shape);
  if (written != expected) throw Failure(fmt::format("{}: {} elements written of {}", what, written, expected));
}

Bars bars_of(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
      return {2.6e-3, 1e-6, 3.8e-3, 2.6e-3};
    case DType::kFloat16:
      return {2.6e-3 / 8, 1e-6, 3.8e-3 / 8, 2.6e-3 / 8};
    default:
      return {2e-6, 1e-6, 1e-5, 1e-5};
  }
}

GpuCase make(std::string name, uint64_t seed, DType dtype, const AttentionProblem& problem) {
  GpuCase c;
  c.name = fmt::format("{} {}", name, dtype_name(dtype));
  c.problem.problem = problem;
  c.problem.problem.dtype = dtype;
  c.problem.seed = seed;
  return c;
}

AttentionProblem sizes(int64_t batch, int64_t heads_q, int64_t heads_kv, int64_t seqlen_q, int64_t seqlen_kv,
                       int64_t head_dim, int64_t head_dim_v) {
  AttentionProblem problem;
  problem.batch = batch, problem.heads_q = heads_q, problem.heads_kv = heads_kv;
  problem.seqlen_q = seqlen_q, problem.seqlen_kv = seqlen_kv;
  problem.head_dim = head_dim, problem.head_dim_v = head_dim_v;
  return problem;
}

AttentionOptions options_of(const AttentionCase& c, Backend backend, Layout layout) {
  AttentionOptions options;
  options.mode = c.problem.mode, options.mask = c.problem.mask;
  options.causal = c.problem.causal;
  options.window_left = c.problem.window_left, options.window_right = c.problem.window_right;
  options.scale = c.scale, options.softcap = c.problem.softcap;
  options.deterministic = c.problem.deterministic;
  options.backend = backend, options.layout = layout;
  if (c.out_float32) options.out_dtype = DType::kFloat32;
  return options;
}

namespace {

// out and lse as a merge over more keys would give them, in both precisions; every seventh row is empty by its lse.
void make_external(const Attention& a, const AttentionTensors& narrow, const AttentionTensors& wide) {
  int64_t count = 0;
  for_each_index(a.lse_shape, [&](const reference::Index& i) {
    const double lse = reference::load(wide.lse, i.batch, i.head, i.seq) + 0.3 * std::sin(static_cast<double>(count));
    reference::store(narrow.lse, i.batch, i.head, i.seq, ++count % 7 == 0 ? -HUGE_VAL : lse);
  });
  for_each_index(a.out_shape, [&](const reference::Index& i) {
    reference::store(narrow.out, i, 0.5 * reference::load(wide.out, i) + 0.1);
  });
  copy_values(as_canonical(narrow.lse), as_canonical(wide.lse), a.lse_shape);
  copy_values(narrow.out, wide.out, a.out_shape);
}

struct Expected {
  Wide wide;
  AttentionTensors tensors;  // with gradients, where asked for

  Expected(const GpuCase& c, const Attention& from, bool gradients)
      : wide(c.problem, options_of(c.problem, Backend::kReference, c.layout), from), tensors(wide.a.with_outputs()) {
    HostPlace host(1, true);
    run(host, arguments(wide.a, wide.options), outputs(wide.a, tensors, wide.options));
    if (gradients) backward(c.dlse);
  }
  void backward(bool dlse) {
    HostPlace host(1, true);
    tensors = wide.a.with_gradients(tensors);
    run(host, backward_arguments(wide.a, tensors, wide.options, dlse), gradients(wide.a, tensors, wide.options));
  }
};

void check_gradients(const GpuCase& c, const Attention& a, const AttentionTensors& t, const Expected& expected) {
  const Bars bars = bars_of(c.problem.problem.dtype);
  const AttentionTensors& e = expected.tensors;
  expect_close("dq", values(t.dq, a.q_shape), values(e.dq, a.q_shape), c.slack * bars.dq_dk, c.floor);
  expect_close("dk", values(t.dk, a.k_shape), values(e.dk, a.k_shape), c.slack * bars.dq_dk, c.floor);
  expect_close("dv", values(t.dv, a.v_shape), values(e.dv, a.v_shape), c.slack * bars.dv, c.floor);
  expect_all_written("dq", a.arena, t.dq.data, a.q_shape);
  expect_all_written("dk", a.arena, t.dk.data, a.k_shape);
  expect_all_written("dv", a.arena, t.dv.data, a.v_shape);
  if (!a.problem.has_sinks) return;
  // A few numbers, each a sum that cancels: twice the bar of elements.
  expect_close("dsinks", values(a.dsinks(t), a.sinks_shape()), values(expected.wide.a.dsinks(e), a.sinks_shape()),
               2 * c.slack * bars.dq_dk, std::max(c.floor, 1.0));
  expect_all_written("dsinks", a.arena, t.dsinks, a.sinks_shape());
}

void check_on(const CudaTarget& target, const GpuCase& c, Attention& a, Expected& expected) {
  const AttentionOptions options = options_of(c.problem, target.backend(), c.layout);
  const auto place = [&] { return target.mirror({.misaligned = c.misaligned, .edge = c.edge}); };
  const AttentionTensors forward = a.with_outputs();
  run(*place(), arguments(a, options), outputs(a, forward, options));
  const Bars bars = bars_of(a.problem.out_dtype);
  // On tensor cores the rounding of probabilities stays in a float32 output.
  const double out_bar = target.tensor_cores() ? bars_of(a.problem.dtype).out : bars.out;
  const AttentionTensors& e = expected.tensors;
  if (!c.external) {
    expect_close("out", values(forward.out, a.out_shape), values(e.out, a.out_shape), c.slack * out_bar, c.floor);
    expect_close("lse", values(as_canonical(forward.lse), a.lse_shape), values(as_canonical(e.lse), a.lse_shape),
                 c.slack * bars.lse, 1.0);
  }
  expect_all_written("out", a.arena, forward.out.data, a.out_shape);
  expect_all_written("lse", a.arena, forward.lse.data, a.lse_shape);
  if (c.external) {
    make_external(a, forward, expected.tensors);
    expected.backward(c.dlse);
  }
  const AttentionTensors t = a.with_gradients(forward);
  run(*place(), backward_arguments(a, t, options, c.dlse), gradients(a, t, options));
  check_gradients(c, a, t, expected);
}

// A forward on tensor cores.
void check_forward(const std::string& what, const CudaTarget& target, const AttentionOptions& options, const GpuCase& c,
                   Attention& a, const Expected& expected) {
  const AttentionTensors t = a.with_outputs();
  run(*target.mirror({.misaligned = c.misaligned, .edge = c.edge}), arguments(a, options), outputs(a, t, options));
  const AttentionTensors& e = expected.tensors;
  expect_close(what + " out", values(t.out, a.out_shape), values(e.out, a.out_shape),
               c.slack * bars_of(a.problem.dtype).out, c.floor);
  expect_close(what + " lse", values(as_canonical(t.lse), a.lse_shape), values(as_canonical(e.lse), a.lse_shape),
               c.slack * bars_of(a.problem.dtype).lse, 1.0);
  expect_all_written(what + " out", a.arena, t.out.data, a.out_shape);
  expect_all_written(what + " lse", a.arena, t.lse.data, a.lse_shape);
}

// The forward over key ranges, even ones or of a fixed size; it takes no packed problems.
void check_splits(const CudaTarget& target, const GpuCase& c, Attention& a, const Expected& expected) {
  if (!target.splits() || c.external || !c.problem.q_lens.empty() || !c.problem.kv_lens.empty()) return;
  AttentionOptions options = options_of(c.problem, target.backend(), c.layout);
  options.strategy = Strategy::kSplitKv;
  if (c.problem.seed % 2 == 1) options.split_size = 16 + static_cast<int64_t>(c.problem.seed % 90);
  check_forward("split_kv", target, options, c, a, expected);
}

// Hopper's forward, of what its copy engine reads: interleaved rows one stride apart, or whole tokens in every tile.
bool sm90_takes(const GpuCase& c) {
  const AttentionProblem& p = c.problem.problem;
  const int64_t larger = std::max(p.head_dim, p.head_dim_v), per = p.rows_per_position();
  const bool apart = per > 1 && (c.problem.strides != Strides::kBhsd || !c.problem.q_lens.empty());
  if (apart && 16 % per != 0) return false;
  return catalog::kSm90 && sm90().device().compute_capability == catalog::kHopper && !c.external && !c.misaligned &&
         c.problem.strides != Strides::kRandom && !c.problem.expanded && p.seqlen_kv > 0 &&
         larger <= catalog::kSm90HeadDims.back() && tensor_cores_take(p.dtype, p.head_dim, p.head_dim_v);
}

}  // namespace

void check_attention(const GpuCase& c, const CudaTarget* only) {
  Attention a(c.problem);
  const AttentionProblem& p = c.problem.problem;
  std::optional<Expected> expected;
  for (const CudaTarget* target : {&naive(), &mma(), &sm90()}) {
    if (only != nullptr && target != only) continue;
    if (target == &mma() && !tensor_cores_take(p.dtype, p.head_dim, p.head_dim_v)) continue;
    if (target == &sm90() && !sm90_takes(c)) continue;
    if (!expected || c.external)
      expected.emplace(c, a, !c.external && only != &sm90());  // external results are made from the backend's own
    try {
      if (target == &sm90()) {
        check_forward("forward", *target, options_of(c.problem, target->backend(), c.layout), c, a, *expected);
        check_splits(*target, c, a, *expected);
        continue;
      }
      check_on(*target, c, a, *expected);
      check_splits(*target, c, a, *expected);
    } catch (const std::exception& error) {
      throw Failure(fmt::format("{}: {}", target->name(), error.what()));
    }
  }
}

void check_all(const std::vector<GpuCase>& cases, const CudaTarget* only) {
  in_parallel(
      static_cast<int64_t>(cases.size()), [&](int64_t i) { check_attention(cases[static_cast<size_t>(i)], only); },
      [&](int64_t i) { return cases[static_cast<size_t>(i)].name; });
}

std::vector<std::vector<double>> results_of(const GpuCase& c, const CudaTarget& target, cudaStream_t stream) {
  Attention a(c.problem);
  const AttentionOptions options = options_of(c.problem, target.backend(), c.layout);
  const auto place = [&] { return stream == nullptr ? target.mirror() : target.mirror_on(stream); };
  const AttentionTensors forward = a.with_outputs();
  run(*place(), arguments(a, options), outputs(a, forward, options));
  const AttentionTensors t = a.with_gradients(forward);
  run(*place(), backward_arguments(a, t, options, c.dlse), gradients(a, t, options));
  std::vector<std::vector<double>> all{values(t.out, a.out_shape), values(as_canonical(t.lse), a.lse_shape),
                                       values(t.dq, a.q_shape), values(t.dk, a.k_shape), values(t.dv, a.v_shape)};
  if (a.problem.has_sinks) all.push_back(values(a.dsinks(t), a.sinks_shape()));
  return all;
}

}  // namespace plait::testing
