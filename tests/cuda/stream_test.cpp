// Streams, CUDA graphs and devices: calls run where the caller says, in order, without a wait, and can be captured.
#include <fmt/format.h>

#include <array>
#include <chrono>
#include <thread>

#include "catalog/catalog.hpp"
#include "cuda/suite.hpp"

namespace plait::testing {
namespace {

using Clock = std::chrono::steady_clock;

void CUDART_CB sleep_on_stream(void*) { std::this_thread::sleep_for(std::chrono::milliseconds(200)); }

GpuCase base_case(const CudaTarget& target, HeadMode mode = HeadMode::kPlain) {
  GpuCase c;
  c.problem.problem = sizes(2, 4, 2, 200, 260, 64, 64);
  AttentionProblem& p = c.problem.problem;
  p.dtype = target.tensor_cores() ? half_dtype() : DType::kFloat32;
  p.mode = mode, p.pseudo_heads = mode == HeadMode::kPlain ? 1 : 2;
  p.causal = true, p.has_sinks = true, p.deterministic = true;
  return c;
}

// Forward and backward of one problem on a mirror; launch() may run any number of times.
struct Training {
  Attention a;
  AttentionTensors tensors;
  std::unique_ptr<DeviceMirror> mirror;
  Launch forward, backward;

  Training(const GpuCase& c, const CudaTarget& target, cudaStream_t stream)
      : a(c.problem), mirror(target.mirror_on(stream)) {
    const AttentionOptions options = options_of(c.problem, target.backend(), c.layout);
    tensors = a.with_gradients(a.with_outputs());
    forward = prepare(*mirror, arguments(a, options), outputs(a, tensors, options));
    backward = prepare(*mirror, backward_arguments(a, tensors, options, true), gradients(a, tensors, options));
  }
  void launch() const { forward(), backward(); }
  std::vector<std::vector<double>> results() {
    mirror->finish();
    return {values(tensors.out, a.out_shape), values(as_canonical(tensors.lse), a.lse_shape),
            values(tensors.dq, a.q_shape),    values(tensors.dk, a.k_shape),
            values(tensors.dv, a.v_shape),    values(a.dsinks(tensors), a.sinks_shape())};
  }
};

void expect_same(const CudaTarget& target, const std::vector<std::vector<double>>& got,
                 const std::vector<std::vector<double>>& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_NO_THROW(expect_equal(target.name(), got[i], expected[i])) << "tensor " << i;
  }
}

struct Graph {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;

  template <class Body>
  Graph(cudaStream_t stream, Body body) {
    check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "cudaStreamBeginCapture");
    body();
    check_cuda(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
    check_cuda(cudaGraphInstantiate(&exec, graph, 0), "cudaGraphInstantiate");
  }
  ~Graph() { cudaGraphExecDestroy(exec), cudaGraphDestroy(graph); }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
};

// A captured step replays with lengths that were changed in place.
TEST(CudaStreams, GraphReplaysWithNewLengths) {
  for (const CudaTarget* target : {&naive(), &mma()}) {
    for (const HeadMode mode : {HeadMode::kPlain, HeadMode::kJoint, HeadMode::kInterleaved}) {
      GpuCase c = base_case(*target, mode);
      c.problem.q_lens = {64, 0, 30, 150}, c.problem.kv_lens = {64, 9, 80, 160}, c.problem.q_tail = 4;
      GpuCase changed = c;
      changed.problem.q_lens = {1, 150, 64, 29}, changed.problem.kv_lens = {160, 73, 0, 80};
      const auto expected_before = results_of(c, *target), expected = results_of(changed, *target);
      const Stream stream;
      Training training(c, *target, stream.get());
      const Graph graph(stream.get(), [&] { training.launch(); });
      check_cuda(cudaGraphLaunch(graph.exec, stream.get()), "cudaGraphLaunch");
      expect_same(*target, training.results(), expected_before);
      const Attention other(changed.problem);
      for (const auto& [to, from] : {std::pair(training.a.inputs.cu_seqlens_q, other.inputs.cu_seqlens_q),
                                     {training.a.inputs.cu_seqlens_kv, other.inputs.cu_seqlens_kv}}) {
        std::copy_n(from, 5, const_cast<int32_t*>(to));
        training.mirror->send(vector_view(to, DType::kInt32, 5));
      }
      check_cuda(cudaGraphLaunch(graph.exec, stream.get()), "cudaGraphLaunch");
      expect_same(*target, training.results(), expected);
    }
  }
}

// One step over a cache, with an append; its lengths grow between two runs.
struct CacheStepOnDevice {
  Arena arena{3, Strides::kBhsd};
  std::vector<int32_t> lengths{5, 40};
  CanonicalTensor k, v, out;
  Shape cache_shape{2, 1, 64, 1, 32}, new_shape{2, 1, 1, 1, 32}, q_shape{2, 2, 1, 1, 32};
  std::unique_ptr<DeviceMirror> mirror;
  Launch launch;

  CacheStepOnDevice(const CudaTarget& target, cudaStream_t stream) : mirror(target.mirror_on(stream)) {
    const auto view = [](const CanonicalTensor& t, const Shape& shape) {
      return view_of(t, shape, Layout::kBhsd, false, false);
    };
    k = arena.random(DType::kFloat16, cache_shape, 64), v = arena.random(DType::kFloat16, cache_shape, 64);
    out = arena.poisoned(DType::kFloat16, q_shape);
    KvCacheArgs args;
    args.q = view(arena.random(DType::kFloat16, q_shape, 1), q_shape);
    args.k_cache = view(k, cache_shape), args.v_cache = view(v, cache_shape);
    args.k_new = view(arena.random(DType::kFloat16, new_shape, 1), new_shape);
    args.v_new = view(arena.random(DType::kFloat16, new_shape, 1), new_shape);
    args.cache_seqlens = lengths_view();
    args.options.causal = true, args.options.backend = target.backend();
    const RowTensor lse = arena.rows(DType::kFloat32, 2, 2, 1, 0);
    launch = prepare(*mirror, args, AttentionOutputs{view(out, q_shape), view_of(lse, {2, 2, 1, 1, 1}, false)});
  }
  TensorView lengths_view() const { return vector_view(lengths.data(), DType::kInt32, 2); }
  template <class Run>
  std::vector<std::vector<double>> twice(Run run_once) {
    run_once();
    lengths = {20, 7};
    mirror->send(lengths_view());
    run_once();
    mirror->finish();
    return {values(out, q_shape), values(k, cache_shape), values(v, cache_shape)};
  }
};

TEST(CudaStreams, GraphOfACacheStepReplaysWithNewLengths) {
  for (const CudaTarget* target : {&naive(), &mma()}) {
    if (target == &mma() && !catalog::kMmaFloat16) continue;
    const Stream stream;
    CacheStepOnDevice eager(*target, stream.get()), captured(*target, stream.get());
    const auto expected = eager.twice([&] { eager.launch(); });
    const Graph graph(stream.get(), [&] { captured.launch(); });
    const auto replay = [&] { check_cuda(cudaGraphLaunch(graph.exec, stream.get()), "cudaGraphLaunch"); };
    expect_same(*target, captured.twice(replay), expected);
  }
}

// The stream is busy; q arrives in it only after the call was made. The call neither waits nor overtakes.
TEST(CudaStreams, CallsKeepTheOrderOfTheirStreamAndDoNotWait) {
  for (const CudaTarget* target : {&naive(), &mma()}) {
    const GpuCase c = base_case(*target);
    const auto expected = results_of(c, *target);
    const Stream stream;
    Training training(c, *target, stream.get());
    const TensorView q =
        training.mirror->in(arguments(training.a, options_of(c.problem, target->backend(), c.layout)).q);
    const auto bytes = static_cast<size_t>(q.numel() * dtype_bytes(q.dtype));
    void* late = nullptr;
    check_cuda(cudaMalloc(&late, bytes), "cudaMalloc");
    check_cuda(cudaMemcpyAsync(late, q.data, bytes, cudaMemcpyDeviceToDevice, stream.get()), "cudaMemcpyAsync");
    check_cuda(cudaMemsetAsync(q.data, 0xff, bytes, stream.get()), "cudaMemsetAsync");
    stream.wait();
    check_cuda(cudaLaunchHostFunc(stream.get(), sleep_on_stream, nullptr), "cudaLaunchHostFunc");
    check_cuda(cudaMemcpyAsync(q.data, late, bytes, cudaMemcpyDeviceToDevice, stream.get()), "cudaMemcpyAsync");
    const auto begin = Clock::now();
    training.launch();
    EXPECT_LT(std::chrono::duration<double>(Clock::now() - begin).count(), 0.15) << target->name() << " waited";
    expect_same(*target, training.results(), expected);
    cudaFree(late);
  }
}

// Two problems on two streams, ten launches of each without a wait between them.
TEST(CudaStreams, TwoStreamsDoNotDisturbEachOther) {
  for (const CudaTarget* target : {&naive(), &mma()}) {
    const GpuCase first = base_case(*target, HeadMode::kJoint);
    GpuCase second = base_case(*target);
    second.problem.seed = 2, second.problem.problem.causal = false;
    const auto expected_first = results_of(first, *target), expected_second = results_of(second, *target);
    const Stream one, two;
    Training a(first, *target, one.get()), b(second, *target, two.get());
    for (int round = 0; round < 10; ++round) a.launch(), b.launch();
    expect_same(*target, a.results(), expected_first);
    expect_same(*target, b.results(), expected_second);
  }
}

TEST(CudaStreams, DefaultStream) {
  for (const CudaTarget* target : {&naive(), &mma()}) {
    const GpuCase c = base_case(*target);
    Training training(c, *target, nullptr);
    training.launch();
    expect_same(*target, training.results(), results_of(c, *target));
  }
}

// Tensors on cuda:1 while device 0 is current, which it stays.
TEST(CudaStreams, SecondDevice) {
  if (DeviceInfo::cuda_count() < 2) GTEST_SKIP() << "needs two GPUs";
  for (const CudaTarget* target : {&naive(), &mma()}) {
    const CudaTarget second(target->backend(), 1);
    const GpuCase c = base_case(*target);
    const Stream stream(1);
    Training training(c, second, stream.get());
    training.launch();
    int current = -1;
    cudaGetDevice(&current);
    EXPECT_EQ(current, 0);
    expect_same(*target, training.results(), results_of(c, *target));
  }
}

TEST(CudaStreams, NoSuchDevice) {
  for (const int32_t index : {-1, DeviceInfo::cuda_count(), 1 << 20}) {
    try {
      DeviceInfo::cuda(index);
      ADD_FAILURE() << index;
    } catch (const Error& error) {
      EXPECT_EQ(error.argument(), "device") << error.what();
    }
  }
}

}  // namespace
}  // namespace plait::testing
