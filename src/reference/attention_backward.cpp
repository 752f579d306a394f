// Gradients of attention by the formulas of docs/numerics.md, one pair (row, key) at a time.
// Called through reference.hpp. `out` and `lse` are inputs and may come from outside.
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "reference/head.hpp"
#include "reference/reference.hpp"

namespace plait::reference {
namespace {

// Keys and values of one head of one sequence, one matrix per pass, and their gradients so far.
struct KeyHead {
  std::vector<Matrix> k, v, dk, dv;
};

std::vector<Matrix> zeros_like(const std::vector<Matrix>& matrices) {
  std::vector<Matrix> zeros;
  for (const Matrix& matrix : matrices) zeros.emplace_back(matrix.rows, matrix.cols);
  return zeros;
}

void write_passes(const AttentionProblem& problem, const CanonicalTensor& tensor, const Sequence& sequence,
                  int64_t kv_head, const std::vector<Matrix>& passes) {
  for (size_t pass = 0; pass < passes.size(); ++pass) {
    write(tensor, key_slice(problem, sequence, kv_head, static_cast<int64_t>(pass), passes[pass].cols), passes[pass]);
  }
}

// Writes dq of one query head, adds to dk and dv of its key head, returns what it adds to dsink.
double backward_query_head(const AttentionProblem& problem, const AttentionTensors& t, const Sequence& sequence,
                           int64_t head, KeyHead& keys) {
  const std::vector<Matrix> q = read_passes(problem, t.q, query_slice, sequence, head, problem.head_dim);
  const Slice rows = query_slice(problem, sequence, head, 0, problem.head_dim_v);
  const Matrix out = read(t.out, rows), dout = read(t.dout, rows);
  const double sink = sink_of(problem, t, head);
  std::vector<Matrix> dq = zeros_like(q);
  double dsink = 0.0;
  for (int64_t row = 0; row < out.rows; ++row) {
    const int64_t lse_row = sequence.q_begin * problem.rows_per_position() + row;
    const double lse = load(t.lse, sequence.batch, head, lse_row);
    if (lse == -std::numeric_limits<double>::infinity()) continue;  // an empty softmax: no gradients
    const double dlse = t.dlse.data == nullptr ? 0.0 : load(t.dlse, sequence.batch, head, lse_row);
    const double delta = dot(dout.row(row), out.row(row), problem.head_dim_v) - dlse;
    for (size_t pass = 0; pass < q.size(); ++pass) {
      for (int64_t key = 0; key < keys.k[pass].rows; ++key) {
        if (!visible(problem, sequence, row, key)) continue;
        const double s = score(problem, q[pass].row(row), keys.k[pass].row(key));
        const double p = std::exp(s - lse);
        const double dp = dot(dout.row(row), keys.v[pass].row(key), problem.head_dim_v);
        const double capped = problem.softcap > 0.0 ? s / problem.softcap : 0.0;
        const double dlogit = problem.scale * p * (dp - delta) * (1.0 - capped * capped);
        add_scaled(dq[pass].row(row), dlogit, keys.k[pass].row(key), problem.head_dim);
        add_scaled(keys.dk[pass].row(key), dlogit, q[pass].row(row), problem.head_dim);
        add_scaled(keys.dv[pass].row(key), p, dout.row(row), problem.head_dim_v);
      }
    }
    dsink -= (lse == sink ? 1.0 : std::exp(sink - lse)) * delta;  // inf - inf is NaN
  }
  for (size_t pass = 0; pass < dq.size(); ++pass) {
    write(t.dq, query_slice(problem, sequence, head, static_cast<int64_t>(pass), problem.head_dim), dq[pass]);
  }
  return dsink;
}

}  // namespace

void attention_backward(const AttentionProblem& problem, const AttentionTensors& t) {
  if (problem.packed) {  // rows past cu_seqlens[-1] belong to no sequence
    const int64_t pseudo = problem.pseudo_heads;
    fill_zero(t.dq, problem.heads_q, problem.seqlen_q, pseudo, problem.head_dim);
    fill_zero(t.dk, problem.heads_kv, problem.seqlen_kv, pseudo, problem.head_dim);
    fill_zero(t.dv, problem.heads_kv, problem.seqlen_kv, pseudo, problem.head_dim_v);
  }
  std::vector<double> dsinks(static_cast<size_t>(problem.heads_q));
  const int64_t group = problem.heads_kv == 0 ? 0 : problem.heads_q / problem.heads_kv;
  for (int64_t index = 0; index < problem.batch; ++index) {
    const Sequence sequence = sequence_at(problem, t, index);
    for (int64_t kv_head = 0; kv_head < problem.heads_kv; ++kv_head) {
      KeyHead keys{read_passes(problem, t.k, key_slice, sequence, kv_head, problem.head_dim),
                   read_passes(problem, t.v, key_slice, sequence, kv_head, problem.head_dim_v),
                   {},
                   {}};
      keys.dk = zeros_like(keys.k), keys.dv = zeros_like(keys.v);
      for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
        dsinks[static_cast<size_t>(head)] += backward_query_head(problem, t, sequence, head, keys);
      }
      write_passes(problem, t.dk, sequence, kv_head, keys.dk);
      write_passes(problem, t.dv, sequence, kv_head, keys.dv);
    }
  }
  for (int64_t head = 0; problem.has_sinks && head < problem.heads_q; ++head) {
    store(t.dsinks, sinks_dtype(problem), head * t.dsinks_stride, dsinks[static_cast<size_t>(head)]);
  }
}

}  // namespace plait::reference
