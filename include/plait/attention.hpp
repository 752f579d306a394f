// Exact softmax attention, forward and backward, over plain heads or over pseudo-heads (IHA).
// Called by C++ users, the CLI and the torch shim. Formulas: docs/numerics.md.
#pragma once

#include <cstdint>
#include <optional>

#include "plait/device.hpp"
#include "plait/error.hpp"
#include "plait/plan.hpp"
#include "plait/tensor.hpp"

// Public symbols are exported; the library is compiled with hidden visibility.
#pragma GCC visibility push(default)
namespace plait {

enum class Layout : int32_t { kBhsd, kBshd };

// How pseudo-heads meet under the softmax (arXiv 2602.21371).
enum class HeadMode : int32_t {
  kPlain,        // q, k, v are rank 4 (rank 3 packed); ordinary attention
  kJoint,        // pseudo-head p meets pseudo-head p; one softmax over all (p, m)
  kInterleaved,  // (n, p) is virtual row n*P + p of a sequence of length N*P
};

enum class PseudoMask : int32_t {
  kFlat,   // interleaved: plain causal on virtual rows (the paper)
  kToken,  // interleaved: a row sees every pseudo-key of its own token
};

struct AttentionOptions {
  HeadMode mode = HeadMode::kPlain;
  PseudoMask mask = PseudoMask::kFlat;
  bool causal = false;          // bottom-right aligned: row i sees keys j <= i + Sk - Sq
  int64_t window_left = -1;     // inclusive; -1 unbounded. Positions (plain, joint) or virtual rows (interleaved)
  int64_t window_right = -1;    // inclusive; -1 unbounded
  std::optional<double> scale;  // default 1/sqrt(head_dim)
  double softcap = 0.0;         // softcap * tanh(S / softcap); 0 is off
  bool deterministic = false;   // bit-equal gradients run to run
  int64_t split_size = 0;       // keys per split (selects split_kv, batch-invariant); 0 lets the planner choose
  Strategy strategy = Strategy::kAuto;
  Backend backend = Backend::kAuto;
  std::optional<DType> out_dtype;  // q's dtype (default) or fp32
  Layout layout = Layout::kBhsd;
};

// The inputs of an attention call.
//   plain         q [B, Hq, Sq, D]      k [B, Hk, Sk, D]      v [B, Hk, Sk, Dv]      (bhsd)
//                 q [B, Sq, Hq, D]      k [B, Sk, Hk, D]      v [B, Sk, Hk, Dv]      (bshd)
//                 q [total_q, Hq, D]    k [total_k, Hk, D]    v [total_k, Hk, Dv]    (packed: cu_seqlens given)
//   joint and     q [B, Hq, Sq, P, D]   k [B, Hk, Sk, P, D]   v [B, Hk, Sk, P, Dv]   (bhsd)
//   interleaved   q [B, Sq, Hq, P, D]   ...                                          (bshd)
//                 q [total_q, Hq, P, D] ...                                          (packed)
// dtypes: q, k, v alike. sinks [Hq] fp32 (fp64 with fp64 inputs). cu_seqlens_* int32 [batch + 1].
struct AttentionArgs {
  TensorView q, k, v;
  std::optional<TensorView> sinks;
  std::optional<TensorView> cu_seqlens_q, cu_seqlens_k;
  AttentionOptions options;
};

// The outputs of a forward call, allocated by the caller.
//   out  plain, joint [B, Hq, Sq, Dv]; interleaved [B, Hq, Sq, P, Dv]; in `layout`; packed [total_q, Hq, (P,) Dv]
//   lse  plain, joint [B, Hq, Sq]; interleaved [B, Hq, Sq*P]; packed [Hq, total_q] or [Hq, total_q*P]
//        fp32 (fp64 for fp64 inputs), natural log of the softmax denominator, scale included
struct AttentionOutputs {
  TensorView out, lse;
};

// The inputs of a backward call. `out` and `lse` may come from outside (context parallelism): P = exp(S - lse).
//   dout like out; dlse like lse, or absent for zero
struct AttentionBackwardArgs {
  AttentionArgs forward;
  TensorView out, lse, dout;
  std::optional<TensorView> dlse;
};

// Gradients, allocated by the caller, of the shapes and dtypes of their inputs.
struct AttentionGrads {
  TensorView dq, dk, dv;
  std::optional<TensorView> dsinks;  // required exactly when sinks are given
};

// Plans a call without running it. Pure: reads shapes, strides and dtypes, never a tensor's contents.
// Errors: kInvalidArgument for a malformed argument, kUnsupported when no backend can serve it.
Plan plan_attention_forward(const AttentionArgs& args, const DeviceInfo& device);
Plan plan_attention_backward(const AttentionBackwardArgs& args, const DeviceInfo& device);

// Runs a call. Every output element is written. `workspace` holds at least plan.workspace_bytes bytes, 64-byte aligned.
// Outputs may not overlap inputs or each other. Throws like plan_*, and then nothing has been written.
void attention_forward(const AttentionArgs& args, const AttentionOutputs& outputs, const Plan& plan, void* workspace,
                       const Executor& executor);
void attention_backward(const AttentionBackwardArgs& args, const AttentionGrads& grads, const Plan& plan,
                        void* workspace, const Executor& executor);

// Merges n partial results over disjoint key sets: lse = log sum exp(lse_i), out = sum exp(lse_i - lse) out_i.
//   outs[i] [..., H, S, Dv] any strides, one dtype; lses[i] like lse above. -inf parts weigh nothing; all -inf give (0,
//   -inf).
struct MergeArgs {
  const TensorView* outs = nullptr;
  const TensorView* lses = nullptr;
  int64_t parts = 0;
  Layout layout = Layout::kBhsd;
  bool packed = false;  // outs [total, H, Dv], lses [H, total]
};
void merge_states(const MergeArgs& args, const AttentionOutputs& outputs, const Executor& executor, int32_t workers);
// The checks of merge_states alone: throws what it would throw for these tensors, reads and writes none of them.
void check_merge_states(const MergeArgs& args, const AttentionOutputs& outputs);
// Gradients of merge_states: douts[i], dlses[i] from dout and dlse (absent: zero).
void merge_states_backward(const MergeArgs& args, const AttentionOutputs& outputs, const TensorView& dout,
                           const std::optional<TensorView>& dlse, const TensorView* douts, const TensorView* dlses,
                           const Executor& executor, int32_t workers);

}  // namespace plait
#pragma GCC visibility pop
