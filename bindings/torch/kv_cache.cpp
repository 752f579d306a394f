// Ops attention_with_kvcache_ and iha_attention_with_kvcache_: they write new keys and values into the caches given.
// Called by torch's dispatcher through library.cpp.
#include "ops.hpp"

namespace plait::torch_shim {
namespace {

// The outputs have the shapes of plain attention with the values of the cache.
AttentionArgs plain_args(const KvCacheArgs& args) {
  AttentionArgs plain;
  plain.q = args.q;
  plain.v = args.v_cache;
  plain.options = args.options;
  return plain;
}

template <class Args>
void run(const Args& args, const KvCacheArgs& attention, StableIValue* results,
         Plan (*plan_call)(const Args&, const DeviceInfo&),
         void (*call)(const Args&, const AttentionOutputs&, const Plan&, void*, const Executor&)) {
  const Plan plan = plan_call(args, device_of("q", attention.q));
  const Tensor out = empty_out(plain_args(attention)), lse = empty_lse(plain_args(attention));
  const Workspace workspace(plan, attention.q.device);
  call(args, {view_of("out", out), view_of("lse", lse)}, plan, workspace.data, executor_of(attention.q));
  results[0] = from(out);
  results[1] = from(lse);
}

}  // namespace

void attention_with_kvcache(Reader& reader, StableIValue* results) {
  const Tensor q = reader.next<Tensor>(), k_cache = reader.next<Tensor>(), v_cache = reader.next<Tensor>();
  const MaybeTensor k_new = reader.next<MaybeTensor>(), v_new = reader.next<MaybeTensor>();
  const Tensor cache_seqlens = reader.next<Tensor>();
  const MaybeTensor block_table = reader.next<MaybeTensor>(), cache_batch_idx = reader.next<MaybeTensor>();
  const MaybeTensor cos = reader.next<MaybeTensor>(), sin = reader.next<MaybeTensor>();
  const MaybeTensor sinks = reader.next<MaybeTensor>();
  const Text rope_style = reader.next<Text>();
  KvCacheArgs args;
  args.options = reader.plain_options().parse();
  args.q = view_of("q", q);
  args.k_cache = view_of("k_cache", k_cache);
  args.v_cache = view_of("v_cache", v_cache);
  args.k_new = view_of("k_new", k_new);
  args.v_new = view_of("v_new", v_new);
  args.cache_seqlens = view_of("cache_seqlens", cache_seqlens);
  args.block_table = view_of("block_table", block_table);
  args.cache_batch_idx = view_of("cache_batch_idx", cache_batch_idx);
  args.rope = rope_of(view_of("rope cos", cos), view_of("rope sin", sin), rope_style);
  args.sinks = view_of("sinks", sinks);
  run(args, args, results, &plait::plan_attention_with_kvcache, &plait::attention_with_kvcache);
}

void iha_attention_with_kvcache(Reader& reader, StableIValue* results) {
  const Tensor q = reader.next<Tensor>();
  const MaybeTensor k_new = reader.next<MaybeTensor>(), v_new = reader.next<MaybeTensor>();
  const Tensor k_cache = reader.next<Tensor>(), v_cache = reader.next<Tensor>();
  const Tensor w_q = reader.next<Tensor>(), w_k = reader.next<Tensor>(), w_v = reader.next<Tensor>();
  const Tensor cache_seqlens = reader.next<Tensor>();
  const MaybeTensor cache_batch_idx = reader.next<MaybeTensor>();
  const MaybeTensor cos = reader.next<MaybeTensor>(), sin = reader.next<MaybeTensor>();
  const MaybeTensor sinks = reader.next<MaybeTensor>();
  const Text cache_kind = reader.next<Text>(), rope_style = reader.next<Text>();
  IhaKvCacheArgs args;
  KvCacheArgs& attention = args.attention;
  attention.options = reader.plain_options().parse();
  attention.q = view_of("q", q);
  attention.k_new = view_of("k_new", k_new);
  attention.v_new = view_of("v_new", v_new);
  attention.k_cache = view_of("k_cache", k_cache);
  attention.v_cache = view_of("v_cache", v_cache);
  attention.cache_seqlens = view_of("cache_seqlens", cache_seqlens);
  attention.cache_batch_idx = view_of("cache_batch_idx", cache_batch_idx);
  attention.rope = rope_of(view_of("rope cos", cos), view_of("rope sin", sin), rope_style);
  attention.sinks = view_of("sinks", sinks);
  args.w_q = view_of("w_q", w_q);
  args.w_k = view_of("w_k", w_k);
  args.w_v = view_of("w_v", w_v);
  args.kind = parse_cache_kind(cache_kind);
  run(args, attention, results, &plait::plan_iha_attention_with_kvcache, &plait::iha_attention_with_kvcache);
}

}  // namespace plait::torch_shim
