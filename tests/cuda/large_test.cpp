// Sizes past 16 and 32 bits: batch * heads above 65535; with --large tensors of more than 2^31 elements.
#include <fmt/format.h>

#include "cuda/suite.hpp"

namespace plait::testing {
namespace {

TEST(CudaLarge, BatchTimesHeadsAbove65535) {
  std::vector<GpuCase> cases;
  for (const auto& [dtype, batch, heads] : std::initializer_list<std::tuple<DType, int64_t, int64_t>>{
           {DType::kFloat16, 22001, 3}, {DType::kBFloat16, 1, 66000}, {DType::kFloat32, 66000, 1}}) {
    for (const bool deterministic : {false, true}) {
      GpuCase c;
      c.name = fmt::format("{} B {} H {}", dtype_name(dtype), batch, heads);
      c.problem.problem = sizes(batch, heads, heads, 3, 5, 8, 8);
      c.problem.problem.dtype = dtype, c.problem.problem.causal = true;
      c.problem.problem.deterministic = deterministic;
      cases.push_back(c);
    }
  }
  check_all(cases);
}

// [1, length, heads, dim] tensors of more than 2^31 elements; a window keeps the work small. The last rows and keys of
// the last head are compared with the reference on a cut-out of the same numbers.
constexpr int64_t kLength = int64_t{1} << 20, kHeads = 33, kDim = 64, kWindow = 63, kCut = 100;
constexpr int64_t kElements = kLength * kHeads * kDim;
static_assert(kElements > int64_t{1} << 31);

class Buffer {
 public:
  explicit Buffer(size_t bytes) { check_cuda(cudaMalloc(&data_, bytes), "cudaMalloc"); }
  ~Buffer() { cudaFree(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  void* data() const { return data_; }

 private:
  void* data_ = nullptr;
};

// A tensor of repeated random numbers; the period divides no stride.
struct Big {
  static constexpr int64_t kPeriod = (1 << 20) - 3;
  Buffer buffer{static_cast<size_t>(kElements * 2)};

  explicit Big(uint64_t seed) {
    Arena arena(seed, Strides::kBhsd);
    const CanonicalTensor numbers = arena.random(DType::kBFloat16, {1, 1, kPeriod, 1, 1}, kPeriod);
    auto* to = static_cast<std::byte*>(buffer.data());
    for (int64_t at = 0; at < kElements; at += kPeriod) {
      const auto bytes = static_cast<size_t>(std::min(kPeriod, kElements - at) * 2);
      check_cuda(cudaMemcpy(to + at * 2, numbers.data, bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
    }
  }
  TensorView view() const {
    TensorView v = TensorView::contiguous(buffer.data(), DType::kBFloat16, {1, kLength, kHeads, kDim});
    v.device = {DeviceKind::kCuda, 0};
    return v;
  }
  // The last `rows` positions of the last head.
  std::vector<double> tail(int64_t rows) const {
    std::vector<uint16_t> raw(static_cast<size_t>(rows * kDim));
    const auto* from =
        static_cast<const std::byte*>(buffer.data()) + 2 * ((kLength - rows) * kHeads * kDim + (kHeads - 1) * kDim);
    check_cuda(cudaMemcpy2D(raw.data(), kDim * 2, from, kHeads * kDim * 2, kDim * 2, static_cast<size_t>(rows),
                            cudaMemcpyDeviceToHost),
               "cudaMemcpy2D");
    std::vector<double> all;
    for (const uint16_t bits : raw) all.push_back(reference::decode_bfloat16(bits));
    return all;
  }
};

TEST(CudaLarge, TensorsAbove2To31Elements) {
  if (!settings().large) GTEST_SKIP() << "needs --large and 40 GB on the device";
  AttentionCase c;
  c.problem = sizes(1, 1, 1, kCut, kCut + kWindow, kDim, kDim);
  c.problem.causal = true, c.problem.window_left = kWindow, c.problem.dtype = DType::kBFloat16;
  Attention cut(c);
  const Big q(1), k(2), v(3), out(4), dq(5), dk(6), dv(7);
  const Buffer lse_memory(static_cast<size_t>(kHeads * kLength * 4));
  TensorView lse = TensorView::contiguous(lse_memory.data(), DType::kFloat32, {1, kHeads, kLength});
  lse.device = {DeviceKind::kCuda, 0};
  assign(cut.inputs.q, cut.q_shape, q.tail(kCut));
  assign(cut.inputs.k, cut.k_shape, k.tail(kCut + kWindow)), assign(cut.inputs.v, cut.v_shape, v.tail(kCut + kWindow));
  for (const CudaTarget* target : {&mma(), &naive()}) {
    const AttentionArgs args{q.view(), k.view(), v.view(), {}, {}, {}, options_of(c, target->backend(), Layout::kBshd)};
    const AttentionBackwardArgs back{args, out.view(), lse, q.view(), {}};  // q serves as dout
    const Plan plan = plan_attention_forward(args, target->device()),
               back_plan = plan_attention_backward(back, target->device());
    const Buffer workspace(
        static_cast<size_t>(std::max({plan.workspace_bytes, back_plan.workspace_bytes, int64_t{1}})));
    attention_forward(args, {out.view(), lse}, plan, workspace.data(), Executor::on_stream(nullptr));
    attention_backward(back, {dq.view(), dk.view(), dv.view(), {}}, back_plan, workspace.data(),
                       Executor::on_stream(nullptr));
    check_cuda(cudaDeviceSynchronize(), "the call");
    Wide wide(c, args.options, cut);
    wide.options.layout = Layout::kBhsd;
    assign(wide.a.inputs.dout, cut.out_shape, q.tail(kCut));
    HostPlace host(1, true);
    AttentionTensors t = wide.a.with_outputs();
    run(host, arguments(wide.a, wide.options), outputs(wide.a, t, wide.options));
    t = wide.a.with_gradients(t);
    run(host, backward_arguments(wide.a, t, wide.options, false), gradients(wide.a, t, wide.options));
    const auto last_keys = [&](const CanonicalTensor& gradient) {
      const std::vector<double> all = values(gradient, cut.k_shape);
      return std::vector<double>(all.end() - kCut * kDim, all.end());
    };
    const Bars bars = bars_of(DType::kBFloat16);
    const std::string name = target->name();
    EXPECT_NO_THROW(expect_close(name + " out", out.tail(kCut), values(t.out, cut.out_shape), 1.5 * bars.out, 0));
    EXPECT_NO_THROW(expect_close(name + " dq", dq.tail(kCut), values(t.dq, cut.q_shape), 1.5 * bars.dq_dk, 0));
    EXPECT_NO_THROW(expect_close(name + " dk", dk.tail(kCut), last_keys(t.dk), 1.5 * bars.dq_dk, 0));
    EXPECT_NO_THROW(expect_close(name + " dv", dv.tail(kCut), last_keys(t.dv), 1.5 * bars.dv, 0));
  }
}

}  // namespace
}  // namespace plait::testing
