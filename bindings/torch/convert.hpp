// Between LibTorch's stable ABI and plait: tensors to views, strings to enums, threads, errors.
// Called by every op of this folder; nothing here knows an op.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "plait/kv_cache.hpp"

namespace plait::torch_shim {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

// A str argument. torch's own conversion to std::string leaks one string per call, so ops read this type instead.
struct Text {
  std::string value;
};

// A view of `tensor`, without its contents being looked at. Refuses rank > kMaxRank and tensors that are not strided.
TensorView view_of(const char* name, const Tensor& tensor);
std::optional<TensorView> view_of(const char* name, const MaybeTensor& tensor);

DType dtype_of(ScalarType type);

// An uninitialised row-major tensor on the device of `like`. `name`: the argument that a lack of memory is put down to.
Tensor empty(const char* name, const std::vector<int64_t>& shape, DType dtype, const TensorView& like);
// The same, but `axis` and `axis + 1` (heads and positions) lie in memory in the order that they have in `like`:
// transposed inputs give transposed outputs.
Tensor empty_ordered(const char* name, const std::vector<int64_t>& shape, DType dtype, const TensorView& like,
                     size_t axis);
// The same shape and order of strides as `like`, as torch.empty_like makes it.
Tensor empty_like(const char* name, const Tensor& like);
// Bytes for a plan; the pointer is 64-byte aligned, null for 0 bytes.
struct Workspace {
  Workspace(const Plan& plan, Device device);
  std::optional<Tensor> tensor;
  void* data = nullptr;
};

// torch's intra-op threads, and on a GPU torch's current stream of the device of `tensor`.
Executor executor_of(const TensorView& tensor);
int32_t torch_workers();  // the number of those threads

// The machine that `tensor` is on, with torch's threads. Refuses a device for which this build has no backend.
DeviceInfo device_of(const char* name, const TensorView& tensor);

Layout parse_layout(const Text& text);
HeadMode parse_mode(const Text& text);
PseudoMask parse_mask(const Text& text);
RopeStyle parse_rope_style(const Text& text);
RopeIndex parse_rope_index(const Text& text);
IhaCacheKind parse_cache_kind(const Text& text);
// The rotation that two tables ask for; none without tables, but style and index are checked all the same.
std::optional<Rope> rope_of(const std::optional<TensorView>& cos, const std::optional<TensorView>& sin,
                            const Text& style, const Text& index = {"token"}, int64_t offset = 0);

// The options of attention ops, read in schema order: mode, mask, causal, window_left, window_right, scale, softcap,
// deterministic, split_size, strategy, backend, out_dtype, layout.
struct RawOptions {
  Text mode, mask;
  bool causal;
  int64_t window_left, window_right;
  std::optional<double> scale;
  double softcap;
  bool deterministic;
  int64_t split_size;
  Text strategy, backend;
  std::optional<ScalarType> out_dtype;
  Text layout;

  AttentionOptions parse() const;
};

// Reads an op's arguments off the stack in schema order and takes them over.
class Reader {
 public:
  Reader(StableIValue* stack, uint64_t count) : stack_(stack), count_(count) {}
  template <class T>
  T next();
  RawOptions options();
  RawOptions plain_options();  // without mode and mask, which are plain and flat

 private:
  StableIValue* stack_;
  uint64_t count_, index_ = 0;
};

// Runs an op body; a plait::Error leaves as the exception that Python shows as ValueError (an argument is wrong) or
// RuntimeError (no backend serves it).
template <void (*body)(Reader&, StableIValue*)>
void boxed(StableIValue* stack, uint64_t inputs, uint64_t /*outputs*/) {
  Reader reader(stack, inputs);
  try {
    body(reader, stack);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kInvalidArgument) throw std::invalid_argument(error.what());
    throw std::runtime_error(error.what());
  }
}

using torch::stable::detail::from;

}  // namespace plait::torch_shim

HIDDEN_NAMESPACE_BEGIN(torch, stable, detail)
template <>
struct ToImpl<plait::torch_shim::Text> {
  static plait::torch_shim::Text call(StableIValue value, uint64_t /*extension_build_version*/, bool /*is_internal*/) {
    const StringHandle handle = to<StringHandle>(value);
    size_t length = 0;
    const char* data = nullptr;
    plait::torch_shim::Text text;
    if (torch_string_length(handle, &length) == 0 && torch_string_c_str(handle, &data) == 0)
      text.value = {data, length};
    TORCH_ERROR_CODE_CHECK(torch_delete_string(handle));
    return text;
  }
};
HIDDEN_NAMESPACE_END(torch, stable, detail)

namespace plait::torch_shim {
template <class T>
T Reader::next() {
  STD_TORCH_CHECK(index_ < count_, "plait: the op was called with too few arguments for its kernel");
  return torch::stable::detail::to<T>(stack_[index_++]);
}
}  // namespace plait::torch_shim
