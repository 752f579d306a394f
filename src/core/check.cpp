// Implementation of the shared checks; every message says what was got, what is legal, and the way out.
// Called by the validate*.cpp files.
#include "core/check.hpp"

#include <algorithm>
#include <vector>

#include "catalog/catalog.hpp"

namespace plait {
namespace {

// So that byte offsets, and sizes made of a few extents, stay inside 64 bits.
constexpr int64_t kMaxElements = int64_t{1} << 48, kMaxReach = int64_t{1} << 56;

// Bytes [begin, end) that a view may touch, its dimensions by falling |stride|, and whether it fills them without gaps.
struct Footprint {
  const char* begin;
  const char* end;
  std::vector<std::pair<int64_t, int64_t>> dims;  // (|stride|, extent) in elements, extents above 1
  bool dense;
  bool overlaps_itself;
};

Footprint footprint(const TensorView& view) {
  const auto* base = static_cast<const char*>(view.data);
  if (view.numel() == 0 || base == nullptr) return {base, base, {}, true, false};
  Footprint print{base, base, {}, false, false};
  int64_t low = 0, high = 0;  // element offsets
  for (int i = 0; i < view.rank; ++i) {
    const int64_t reach = view.stride[i] * (view.shape[i] - 1);
    (reach < 0 ? low : high) += reach;
    if (view.shape[i] > 1) print.dims.emplace_back(std::abs(view.stride[i]), view.shape[i]);
  }
  // Every dimension must step over all that the smaller ones reach.
  std::sort(print.dims.begin(), print.dims.end());
  int64_t reach = 0;
  for (const auto& [stride, extent] : print.dims) {
    print.overlaps_itself = print.overlaps_itself || stride <= reach;
    reach += stride * (extent - 1);
  }
  std::reverse(print.dims.begin(), print.dims.end());
  const int64_t size = dtype_bytes(view.dtype);
  print.begin = base + low * size;
  print.end = base + (high + 1) * size;
  print.dense = high - low + 1 == view.numel();
  return print;
}

// One dimension of two views of one stride; an extent of 1 where a view has no such dimension.
struct SharedDim {
  int64_t stride, extent_a, extent_b;
};

std::vector<SharedDim> shared_dims(const Footprint& a, const Footprint& b) {
  std::vector<SharedDim> dims;
  for (const auto& [stride, extent] : a.dims) dims.push_back({stride, extent, 1});
  for (const auto& [stride, extent] : b.dims) {
    const auto same =
        std::find_if(dims.begin(), dims.end(), [s = stride](const SharedDim& d) { return d.stride == s; });
    if (same != dims.end()) {
      same->extent_b = extent;
    } else {
      dims.push_back({stride, 1, extent});
    }
  }
  std::sort(dims.begin(), dims.end(), [](const SharedDim& x, const SharedDim& y) { return x.stride > y.stride; });
  return dims;
}

// Whether elements of the two views meet: sum of (i_a - i_b) * stride = `offset` from dimension `at` on. Exact where
// larger strides step over all that the smaller ones reach, as slices of one buffer do.
bool meet(const std::vector<SharedDim>& dims, size_t at, int64_t offset) {
  if (at == dims.size()) return offset == 0;
  const SharedDim& dim = dims[at];
  if (dim.stride == 0) return meet(dims, at + 1, offset);
  const int64_t below = offset / dim.stride - (offset % dim.stride < 0 ? 1 : 0);
  for (const int64_t steps : {below, below + 1}) {
    const bool possible = steps < dim.extent_a && -steps < dim.extent_b;
    if (possible && meet(dims, at + 1, offset - steps * dim.stride)) return true;
  }
  return false;
}

bool ends_inside(const Footprint& outer, const Footprint& inner) {
  return (outer.begin <= inner.begin && inner.begin < outer.end) || (outer.begin < inner.end && inner.end <= outer.end);
}

bool share_memory(const TensorView& a, const TensorView& b) {
  const Footprint fa = footprint(a), fb = footprint(b);
  if (fa.begin >= fb.end || fb.begin >= fa.end) return false;
  if (fa.begin == fb.begin) return true;
  if ((fa.dense && ends_inside(fa, fb)) || (fb.dense && ends_inside(fb, fa))) return true;
  // Two strided slices of one buffer may interleave without sharing an element (dq, dk, dv of one tensor).
  const int64_t bytes = fb.begin - fa.begin, size = dtype_bytes(a.dtype);
  if (a.dtype != b.dtype || bytes % size != 0) return true;
  return meet(shared_dims(fa, fb), 0, bytes / size);
}

}  // namespace

void refuse(const char* argument, const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, argument, message);
}

Axes axes_of(Layout layout, bool packed, bool pseudo) {
  if (packed) return {-1, 1, 0, pseudo ? 2 : -1, pseudo ? 3 : 2};
  const bool bhsd = layout == Layout::kBhsd;
  return {0, bhsd ? 1 : 2, bhsd ? 2 : 1, pseudo ? 3 : -1, pseudo ? 4 : 3};
}

std::string axes_text(const Axes& axes, const char* heads, const char* seqlen, const char* dim) {
  std::string text[kMaxRank];
  if (axes.batch >= 0) text[axes.batch] = "B";
  if (axes.heads >= 0) text[axes.heads] = heads;
  if (axes.seqlen >= 0) text[axes.seqlen] = axes.batch < 0 ? "total" : seqlen;
  if (axes.pseudo >= 0) text[axes.pseudo] = "P";
  if (axes.dim >= 0) text[axes.dim] = dim;
  std::string all = "[";
  for (int i = 0; i < axes.rank(); ++i) all += (i > 0 ? ", " : "") + text[i];
  return all + "]";
}

void check_tensor(Named tensor, int rank, const std::string& expected) {
  const TensorView& view = *tensor.view;
  if (view.rank != rank) {
    refuse(tensor.name, fmt::format("got rank {} {}, expected {}", view.rank, view.shape_string(), expected));
  }
  int64_t count = 1;
  for (int i = 0; i < rank; ++i) {
    if (view.shape[i] < 0) refuse(tensor.name, fmt::format("got a negative size in {}", view.shape_string()));
    if (__builtin_mul_overflow(count, std::max<int64_t>(view.shape[i], 1), &count) || count > kMaxElements) {
      refuse(tensor.name, fmt::format("got {}, expected at most 2^48 elements", view.shape_string()));
    }
    int64_t reach = 0;
    if (__builtin_mul_overflow(view.stride[i], std::max<int64_t>(view.shape[i] - 1, 0), &reach) || reach > kMaxReach ||
        reach < -kMaxReach) {
      refuse(tensor.name, fmt::format("got stride {} in dimension {}, expected a reach of at most 2^56 elements",
                                      view.stride[i], i));
    }
  }
}

void check_same_dtype(Named tensor, Named like) {
  if (tensor.view->dtype != like.view->dtype) {
    refuse(tensor.name, fmt::format("got {}, expected {} as {} has; convert one of them",
                                    dtype_name(tensor.view->dtype), dtype_name(like.view->dtype), like.name));
  }
}

void check_dtype(Named tensor, std::initializer_list<DType> legal, const char* way_out) {
  if (std::find(legal.begin(), legal.end(), tensor.view->dtype) != legal.end()) return;
  std::string names;
  for (const DType dtype : legal) {
    if (names.find(dtype_name(dtype)) == std::string::npos)
      names += (names.empty() ? "" : " or ") + std::string(dtype_name(dtype));
  }
  refuse(tensor.name, fmt::format("got {}, expected {}; {}", dtype_name(tensor.view->dtype), names, way_out));
}

void check_floating(Named tensor) {
  check_dtype(tensor, {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64},
              "convert the inputs to one of these");
}

void check_same_device(Named tensor, Named like) {
  const auto text = [](Device device) {
    const char* kind = device.kind == DeviceKind::kCpu    ? "cpu"
                       : device.kind == DeviceKind::kCuda ? "cuda"
                                                          : "another device";
    const bool indexed = device.kind == DeviceKind::kCuda || device.index != 0;
    return indexed ? fmt::format("{}:{}", kind, device.index) : std::string(kind);
  };
  if (tensor.view->device.kind == DeviceKind::kOther) {
    refuse(tensor.name, "got a device that is neither cpu nor cuda; move the tensors to one of these");
  }
  if (!(tensor.view->device == like.view->device)) {
    refuse(tensor.name, fmt::format("got device {}, expected {} as {} has; move one of them", text(tensor.view->device),
                                    text(like.view->device), like.name));
  }
}

void check_extent(Named tensor, int axis, int64_t expected, const std::string& why) {
  const int64_t got = extent(*tensor.view, axis);
  if (got != expected) {
    refuse(tensor.name, fmt::format("got size {} in dimension {} of {}, expected {} ({})", got, axis,
                                    tensor.view->shape_string(), expected, why));
  }
}

void check_shape(Named tensor, std::initializer_list<int64_t> shape, const std::string& why) {
  TensorView expected = TensorView::contiguous(nullptr, tensor.view->dtype, shape);
  const std::string text = fmt::format("{} ({})", expected.shape_string(), why);
  check_tensor(tensor, expected.rank, text);
  for (int i = 0; i < expected.rank; ++i) {
    if (tensor.view->shape[i] != expected.shape[i]) {
      refuse(tensor.name, fmt::format("got shape {}, expected {}", tensor.view->shape_string(), text));
    }
  }
}

void check_head_dim(const char* argument, int64_t head_dim) {
  if (head_dim < 1 || head_dim > catalog::kMaxHeadDim) {
    refuse(argument, fmt::format("got head dim {}, supported 1 to {}", head_dim, catalog::kMaxHeadDim));
  }
}

void check_no_alias(std::initializer_list<Named> outputs, std::initializer_list<Named> inputs) {
  for (const Named* output = outputs.begin(); output != outputs.end(); ++output) {
    if (output->view == nullptr) continue;
    if (output->view->data == nullptr && output->view->numel() > 0)
      refuse(output->name, "got a null data pointer; give it memory for its elements");
    if (footprint(*output->view).overlaps_itself) {
      refuse(output->name,
             fmt::format("is an output whose strides make elements of {} overlap; give it memory of its own",
                         output->view->shape_string()));
    }
    const auto check = [&](const Named& other) {
      if (other.view == nullptr || !share_memory(*output->view, *other.view)) return;
      refuse(output->name,
             fmt::format("is an output and shares memory with {}; give it memory of its own", other.name));
    };
    std::for_each(inputs.begin(), inputs.end(), check);
    std::for_each(output + 1, outputs.end(), check);
  }
  for (const Named& input : inputs) {
    if (input.view != nullptr && input.view->data == nullptr && input.view->numel() > 0) {
      refuse(input.name, "got a null data pointer; give it memory for its elements");
    }
  }
}

int64_t extent(const TensorView& view, int axis) { return axis < 0 ? 1 : view.shape[axis]; }

CanonicalTensor canonical(const TensorView& view, const Axes& axes) {
  const auto stride = [&](int axis) { return axis < 0 ? 0 : view.stride[axis]; };
  return {view.data,           view.dtype,          stride(axes.batch), stride(axes.heads),
          stride(axes.seqlen), stride(axes.pseudo), stride(axes.dim)};
}

void check_rope_tables(const Rope& rope, DType dtype, int64_t head_dim, Named like) {
  const Named cos = named("rope cos", rope.cos), sin = named("rope sin", rope.sin);
  check_tensor(cos, 2, "[positions, D_rot / 2]");
  check_shape(sin, {rope.cos.shape[0], rope.cos.shape[1]}, "the shape of cos");
  for (const Named& table : {cos, sin}) {
    check_dtype(table, {dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32}, "convert the tables");
    check_same_device(table, like);
    if (table.view->data == nullptr && table.view->numel() > 0)
      refuse(table.name, "got a null data pointer; give it memory for its elements");
  }
  if (2 * rope.cos.shape[1] > head_dim) {
    refuse("rope",
           fmt::format("the tables turn {} dims, expected at most the head dim {}", 2 * rope.cos.shape[1], head_dim));
  }
}

int64_t check_cu_seqlens(Named cu_seqlens, Named like) {
  check_tensor(cu_seqlens, 1, "[batch + 1]");
  check_dtype(cu_seqlens, {DType::kInt32}, "convert it with .to(int32)");
  check_same_device(cu_seqlens, like);
  if (cu_seqlens.view->shape[0] < 1)
    refuse(cu_seqlens.name, "got no element, expected batch + 1 offsets starting at 0");
  if (cu_seqlens.view->shape[0] > 1 && cu_seqlens.view->stride[0] != 1) {
    refuse(cu_seqlens.name, "got a strided tensor, expected contiguous; call .contiguous()");
  }
  return cu_seqlens.view->shape[0] - 1;
}

void check_cu_seqlens_values(Named cu_seqlens, int64_t total) {
  if (cu_seqlens.view->device.kind != DeviceKind::kCpu || cu_seqlens.view->data == nullptr) return;
  const auto* offsets = static_cast<const int32_t*>(cu_seqlens.view->data);
  const int64_t batch = cu_seqlens.view->shape[0] - 1;
  if (offsets[0] != 0) refuse(cu_seqlens.name, fmt::format("got {} first, expected 0", offsets[0]));
  for (int64_t i = 0; i < batch; ++i) {
    if (offsets[i + 1] < offsets[i]) {
      refuse(cu_seqlens.name, fmt::format("decreases from {} to {} at index {}, expected offsets that never decrease",
                                          offsets[i], offsets[i + 1], i + 1));
    }
  }
  if (offsets[batch] > total) {
    refuse(cu_seqlens.name, fmt::format("ends at {}, past the {} rows of the tensor", offsets[batch], total));
  }
}

}  // namespace plait
