// Small checks that every validate_* function shares, and the axes of each layout.
// Called by the validate*.cpp files.
#pragma once

#include <fmt/format.h>

#include <initializer_list>
#include <string>

#include "core/problem.hpp"

namespace plait {

[[noreturn]] void refuse(const char* argument, const std::string& message);

// A tensor with the name under which the public API knows it.
struct Named {
  const char* name;
  const TensorView* view;
};

// Position of each canonical axis in a tensor of the public API; -1 where it has none.
struct Axes {
  int batch, heads, seqlen, pseudo, dim;
  int rank() const { return 1 + (batch >= 0) + (heads >= 0) + (seqlen >= 0) + (pseudo >= 0); }
};

// layout and packed choose among [B, H, S, (P,) D], [B, S, H, (P,) D] and [total, H, (P,) D].
Axes axes_of(Layout layout, bool packed, bool pseudo);
std::string axes_text(const Axes& axes, const char* heads, const char* seqlen, const char* dim);  // "[B, Hq, Sq, D]"

// Throws unless the view has `rank` (described by `expected`), no negative size, and a size and reach that fit 64 bits.
void check_tensor(Named tensor, int rank, const std::string& expected);
void check_same_dtype(Named tensor, Named like);
void check_dtype(Named tensor, std::initializer_list<DType> legal, const char* way_out);
void check_same_device(Named tensor, Named like);
void check_extent(Named tensor, int axis, int64_t expected, const std::string& why);
void check_shape(Named tensor, std::initializer_list<int64_t> shape, const std::string& why);
void check_floating(Named tensor);
// Query heads must be a multiple of key/value heads; `argument` names the tensor of the latter.
void check_head_groups(const char* argument, int64_t heads_q, int64_t heads_kv);
// Checks sinks [heads_q] and puts them into the problem, whose heads_q and dtype are set.
void set_sinks(const TensorView& view, const Named& q, AttentionProblem& problem, AttentionTensors& tensors);
void check_head_dim(const char* argument, int64_t head_dim);

// Throws when two outputs, or an output and an input, share memory, or when an output overlaps itself.
void check_no_alias(std::initializer_list<Named> outputs, std::initializer_list<Named> inputs);

int64_t extent(const TensorView& view, int axis);  // 1 for axis -1
CanonicalTensor canonical(const TensorView& view, const Axes& axes);
inline const TensorView* view_of(const std::optional<TensorView>& view) { return view ? &*view : nullptr; }
inline Named named(const char* name, const TensorView& view) { return {name, &view}; }

// Rotary tables: two like tensors [positions, D_rot / 2] with D_rot <= head_dim, in fp32 (fp64 with fp64 inputs).
void check_rope_tables(const Rope& rope, DType dtype, int64_t head_dim, Named like);

// cu_seqlens: int32, rank 1, unit stride, at least one element. Returns the number of sequences.
int64_t check_cu_seqlens(Named cu_seqlens, Named like);
// Contents: starts at 0, never decreases, ends at or before `total`. Only where the host can read them.
void check_cu_seqlens_values(Named cu_seqlens, int64_t total);

}  // namespace plait
