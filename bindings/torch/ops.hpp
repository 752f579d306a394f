// The boxed kernels of this folder, one per op of library.cpp, and the argument sets that plan ops share with them.
// Called by library.cpp.
#pragma once

#include "convert.hpp"

namespace plait::torch_shim {

void attention_forward(Reader& reader, StableIValue* results);
void attention_backward(Reader& reader, StableIValue* results);
void merge_states_forward(Reader& reader, StableIValue* results);
void merge_states_backward(Reader& reader, StableIValue* results);
void premix_forward(Reader& reader, StableIValue* results);
void premix_backward(Reader& reader, StableIValue* results);
void premix_qkv_forward(Reader& reader, StableIValue* results);
void premix_qkv_backward(Reader& reader, StableIValue* results);
void collapse_forward(Reader& reader, StableIValue* results);
void collapse_backward(Reader& reader, StableIValue* results);
void attention_with_kvcache(Reader& reader, StableIValue* results);
void iha_attention_with_kvcache(Reader& reader, StableIValue* results);

void plan_attention(Reader& reader, StableIValue* results);
void plan_premix(Reader& reader, StableIValue* results);
void plan_collapse(Reader& reader, StableIValue* results);
void plan_attention_with_kvcache(Reader& reader, StableIValue* results);
void plan_iha_attention_with_kvcache(Reader& reader, StableIValue* results);
void check_merge(Reader& reader, StableIValue* results);
void flop_matched_window(Reader& reader, StableIValue* results);

// Uninitialised outputs of a forward call, for q, v and the options of `args`.
Tensor empty_out(const AttentionArgs& args);
Tensor empty_lse(const AttentionArgs& args);

// dout where autograd has none: one zero with strides 0, in host memory: to be planned with, or read by the CPU.
TensorView expanded_zeros(const TensorView& like);
// The same on the device of `like`.
struct Zeros {
  Zeros(const TensorView& like, bool needed);
  MaybeTensor memory;
  TensorView view;
};

}  // namespace plait::torch_shim
