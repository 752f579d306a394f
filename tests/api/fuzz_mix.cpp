// Random premix, collapse and merge problems: a backend against the float64 reference, or against the formula.
// Called through fuzz.hpp.
#include "api/fuzz.hpp"

namespace plait::testing {
namespace {

struct How {
  const Target& target;
  Layout layout;
  int32_t workers;
  bool sequential;
  double epsilon;  // fp32 arithmetic; on tensor cores fp32 weights are sums of two 16-bit numbers

  How(Random& random, const Target& of)
      : target(of),
        layout(random.pick({Layout::kBhsd, Layout::kBshd})),
        workers(static_cast<int32_t>(random.between(1, 4))),
        sequential(random.chance(20)),
        epsilon(of.tensor_cores() ? 4e-5 : 4e-6) {}
  std::unique_ptr<Place> place() const { return target.place(workers, sequential); }
};

std::unique_ptr<Place> host_place() { return std::make_unique<HostPlace>(1, true); }

DType weight_dtype(Random& random, DType dtype) { return random.chance(50) ? DType::kFloat32 : dtype; }

// ---- premix

PremixCase choose_premix(Random& random) {
  PremixCase c;
  PremixProblem& p = c.problem;
  p.batch = random.between(1, 3), p.pseudo_heads = random.between(1, 4);
  p.heads = random.chance(80) ? random.between(1, 6) : random.between(7, 64);
  p.head_dim = random.head_dim();
  p.dtype = random.dtype(), p.weight_dtype = weight_dtype(random, p.dtype);
  const int64_t longest = 1 + 40'000 / (p.head_dim * p.pseudo_heads * p.heads);
  p.seqlen = random.length(longest);
  if (random.chance(40)) {
    c.lens = random_lengths(random.seed(), p.batch, static_cast<int32_t>(longest));
    c.tail = random.between(0, 3);
    if (random.chance(50)) {
      for (const int32_t length : c.lens) {
        c.other_lens.push_back(random.chance(15) ? 0 : length + static_cast<int32_t>(random.between(0, 9)));
      }
    }
  }
  if (random.chance(60)) {
    p.rope_dim = 2 * random.between(0, p.head_dim / 2);
    p.rope_style = random.pick({RopeStyle::kHalf, RopeStyle::kPairs});
    p.rope_index = random.pick({RopeIndex::kToken, RopeIndex::kRow});
    p.rope_offset = random.chance(50) ? 0 : random.between(0, 50);
  }
  c.strides = random.strides();
  c.seed = random.seed();
  return c;
}

void expect_premix(const Premix& m, const Premix& wide, const How& how, const Target& target) {
  const PremixProblem& p = m.problem;
  const double rows = static_cast<double>(p.batch * p.seqlen * p.head_dim), heads = static_cast<double>(p.heads);
  // Tensor cores take what was turned in the dtype of x: the narrow rows for dw, by row also the wide rows for dx,
  // whose few terms, products of two normal numbers, have long tails: one of 15,000 was 2.5 roundoffs off.
  const double turned = target.tensor_cores() && p.rope_dim > 0 ? 2 * roundoff(p.dtype) : 0;
  const double turned_wide = p.rope_index == RopeIndex::kRow ? 2 * turned : 0;
  expect_near("y", values(m.tensors.y, m.y_shape), values(wide.tensors.y, m.y_shape), p.dtype, how.epsilon * heads);
  expect_near("dx", values(m.tensors.dx, m.x_shape), values(wide.tensors.dx, m.x_shape), p.dtype,
              how.epsilon * heads * static_cast<double>(p.pseudo_heads) +
                  turned_wide * std::sqrt(heads * static_cast<double>(p.pseudo_heads)));
  expect_near("dw", values(as_canonical(m.tensors.dw), shape_of(m.tensors.dw)),
              values(as_canonical(wide.tensors.dw), shape_of(wide.tensors.dw)), p.weight_dtype,
              (how.epsilon + turned) * (1 + std::sqrt(rows)));
  expect_written("y", m.arena, m.tensors.y.data, elements(m.y_shape));
  expect_written("dx", m.arena, m.tensors.dx.data, elements(m.x_shape));
}

void fuzz_premix(Random& random, const Target& target) {
  const PremixCase c = choose_premix(random);
  const How how(random, target);
  Premix m(c);
  Premix wide = float64(c, m);
  run_both(m, how.layout, target.backend(), [&] { return how.place(); });
  run_both(wide, how.layout, Backend::kReference, host_place);
  expect_premix(m, wide, how, target);
}

// Several in one call, most of one dtype.
void fuzz_premixes(Random& random, const Target& target) {
  const How how(random, target);
  std::vector<PremixCase> cases;
  for (int64_t i = random.between(1, 4); i > 0; --i) {
    cases.push_back(choose_premix(random));
    if (random.chance(80)) cases.back().problem.dtype = cases.front().problem.dtype;
    if (random.chance(80)) cases.back().problem.weight_dtype = DType::kFloat32;
    if (cases.back().problem.weight_dtype != DType::kFloat32) {
      cases.back().problem.weight_dtype = cases.back().problem.dtype;
    }
  }
  std::vector<std::unique_ptr<Premix>> all;
  for (const PremixCase& c : cases) all.push_back(std::make_unique<Premix>(c));
  run_together(all, how.layout, target.backend(), [&] { return how.place(); });
  for (size_t i = 0; i < all.size(); ++i) {
    Premix wide = float64(cases[i], *all[i]);
    run_both(wide, how.layout, Backend::kReference, host_place);
    expect_premix(*all[i], wide, how, target);
  }
}

// ---- collapse

void fuzz_collapse(Random& random, const Target& target) {
  CollapseCase c;
  CollapseProblem& p = c.problem;
  const bool packed = random.chance(30);
  p.batch = packed ? 1 : random.between(1, 3);
  p.heads = random.between(1, 6), p.pseudo_heads = random.between(1, 4);
  p.head_dim = random.head_dim();
  p.dtype = random.dtype(), p.weight_dtype = weight_dtype(random, p.dtype);
  p.global = random.chance(50);
  p.seqlen = random.length(1 + 40'000 / (p.head_dim * p.pseudo_heads * p.heads));
  c.strides = random.strides();
  c.seed = random.seed();
  const How how(random, target);
  Collapse m(c);
  Collapse wide = float64(c, m);
  run_both(m, packed, how.layout, target.backend(), [&] { return how.place(); });
  run_both(wide, packed, how.layout, Backend::kReference, host_place);
  const double terms = static_cast<double>(p.heads * p.pseudo_heads),
               rows = static_cast<double>(p.batch * p.seqlen * p.head_dim);
  expect_near("collapse y", values(m.tensors.y, m.y_shape), values(wide.tensors.y, m.y_shape), p.dtype,
              how.epsilon * terms);
  expect_near("collapse dx", values(m.tensors.dx, m.x_shape), values(wide.tensors.dx, m.x_shape), p.dtype,
              how.epsilon * terms);
  expect_near("dr", values(as_canonical(m.tensors.dr), shape_of(m.tensors.dr)),
              values(as_canonical(wide.tensors.dr), shape_of(wide.tensors.dr)), p.weight_dtype,
              how.epsilon * (1 + std::sqrt(rows)));
  expect_written("collapse y", m.arena, m.tensors.y.data, elements(m.y_shape));
  expect_written("collapse dx", m.arena, m.tensors.dx.data, elements(m.x_shape));
}

// ---- merge_states

void fuzz_merge(Random& random, const Target& target) {
  const bool packed = random.chance(30);
  const Shape shape{packed ? 1 : random.between(1, 3), random.between(1, 3), random.length(70), 1, random.head_dim()};
  const Shape lse_shape{shape[0], shape[1], shape[2], 1, 1};
  const DType dtype = random.dtype();
  const How how(random, target);
  const int64_t parts = random.between(1, 4);
  Arena arena(random.seed(), random.strides());
  std::vector<CanonicalTensor> outs;
  std::vector<RowTensor> lses;
  std::vector<TensorView> out_views, lse_views;
  for (int64_t i = 0; i < parts; ++i) {
    outs.push_back(arena.random(dtype, shape, shape[2]));
    lses.push_back(arena.rows(DType::kFloat32, shape[0], shape[1], shape[2], shape[2]));
    for_each_index(lse_shape, [&](const reference::Index& at) {
      const double lse = random.chance(20) ? -HUGE_VAL : random.uniform(-60, 60);
      reference::store(lses.back(), at.batch, at.head, at.seq, lse);
      if (lse != -HUGE_VAL) return;  // an empty part weighs nothing, whatever it holds
      for (int64_t d = 0; d < shape[4]; ++d) reference::store(outs.back(), {at.batch, at.head, at.seq, 0, d}, NAN);
    });
    out_views.push_back(view_of(outs.back(), shape, how.layout, packed, false));
    lse_views.push_back(view_of(lses.back(), lse_shape, packed));
  }
  const CanonicalTensor out = arena.poisoned(dtype, shape);
  const RowTensor lse = arena.rows(DType::kFloat32, shape[0], shape[1], shape[2], 0);
  run(*how.place(), MergeArgs{out_views.data(), lse_views.data(), parts, how.layout, packed},
      AttentionOutputs{view_of(out, shape, how.layout, packed, false), view_of(lse, lse_shape, packed)});
  std::vector<double> expected_lse, expected;
  for_each_index(lse_shape, [&](const reference::Index& at) {
    double sum = 0;
    for (const RowTensor& part : lses) sum += std::exp(reference::load(part, at.batch, at.head, at.seq));
    expected_lse.push_back(std::log(sum));
    for (int64_t d = 0; d < shape[4]; ++d) {
      double value = 0;
      for (int64_t i = 0; i < parts; ++i) {
        const double weight = std::exp(reference::load(lses[i], at.batch, at.head, at.seq));
        if (weight > 0) value += weight / sum * reference::load(outs[i], {at.batch, at.head, at.seq, 0, d});
      }
      expected.push_back(value);
    }
  });
  // Rounding of an LSE of 60 reaches the weights.
  expect_near("merged lse", values(as_canonical(lse), lse_shape), expected_lse, DType::kFloat32, how.epsilon);
  expect_near("merged out", values(out, shape), expected, dtype, 10 * how.epsilon);
  expect_written("merged out", arena, out.data, elements(shape));
}

}  // namespace

void fuzz_mix(uint64_t seed, const Target& target) {
  Random random(seed, target.tensor_cores());
  const int64_t which = random.below(4);
  if (which == 0) return fuzz_premix(random, target);
  if (which == 1) return fuzz_collapse(random, target);
  if (which == 2) return fuzz_premixes(random, target);
  fuzz_merge(random, target);
}

}  // namespace plait::testing
