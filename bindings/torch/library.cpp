// The ops of the namespace `plait`: schemas and CPU kernels. Fake kernels and autograd are registered in Python.
// Called by torch.ops.load_library; one binary serves torch 2.10 and newer, whatever the Python.
#include <string>

#include "ops.hpp"

namespace plait::torch_shim {
namespace {

// RawOptions, in its order; ops over plain heads have no mode and mask.
const std::string kPlainOptions =
    "bool causal, SymInt window_left, SymInt window_right, float? scale, float softcap, "
    "bool deterministic, SymInt split_size, str strategy, str backend, ScalarType? out_dtype, str layout";
const std::string kOptions = "str mode, str mask, " + kPlainOptions;
const std::string kAttention =
    "Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, " + kOptions;
const std::string kRope = "str rope_style, str rope_index, SymInt rope_offset, str layout, str backend";
const std::string kPremix =
    "Tensor x, Tensor w, Tensor? cos, Tensor? sin, Tensor? cu_seqlens, Tensor? cu_seqlens_other, " + kRope;
const std::string kPremixQkv =
    "Tensor q, Tensor k, Tensor v, Tensor w_q, Tensor w_k, Tensor w_v, Tensor? cos, Tensor? sin, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, " +
    kRope;
const std::string kCollapse = "Tensor x, Tensor r, bool packed, str layout, str backend";
const std::string kWithKvCache =
    "Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor? k_new, Tensor? v_new, Tensor cache_seqlens, "
    "Tensor? block_table, Tensor? cache_batch_idx, Tensor? cos, Tensor? sin, Tensor? sinks, str rope_style, " +
    kPlainOptions;
const std::string kIhaWithKvCache =
    "Tensor q, Tensor? k_new, Tensor? v_new, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor w_q, Tensor w_k, "
    "Tensor w_v, Tensor cache_seqlens, Tensor? cache_batch_idx, Tensor? cos, Tensor? sin, Tensor? sinks, "
    "str cache_kind, str rope_style, " +
    kPlainOptions;
const std::string kMerge = "Tensor[] outs, Tensor[] lses, bool packed, str layout";

void define(torch::stable::detail::StableLibrary& library, const std::string& schema) { library.def(schema.c_str()); }

}  // namespace

STABLE_TORCH_LIBRARY(plait, library) {
  define(library, "attention_forward(" + kAttention + ") -> (Tensor out, Tensor lse)");
  define(library, "attention_backward(Tensor? dout, Tensor out, Tensor lse, Tensor? dlse, " + kAttention +
                      ") -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)");
  define(library, "merge_states_forward(" + kMerge + ") -> (Tensor out, Tensor lse)");
  define(library, "merge_states_backward(Tensor? dout, Tensor? dlse, Tensor out, Tensor lse, " + kMerge +
                      ") -> (Tensor[] douts, Tensor[] dlses)");
  define(library, "premix_forward(" + kPremix + ") -> Tensor");
  define(library, "premix_backward(Tensor dy, " + kPremix + ") -> (Tensor dx, Tensor dw)");
  define(library, "premix_qkv_forward(" + kPremixQkv + ") -> (Tensor q, Tensor k, Tensor v)");
  define(library, "premix_qkv_backward(Tensor dq, Tensor dk, Tensor dv, " + kPremixQkv +
                      ") -> (Tensor dq, Tensor dk, Tensor dv, Tensor dw_q, Tensor dw_k, Tensor dw_v)");
  define(library, "collapse_forward(" + kCollapse + ") -> Tensor");
  define(library, "collapse_backward(Tensor dy, " + kCollapse + ") -> (Tensor dx, Tensor dr)");
  define(library, "attention_with_kvcache_(" + kWithKvCache + ") -> (Tensor out, Tensor lse)");
  define(library, "iha_attention_with_kvcache_(" + kIhaWithKvCache + ") -> (Tensor out, Tensor lse)");
  define(library, "plan_attention(int[] tensors, bool backward, str device, " + kOptions + ") -> (int code, str text)");
  define(library, "plan_premix(int[] tensors, bool backward, " + kRope + ") -> (int code, str text)");
  define(library,
         "plan_collapse(int[] tensors, bool backward, bool packed, str layout, str backend) -> (int code, str text)");
  define(library,
         "plan_attention_with_kvcache(int[] tensors, str rope_style, " + kPlainOptions + ") -> (int code, str text)");
  define(library, "plan_iha_attention_with_kvcache(int[] tensors, str cache_kind, str rope_style, " + kPlainOptions +
                      ") -> (int code, str text)");
  define(library, "check_merge(int[] tensors, int parts, bool packed, str layout) -> (int code, str text)");
  define(library, "flop_matched_window(int seqlen, int pseudo_heads, str mode, int tile) -> (int left, float ratio)");
}

// Not "CPU": a tensor on a device without a backend reaches the planner, which says so in its own words.
STABLE_TORCH_LIBRARY_IMPL(plait, CompositeExplicitAutograd, library) {
  library.impl("attention_forward", &boxed<&attention_forward>);
  library.impl("attention_backward", &boxed<&attention_backward>);
  library.impl("merge_states_forward", &boxed<&merge_states_forward>);
  library.impl("merge_states_backward", &boxed<&merge_states_backward>);
  library.impl("premix_forward", &boxed<&premix_forward>);
  library.impl("premix_backward", &boxed<&premix_backward>);
  library.impl("premix_qkv_forward", &boxed<&premix_qkv_forward>);
  library.impl("premix_qkv_backward", &boxed<&premix_qkv_backward>);
  library.impl("collapse_forward", &boxed<&collapse_forward>);
  library.impl("collapse_backward", &boxed<&collapse_backward>);
  library.impl("attention_with_kvcache_", &boxed<&attention_with_kvcache>);
  library.impl("iha_attention_with_kvcache_", &boxed<&iha_attention_with_kvcache>);
  library.impl("plan_attention", &boxed<&plan_attention>);
  library.impl("plan_premix", &boxed<&plan_premix>);
  library.impl("plan_collapse", &boxed<&plan_collapse>);
  library.impl("plan_attention_with_kvcache", &boxed<&plan_attention_with_kvcache>);
  library.impl("plan_iha_attention_with_kvcache", &boxed<&plan_iha_attention_with_kvcache>);
  library.impl("check_merge", &boxed<&check_merge>);
  library.impl("flop_matched_window", &boxed<&flop_matched_window>);
}

}  // namespace plait::torch_shim
