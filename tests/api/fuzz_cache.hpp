// One random step over a cache: its sizes and indices, and its tensors in any dtype and strides.
// Called by fuzz_kv_cache.cpp, fuzz_bad_contents.cpp and fuzz_bad_structs.cpp.
#pragma once

#include <optional>
#include <utility>

#include "api/fuzz.hpp"
#include "plait/kv_cache.hpp"

namespace plait::testing {

struct CacheCase {
  uint64_t seed;
  int64_t batch, heads_kv, heads_q, seqlen_q, new_keys, dim, dim_v, capacity;
  int64_t page = 0, max_pages = 0, cache_rows;  // page 0: dense; cache_rows: rows or pages
  bool iha = false, one_cache = false;          // one_cache: v_cache is k_cache
  IhaCacheKind kind = IhaCacheKind::kMixed;
  int64_t pseudo = 1, rope_dim = 0;
  RopeStyle style = RopeStyle::kHalf;
  bool sinks;
  DType dtype, weight_dtype;
  Strides strides;
  int32_t workers;
  bool sequential;
  AttentionOptions options;
  std::vector<int32_t> lengths, rows, table;  // cache_seqlens, cache_batch_idx (empty: none), block_table

  // splits: whether the backend has split_kv and split_size. tensor_cores: what they take.
  explicit CacheCase(uint64_t from, bool splits = true, bool tensor_cores = false) : seed(from) {
    Random random(from, tensor_cores);
    batch = random.between(1, 4), heads_kv = random.between(1, 2);
    heads_q = heads_kv * random.pick<int64_t>({1, 2, 3});
    dim = random.head_dim(), dim_v = random.chance(60) ? dim : random.head_dim();
    seqlen_q = random.chance(60) ? 1 : random.length(40);
    new_keys = random.chance(50) ? seqlen_q : random.length(40);
    if (tensor_cores && random.chance(20)) seqlen_q = new_keys = random.length(300);  // a prompt, or a piece of one
    dtype = random.dtype();
    weight_dtype = random.chance(50) ? DType::kFloat32 : dtype;
    strides = random.strides();
    sinks = random.chance(30);
    workers = static_cast<int32_t>(random.between(1, 4));
    sequential = random.chance(20);
    const int64_t longest = random.chance(15) ? 1500 : 200;
    capacity = new_keys + random.length(std::max<int64_t>(1, longest * 64 / (64 + dim + dim_v)));
    if (random.chance(40)) iha = true, pseudo = random.between(1, 3);
    if (random.chance(50)) kind = IhaCacheKind::kRaw;
    if (!iha && random.chance(50)) page = random.pick<int64_t>({1, 2, 3, 16, 64, 100, 256});
    choose_options(random);
    if (!splits) options.split_size = 0, options.strategy = Strategy::kAuto;
    if (tensor_cores) {
      kind = IhaCacheKind::kMixed;
      if (options.strategy == Strategy::kSplitQ && page > 0) options.strategy = Strategy::kAuto;
    }
    choose_lengths(random);
    page > 0 ? choose_pages(random) : choose_rows(random);
    one_cache = !iha && new_keys == 0 && dim == dim_v && random.chance(20);
  }

  bool mixed() const { return iha && kind == IhaCacheKind::kMixed; }
  double scale() const { return options.scale.value_or(1 / std::sqrt(static_cast<double>(dim))); }
  // How far fp32 arithmetic may carry an appended element, an LSE, an output element.
  double mix_bar() const { return 4e-6 * gain(); }
  double lse_bar() const {
    return 4e-6 * (1 + 3 * std::abs(scale()) * std::sqrt(static_cast<double>(dim)) * gain() * gain());
  }
  double out_bar() const { return lse_bar() * gain() * std::max(1.0, std::sqrt(static_cast<double>(dim_v)) / 8); }
  // What tensor cores add: turned queries, probabilities and a merge of ranges are rounded to the input dtype.
  double score_rounding() const {
    const bool turned = iha || rope_dim > 0;
    return turned ? 4 * roundoff(dtype) * std::abs(scale()) * std::sqrt(static_cast<double>(dim)) * gain() * gain() : 0;
  }
  double tensor_lse_bar() const { return lse_bar() + score_rounding(); }
  double tensor_out_bar() const {
    const double products = options.out_dtype ? 12 : 4;
    return out_bar() + (products * roundoff(dtype) + 4 * score_rounding()) * gain();
  }
  // (row or page, slot in it) of a position.
  std::pair<int64_t, int64_t> place(int64_t b, int64_t position) const {
    if (page > 0) return {table[b * max_pages + position / page], position % page};
    return {rows.empty() ? b : rows[b], position};
  }

 private:
  // Sums over heads make mixed numbers larger.
  double gain() const { return iha ? 2.0 * static_cast<double>(heads_q) : 1.0; }

  void choose_options(Random& random) {
    options.causal = random.chance(60);
    if (random.chance(30)) options.window_left = random.between(0, 60);
    if (random.chance(15)) options.window_right = random.between(0, 10);
    if (random.chance(20)) options.softcap = random.pick({2.0, 30.0});
    if (random.chance(20)) options.scale = random.uniform(0.05, 0.4);
    options.layout = random.pick({Layout::kBhsd, Layout::kBshd});
    options.strategy = random.pick({Strategy::kAuto, Strategy::kSplitQ, Strategy::kSplitKv});
    if (options.strategy != Strategy::kSplitQ && random.chance(40)) options.split_size = random.pick({1, 7, 64, 200});
    if (dtype != DType::kFloat32 && random.chance(30)) options.out_dtype = DType::kFloat32;
    if (random.chance(50)) {
      rope_dim = 2 * random.between(0, dim / 2);
      style = random.pick({RopeStyle::kHalf, RopeStyle::kPairs});
    }
  }

  void choose_lengths(Random& random) {
    // A rotated query stands at a position >= 0.
    const int64_t least = rope_dim > 0 ? std::max<int64_t>(0, seqlen_q - new_keys) : 0;
    capacity = std::max(capacity, least + new_keys);
    for (int64_t b = 0; b < batch; ++b) {
      const int64_t most = capacity - new_keys;
      lengths.push_back(static_cast<int32_t>(random.chance(15) ? most : random.between(least, most)));
    }
  }

  void choose_rows(Random& random) {
    cache_rows = batch + random.between(0, 2);
    if (!random.chance(50)) return;
    for (int64_t i = 0; i < cache_rows; ++i) rows.push_back(static_cast<int32_t>(i));
    for (int64_t i = cache_rows - 1; i > 0; --i) std::swap(rows[i], rows[random.below(i + 1)]);
    rows.resize(static_cast<size_t>(batch));
    // Without an append two sequences may read one row.
    if (new_keys == 0 && batch > 1 && random.chance(40)) rows[1] = rows[0], lengths[1] = lengths[0];
  }

  void choose_pages(Random& random) {
    max_pages = (capacity + page - 1) / page + random.between(0, 2);
    cache_rows = batch * max_pages + random.between(1, 3);
    std::vector<int32_t> ids;
    for (int64_t i = 0; i < cache_rows; ++i) ids.push_back(static_cast<int32_t>(i));
    for (int64_t i = cache_rows - 1; i > 0; --i) std::swap(ids[i], ids[random.below(i + 1)]);
    table.assign(ids.begin(), ids.begin() + batch * max_pages);
    for (int64_t b = 0; b < batch; ++b) {
      const int64_t used = (lengths[b] + new_keys + page - 1) / page;
      for (int64_t i = used; i < max_pages; ++i) {  // entries that nobody may follow
        table[b * max_pages + i] = random.pick({-1, -7, INT32_MIN, INT32_MAX, 0});
      }
    }
    // A common prefix: full pages of sequence 0 that sequence 1 reads too.
    if (batch < 2 || !random.chance(30)) return;
    const int64_t common = std::min(lengths[0], lengths[1]) / page;
    for (int64_t i = 0; i < common; ++i) table[max_pages + i] = table[i];
  }
};

// The tensors of a case. Keys and values stand at the positions that hold one; everything else in the caches is NaN.
struct CacheStep {
  const CacheCase& c;
  Arena arena;
  Shape q_shape, k_shape, v_shape, k_new_shape, v_new_shape, out_shape, lse_shape;
  CanonicalTensor q, k, v, k_new, v_new, out;
  RowTensor lse, sinks;
  TensorView cos, sin, w_q, w_k, w_v;
  std::vector<int32_t> lengths;  // of the next run

  CacheStep(const CacheCase& of, DType dtype, Strides strides) : c(of), arena(of.seed ^ 0x5eed, strides) {
    const int64_t slots = c.page > 0 ? c.page : c.capacity, pseudo = c.mixed() ? c.pseudo : 1;
    q_shape = {c.batch, c.heads_q, c.seqlen_q, 1, c.dim};
    k_shape = {c.cache_rows, c.heads_kv, slots, pseudo, c.dim}, v_shape = k_shape;
    v_shape[4] = c.dim_v;
    k_new_shape = {c.batch, c.heads_kv, c.new_keys, 1, c.dim}, v_new_shape = k_new_shape;
    v_new_shape[4] = c.dim_v;
    out_shape = {c.batch, c.heads_q, c.seqlen_q, 1, c.dim_v};
    lse_shape = {c.batch, c.heads_q, c.seqlen_q, 1, 1};
    q = arena.random(dtype, q_shape, c.seqlen_q);
    k = arena.poisoned(dtype, k_shape);
    v = c.one_cache ? k : arena.poisoned(dtype, v_shape);
    fill(k, k_shape);
    if (!c.one_cache) fill(v, v_shape);
    k_new = arena.random(dtype, k_new_shape, c.new_keys), v_new = arena.random(dtype, v_new_shape, c.new_keys);
    const DType row = row_dtype_of(dtype), weight = dtype == DType::kFloat64 ? dtype : c.weight_dtype;
    sinks = arena.rows(row, 1, 1, c.heads_q, c.heads_q);
    if (c.rope_dim > 0) {
      cos = arena.view(row, c.capacity + 1, c.rope_dim / 2, 0, true);
      sin = arena.view(row, c.capacity + 1, c.rope_dim / 2, 0, true);
      make_angles();
    }
    if (c.iha) {
      w_q = arena.view(weight, c.heads_q, c.pseudo, c.heads_q, true);
      w_k = arena.view(weight, c.heads_kv, c.pseudo, c.heads_kv, true);
      w_v = arena.view(weight, c.heads_kv, c.pseudo, c.heads_kv, true);
    }
    fresh_outputs(dtype);
    lengths = c.lengths;
  }

  void fresh_outputs(DType dtype) {
    out = arena.poisoned(dtype == DType::kFloat64 ? dtype : c.options.out_dtype.value_or(dtype), out_shape);
    lse = arena.rows(row_dtype_of(dtype), c.batch, c.heads_q, c.seqlen_q, 0);
  }

  // The numbers of another step of the same case, the caches as they are now.
  void take_numbers(const CacheStep& from) {
    const auto copy = [](const CanonicalTensor& a, const CanonicalTensor& b, const Shape& shape) {
      assign(b, shape, values(a, shape));
    };
    copy(from.q, q, q_shape), copy(from.k, k, k_shape), copy(from.v, v, v_shape);
    copy(from.k_new, k_new, k_new_shape), copy(from.v_new, v_new, v_new_shape);
    copy(as_canonical(from.sinks), as_canonical(sinks), {1, 1, c.heads_q, 1, 1});
    for (const auto& [a, b] :
         {std::pair(&from.cos, &cos), {&from.sin, &sin}, {&from.w_q, &w_q}, {&from.w_k, &w_k}, {&from.w_v, &w_v}}) {
      if (a->data != nullptr) copy(as_canonical(*a), as_canonical(*b), shape_of(*a));
    }
  }

  IhaKvCacheArgs arguments(Backend backend, int64_t appended) const {
    const Layout layout = c.options.layout;
    IhaKvCacheArgs args;
    KvCacheArgs& a = args.attention;
    a.q = view_of(q, q_shape, layout, false, false);
    a.k_cache = view_of(k, k_shape, c.page > 0 ? Layout::kBshd : layout, false, c.mixed());
    a.v_cache = view_of(v, v_shape, c.page > 0 ? Layout::kBshd : layout, false, c.mixed());
    if (appended > 0) {
      a.k_new = view_of(k_new, k_new_shape, layout, false, false);
      a.v_new = view_of(v_new, v_new_shape, layout, false, false);
    }
    a.cache_seqlens = index_view(lengths);
    if (!c.rows.empty()) a.cache_batch_idx = index_view(c.rows);
    if (c.page > 0) {
      a.block_table =
          TensorView::contiguous(const_cast<int32_t*>(c.table.data()), DType::kInt32, {c.batch, c.max_pages});
    }
    if (c.rope_dim > 0) a.rope = Rope{cos, sin, c.style, RopeIndex::kToken, 0};
    if (c.sinks) a.sinks = vector_view(sinks.data, sinks.dtype, c.heads_q, sinks.row_stride);
    a.options = c.options;
    a.options.backend = backend;
    if (backend == Backend::kReference) {
      a.options.strategy = Strategy::kAuto, a.options.split_size = 0, a.options.out_dtype.reset();
    }
    args.w_q = w_q, args.w_k = w_k, args.w_v = w_v, args.kind = c.kind;
    return args;
  }

  AttentionOutputs outputs() const {
    return {view_of(out, out_shape, c.options.layout, false, false), view_of(lse, lse_shape, false)};
  }

  // A step that appends `appended` keys, all new ones or none: then they are taken to be in the cache already.
  void run(Backend backend, int64_t appended, Place& place) {
    lengths = c.lengths;
    if (appended == 0) {
      for (int32_t& length : lengths) length += static_cast<int32_t>(c.new_keys);
    }
    const IhaKvCacheArgs args = arguments(backend, appended);
    if (c.iha) {
      testing::run(place, args, outputs());
    } else {
      testing::run(place, args.attention, outputs());
    }
  }

 private:
  void fill(const CanonicalTensor& cache, const Shape& shape) {
    for (int64_t b = 0; b < c.batch; ++b) {
      for (int64_t position = 0; position < c.lengths[b]; ++position) {
        const auto [row, slot] = c.place(b, position);
        for (int64_t h = 0; h < shape[1]; ++h)
          for (int64_t p = 0; p < shape[3]; ++p)
            for (int64_t d = 0; d < shape[4]; ++d) reference::store(cache, {row, h, slot, p, d}, arena.normal());
      }
    }
  }

  void make_angles() {
    for (int64_t n = 0; n <= c.capacity; ++n) {
      for (int64_t i = 0; i < c.rope_dim / 2; ++i) {
        const double angle = static_cast<double>(n) * std::pow(100.0, -2.0 * i / static_cast<double>(c.rope_dim));
        reference::store(cos, n, i, 0, std::cos(angle));
        reference::store(sin, n, i, 0, std::sin(angle));
      }
    }
  }
};

}  // namespace plait::testing
