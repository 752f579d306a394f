// Wrong numbers inside index tensors: cu_seqlens, lengths, rows, pages, too short rotary tables. Whether a call must be
// refused is decided here, from the contract; a call that is not refused must agree with the reference. A backend whose
// index tensors the host cannot read refuses nothing: it must stay in bounds.
// Called through fuzz.hpp; worth running under AddressSanitizer, where every read out of bounds ends the run (on a GPU
// under compute-sanitizer).
#include "api/fuzz.hpp"
#include "api/fuzz_cache.hpp"
#include "plait/iha.hpp"

namespace plait::testing {
namespace {

DType dtype_for(const Target& target) { return target.tensor_cores() ? DType::kFloat16 : DType::kFloat32; }

// Replaces one to three numbers by wild ones or by neighbours.
void corrupt(Random& random, std::vector<int32_t>& numbers) {
  if (numbers.empty()) return;
  for (int64_t i = random.between(1, 3); i > 0; --i) {
    int32_t& number = numbers[random.below(static_cast<int64_t>(numbers.size()))];
    const int32_t other = numbers[random.below(static_cast<int64_t>(numbers.size()))];
    number = random.pick(
        {-1, INT32_MIN, INT32_MAX, 0, 1 << 20, other, static_cast<int32_t>(random.between(-3, 300)),
         static_cast<int32_t>(std::clamp<int64_t>(int64_t{number} + random.between(-2, 2), INT32_MIN, INT32_MAX))});
  }
}

std::vector<int32_t> offsets_of(Random& random, int64_t sequences) {
  std::vector<int32_t> offsets{0};
  for (int64_t i = 0; i < sequences; ++i) offsets.push_back(offsets.back() + static_cast<int32_t>(random.below(12)));
  return offsets;
}

bool legal_offsets(const std::vector<int32_t>& offsets, int64_t total) {
  return offsets.front() == 0 && std::is_sorted(offsets.begin(), offsets.end()) && offsets.back() <= total;
}

// The backend under test, then the reference, each with what it needs to judge a call.
struct Judge {
  Backend backend;
  bool reads_indices;
  std::function<std::unique_ptr<Place>()> place;
};
std::array<Judge, 2> judges(const Target& target) {
  return {Judge{target.backend(), target.reads_indices(), [&] { return target.place(2, false); }},
          Judge{Backend::kReference, true, [] { return std::make_unique<HostPlace>(2, false); }}};
}

// Runs `call`: refused as it must be, and then `unwritten` tells that nothing was written; or not refused at all.
// Whether there is a result to compare.
template <class Call, class Unwritten>
bool expect_verdict(const Judge& judge, bool legal, std::initializer_list<const char*> names, const Call& call,
                    const Unwritten& unwritten) {
  if (!legal && !judge.reads_indices) {
    call();
    return false;
  }
  try {
    call();
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kInvalidArgument) throw Failure(fmt::format("a wrong code: {}", error.what()));
    expect_clear(error.argument(), error.what(), names);
    if (legal) throw Failure(fmt::format("refused a legal call: {}", error.what()));
    unwritten();
    return false;
  }
  if (!legal) throw Failure("accepted what the contract forbids");
  return true;
}

void fuzz_offsets(Random& random, const Target& target) {
  const int64_t sequences = random.between(0, 5), heads = 2, dim = 8;
  const DType dtype = dtype_for(target);
  std::vector<int32_t> q_offsets = offsets_of(random, sequences), kv_offsets = offsets_of(random, sequences);
  const int64_t total_q = q_offsets.back() + random.below(3), total_kv = kv_offsets.back() + random.below(3);
  if (random.chance(70)) corrupt(random, q_offsets);
  if (random.chance(50)) corrupt(random, kv_offsets);
  Arena arena(random.seed(), Strides::kBhsd);
  const Shape q_shape{1, heads, total_q, 1, dim}, kv_shape{1, heads, total_kv, 1, dim},
      lse_shape{1, heads, total_q, 1, 1};
  const auto packed = [&](const CanonicalTensor& t, const Shape& shape) {
    return view_of(t, shape, Layout::kBhsd, true, false);
  };
  AttentionArgs args;
  args.q = packed(arena.random(dtype, q_shape, total_q), q_shape);
  args.k = packed(arena.random(dtype, kv_shape, total_kv), kv_shape);
  args.v = packed(arena.random(dtype, kv_shape, total_kv), kv_shape);
  args.cu_seqlens_q = index_view(q_offsets), args.cu_seqlens_k = index_view(kv_offsets);
  args.options.causal = random.chance(50);
  const bool legal = legal_offsets(q_offsets, total_q) && legal_offsets(kv_offsets, total_kv);
  std::vector<std::vector<double>> results;
  for (const Judge& judge : judges(target)) {
    args.options.backend = judge.backend;
    const CanonicalTensor out = arena.poisoned(dtype, q_shape);
    const RowTensor lse = arena.rows(DType::kFloat32, 1, heads, total_q, 0);
    const AttentionOutputs outputs{packed(out, q_shape), view_of(lse, lse_shape, true)};
    // The backward takes what the forward gave.
    const CanonicalTensor dq = arena.poisoned(dtype, q_shape), dk = arena.poisoned(dtype, kv_shape),
                          dv = arena.poisoned(dtype, kv_shape);
    const AttentionBackwardArgs back{args, outputs.out, outputs.lse, outputs.out, {}};
    const bool ran = expect_verdict(
        judge, legal, {"cu_seqlens_q", "cu_seqlens_k"},
        [&] {
          run(*judge.place(), args, outputs);
          run(*judge.place(), back,
              AttentionGrads{packed(dq, q_shape), packed(dk, kv_shape), packed(dv, kv_shape), {}});
        },
        [&] { expect_written("out", arena, out.data, 0), expect_written("lse", arena, lse.data, 0); });
    if (!ran) continue;
    results.emplace_back();
    for (const auto& [tensor, shape] : {std::pair(out, q_shape), {dq, q_shape}, {dk, kv_shape}, {dv, kv_shape}}) {
      const std::vector<double> all = values(tensor, shape);
      results.back().insert(results.back().end(), all.begin(), all.end());
    }
  }
  if (legal) expect_near("packed results", results.at(0), results.at(1), dtype, dtype == DType::kFloat32 ? 2e-5 : 0.02);
}

void fuzz_packed_premix(Random& random, const Target& target) {
  const int64_t sequences = random.between(0, 4), heads = 2, dim = target.tensor_cores() ? 8 : 6, pseudo = 2;
  const DType dtype = dtype_for(target);
  std::vector<int32_t> offsets = offsets_of(random, sequences), others = offsets_of(random, sequences);
  const int64_t total = offsets.back() + random.below(3), rows = random.between(0, 30);
  if (random.chance(60)) corrupt(random, offsets);
  if (random.chance(40)) corrupt(random, others);
  Arena arena(random.seed(), Strides::kBhsd);
  const Shape x_shape{1, heads, total, 1, dim}, y_shape{1, heads, total, pseudo, dim};
  PremixArgs args;
  args.x = view_of(arena.random(dtype, x_shape, total), x_shape, Layout::kBhsd, true, false);
  args.w = arena.view(dtype, heads, pseudo, heads, true);
  args.cu_seqlens = index_view(offsets);
  args.cu_seqlens_other = index_view(others);
  args.rope =
      Rope{arena.view(DType::kFloat32, rows, dim / 2, 0, true), arena.view(DType::kFloat32, rows, dim / 2, 0, true)};
  args.rope->index = random.pick({RopeIndex::kToken, RopeIndex::kRow});
  args.rope->offset = random.between(-4, 4);
  bool legal = legal_offsets(offsets, total) && legal_offsets(others, INT32_MAX);
  for (size_t i = 0; legal && i < offsets.size() - 1; ++i) {
    const int64_t length = offsets[i + 1] - offsets[i], other = others[i + 1] - others[i];
    const int64_t first = args.rope->offset + other - length,
                  past = (first + length) * (args.rope->index == RopeIndex::kRow ? pseudo : 1);
    // Rows that see no key are not turned.
    legal = length == 0 || other == 0 || (first >= 0 && past <= rows);
  }
  std::vector<std::vector<double>> results;
  for (const Judge& judge : judges(target)) {
    args.backend = judge.backend;
    const CanonicalTensor y = arena.poisoned(dtype, y_shape);
    const TensorView y_view = view_of(y, y_shape, Layout::kBhsd, true, true);
    const bool ran = expect_verdict(
        judge, legal, {"cu_seqlens", "cu_seqlens_other", "rope"},
        [&] {
          run(*judge.place(), args, y_view);
          run(*judge.place(), args, y_view,
              view_of(arena.poisoned(dtype, x_shape), x_shape, Layout::kBhsd, true, false),
              arena.view(dtype, heads, pseudo, heads, false));
        },
        [&] { expect_written("y", arena, y.data, 0); });
    if (ran) results.push_back(values(y, y_shape));
  }
  if (legal) expect_near("packed y", results.at(0), results.at(1), dtype, dtype == DType::kFloat32 ? 1e-5 : 2e-3);
}

// The contract's rules for a step over a cache, from the numbers alone.
bool legal_step(const CacheCase& c) {
  std::vector<std::pair<int64_t, int64_t>> written;
  const int64_t capacity = c.page > 0 ? c.page * c.max_pages : c.capacity;
  for (int64_t b = 0; b < c.batch; ++b) {
    const int64_t before = c.lengths[b], after = before + c.new_keys;
    if (before < 0 || after > capacity) return false;
    if (!c.rows.empty() && (c.rows[b] < 0 || c.rows[b] >= c.cache_rows)) return false;
    if (c.page > 0) {
      for (int64_t i = 0; i * c.page < after; ++i) {
        const int32_t page = c.table[b * c.max_pages + i];
        if (page < 0 || page >= c.cache_rows) return false;
      }
    }
    if (c.rope_dim > 0 && (c.seqlen_q > after || after > c.capacity + 1)) return false;
    for (int64_t i = before; i < after; ++i) written.push_back(c.place(b, i));
  }
  std::sort(written.begin(), written.end());
  return std::adjacent_find(written.begin(), written.end()) == written.end();
}

void fuzz_cache_indices(Random& random, const Target& target) {
  CacheCase c(random.seed(), target.splits(), target.tensor_cores());
  c.options.out_dtype.reset();
  if (!target.tensor_cores()) c.dtype = c.weight_dtype = DType::kFloat32;
  CacheStep step(c, c.dtype, c.strides);
  // Every slot holds a number, so that a call with other indices that are legal has a result too.
  const auto for_both = [&](const auto& function) { function(step.k, step.k_shape), function(step.v, step.v_shape); };
  for_both([&](const CanonicalTensor& cache, const Shape& shape) {
    for_each_index(shape, [&](const reference::Index& i) { reference::store(cache, i, step.arena.normal()); });
  });
  if (random.chance(60)) corrupt(random, c.lengths);
  if (random.chance(60)) corrupt(random, c.rows);
  if (random.chance(60)) corrupt(random, c.table);
  const bool legal = legal_step(c);
  const std::vector<double> k_before = values(step.k, step.k_shape), v_before = values(step.v, step.v_shape);
  std::vector<std::vector<double>> results;
  for (const Judge& judge : judges(target)) {
    assign(step.k, step.k_shape, k_before), assign(step.v, step.v_shape, v_before);
    step.fresh_outputs(c.dtype);
    const bool ran = expect_verdict(
        judge, legal, {"cache_seqlens", "cache_batch_idx", "block_table", "rope"},
        [&] { step.run(judge.backend, c.new_keys, *judge.place()); },
        [&] {
          expect_written("out", step.arena, step.out.data, 0);
          if (values(step.k, step.k_shape) != k_before || values(step.v, step.v_shape) != v_before) {
            throw Failure("a refused step changed the cache");
          }
        });
    if (ran) results.push_back(values(step.out, step.out_shape));
  }
  const double bar = target.tensor_cores() ? c.tensor_out_bar() : c.out_bar();
  if (legal) expect_near("out", results.at(0), results.at(1), c.dtype, bar);
}

}  // namespace

void fuzz_bad_contents(uint64_t seed, const Target& target) {
  Random random(seed);
  const int64_t which = random.below(5);
  if (which < 2) return fuzz_offsets(random, target);
  if (which < 3) return fuzz_packed_premix(random, target);
  fuzz_cache_indices(random, target);
}

}  // namespace plait::testing
