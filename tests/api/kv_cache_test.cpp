// Attention over caches: CPU against the reference, the reference against ordinary attention on gathered keys,
// in-place appends, refusals that write nothing.
#include "plait/kv_cache.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <random>
#include <vector>

#include "support/workspace.hpp"

namespace plait {
namespace {

struct Shape {
  int64_t batch = 3, heads_q = 4, heads_kv = 2, seqlen_q = 2, capacity = 40, dim = 16, dim_v = 12, new_keys = 3;
  int64_t page = 0;    // page size, 0 dense
  int64_t pseudo = 0;  // P, 0: no IHA
  IhaCacheKind kind = IhaCacheKind::kMixed;
  bool rope = false, batch_idx = false, bshd = false, causal = true;
  int64_t left = -1;
  double softcap = 0;
  bool sinks = false;
  RopeStyle style = RopeStyle::kHalf;
};

// Every tensor of a call, with memory of its own.
struct Call {
  Shape shape;
  std::vector<std::vector<float>> memory;
  std::vector<int32_t> lengths, rows, table;
  IhaKvCacheArgs args;
  AttentionOutputs outputs;
  std::mt19937 engine{11};

  explicit Call(const Shape& s) : shape(s) {
    KvCacheArgs& a = args.attention;
    const auto heads_rows = [&](int64_t batch, int64_t heads, int64_t count, int64_t dim) {
      return s.bshd ? tensor({batch, count, heads, dim}) : tensor({batch, heads, count, dim});
    };
    a.q = heads_rows(s.batch, s.heads_q, s.seqlen_q, s.dim);
    if (s.new_keys > 0) {
      a.k_new = heads_rows(s.batch, s.heads_kv, s.new_keys, s.dim);
      a.v_new = heads_rows(s.batch, s.heads_kv, s.new_keys, s.dim_v);
    }
    for (int64_t b = 0; b < s.batch; ++b)
      lengths.push_back(static_cast<int32_t>(b == 1 ? 0 : s.capacity - s.new_keys - 5 * b));
    a.cache_seqlens = TensorView::contiguous(lengths.data(), DType::kInt32, {s.batch});
    if (s.page > 0) {
      make_pages();
    } else {
      make_dense(heads_rows);
    }
    if (s.rope)
      a.rope = Rope{tensor({s.capacity + s.page, s.dim / 4}), tensor({s.capacity + s.page, s.dim / 4}), s.style};
    if (s.sinks) a.sinks = tensor({s.heads_q});
    a.options.causal = s.causal;
    a.options.window_left = s.left;
    a.options.softcap = s.softcap;
    a.options.layout = s.bshd ? Layout::kBshd : Layout::kBhsd;
    if (s.pseudo > 0) {
      args.kind = s.kind;
      args.w_q = tensor({s.heads_q, s.pseudo, s.heads_q});
      args.w_k = tensor({s.heads_kv, s.pseudo, s.heads_kv});
      args.w_v = tensor({s.heads_kv, s.pseudo, s.heads_kv});
    }
    outputs.out = heads_rows(s.batch, s.heads_q, s.seqlen_q, s.dim_v);
    outputs.lse = tensor({s.batch, s.heads_q, s.seqlen_q});
    for (size_t i = memory.size() - 2; i < memory.size(); ++i) std::fill(memory[i].begin(), memory[i].end(), NAN);
  }

  TensorView tensor(std::initializer_list<int64_t> extents) {
    TensorView view = TensorView::contiguous(nullptr, DType::kFloat32, extents);
    std::normal_distribution<float> normal;
    auto& values = memory.emplace_back(static_cast<size_t>(view.numel()));
    for (float& value : values) value = normal(engine);
    view.data = values.data();
    return view;
  }

  template <class Make>
  void make_dense(const Make& heads_rows) {
    const int64_t cache_rows = shape.batch + 2;
    if (shape.pseudo > 0 && shape.kind == IhaCacheKind::kMixed) {
      args.attention.k_cache = tensor({cache_rows, shape.heads_kv, shape.capacity, shape.pseudo, shape.dim});
      args.attention.v_cache = tensor({cache_rows, shape.heads_kv, shape.capacity, shape.pseudo, shape.dim_v});
    } else {
      args.attention.k_cache = heads_rows(cache_rows, shape.heads_kv, shape.capacity, shape.dim);
      args.attention.v_cache = heads_rows(cache_rows, shape.heads_kv, shape.capacity, shape.dim_v);
    }
    if (!shape.batch_idx) return;
    for (int64_t b = 0; b < shape.batch; ++b) rows.push_back(static_cast<int32_t>(cache_rows - 1 - b));
    args.attention.cache_batch_idx = TensorView::contiguous(rows.data(), DType::kInt32, {shape.batch});
  }

  void make_pages() {
    const int64_t blocks = (shape.capacity + shape.page - 1) / shape.page, pages = shape.batch * blocks + 3;
    args.attention.k_cache = tensor({pages, shape.page, shape.heads_kv, shape.dim});
    args.attention.v_cache = tensor({pages, shape.page, shape.heads_kv, shape.dim_v});
    std::vector<int32_t> ids;
    for (int64_t i = 0; i < pages; ++i) ids.push_back(static_cast<int32_t>(i));
    std::shuffle(ids.begin(), ids.end(), engine);
    table.assign(ids.begin(), ids.begin() + shape.batch * blocks);
    // Blocks past the used length hold garbage that nobody may follow.
    for (int64_t b = 0; b < shape.batch; ++b) {
      const int64_t used = (lengths[b] + shape.new_keys + shape.page - 1) / shape.page;
      for (int64_t i = used; i < blocks; ++i) table[b * blocks + i] = -7;
    }
    args.attention.block_table = TensorView::contiguous(table.data(), DType::kInt32, {shape.batch, blocks});
  }

  void run(Backend backend, int32_t workers = 2, Strategy strategy = Strategy::kAuto) {
    args.attention.options.backend = backend;
    args.attention.options.strategy = strategy;
    const DeviceInfo device = DeviceInfo::host(workers);
    if (shape.pseudo > 0) {
      const Plan plan = plan_iha_attention_with_kvcache(args, device);
      iha_attention_with_kvcache(args, outputs, plan, testing::workspace_of(plan).get(), Executor::threads());
    } else {
      const Plan plan = plan_attention_with_kvcache(args.attention, device);
      attention_with_kvcache(args.attention, outputs, plan, testing::workspace_of(plan).get(), Executor::threads());
    }
  }
};

std::vector<Shape> shapes() {
  std::vector<Shape> all;
  for (const int64_t page : {0, 1, 3, 16, 64}) {
    for (const bool rope : {false, true}) all.push_back({.page = page, .rope = rope});
  }
  all.push_back({.batch_idx = true, .bshd = true});
  all.push_back({.new_keys = 0, .page = 16});
  all.push_back({.seqlen_q = 1, .rope = true, .style = RopeStyle::kPairs});
  all.push_back({.seqlen_q = 5, .new_keys = 5, .rope = true, .left = 7});
  all.push_back({.seqlen_q = 70, .capacity = 300, .new_keys = 70, .rope = true, .softcap = 5, .sinks = true});
  all.push_back({.seqlen_q = 5, .new_keys = 2, .causal = false});
  all.push_back({.seqlen_q = 1, .capacity = 2000, .new_keys = 1});
  for (const IhaCacheKind kind : {IhaCacheKind::kMixed, IhaCacheKind::kRaw}) {
    for (const bool rope : {false, true}) all.push_back({.pseudo = 3, .kind = kind, .rope = rope, .batch_idx = rope});
    all.push_back({.seqlen_q = 1, .new_keys = 1, .pseudo = 2, .kind = kind, .rope = true, .left = 9});
  }
  return all;
}

TEST(KvCache, CpuAgreesWithTheReferenceAndAppendsTheSame) {
  int index = 0;
  for (const Shape& shape : shapes()) {
    SCOPED_TRACE(::testing::Message() << "shape " << index++);
    Call reference(shape);
    reference.run(Backend::kReference);
    for (const Strategy strategy : {Strategy::kAuto, Strategy::kSplitKv}) {
      Call cpu(shape);
      cpu.run(Backend::kCpu, 2, strategy);
      ASSERT_EQ(cpu.memory.size(), reference.memory.size());
      for (size_t t = 0; t < cpu.memory.size(); ++t) {
        for (size_t i = 0; i < cpu.memory[t].size(); ++i) {
          const float expected = reference.memory[t][i];
          if (cpu.memory[t][i] == expected) continue;  // also -inf, the LSE of an empty row
          ASSERT_NEAR(cpu.memory[t][i], expected, 3e-5 * (1 + std::abs(expected)))
              << "tensor " << t << " element " << i;
        }
      }
    }
  }
}

TEST(KvCache, ResultsDoNotDependOnWorkers) {
  for (const Shape& shape : shapes()) {
    Call one(shape), three(shape);
    one.run(Backend::kCpu, 1);
    three.run(Backend::kCpu, 3);
    ASSERT_EQ(one.memory, three.memory);
  }
}

// A paged call equals ordinary attention on the keys gathered by hand, one sequence at a time.
TEST(KvCache, PagedEqualsOrdinaryAttentionOnGatheredKeys) {
  Call call({.page = 16});
  call.run(Backend::kReference);
  const Shape& s = call.shape;
  const int64_t blocks = call.args.attention.block_table->shape[1];
  const auto* k_pages = static_cast<const float*>(call.args.attention.k_cache.data);
  const auto* v_pages = static_cast<const float*>(call.args.attention.v_cache.data);
  for (int64_t b = 0; b < s.batch; ++b) {
    const int64_t length = call.lengths[b] + s.new_keys;
    std::vector<float> k, v, out(s.heads_q * s.seqlen_q * s.dim_v), lse(s.heads_q * s.seqlen_q);
    for (int64_t i = 0; i < length; ++i) {
      const int64_t row = call.table[b * blocks + i / s.page] * s.page + i % s.page;
      k.insert(k.end(), k_pages + row * s.heads_kv * s.dim, k_pages + (row + 1) * s.heads_kv * s.dim);
      v.insert(v.end(), v_pages + row * s.heads_kv * s.dim_v, v_pages + (row + 1) * s.heads_kv * s.dim_v);
    }
    AttentionArgs args;
    args.options = call.args.attention.options;
    args.options.layout = Layout::kBshd;
    args.q = call.args.attention.q;  // bhsd in memory, read as bshd by strides
    args.q.data = static_cast<float*>(args.q.data) + b * args.q.stride[0];
    args.q.shape = {1, s.seqlen_q, s.heads_q, s.dim};
    std::swap(args.q.stride[1], args.q.stride[2]);
    args.k = TensorView::contiguous(k.data(), DType::kFloat32, {1, length, s.heads_kv, s.dim});
    args.v = TensorView::contiguous(v.data(), DType::kFloat32, {1, length, s.heads_kv, s.dim_v});
    const AttentionOutputs outputs{
        TensorView::contiguous(out.data(), DType::kFloat32, {1, s.seqlen_q, s.heads_q, s.dim_v}),
        TensorView::contiguous(lse.data(), DType::kFloat32, {1, s.heads_q, s.seqlen_q})};
    const Plan plan = plan_attention_forward(args, DeviceInfo::host(1));
    attention_forward(args, outputs, plan, nullptr, Executor::threads());
    const auto* got = static_cast<const float*>(call.outputs.out.data) + b * s.heads_q * s.seqlen_q * s.dim_v;
    for (int64_t h = 0; h < s.heads_q; ++h) {
      for (int64_t i = 0; i < s.seqlen_q; ++i) {
        for (int64_t d = 0; d < s.dim_v; ++d) {
          ASSERT_EQ(got[(h * s.seqlen_q + i) * s.dim_v + d], out[(i * s.heads_q + h) * s.dim_v + d]);
        }
      }
    }
  }
}

TEST(KvCache, ReadsNothingPastTheLengths) {
  for (const Shape& shape :
       {Shape{}, Shape{.page = 3}, Shape{.pseudo = 2}, Shape{.pseudo = 2, .kind = IhaCacheKind::kRaw}}) {
    Call clean(shape), poisoned(shape);
    // Every cache slot of sequence 1, which is empty before the append, starts as NaN; so do the spare rows.
    for (const TensorView* cache : {&poisoned.args.attention.k_cache, &poisoned.args.attention.v_cache}) {
      auto* values = static_cast<float*>(cache->data);
      if (shape.page > 0) {
        const int64_t blocks = poisoned.args.attention.block_table->shape[1];
        const int32_t page = poisoned.table[blocks];
        std::fill_n(values + page * cache->stride[0], cache->stride[0], NAN);
      } else {
        std::fill_n(values + cache->stride[0], cache->stride[0], NAN);
      }
    }
    clean.run(Backend::kCpu);
    poisoned.run(Backend::kCpu);
    const auto* a = static_cast<const float*>(clean.outputs.out.data);
    const auto* b = static_cast<const float*>(poisoned.outputs.out.data);
    for (int64_t i = 0; i < clean.outputs.out.numel(); ++i) ASSERT_EQ(a[i], b[i]) << i;
  }
}

TEST(KvCache, RefusalsNameTheArgumentAndWriteNothing) {
  const std::vector<std::pair<const char*, std::function<void(Call&)>>> cases{
      {"cache_seqlens", [](Call& c) { c.lengths[0] = 38; }},
      {"cache_seqlens", [](Call& c) { c.lengths[2] = -1; }},
      {"cache_seqlens", [](Call& c) { c.args.attention.cache_seqlens.shape[0] = 2; }},
      {"cache_seqlens", [](Call& c) { c.args.attention.cache_seqlens.dtype = DType::kFloat32; }},
      {"v_new", [](Call& c) { c.args.attention.v_new.reset(); }},
      {"k_new", [](Call& c) { c.args.attention.k_new.reset(); }},
      {"k_new", [](Call& c) { c.args.attention.k_new->shape[3] = 8; }},
      {"k_cache", [](Call& c) { c.args.attention.k_cache.shape[0] = 2, c.args.attention.v_cache.shape[0] = 2; }},
      {"k_cache", [](Call& c) { c.args.attention.k_cache.dtype = DType::kFloat16; }},
      {"v_cache", [](Call& c) { c.args.attention.v_cache.shape[2] = 39; }},
      {"k_cache", [](Call& c) { c.args.attention.v_cache.data = c.args.attention.k_cache.data; }},
      {"mode", [](Call& c) { c.args.attention.options.mode = HeadMode::kJoint; }},
      {"out", [](Call& c) { c.outputs.out.data = c.args.attention.q.data; }},
      {"rope", [](Call& c) { c.args.attention.rope = Rope{c.tensor({39, 4}), c.tensor({39, 4})}; }},
      {"rope", [](Call& c) { c.args.attention.rope = Rope{c.tensor({40, 9}), c.tensor({40, 9})}; }},
      {"rope",
       [](Call& c) {
         c.args.attention.rope = Rope{c.tensor({40, 4}), c.tensor({40, 4}), RopeStyle::kHalf, RopeIndex::kRow};
       }},
      {"cache_batch_idx",
       [](Call& c) {
         c.rows = {0, 5, 1},
         c.args.attention.cache_batch_idx = TensorView::contiguous(c.rows.data(), DType::kInt32, {3});
       }},
      {"cache_batch_idx",
       [](Call& c) {
         c.lengths = {4, 4, 4}, c.rows = {0, 1, 0},
         c.args.attention.cache_batch_idx = TensorView::contiguous(c.rows.data(), DType::kInt32, {3});
       }},
      {"block_table", [](Call& c) { c = Call({.page = 16}), c.table[0] = 99; }},
      {"block_table", [](Call& c) { c = Call({.page = 16}), c.table[0] = -1; }},
      {"block_table", [](Call& c) { c = Call({.page = 64}), c.lengths = {4, 4, 4}, c.table[2] = c.table[0]; }},
      {"w_q", [](Call& c) { c = Call({.pseudo = 2}), c.args.w_q.shape[1] = 0; }},
      {"w_k", [](Call& c) { c = Call({.pseudo = 2}), c.args.w_k.shape[0] = 3; }},
      {"k_cache", [](Call& c) { c = Call({.pseudo = 2}), c.args.attention.k_cache.shape[3] = 1; }},
      {"block_table", [](Call& c) { c = Call({.page = 16, .pseudo = 2}); }},
  };
  for (size_t i = 0; i < cases.size(); ++i) {
    Call call{Shape{}};
    cases[i].second(call);
    // Call moved into place keeps its views: vectors move their buffers.
    const auto before = call.memory;
    std::string argument;
    try {
      call.run(Backend::kCpu);
    } catch (const Error& error) {
      argument = error.argument();
    }
    EXPECT_EQ(argument, cases[i].first) << "case " << i;
    for (size_t t = 0; t < before.size(); ++t) {
      for (size_t j = 0; j < before[t].size(); ++j) {
        const bool same =
            before[t][j] == call.memory[t][j] || (std::isnan(before[t][j]) && std::isnan(call.memory[t][j]));
        ASSERT_TRUE(same) << "case " << i << " wrote tensor " << t;
      }
    }
  }
}

}  // namespace
}  // namespace plait
