// Interleaved Head Attention: premix, RoPE and collapse around attention over pseudo-heads (arXiv 2602.21371).
// Called by C++ users, the CLI and the torch shim; the attention itself is attention.hpp with a HeadMode.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "plait/attention.hpp"

// Public symbols are exported; the library is compiled with hidden visibility.
#pragma GCC visibility push(default)
namespace plait {

enum class RopeStyle : int32_t {
  kHalf,   // dims (i, i + D_rot/2) turn together (LLaMA)
  kPairs,  // dims (2i, 2i + 1) turn together
};

enum class RopeIndex : int32_t {
  kToken,  // every pseudo-head of position n turns by table row n (+ offset); commutes with the mix
  kRow,    // virtual row n*P + p (+ offset*P) turns by table row of that number
};

// Rotary tables: cos, sin [positions, D_rot/2] fp32 (fp64 with fp64 inputs); D_rot <= D.
// Table row of position n is n + offset; in a packed input positions restart in each sequence.
struct Rope {
  TensorView cos, sin;
  RopeStyle style = RopeStyle::kHalf;
  RopeIndex index = RopeIndex::kToken;
  int64_t offset = 0;  // position of the first token: Sk - Sq for queries, the cached length when decoding
};

// y[b, n, h, p, :] = sum_s w[h, p, s] * x[b, n, s, :], then or before it the rotation of `rope`.
//   x [B, H, N, D] (bhsd), [B, N, H, D] (bshd), [total, H, D] (packed: cu_seqlens given)
//   w [H, P, H] fp32 or x's dtype
//   y [B, H, N, P, D], [B, N, H, P, D], [total, H, P, D], x's dtype
// With packed input and queries of another length than keys, `cu_seqlens_other` gives each sequence its own offset
// (Sk - Sq of that sequence) on top of rope.offset.
struct PremixArgs {
  TensorView x, w;
  std::optional<Rope> rope;
  std::optional<TensorView> cu_seqlens;        // of x, int32 [batch + 1]
  std::optional<TensorView> cu_seqlens_other;  // of the keys when x are queries, int32 [batch + 1]
  Layout layout = Layout::kBhsd;
  Backend backend = Backend::kAuto;
};

// Plan and run as plan_attention_forward and attention_forward do: same purity, workspace, aliasing and error rules.
Plan plan_premix_forward(const PremixArgs& args, const DeviceInfo& device);
Plan plan_premix_backward(const PremixArgs& args, const DeviceInfo& device);
void premix_forward(const PremixArgs& args, const TensorView& y, const Plan& plan, void* workspace,
                    const Executor& executor);
// dx[s] = sum_{h,p} w[h,p,s] dy[h,p] (turned back); dw[h,p,s] = sum_{b,n,d} dy x, in w's dtype. Deterministic.
void premix_backward(const PremixArgs& args, const TensorView& dy, const TensorView& dx, const TensorView& dw,
                     const Plan& plan, void* workspace, const Executor& executor);

// Premixes of several tensors on one device in one call, such as those of Q, K and V: what a call for each gives. All
// run on one backend; cuda_mma takes up to three of one dtype in one launch. A refusal has the argument's number:
// "w[1]".
struct PremixGradients {
  TensorView dy, dx, dw;  // as in premix_backward
};
Plan plan_premix_forward(std::span<const PremixArgs> args, const DeviceInfo& device);
Plan plan_premix_backward(std::span<const PremixArgs> args, const DeviceInfo& device);
void premix_forward(std::span<const PremixArgs> args, std::span<const TensorView> ys, const Plan& plan, void* workspace,
                    const Executor& executor);
void premix_backward(std::span<const PremixArgs> args, std::span<const PremixGradients> gradients, const Plan& plan,
                     void* workspace, const Executor& executor);

// Interleaved mode's last step.
//   x [B, H, N, P, D] (bhsd), [B, N, H, P, D] (bshd), [total, H, P, D] (packed = true)
//   r [H, P]: y[n, h] = sum_p r[h, p] x[n, h, p]          (per head, Algorithm 1)
//   r [H, H, P]: y[n, h] = sum_{g, p} r[h, g, p] x[n, g, p]  (global, Definition 3)
//   y [B, H, N, D], [B, N, H, D], [total, H, D], x's dtype; r fp32 or x's dtype
struct CollapseArgs {
  TensorView x, r;
  bool packed = false;
  Layout layout = Layout::kBhsd;
  Backend backend = Backend::kAuto;
};

// Plan and run as above. Backward: dx[n, h, p] = r dy, dr = sum dy x over batch, positions and dims, in r's dtype.
Plan plan_collapse_forward(const CollapseArgs& args, const DeviceInfo& device);
Plan plan_collapse_backward(const CollapseArgs& args, const DeviceInfo& device);
void collapse_forward(const CollapseArgs& args, const TensorView& y, const Plan& plan, void* workspace,
                      const Executor& executor);
void collapse_backward(const CollapseArgs& args, const TensorView& dy, const TensorView& dx, const TensorView& dr,
                       const Plan& plan, void* workspace, const Executor& executor);

struct FlopMatch {
  int64_t left = -1;          // window_left in positions (joint) or virtual rows (interleaved); -1 unbounded
  int64_t formula_left = -1;  // N / (2P) - 1 before tile matching, N rounded up to tiles; -1 for P = 1
  int64_t visits = 0;         // key tiles visited with `left`, all query tiles (times P in joint mode)
  int64_t causal_visits = 0;  // key tiles of plain causal attention on N positions
  double visit_ratio = 1.0;   // visits / causal_visits
};

// The window that makes IHA cost as many key tiles as plain causal attention on `seqlen` positions.
// mode: kJoint or kInterleaved. Errors: P < 1, seqlen < 1, tile < 1, 2P > seqlen.
FlopMatch flop_matched_window(int64_t seqlen, int64_t pseudo_heads, HeadMode mode = HeadMode::kJoint,
                              int64_t tile = 128);

}  // namespace plait
#pragma GCC visibility pop
