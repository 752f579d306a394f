// One IHA layer's attention, forward and backward, from C++: premix, joint attention in a FLOP-matched window,
// gradients. Called from the shell after building examples/cpp.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include "plait/attention.hpp"
#include "plait/iha.hpp"

namespace {

constexpr int64_t kBatch = 1, kHeads = 4, kLength = 512, kDim = 32, kPseudo = 2;

// A fp32 tensor that owns its memory.
struct Tensor {
  std::vector<float> values;
  plait::TensorView view;

  explicit Tensor(std::initializer_list<int64_t> shape) {
    int64_t count = 1;
    for (const int64_t extent : shape) count *= extent;
    values.resize(static_cast<size_t>(count));
    view = plait::TensorView::contiguous(values.data(), plait::DType::kFloat32, shape);
  }

  void fill(unsigned seed) {  // values in [-1, 1]
    for (float& value : values) {
      seed = seed * 1664525u + 1013904223u;
      value = static_cast<float>(seed >> 8) / 8388608.0f - 1.0f;
    }
  }
};

struct Free {
  void operator()(void* data) const { std::free(data); }
};
using Workspace = std::unique_ptr<void, Free>;

// The caller owns scratch memory: as much as the plan says, 64-byte aligned.
Workspace workspace_for(const plait::Plan& plan) {
  const size_t bytes = (static_cast<size_t>(plan.workspace_bytes) + 64) / 64 * 64;
  return Workspace(std::aligned_alloc(64, bytes));
}

// y = the P pseudo-heads of x, by w [H, P, H] = the identity for each p.
void premix(const Tensor& x, Tensor& y, const Tensor& w, const plait::DeviceInfo& device) {
  const plait::PremixArgs args{.x = x.view, .w = w.view, .rope = {}, .cu_seqlens = {}, .cu_seqlens_other = {}};
  const plait::Plan plan = plait::plan_premix_forward(args, device);
  plait::premix_forward(args, y.view, plan, workspace_for(plan).get(), plait::Executor::threads());
}

double norm(const Tensor& tensor) {
  double squares = 0;
  for (const float value : tensor.values) squares += static_cast<double>(value) * value;
  return std::sqrt(squares);
}

void run() {
  const plait::DeviceInfo device = plait::DeviceInfo::host();
  Tensor x({kBatch, kHeads, kLength, kDim}), w({kHeads, kPseudo, kHeads});
  x.fill(1);
  for (int64_t h = 0; h < kHeads; ++h) {
    for (int64_t p = 0; p < kPseudo; ++p) w.values[static_cast<size_t>((h * kPseudo + p) * kHeads + h)] = 1;
  }
  Tensor q({kBatch, kHeads, kLength, kPseudo, kDim}), k = q, v = q;
  for (Tensor* tensor : {&q, &k, &v}) {
    tensor->view.data = tensor->values.data();
    premix(x, *tensor, w, device);
  }

  plait::AttentionArgs args;
  args.q = q.view;
  args.k = k.view;
  args.v = v.view;
  args.options.mode = plait::HeadMode::kJoint;
  args.options.causal = true;
  args.options.window_left = plait::flop_matched_window(kLength, kPseudo).left;

  Tensor out({kBatch, kHeads, kLength, kDim}), lse({kBatch, kHeads, kLength});
  const plait::Plan plan = plait::plan_attention_forward(args, device);
  plait::attention_forward(args, {out.view, lse.view}, plan, workspace_for(plan).get(), plait::Executor::threads());
  std::printf("%s", plan.explain().c_str());

  Tensor dout({kBatch, kHeads, kLength, kDim}), dq = q, dk = k, dv = v;
  dout.fill(2);
  for (Tensor* tensor : {&dq, &dk, &dv}) tensor->view.data = tensor->values.data();
  plait::AttentionBackwardArgs backward;
  backward.forward = args;
  backward.out = out.view;
  backward.lse = lse.view;
  backward.dout = dout.view;
  const plait::Plan backward_plan = plait::plan_attention_backward(backward, device);
  plait::attention_backward(backward, {dq.view, dk.view, dv.view, {}}, backward_plan,
                            workspace_for(backward_plan).get(), plait::Executor::threads());
  std::printf("window %ld, |out| %.3f, |dq| %.3f, |dk| %.3f, |dv| %.3f\n", static_cast<long>(args.options.window_left),
              norm(out), norm(dq), norm(dk), norm(dv));
}

}  // namespace

int main() {
  try {
    run();
    return 0;
  } catch (const plait::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
