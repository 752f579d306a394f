// Reads the C API's structs; see c_structs.hpp.
#include "api/c_structs.hpp"

#include <algorithm>

namespace plait::c_api {
namespace {

static_assert(PLAIT_MAX_RANK == kMaxRank);
static_assert(PLAIT_INT32 == static_cast<int>(DType::kInt32) && PLAIT_FLOAT64 == static_cast<int>(DType::kFloat64));
static_assert(PLAIT_BACKEND_CUDA_SM90 == static_cast<int>(Backend::kCudaSm90));
static_assert(PLAIT_SPLIT_D == static_cast<int>(Strategy::kSplitD));
static_assert(PLAIT_DEVICE == static_cast<int>(ErrorCode::kDevice));
static_assert(PLAIT_KVCACHE_FORWARD == static_cast<int>(Op::kKvCacheForward));

AttentionOptions options(const plait_options& c) {
  if (c.struct_size != sizeof(plait_options)) {
    invalid("struct_size", fmt::format("got {} in options; start from PLAIT_OPTIONS_INIT", c.struct_size));
  }
  for (const int64_t value : c.reserved) {
    if (value != 0) {
      invalid("reserved", fmt::format("got {} in options, expected 0: this library has no such option; start from "
                                      "PLAIT_OPTIONS_INIT, or use the library of your header",
                                      value));
    }
  }
  AttentionOptions o;
  o.mode = checked(c.mode, HeadMode::kInterleaved, "mode");
  o.mask = checked(c.mask, PseudoMask::kToken, "mask");
  o.layout = checked(c.layout, Layout::kBshd, "layout");
  o.strategy = checked(c.strategy, Strategy::kSplitD, "strategy");
  o.backend = checked(c.backend, Backend::kCudaSm90, "backend");
  if (c.out_dtype != -1) o.out_dtype = checked(c.out_dtype, DType::kFloat64, "out_dtype");
  if (flag(c.has_scale, "has_scale")) o.scale = c.scale;
  o.causal = flag(c.causal, "causal");
  o.deterministic = flag(c.deterministic, "deterministic");
  o.softcap = c.softcap;
  o.window_left = c.window_left;
  o.window_right = c.window_right;
  o.split_size = c.split_size;
  return o;
}

std::optional<Rope> rope(const plait_rope* from) {
  if (from == nullptr) return std::nullopt;
  const auto c = read<plait_rope>(from, "rope");
  return Rope{tensor(&c.cos, "rope cos"), tensor(&c.sin, "rope sin"), checked(c.style, RopeStyle::kPairs, "rope style"),
              checked(c.index, RopeIndex::kRow, "rope index"), c.offset};
}

KvCacheArgs kvcache_args(const plait_kvcache& c) {
  return {tensor(c.q, "q"),
          tensor(c.k_cache, "k_cache"),
          tensor(c.v_cache, "v_cache"),
          optional_tensor(c.k_new, "k_new"),
          optional_tensor(c.v_new, "v_new"),
          tensor(c.cache_seqlens, "cache_seqlens"),
          optional_tensor(c.block_table, "block_table"),
          optional_tensor(c.cache_batch_idx, "cache_batch_idx"),
          rope(c.rope),
          optional_tensor(c.sinks, "sinks"),
          options(c.options)};
}

}  // namespace

TensorView tensor(const plait_tensor* from, const char* name) {
  if (from == nullptr) invalid(name, "is missing (null)");
  TensorView view;
  view.data = from->data;
  view.dtype = from->dtype >= 0 && from->dtype <= PLAIT_INT32 ? static_cast<DType>(from->dtype) : DType::kOther;
  view.device = {from->device_kind >= 0 && from->device_kind <= PLAIT_CUDA ? static_cast<DeviceKind>(from->device_kind)
                                                                           : DeviceKind::kOther,
                 from->device_index};
  if (from->rank < 0 || from->rank > kMaxRank) {
    invalid(name, fmt::format("got rank {}, expected 0 to {}", from->rank, kMaxRank));
  }
  view.rank = from->rank;
  std::copy_n(from->shape, kMaxRank, view.shape.begin());
  std::copy_n(from->stride, kMaxRank, view.stride.begin());
  return view;
}

std::optional<TensorView> optional_tensor(const plait_tensor* from, const char* name) {
  return from == nullptr ? std::nullopt : std::optional(tensor(from, name));
}

bool flag(int32_t value, const char* argument) {
  if (value != 0 && value != 1) invalid(argument, fmt::format("got {}, expected 0 or 1", value));
  return value == 1;
}

AttentionArgs attention_args(const plait_attention& c) {
  return {tensor(c.q, "q"),
          tensor(c.k, "k"),
          tensor(c.v, "v"),
          optional_tensor(c.sinks, "sinks"),
          optional_tensor(c.cu_seqlens_q, "cu_seqlens_q"),
          optional_tensor(c.cu_seqlens_k, "cu_seqlens_k"),
          options(c.options)};
}

AttentionBackwardArgs backward_args(const plait_attention& c) {
  return {attention_args(c), tensor(c.out, "out"), tensor(c.lse, "lse"), tensor(c.dout, "dout"),
          optional_tensor(c.dlse, "dlse")};
}

PremixArgs premix_args(const plait_premix& c) {
  return {tensor(c.x, "x"),
          tensor(c.w, "w"),
          rope(c.rope),
          optional_tensor(c.cu_seqlens, "cu_seqlens"),
          optional_tensor(c.cu_seqlens_other, "cu_seqlens_other"),
          checked(c.layout, Layout::kBshd, "layout"),
          checked(c.backend, Backend::kCudaSm90, "backend")};
}

CollapseArgs collapse_args(const plait_collapse& c) {
  return {tensor(c.x, "x"), tensor(c.r, "collapse"), flag(c.packed, "packed"),
          checked(c.layout, Layout::kBshd, "layout"), checked(c.backend, Backend::kCudaSm90, "backend")};
}

std::variant<KvCacheArgs, IhaKvCacheArgs> any_kvcache_args(const plait_kvcache& c) {
  if (c.w_q == nullptr && c.w_k == nullptr && c.w_v == nullptr) return kvcache_args(c);
  return IhaKvCacheArgs{kvcache_args(c), tensor(c.w_q, "w_q"), tensor(c.w_k, "w_k"), tensor(c.w_v, "w_v"),
                        checked(c.iha_cache, IhaCacheKind::kRaw, "iha_cache")};
}

DeviceInfo device_info(const plait_device* device) {
  if (device == nullptr || device->name == nullptr) invalid("device", "is missing (null); \"cpu\" is always there");
  if (device->workers < 0) invalid("workers", fmt::format("got {}, expected 0 (all cores) or more", device->workers));
  DeviceInfo info = DeviceInfo::named(device->name);
  if (info.kind == DeviceKind::kCpu && device->workers > 0) info.workers = device->workers;
  return info;
}

Executor executor_of(const plait_executor* executor) {
  Executor chosen = Executor::threads();
  if (executor == nullptr) return chosen;
  if (executor->run != nullptr) chosen = {executor->run, executor->context};
  chosen.stream = executor->stream;
  return chosen;
}

}  // namespace plait::c_api
