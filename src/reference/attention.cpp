// Forward attention by its definition: every score of a row, one softmax over all of them, one weighted sum.
// Called through reference.hpp.
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "reference/head.hpp"
#include "reference/reference.hpp"

namespace plait::reference {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct HeadInputs {
  std::vector<Matrix> q, k, v;  // one per pass
  double sink;                  // -inf: none
};

// One softmax row: adds the weighted values to `out`, which holds zeros, and returns the LSE.
double attend(const AttentionProblem& problem, const Sequence& sequence, const HeadInputs& in, int64_t row,
              double* out) {
  struct Pair {
    const double* value;
    double score;
  };
  std::vector<Pair> pairs;
  double largest = in.sink;
  for (size_t pass = 0; pass < in.q.size(); ++pass) {
    for (int64_t key = 0; key < in.k[pass].rows; ++key) {
      if (!visible(problem, sequence, row, key)) continue;
      pairs.push_back({in.v[pass].row(key), score(problem, in.q[pass].row(row), in.k[pass].row(key))});
      if (!(pairs.back().score <= largest)) largest = pairs.back().score;
    }
  }
  if (largest == -kInfinity) return -kInfinity;
  double denominator = in.sink == largest ? 1.0 : std::exp(in.sink - largest);  // inf - inf is NaN
  for (const Pair& pair : pairs) denominator += std::exp(pair.score - largest);
  for (const Pair& pair : pairs) {
    add_scaled(out, std::exp(pair.score - largest) / denominator, pair.value, problem.head_dim_v);
  }
  return largest + std::log(denominator);
}

void forward_head(const AttentionProblem& problem, const AttentionTensors& t, const Sequence& sequence, int64_t head) {
  const int64_t kv_head = head / (problem.heads_q / problem.heads_kv);
  const HeadInputs in{read_passes(problem, t.q, query_slice, sequence, head, problem.head_dim),
                      read_passes(problem, t.k, key_slice, sequence, kv_head, problem.head_dim),
                      read_passes(problem, t.v, key_slice, sequence, kv_head, problem.head_dim_v),
                      sink_of(problem, t, head)};
  const Slice rows = query_slice(problem, sequence, head, 0, problem.head_dim_v);
  Matrix out(rows.rows(), problem.head_dim_v);
  for (int64_t row = 0; row < out.rows; ++row) {
    const double lse = attend(problem, sequence, in, row, out.row(row));
    store(t.lse, sequence.batch, head, sequence.q_begin * problem.rows_per_position() + row, lse);
  }
  write(t.out, rows, out);
}

}  // namespace

void attention_forward(const AttentionProblem& problem, const AttentionTensors& t) {
  const int64_t per = problem.rows_per_position();
  if (problem.packed) {  // rows past cu_seqlens[-1] belong to no sequence
    fill_zero(t.out, problem.heads_q, problem.seqlen_q, per, problem.head_dim_v);
    for (int64_t head = 0; head < problem.heads_q; ++head) {
      for (int64_t row = 0; row < problem.seqlen_q * per; ++row) store(t.lse, 0, head, row, -kInfinity);
    }
  }
  for (int64_t index = 0; index < problem.batch; ++index) {
    const Sequence sequence = sequence_at(problem, t, index);
    for (int64_t head = 0; head < problem.heads_q; ++head) forward_head(problem, t, sequence, head);
  }
}

}  // namespace plait::reference
