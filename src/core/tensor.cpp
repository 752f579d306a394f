// TensorView's out-of-line members.
// Called by user code, validation and tests.
#include "plait/tensor.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <span>

#include "plait/error.hpp"

namespace plait {

TensorView TensorView::contiguous(void* data, DType dtype, std::initializer_list<int64_t> shape) {
  if (shape.size() > static_cast<size_t>(kMaxRank)) {
    throw Error(ErrorCode::kInvalidArgument, "shape",
                fmt::format("got rank {}, expected at most {}", shape.size(), kMaxRank));
  }
  TensorView view;
  view.data = data;
  view.dtype = dtype;
  view.rank = static_cast<int32_t>(shape.size());
  int32_t i = 0;
  for (const int64_t extent : shape) view.shape[i++] = extent;
  int64_t stride = 1;
  for (i = view.rank - 1; i >= 0; --i) {
    view.stride[i] = stride;
    stride *= view.shape[i];
  }
  return view;
}

std::string TensorView::shape_string() const {
  const auto axes = static_cast<size_t>(std::clamp(rank, 0, kMaxRank));  // a wrong rank is for refusals to tell
  return fmt::format("[{}]", fmt::join(std::span(shape.data(), axes), ", "));
}

}  // namespace plait
