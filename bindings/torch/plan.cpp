// Ops plan_*, check_merge and flop_matched_window: they take numbers, never tensors.
// Called by the fake kernels (to refuse what the real kernels refuse) and by plait.explain.
#include "ops.hpp"

namespace plait::torch_shim {
namespace {

// Tensors as a flat list: -1 for an absent one, else rank, dtype, device kind, device index, shape, strides.
class Slots {
 public:
  explicit Slots(std::vector<int64_t> values) : values_(std::move(values)) {}

  std::optional<TensorView> next(const char* name) {
    const int64_t rank = take();
    if (rank < 0) return std::nullopt;
    if (rank > kMaxRank) {
      throw Error(ErrorCode::kInvalidArgument, name,
                  "got rank " + std::to_string(rank) + ", expected at most " + std::to_string(kMaxRank));
    }
    TensorView view;
    // Planning never reads contents, but wants pointers, and merging wants them apart: addresses that nobody follows.
    view.data = reinterpret_cast<void*>(++slot_ << 44);  // NOLINT(performance-no-int-to-ptr)
    view.rank = static_cast<int32_t>(rank);
    view.dtype = static_cast<DType>(take());
    view.device.kind = static_cast<DeviceKind>(take());
    view.device.index = static_cast<int32_t>(take());
    for (int axis = 0; axis < rank; ++axis) view.shape[axis] = take();
    for (int axis = 0; axis < rank; ++axis) view.stride[axis] = take();
    return view;
  }

  TensorView required(const char* name) {
    const std::optional<TensorView> view = next(name);
    if (!view) throw Error(ErrorCode::kInvalidArgument, name, "is missing");
    return *view;
  }

 private:
  int64_t take() {
    STD_TORCH_CHECK(index_ < values_.size(), "plait: a plan op got too few numbers");
    return values_[index_++];
  }

  std::vector<int64_t> values_;
  size_t index_ = 0;
  uintptr_t slot_ = 0;
};

// Results: (0, explanation), (1, an argument is wrong) or (2, no backend serves it), without an exception, which
// torch's fake-tensor machinery would log.
template <class Body>
void answer(StableIValue* results, Body body) {
  int64_t code = 0;
  std::string text;
  try {
    text = body();
  } catch (const Error& error) {
    code = error.code() == ErrorCode::kInvalidArgument ? 1 : 2;
    text = error.what();
  }
  results[0] = from(code);
  results[1] = from(text);
}

AttentionArgs read_attention(Slots& slots, const RawOptions& options) {
  AttentionArgs args;
  args.options = options.parse();
  args.q = slots.required("q");
  args.k = slots.required("k");
  args.v = slots.required("v");
  args.sinks = slots.next("sinks");
  args.cu_seqlens_q = slots.next("cu_seqlens_q");
  args.cu_seqlens_k = slots.next("cu_seqlens_k");
  return args;
}

// Plans for `device` wherever the tensors are.
void move_to(const DeviceInfo& device, AttentionArgs& args) {
  for (TensorView* view : {&args.q, &args.k, &args.v}) view->device = {device.kind, 0};
  for (std::optional<TensorView>* view : {&args.sinks, &args.cu_seqlens_q, &args.cu_seqlens_k}) {
    if (*view) (*view)->device = {device.kind, 0};
  }
}

}  // namespace

void plan_attention(Reader& reader, StableIValue* results) {
  Slots slots(reader.next<std::vector<int64_t>>());
  const bool backward = reader.next<bool>();
  const Text device_name = reader.next<Text>();
  const RawOptions options = reader.options();
  answer(results, [&] {
    AttentionBackwardArgs args;
    args.forward = read_attention(slots, options);
    const DeviceInfo device =
        device_name.value.empty() ? device_of("q", args.forward.q) : DeviceInfo::named(device_name.value);
    if (!device_name.value.empty()) move_to(device, args.forward);
    if (!backward) return plan_attention_forward(args.forward, device).explain();
    args.out = slots.required("out");
    args.lse = slots.required("lse");
    const std::optional<TensorView> dout = slots.next("dout");
    args.dout = dout ? *dout : expanded_zeros(args.out);
    args.dlse = slots.next("dlse");
    if (!device_name.value.empty()) args.out.device = args.lse.device = args.dout.device = {device.kind, 0};
    return plan_attention_backward(args, device).explain();
  });
}

void plan_premix(Reader& reader, StableIValue* results) {
  Slots slots(reader.next<std::vector<int64_t>>());
  const bool backward = reader.next<bool>();
  const Text style = reader.next<Text>(), index = reader.next<Text>();
  const int64_t offset = reader.next<int64_t>();
  const Text layout = reader.next<Text>(), backend = reader.next<Text>();
  answer(results, [&] {
    PremixArgs args;
    args.x = slots.required("x");
    args.w = slots.required("w");
    const std::optional<TensorView> cos = slots.next("rope cos"), sin = slots.next("rope sin");
    args.rope = rope_of(cos, sin, style, index, offset);
    args.cu_seqlens = slots.next("cu_seqlens");
    args.cu_seqlens_other = slots.next("cu_seqlens_other");
    args.layout = parse_layout(layout);
    args.backend = parse_backend(backend.value);
    const DeviceInfo device = device_of("x", args.x);
    return (backward ? plan_premix_backward(args, device) : plan_premix_forward(args, device)).explain();
  });
}

void plan_collapse(Reader& reader, StableIValue* results) {
  Slots slots(reader.next<std::vector<int64_t>>());
  const bool backward = reader.next<bool>(), packed = reader.next<bool>();
  const Text layout = reader.next<Text>(), backend = reader.next<Text>();
  answer(results, [&] {
    const TensorView x = slots.required("x"), r = slots.required("r");
    const CollapseArgs args{x, r, packed, parse_layout(layout), parse_backend(backend.value)};
    const DeviceInfo device = device_of("x", args.x);
    return (backward ? plan_collapse_backward(args, device) : plan_collapse_forward(args, device)).explain();
  });
}

void plan_attention_with_kvcache(Reader& reader, StableIValue* results) {
  Slots slots(reader.next<std::vector<int64_t>>());
  const Text rope_style = reader.next<Text>();
  const RawOptions options = reader.plain_options();
  answer(results, [&] {
    KvCacheArgs args;
    args.options = options.parse();
    args.q = slots.required("q");
    args.k_cache = slots.required("k_cache");
    args.v_cache = slots.required("v_cache");
    args.k_new = slots.next("k_new");
    args.v_new = slots.next("v_new");
    args.cache_seqlens = slots.required("cache_seqlens");
    args.block_table = slots.next("block_table");
    args.cache_batch_idx = slots.next("cache_batch_idx");
    const std::optional<TensorView> cos = slots.next("rope cos"), sin = slots.next("rope sin");
    args.rope = rope_of(cos, sin, rope_style);
    args.sinks = slots.next("sinks");
    return plait::plan_attention_with_kvcache(args, device_of("q", args.q)).explain();
  });
}

void plan_iha_attention_with_kvcache(Reader& reader, StableIValue* results) {
  Slots slots(reader.next<std::vector<int64_t>>());
  const Text cache_kind = reader.next<Text>(), rope_style = reader.next<Text>();
  const RawOptions options = reader.plain_options();
  answer(results, [&] {
    IhaKvCacheArgs args;
    KvCacheArgs& attention = args.attention;
    attention.options = options.parse();
    attention.q = slots.required("q");
    attention.k_new = slots.next("k_new");
    attention.v_new = slots.next("v_new");
    attention.k_cache = slots.required("k_cache");
    attention.v_cache = slots.required("v_cache");
    args.w_q = slots.required("w_q");
    args.w_k = slots.required("w_k");
    args.w_v = slots.required("w_v");
    attention.cache_seqlens = slots.required("cache_seqlens");
    attention.cache_batch_idx = slots.next("cache_batch_idx");
    const std::optional<TensorView> cos = slots.next("rope cos"), sin = slots.next("rope sin");
    attention.rope = rope_of(cos, sin, rope_style);
    attention.sinks = slots.next("sinks");
    args.kind = parse_cache_kind(cache_kind);
    return plait::plan_iha_attention_with_kvcache(args, device_of("q", attention.q)).explain();
  });
}

void check_merge(Reader& reader, StableIValue* results) {
  Slots slots(reader.next<std::vector<int64_t>>());
  const int64_t parts = reader.next<int64_t>();
  const bool packed = reader.next<bool>();
  const Text layout = reader.next<Text>();
  answer(results, [&] {
    std::vector<TensorView> outs, lses;
    for (int64_t part = 0; part < parts; ++part) outs.push_back(slots.required("outs"));
    for (int64_t part = 0; part < parts; ++part) lses.push_back(slots.required("lses"));
    const AttentionOutputs outputs{slots.required("out"), slots.required("lse")};
    check_merge_states({outs.data(), lses.data(), parts, parse_layout(layout), packed}, outputs);
    return std::string();
  });
}

void flop_matched_window(Reader& reader, StableIValue* results) {
  const int64_t seqlen = reader.next<int64_t>(), pseudo_heads = reader.next<int64_t>();
  const Text mode = reader.next<Text>();
  const int64_t tile = reader.next<int64_t>();
  const FlopMatch match = plait::flop_matched_window(seqlen, pseudo_heads, parse_mode(mode), tile);
  results[0] = from(match.left);
  results[1] = from(match.visit_ratio);
}

}  // namespace plait::torch_shim
