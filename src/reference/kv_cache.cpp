// Attention over a cache by its definition: append row by row, gather each sequence, rotate and mix in float64, attend.
// Called through reference.hpp.
#include <vector>

#include "reference/access.hpp"
#include "reference/reference.hpp"

namespace plait::reference {
namespace {

// A float64 tensor [1, heads, rows, pseudo, dim] that owns its memory.
struct Rows {
  std::vector<double> values;
  int64_t heads, rows, pseudo, dim;

  Rows(int64_t head_count, int64_t row_count, int64_t pseudo_count, int64_t dims)
      : values(static_cast<size_t>(head_count * row_count * pseudo_count * dims)),
        heads(head_count),
        rows(row_count),
        pseudo(pseudo_count),
        dim(dims) {}
  CanonicalTensor tensor() { return {values.data(), DType::kFloat64, 0, rows * pseudo * dim, pseudo * dim, dim, 1}; }
};

// Copies rows between tensors, each located by a function of (head, row, pseudo, dim).
template <class From, class To>
void copy(const Rows& shape, const CanonicalTensor& from, From from_index, const CanonicalTensor& to, To to_index) {
  for (int64_t h = 0; h < shape.heads; ++h) {
    for (int64_t r = 0; r < shape.rows; ++r) {
      for (int64_t p = 0; p < shape.pseudo; ++p) {
        for (int64_t d = 0; d < shape.dim; ++d) store(to, to_index(h, r, p, d), load(from, from_index(h, r, p, d)));
      }
    }
  }
}

// Turns every row by its absolute position, or nothing without tables.
void rotate(const KvCacheProblem& problem, const KvCacheTensors& t, Rows& rows, int64_t first_position) {
  if (!problem.has_rope) return;
  const int64_t half = problem.rope_dim / 2;
  const bool pairs = problem.rope_style == RopeStyle::kPairs;
  for (int64_t h = 0; h < rows.heads; ++h) {
    for (int64_t r = 0; r < rows.rows; ++r) {
      double* row = rows.values.data() + (h * rows.rows + r) * rows.dim;
      for (int64_t i = 0; i < half; ++i) {
        double& a = row[pairs ? 2 * i : i];
        double& b = row[pairs ? 2 * i + 1 : i + half];
        const double c = load(t.cos, first_position + r, i), s = load(t.sin, first_position + r, i);
        const double turned = a * c - b * s;
        b = b * c + a * s;
        a = turned;
      }
    }
  }
}

Rows mix(const KvCacheProblem& problem, Rows& source, const TensorView& w) {
  Rows mixed(source.heads, source.rows, problem.attention.pseudo_heads, source.dim);
  PremixProblem premix;
  premix.batch = 1;
  premix.heads = source.heads;
  premix.seqlen = source.rows;
  premix.pseudo_heads = problem.attention.pseudo_heads;
  premix.head_dim = source.dim;
  premix.dtype = DType::kFloat64;
  premix.weight_dtype = problem.weight_dtype;
  PremixTensors tensors;
  tensors.x = source.tensor();
  tensors.y = mixed.tensor();
  tensors.w = w;
  premix_forward(premix, tensors);
  return mixed;
}

// One sequence: where its keys lie, and its step.
class SequenceStep {
 public:
  SequenceStep(const KvCacheProblem& problem, const KvCacheTensors& tensors, int64_t batch)
      : p_(problem),
        a_(problem.attention),
        t_(tensors),
        batch_(batch),
        before_(tensors.attention.cache.seqlens[batch]) {}

  void append() {
    if (a_.new_keys == 0) return;
    append_to(t_.attention.k, t_.k_new, a_.head_dim, t_.w_k, true);
    append_to(t_.attention.v, t_.v_new, a_.head_dim_v, t_.w_v, false);
  }

  void attend() {
    const int64_t kv_len = before_ + a_.new_keys;
    Rows q = source(t_.attention.q, a_.heads_q, a_.seqlen_q, a_.head_dim);
    rotate(p_, t_, q, kv_len - a_.seqlen_q);
    if (p_.iha) q = mix(p_, q, t_.w_q);
    Rows k = cached(t_.attention.k, kv_len, a_.head_dim, t_.w_k),
         v = cached(t_.attention.v, kv_len, a_.head_dim_v, t_.w_v);
    AttentionProblem problem = a_;
    problem.op = Op::kAttentionForward;
    problem.batch = 1;
    problem.cached = false;
    problem.seqlen_kv = kv_len;
    AttentionTensors tensors = t_.attention;
    tensors.q = q.tensor();
    tensors.k = k.tensor();
    tensors.v = v.tensor();
    tensors.out.data =
        static_cast<char*>(tensors.out.data) + batch_ * tensors.out.batch_stride * dtype_bytes(tensors.out.dtype);
    tensors.lse.data =
        static_cast<char*>(tensors.lse.data) + batch_ * tensors.lse.batch_stride * dtype_bytes(tensors.lse.dtype);
    attention_forward(problem, tensors);
  }

 private:
  // Row `position` of the sequence's cache, by the definition of dense, re-indexed and paged caches.
  Index cache_index(int64_t h, int64_t position, int64_t p, int64_t d) const {
    const KvCacheIndex& cache = t_.attention.cache;
    if (a_.page_size > 0) {
      const int64_t page = cache.block_table[batch_ * cache.block_stride + position / a_.page_size];
      return {page, h, position % a_.page_size, p, d};
    }
    return {cache.batch_idx != nullptr ? cache.batch_idx[batch_] : batch_, h, position, p, d};
  }

  Rows source(const CanonicalTensor& from, int64_t heads, int64_t count, int64_t dim) const {
    Rows rows(heads, count, 1, dim);
    copy(
        rows, from, [&](int64_t h, int64_t r, int64_t, int64_t d) { return Index{batch_, h, r, 0, d}; }, rows.tensor(),
        [](int64_t h, int64_t r, int64_t p, int64_t d) { return Index{0, h, r, p, d}; });
    return rows;
  }

  void append_to(const CanonicalTensor& cache, const CanonicalTensor& fresh, int64_t dim, const TensorView& w,
                 bool keys) {
    Rows rows = source(fresh, a_.heads_kv, a_.new_keys, dim);
    if (keys) rotate(p_, t_, rows, before_);
    if (p_.mixed()) rows = mix(p_, rows, w);
    copy(
        rows, rows.tensor(), [](int64_t h, int64_t r, int64_t p, int64_t d) { return Index{0, h, r, p, d}; }, cache,
        [&](int64_t h, int64_t r, int64_t p, int64_t d) { return cache_index(h, before_ + r, p, d); });
  }

  Rows cached(const CanonicalTensor& cache, int64_t count, int64_t dim, const TensorView& w) const {
    Rows rows(a_.heads_kv, count, p_.mixed() ? a_.pseudo_heads : 1, dim);
    copy(
        rows, cache, [&](int64_t h, int64_t r, int64_t p, int64_t d) { return cache_index(h, r, p, d); }, rows.tensor(),
        [](int64_t h, int64_t r, int64_t p, int64_t d) { return Index{0, h, r, p, d}; });
    return p_.raw() ? mix(p_, rows, w) : std::move(rows);
  }

  const KvCacheProblem& p_;
  const AttentionProblem& a_;
  const KvCacheTensors& t_;
  int64_t batch_, before_;
};

}  // namespace

void attention_with_kvcache(const KvCacheProblem& problem, const KvCacheTensors& tensors) {
  // Appends first: a page that two sequences read is complete before either attends.
  for (int64_t b = 0; b < problem.attention.batch; ++b) SequenceStep(problem, tensors, b).append();
  for (int64_t b = 0; b < problem.attention.batch; ++b) SequenceStep(problem, tensors, b).attend();
}

}  // namespace plait::reference
