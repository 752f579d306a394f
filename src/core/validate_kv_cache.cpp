// Attention over a cache: arguments to KvCacheProblem and KvCacheTensors, and the contents the host can read.
// Called by api/kv_cache.cpp.
#include <algorithm>
#include <vector>

#include "core/check.hpp"
#include "core/rounding.hpp"
#include "core/validate.hpp"

namespace plait {
namespace {

// int32 [batch] or, with `columns`, [batch, any]; contiguous in its last dimension.
void check_index(Named index, int64_t batch, bool columns, Named like) {
  check_tensor(index, columns ? 2 : 1, columns ? "[B, max_pages]" : "[B]");
  check_dtype(index, {DType::kInt32}, "convert it with .to(int32)");
  check_same_device(index, like);
  check_extent(index, 0, batch, "the batch of q");
  const int last = columns ? 1 : 0;
  if (index.view->shape[last] > 1 && index.view->stride[last] != 1) {
    refuse(index.name, "got a strided tensor, expected contiguous; call .contiguous()");
  }
  if (index.view->data == nullptr && index.view->numel() > 0)
    refuse(index.name, "got a null data pointer; give it memory for its elements");
}

void validate_rope(const KvCacheArgs& args, KvCacheProblem& problem, KvCacheTensors& tensors) {
  if (!args.rope) return;
  const Rope& rope = *args.rope;
  const AttentionProblem& attention = problem.attention;
  const Named q = named("q", args.q);
  check_rope_tables(rope, attention.dtype, attention.head_dim, q);
  if (rope.index != RopeIndex::kToken || rope.offset != 0) {
    refuse("rope", "a cache turns by absolute positions; use index token and offset 0");
  }
  problem.has_rope = true;
  problem.rope_style = rope.style;
  problem.rope_dim = 2 * rope.cos.shape[1];
  problem.rope_rows = rope.cos.shape[0];
  tensors.cos = rope.cos;
  tensors.sin = rope.sin;
}

// q, k_new, v_new and the caches against each other; fills the sizes of `problem.attention`.
void validate_shapes(const KvCacheArgs& args, KvCacheProblem& problem, KvCacheTensors& tensors) {
  AttentionProblem& attention = problem.attention;
  const bool paged = args.block_table.has_value();
  const Axes axes = axes_of(args.options.layout, /*packed=*/false, /*pseudo=*/false);
  // A paged pool is [pages, page, Hk, D] whatever the layout.
  const Axes cache_axes = axes_of(paged ? Layout::kBshd : args.options.layout, /*packed=*/false, problem.mixed());
  const Named q = named("q", args.q), k = named("k_cache", args.k_cache), v = named("v_cache", args.v_cache);
  check_tensor(q, axes.rank(), axes_text(axes, "Hq", "Sq", "D"));
  const std::string pool = "[pages, page, Hk, D]";
  check_tensor(k, cache_axes.rank(), paged ? pool : axes_text(cache_axes, "Hk", "S_max", "D"));
  check_tensor(v, cache_axes.rank(), paged ? pool : axes_text(cache_axes, "Hk", "S_max", "Dv"));
  check_floating(q);
  check_same_device(q, q);
  for (const Named& cache : {k, v}) {
    check_same_dtype(cache, q);
    check_same_device(cache, q);
  }
  attention.batch = extent(args.q, axes.batch);
  attention.heads_q = extent(args.q, axes.heads);
  attention.seqlen_q = extent(args.q, axes.seqlen);
  attention.head_dim = extent(args.q, axes.dim);
  attention.heads_kv = extent(args.k_cache, cache_axes.heads);
  attention.head_dim_v = extent(args.v_cache, cache_axes.dim);
  problem.cache_rows = extent(args.k_cache, cache_axes.batch);
  check_head_dim("q", attention.head_dim);
  check_head_dim("v_cache", attention.head_dim_v);
  check_extent(k, cache_axes.dim, attention.head_dim, "the head dim of q");
  check_extent(v, cache_axes.batch, problem.cache_rows, "as k_cache has");
  check_extent(v, cache_axes.seqlen, extent(args.k_cache, cache_axes.seqlen), "as k_cache has");
  check_extent(v, cache_axes.heads, attention.heads_kv, "the heads of k_cache");
  if (cache_axes.pseudo >= 0) {
    check_extent(k, cache_axes.pseudo, attention.pseudo_heads, "the pseudo-heads P of w_q");
    check_extent(v, cache_axes.pseudo, attention.pseudo_heads, "the pseudo-heads P of w_q");
  }
  check_head_groups("k_cache", attention.heads_q, attention.heads_kv);
  const int64_t rows = extent(args.k_cache, cache_axes.seqlen);
  if (paged && rows < 1) refuse("k_cache", "got pages of 0 keys, expected a page size of at least 1");
  attention.page_size = paged ? rows : 0;
  attention.seqlen_kv = rows;
  if (paged) {
    check_index(named("block_table", *args.block_table), attention.batch, true, q);
    if (__builtin_mul_overflow(rows, args.block_table->shape[1], &attention.seqlen_kv)) {
      refuse("block_table", fmt::format("got {} pages of {} keys, expected a capacity that fits 64 bits",
                                        args.block_table->shape[1], rows));
    }
  }
  tensors.attention.q = canonical(args.q, axes);
  tensors.attention.k = canonical(args.k_cache, cache_axes);
  tensors.attention.v = canonical(args.v_cache, cache_axes);
  if (args.k_new.has_value() != args.v_new.has_value()) {
    refuse(args.k_new ? "v_new" : "k_new", "is missing; give k_new and v_new together");
  }
  if (!args.k_new) return;
  for (const auto& [name, view, dim] : {std::tuple{"k_new", &*args.k_new, attention.head_dim},
                                        std::tuple{"v_new", &*args.v_new, attention.head_dim_v}}) {
    const Named tensor{name, view};
    check_tensor(tensor, axes.rank(), axes_text(axes, "Hk", "Sn", "D"));
    check_same_dtype(tensor, q);
    check_same_device(tensor, q);
    check_extent(tensor, axes.batch, attention.batch, "the batch of q");
    check_extent(tensor, axes.heads, attention.heads_kv, "the heads of the cache");
    check_extent(tensor, axes.seqlen, extent(*args.k_new, axes.seqlen), "the length of k_new");
    check_extent(tensor, axes.dim, dim, "the head dim of the cache");
  }
  attention.new_keys = extent(*args.k_new, axes.seqlen);
  tensors.k_new = canonical(*args.k_new, axes);
  tensors.v_new = canonical(*args.v_new, axes);
}

void validate_indices(const KvCacheArgs& args, KvCacheProblem& problem, KvCacheTensors& tensors) {
  const int64_t batch = problem.attention.batch;
  const Named q = named("q", args.q);
  check_index(named("cache_seqlens", args.cache_seqlens), batch, false, q);
  KvCacheIndex& cache = tensors.attention.cache;
  cache.seqlens = static_cast<const int32_t*>(args.cache_seqlens.data);
  if (args.block_table) {
    if (args.cache_batch_idx)
      refuse("cache_batch_idx", "a paged cache has no rows; the block table already says where");
    cache.block_table = static_cast<const int32_t*>(args.block_table->data);
    cache.block_stride = args.block_table->stride[0];
  } else if (args.cache_batch_idx) {
    check_index(named("cache_batch_idx", *args.cache_batch_idx), batch, false, q);
    cache.batch_idx = static_cast<const int32_t*>(args.cache_batch_idx->data);
  } else if (problem.cache_rows < batch) {
    refuse("k_cache", fmt::format("got {} rows for a batch of {}, expected at least as many, or cache_batch_idx",
                                  problem.cache_rows, batch));
  }
}

// The weights of IHA; fills P before the caches are checked.
void validate_weights(const IhaKvCacheArgs& args, KvCacheProblem& problem, KvCacheTensors& tensors) {
  problem.iha = true;
  problem.kind = args.kind;
  problem.weight_dtype = args.w_q.dtype;
  check_tensor(named("w_q", args.w_q), 3, "[Hq, P, Hq]");
  const int64_t pseudo = args.w_q.shape[1];
  if (pseudo < 1) refuse("w_q", fmt::format("got P = 0 in {}, expected at least 1", args.w_q.shape_string()));
  if (args.attention.block_table) refuse("block_table", "IHA caches are dense; use cache_batch_idx");
  problem.attention.mode = HeadMode::kJoint;
  problem.attention.pseudo_heads = pseudo;
  tensors.w_q = args.w_q;
  tensors.w_k = args.w_k;
  tensors.w_v = args.w_v;
}

void check_weights(const IhaKvCacheArgs& args, const KvCacheProblem& problem) {
  const AttentionProblem& attention = problem.attention;
  const Named q = named("q", args.attention.q);
  for (const auto& [name, view, heads] :
       {std::tuple{"w_q", &args.w_q, attention.heads_q}, std::tuple{"w_k", &args.w_k, attention.heads_kv},
        std::tuple{"w_v", &args.w_v, attention.heads_kv}}) {
    const Named weight{name, view};
    check_shape(weight, {heads, attention.pseudo_heads, heads}, "[H, P, H] with its tensor's heads and the P of w_q");
    check_dtype(weight, {DType::kFloat32, attention.dtype}, "weights are float32 or of the dtype of q");
    check_same_dtype(weight, named("w_q", args.w_q));
    check_same_device(weight, q);
  }
}

ValidatedKvCache validate_inputs(const KvCacheArgs& args, const IhaKvCacheArgs* iha) {
  ValidatedKvCache result;
  AttentionProblem& attention = result.problem.attention;
  if (args.options.mode != HeadMode::kPlain) refuse("mode", "a cache call takes source heads; leave the mode plain");
  validate_options(args.options);
  attention.op = Op::kKvCacheForward;
  attention.cached = true;
  if (iha != nullptr) validate_weights(*iha, result.problem, result.tensors);
  validate_shapes(args, result.problem, result.tensors);
  set_options(args.options, args.q, attention);
  if (iha != nullptr) check_weights(*iha, result.problem);
  validate_indices(args, result.problem, result.tensors);
  if (args.sinks) set_sinks(*args.sinks, named("q", args.q), attention, result.tensors.attention);
  validate_rope(args, result.problem, result.tensors);
  return result;
}

// Slots [begin, end) of a cache row or page.
struct SlotRun {
  int64_t row, begin, end;
  auto operator<=>(const SlotRun&) const = default;
};

// The legal indices among `count` rows or pages.
std::string range_text(int64_t count, const char* what) {
  return count > 0 ? fmt::format("0 to {}", count - 1) : fmt::format("none: the cache has no {}", what);
}

// Lengths, rows, pages and positions, where the host can read them.
void check_contents(const KvCacheProblem& problem, const KvCacheTensors& tensors, int64_t max_pages) {
  const AttentionProblem& attention = problem.attention;
  const KvCacheIndex& cache = tensors.attention.cache;
  if (attention.device.kind != DeviceKind::kCpu) return;
  std::vector<SlotRun> written;
  for (int64_t b = 0; b < attention.batch; ++b) {
    const int64_t before = cache.seqlens[b], after = before + attention.new_keys;
    if (attention.new_keys > attention.seqlen_kv) {
      refuse("k_new",
             fmt::format("got {} new keys, but the cache holds {}; give {}", attention.new_keys, attention.seqlen_kv,
                         attention.page_size > 0 ? "block_table more columns" : "it more positions"));
    }
    if (before < 0 || after > attention.seqlen_kv) {
      refuse("cache_seqlens",
             fmt::format("got {} for sequence {} with {} new keys, expected 0 to {} (the cache holds {})", before, b,
                         attention.new_keys, attention.seqlen_kv - attention.new_keys, attention.seqlen_kv));
    }
    if (cache.batch_idx != nullptr && (cache.batch_idx[b] < 0 || cache.batch_idx[b] >= problem.cache_rows)) {
      refuse("cache_batch_idx", fmt::format("got {} for sequence {}, expected a row of the cache, {}",
                                            cache.batch_idx[b], b, range_text(problem.cache_rows, "rows")));
    }
    if (attention.page_size > 0) {
      const int64_t pages = ceil_div(after, attention.page_size);
      for (int64_t i = 0; i < std::min(pages, max_pages); ++i) {
        const int32_t page = cache.block_table[b * cache.block_stride + i];
        if (page < 0 || page >= problem.cache_rows) {
          refuse("block_table", fmt::format("got page {} for block {} of sequence {}, expected {}", page, i, b,
                                            range_text(problem.cache_rows, "pages")));
        }
      }
    }
    if (problem.has_rope && attention.seqlen_q > after) {
      refuse("rope", fmt::format("sequence {} has {} queries for {} keys, so its first query stands before position 0",
                                 b, attention.seqlen_q, after));
    }
    if (problem.has_rope && after > problem.rope_rows) {
      refuse("rope",
             fmt::format("the tables have {} rows, expected at least {} (sequence {})", problem.rope_rows, after, b));
    }
    // The runs of slots that sequence b writes: one per page, or one in its row.
    for (int64_t i = before; i < after;) {
      const int64_t size = attention.page_size;
      const int64_t end = size > 0 ? std::min(after, (i / size + 1) * size) : after;
      const int64_t row = size > 0 ? cache.block_table[b * cache.block_stride + i / size]
                                   : (cache.batch_idx != nullptr ? cache.batch_idx[b] : b);
      const int64_t first = size > 0 ? i % size : i;
      written.push_back({row, first, first + end - i});
      i = end;
    }
  }
  std::sort(written.begin(), written.end());
  const auto twice = std::adjacent_find(written.begin(), written.end(), [](const SlotRun& a, const SlotRun& b) {
    return a.row == b.row && b.begin < a.end;
  });
  if (twice != written.end()) {
    refuse(attention.page_size > 0 ? "block_table" : "cache_batch_idx",
           fmt::format("two sequences append to {} {} at position {}; give each its own",
                       attention.page_size > 0 ? "page" : "cache row", twice->row, (twice + 1)->begin));
  }
}

ValidatedKvCache validate_call(const KvCacheArgs& args, const IhaKvCacheArgs* iha, const AttentionOutputs* outputs) {
  ValidatedKvCache result = validate_inputs(args, iha);
  if (outputs == nullptr) return result;
  const AttentionProblem& attention = result.problem.attention;
  AttentionArgs like{
      .q = args.q, .k = {}, .v = {}, .sinks = {}, .cu_seqlens_q = {}, .cu_seqlens_k = {}, .options = args.options};
  set_outputs(like, *outputs, attention, result.tensors.attention);
  // The caches are written only where there are new keys; else they may be expanded, or be one tensor.
  const bool writes = attention.new_keys > 0;
  check_no_alias({named("out", outputs->out),
                  named("lse", outputs->lse),
                  {"k_cache", writes ? &args.k_cache : nullptr},
                  {"v_cache", writes ? &args.v_cache : nullptr}},
                 {named("q", args.q),
                  {"k_new", view_of(args.k_new)},
                  {"v_new", view_of(args.v_new)},
                  {"k_cache", writes ? nullptr : &args.k_cache},
                  {"v_cache", writes ? nullptr : &args.v_cache},
                  named("cache_seqlens", args.cache_seqlens),
                  {"block_table", view_of(args.block_table)},
                  {"cache_batch_idx", view_of(args.cache_batch_idx)},
                  {"sinks", view_of(args.sinks)},
                  {"rope cos", args.rope ? &args.rope->cos : nullptr},
                  {"rope sin", args.rope ? &args.rope->sin : nullptr},
                  {"w_q", iha != nullptr ? &iha->w_q : nullptr},
                  {"w_k", iha != nullptr ? &iha->w_k : nullptr},
                  {"w_v", iha != nullptr ? &iha->w_v : nullptr}});
  check_contents(result.problem, result.tensors, args.block_table ? args.block_table->shape[1] : 0);
  return result;
}

}  // namespace

ValidatedKvCache validate(const KvCacheArgs& args, const AttentionOutputs* outputs) {
  return validate_call(args, nullptr, outputs);
}

ValidatedKvCache validate(const IhaKvCacheArgs& args, const AttentionOutputs* outputs) {
  return validate_call(args.attention, &args, outputs);
}

}  // namespace plait
