// Between LibTorch's stable ABI and plait: tensors to views, strings to enums, threads, errors.
// Called by every op of this folder.
#include "convert.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <numeric>
#include <utility>

namespace plait::torch_shim {
namespace {

constexpr int64_t kWorkspaceAlignBytes = 64;  // what torch's CPU allocator gives

DType dtype_of(int32_t type) {
  if (type == aoti_torch_dtype_float32()) return DType::kFloat32;
  if (type == aoti_torch_dtype_bfloat16()) return DType::kBFloat16;
  if (type == aoti_torch_dtype_float16()) return DType::kFloat16;
  if (type == aoti_torch_dtype_float64()) return DType::kFloat64;
  if (type == aoti_torch_dtype_int32()) return DType::kInt32;
  return DType::kOther;
}

int32_t torch_dtype(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return aoti_torch_dtype_float16();
    case DType::kBFloat16:
      return aoti_torch_dtype_bfloat16();
    case DType::kFloat32:
      return aoti_torch_dtype_float32();
    case DType::kFloat64:
      return aoti_torch_dtype_float64();
    case DType::kInt32:
      return aoti_torch_dtype_int32();
    case DType::kOther:
      break;
  }
  throw Error(ErrorCode::kInternal, "dtype", "no torch dtype for this output");
}

int32_t torch_device(DeviceKind kind) {
  return kind == DeviceKind::kCuda ? aoti_torch_device_type_cuda() : aoti_torch_device_type_cpu();
}

[[noreturn]] void refuse_memory(const char* name, const std::vector<int64_t>& shape) {
  std::string text;
  for (const int64_t extent : shape) text += (text.empty() ? "" : ", ") + std::to_string(extent);
  throw Error(ErrorCode::kUnsupported, name,
              "torch cannot allocate a result of shape [" + text +
                  "] (its elements have memory of their own, also where the inputs are expanded); use a smaller batch "
                  "or length, or free memory");
}

// `order`: the axes from the slowest to the fastest.
Tensor empty_in_order(const char* name, const std::vector<int64_t>& shape, const std::vector<size_t>& order,
                      int32_t dtype, Device device) {
  std::vector<int64_t> stride(shape.size());
  int64_t step = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    stride[order[i]] = step;
    step *= std::max<int64_t>(shape[order[i]], 1);
  }
  AtenTensorHandle handle = nullptr;
  if (aoti_torch_empty_strided(static_cast<int64_t>(shape.size()), shape.data(), stride.data(), dtype,
                               torch_device(device.kind), device.index, &handle) != AOTI_TORCH_SUCCESS) {
    refuse_memory(name, shape);
  }
  return Tensor(handle);
}

template <class Enum, size_t size>
Enum parse(const char* argument, const Text& text, const std::pair<const char*, Enum> (&names)[size]) {
  std::string legal;
  for (const auto& [name, value] : names) {
    if (text.value == name) return value;
    legal += (legal.empty() ? "'" : ", '") + std::string(name) + "'";
  }
  throw Error(ErrorCode::kInvalidArgument, argument, "got '" + text.value + "', expected one of " + legal);
}

// torch's current stream of a GPU. The function is in libtorch_cuda, which a CPU-only torch does not have, so it is
// looked up in the library that `import torch` loaded.
void* current_stream(int32_t device) {
  using GetStream = AOTITorchError (*)(int32_t, void**);
  static const auto get = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    return library == nullptr ? nullptr
                              : reinterpret_cast<GetStream>(dlsym(library, "aoti_torch_get_current_cuda_stream"));
  }();
  if (get == nullptr) {
    throw Error(ErrorCode::kUnsupported, "device", "this torch has no CUDA streams; install torch with CUDA");
  }
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(get(device, &stream));
  return stream;
}

struct Task {
  void (*body)(void* arg, int32_t worker);
  void* arg;
};

void run_on_torch(void* /*context*/, int32_t workers, void (*body)(void* arg, int32_t worker), void* arg) {
  Task task{body, arg};
  const auto run_range = [](int64_t begin, int64_t end, void* context) {
    const Task& ranged = *static_cast<Task*>(context);
    for (int64_t worker = begin; worker < end; ++worker) ranged.body(ranged.arg, static_cast<int32_t>(worker));
  };
  TORCH_ERROR_CODE_CHECK(torch_parallel_for(0, workers, 1, run_range, &task));
}

}  // namespace

TensorView view_of(const char* name, const Tensor& tensor) {
  int32_t layout = 0, dtype = 0, device_type = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_layout(tensor.get(), &layout));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &dtype));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &device_type));
  const int64_t rank = tensor.dim();
  if (layout != aoti_torch_layout_strided()) {
    throw Error(ErrorCode::kInvalidArgument, name, "is not a strided tensor; convert it with .to_dense()");
  }
  if (rank > kMaxRank) {
    throw Error(ErrorCode::kInvalidArgument, name,
                "got rank " + std::to_string(rank) + ", expected at most " + std::to_string(kMaxRank));
  }
  TensorView view;
  view.dtype = dtype_of(dtype);
  view.device.kind = device_type == aoti_torch_device_type_cpu()    ? DeviceKind::kCpu
                     : device_type == aoti_torch_device_type_cuda() ? DeviceKind::kCuda
                                                                    : DeviceKind::kOther;
  view.device.index = view.device.kind == DeviceKind::kCpu ? 0 : tensor.get_device_index();
  view.rank = static_cast<int32_t>(rank);
  std::copy_n(tensor.sizes().data(), rank, view.shape.begin());
  std::copy_n(tensor.strides().data(), rank, view.stride.begin());
  view.data = tensor.data_ptr();
  return view;
}

std::optional<TensorView> view_of(const char* name, const MaybeTensor& tensor) {
  if (!tensor) return std::nullopt;
  return view_of(name, *tensor);
}

DType dtype_of(ScalarType type) {
  switch (type) {
    case ScalarType::Half:
      return DType::kFloat16;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    case ScalarType::Float:
      return DType::kFloat32;
    case ScalarType::Double:
      return DType::kFloat64;
    case ScalarType::Int:
      return DType::kInt32;
    default:
      return DType::kOther;
  }
}

Tensor empty(const char* name, const std::vector<int64_t>& shape, DType dtype, const TensorView& like) {
  std::vector<size_t> order(shape.size());
  std::iota(order.begin(), order.end(), 0);
  return empty_in_order(name, shape, order, torch_dtype(dtype), like.device);
}

Tensor empty_ordered(const char* name, const std::vector<int64_t>& shape, DType dtype, const TensorView& like,
                     size_t axis) {
  std::vector<size_t> order(shape.size());
  std::iota(order.begin(), order.end(), 0);
  if (axis + 1 < shape.size() && like.stride[axis] < like.stride[axis + 1]) std::swap(order[axis], order[axis + 1]);
  return empty_in_order(name, shape, order, torch_dtype(dtype), like.device);
}

Tensor empty_like(const char* name, const Tensor& like) {
  try {
    return torch::stable::empty_like(like);
  } catch (const std::runtime_error&) {
    refuse_memory(name, {like.sizes().begin(), like.sizes().end()});
  }
}

Workspace::Workspace(const Plan& plan, Device device) {
  if (plan.workspace_bytes == 0) return;
  tensor = empty_in_order("workspace", {plan.workspace_bytes}, {0}, aoti_torch_dtype_uint8(), device);
  data = tensor->data_ptr();
  STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(data) % kWorkspaceAlignBytes == 0,
                  "plait: torch's allocator returned a workspace that is not 64-byte aligned");
}

Executor executor_of(const TensorView& tensor) {
  const bool gpu = tensor.device.kind == DeviceKind::kCuda;
  return {&run_on_torch, nullptr, gpu ? current_stream(tensor.device.index) : nullptr};
}

int32_t torch_workers() {
  uint32_t threads = 1;
  TORCH_ERROR_CODE_CHECK(torch_get_num_threads(&threads));
  return std::max<int32_t>(static_cast<int32_t>(threads), 1);
}

DeviceInfo device_of(const char* name, const TensorView& tensor) {
  if (tensor.device.kind == DeviceKind::kCpu) return DeviceInfo::host(torch_workers());
  if (tensor.device.kind == DeviceKind::kCuda) return DeviceInfo::cuda(tensor.device.index);
  throw Error(ErrorCode::kUnsupported, name,
              "is on a device that is neither cpu nor cuda; move the tensors, or use "
              "torch.nn.functional.scaled_dot_product_attention");
}

Layout parse_layout(const Text& text) {
  return parse<Layout, 2>("layout", text, {{"bhsd", Layout::kBhsd}, {"bshd", Layout::kBshd}});
}

HeadMode parse_mode(const Text& text) {
  return parse<HeadMode, 3>(
      "mode", text,
      {{"plain", HeadMode::kPlain}, {"joint", HeadMode::kJoint}, {"interleaved", HeadMode::kInterleaved}});
}

PseudoMask parse_mask(const Text& text) {
  return parse<PseudoMask, 2>("mask", text, {{"flat", PseudoMask::kFlat}, {"token", PseudoMask::kToken}});
}

RopeStyle parse_rope_style(const Text& text) {
  return parse<RopeStyle, 2>("rope_style", text, {{"half", RopeStyle::kHalf}, {"pairs", RopeStyle::kPairs}});
}

RopeIndex parse_rope_index(const Text& text) {
  return parse<RopeIndex, 2>("rope_index", text, {{"token", RopeIndex::kToken}, {"row", RopeIndex::kRow}});
}

IhaCacheKind parse_cache_kind(const Text& text) {
  return parse<IhaCacheKind, 2>("cache_kind", text, {{"mixed", IhaCacheKind::kMixed}, {"raw", IhaCacheKind::kRaw}});
}

std::optional<Rope> rope_of(const std::optional<TensorView>& cos, const std::optional<TensorView>& sin,
                            const Text& style, const Text& index, int64_t offset) {
  const RopeStyle parsed_style = parse_rope_style(style);
  const RopeIndex parsed_index = parse_rope_index(index);
  if (cos.has_value() != sin.has_value()) {
    throw Error(ErrorCode::kInvalidArgument, "rope", "got one table, expected both cos and sin");
  }
  if (!cos) return std::nullopt;
  return Rope{*cos, *sin, parsed_style, parsed_index, offset};
}

AttentionOptions RawOptions::parse() const {
  AttentionOptions options;
  options.mode = parse_mode(mode);
  options.mask = parse_mask(mask);
  options.causal = causal;
  options.window_left = window_left;
  options.window_right = window_right;
  options.scale = scale;
  options.softcap = softcap;
  options.deterministic = deterministic;
  options.split_size = split_size;
  options.strategy = parse_strategy(strategy.value);
  options.backend = parse_backend(backend.value);
  if (out_dtype) options.out_dtype = dtype_of(*out_dtype);
  options.layout = parse_layout(layout);
  return options;
}

RawOptions Reader::options() {
  const Text mode = next<Text>(), mask = next<Text>();
  RawOptions options = plain_options();
  options.mode = mode;
  options.mask = mask;
  return options;
}

RawOptions Reader::plain_options() {
  // Braces evaluate left to right: this is the order of the schema.
  return RawOptions{Text{"plain"},   Text{"flat"},    next<bool>(),
                    next<int64_t>(), next<int64_t>(), next<std::optional<double>>(),
                    next<double>(),  next<bool>(),    next<int64_t>(),
                    next<Text>(),    next<Text>(),    next<std::optional<ScalarType>>(),
                    next<Text>()};
}

}  // namespace plait::torch_shim
