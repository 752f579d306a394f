// Premix with RoPE and collapse, forward and backward, by their definitions.
// Called through reference.hpp.
#include <cstdint>

#include "reference/head.hpp"
#include "reference/reference.hpp"

namespace plait::reference {
namespace {

// One sequence of a premix: positions [begin, begin + length), the first of which stands at `first_position`.
struct Span {
  int64_t batch, begin, length, first_position;
};

Span span_at(const PremixProblem& problem, const PremixTensors& t, int64_t index) {
  if (!problem.packed) return {index, 0, problem.seqlen, problem.rope_offset};
  const int64_t begin = t.cu_seqlens[index], length = t.cu_seqlens[index + 1] - begin;
  int64_t first = problem.rope_offset;
  if (t.cu_seqlens_other != nullptr) {
    const int64_t keys = static_cast<int64_t>(t.cu_seqlens_other[index + 1]) - t.cu_seqlens_other[index];
    first = keys == 0 ? -length : first + keys - length;  // without keys: before row 0, whatever the offset
  }
  return {0, begin, length, first};
}

// Turns `x` [head_dim] by the angles of one table row, in place; `direction` -1 turns it back. Queries of a packed
// sequence without keys stand before row 0, see nothing, and are left as they are.
void turn(const PremixProblem& problem, const PremixTensors& t, double* x, int64_t table_row, double direction) {
  if (table_row < 0) return;
  const int64_t half = problem.rope_dim / 2;
  for (int64_t i = 0; i < half; ++i) {
    const double c = load(t.cos, table_row, i), s = direction * load(t.sin, table_row, i);
    double& a = x[problem.rope_style == RopeStyle::kHalf ? i : 2 * i];
    double& b = x[problem.rope_style == RopeStyle::kHalf ? i + half : 2 * i + 1];
    const double turned = a * c - b * s;
    b = b * c + a * s;
    a = turned;
  }
}

// The source heads [heads, head_dim] of one position, turned when all its pseudo-heads turn alike.
Matrix source_heads(const PremixProblem& problem, const PremixTensors& t, const Span& span, int64_t n) {
  Matrix x(problem.heads, problem.head_dim);
  for (int64_t s = 0; s < x.rows; ++s) {
    for (int64_t d = 0; d < x.cols; ++d) x.row(s)[d] = load(t.x, {span.batch, s, span.begin + n, 0, d});
    if (problem.has_rope && problem.rope_index == RopeIndex::kToken) {
      turn(problem, t, x.row(s), span.first_position + n, 1.0);
    }
  }
  return x;
}

bool turns_rows(const PremixProblem& problem) { return problem.has_rope && problem.rope_index == RopeIndex::kRow; }

// The pseudo row (n, p) in the rotary tables, one row per virtual row.
int64_t virtual_row(const PremixProblem& problem, const Span& span, int64_t n, int64_t p) {
  return (span.first_position + n) * problem.pseudo_heads + p;
}

// Gradients of one position: writes its dx, adds to dw [heads * pseudo_heads, heads].
void backward_position(const PremixProblem& problem, const PremixTensors& t, const Span& span, int64_t n, Matrix& dw) {
  const Matrix x = source_heads(problem, t, span, n);
  Matrix dx(x.rows, x.cols), dy(1, x.cols);
  for (int64_t h = 0; h < problem.heads; ++h) {
    for (int64_t p = 0; p < problem.pseudo_heads; ++p) {
      for (int64_t d = 0; d < dy.cols; ++d) dy.row(0)[d] = load(t.dy, {span.batch, h, span.begin + n, p, d});
      if (turns_rows(problem)) turn(problem, t, dy.row(0), virtual_row(problem, span, n, p), -1.0);
      for (int64_t s = 0; s < problem.heads; ++s) {
        add_scaled(dx.row(s), load(t.w, h, p, s), dy.row(0), dy.cols);
        dw.row(h * problem.pseudo_heads + p)[s] += dot(dy.row(0), x.row(s), dy.cols);
      }
    }
  }
  for (int64_t s = 0; s < dx.rows; ++s) {
    if (problem.has_rope && !turns_rows(problem)) turn(problem, t, dx.row(s), span.first_position + n, -1.0);
    for (int64_t d = 0; d < dx.cols; ++d) store(t.dx, {span.batch, s, span.begin + n, 0, d}, dx.row(s)[d]);
  }
}

// Calls visit(b, n, h, g, p) for every product r[h, (g,) p] * x[b, n, g, p] of a collapse; per head, g is h.
template <class Visit>
void for_each_product(const CollapseProblem& problem, Visit visit) {
  for (int64_t b = 0; b < problem.batch; ++b) {
    for (int64_t n = 0; n < problem.seqlen; ++n) {
      for (int64_t h = 0; h < problem.heads; ++h) {
        const int64_t first = problem.global ? 0 : h, end = problem.global ? problem.heads : h + 1;
        for (int64_t g = first; g < end; ++g) {
          for (int64_t p = 0; p < problem.pseudo_heads; ++p) visit(b, n, h, g, p);
        }
      }
    }
  }
}

double collapse_weight(const CollapseProblem& problem, const TensorView& r, int64_t h, int64_t g, int64_t p) {
  return problem.global ? load(r, h, g, p) : load(r, h, p);
}

}  // namespace

void premix_forward(const PremixProblem& problem, const PremixTensors& t) {
  if (problem.packed) fill_zero(t.y, problem.heads, problem.seqlen, problem.pseudo_heads, problem.head_dim);
  for (int64_t index = 0; index < problem.batch; ++index) {
    const Span span = span_at(problem, t, index);
    for (int64_t n = 0; n < span.length; ++n) {
      const Matrix x = source_heads(problem, t, span, n);
      for (int64_t h = 0; h < problem.heads; ++h) {
        for (int64_t p = 0; p < problem.pseudo_heads; ++p) {
          Matrix y(1, problem.head_dim);
          for (int64_t s = 0; s < problem.heads; ++s) add_scaled(y.row(0), load(t.w, h, p, s), x.row(s), y.cols);
          if (turns_rows(problem)) turn(problem, t, y.row(0), virtual_row(problem, span, n, p), 1.0);
          for (int64_t d = 0; d < y.cols; ++d) store(t.y, {span.batch, h, span.begin + n, p, d}, y.row(0)[d]);
        }
      }
    }
  }
}

void premix_backward(const PremixProblem& problem, const PremixTensors& t) {
  if (problem.packed) fill_zero(t.dx, problem.heads, problem.seqlen, 1, problem.head_dim);
  Matrix dw(problem.heads * problem.pseudo_heads, problem.heads);
  for (int64_t index = 0; index < problem.batch; ++index) {
    const Span span = span_at(problem, t, index);
    for (int64_t n = 0; n < span.length; ++n) backward_position(problem, t, span, n, dw);
  }
  for (int64_t h = 0; h < problem.heads; ++h) {
    for (int64_t p = 0; p < problem.pseudo_heads; ++p) {
      for (int64_t s = 0; s < problem.heads; ++s) store(t.dw, h, p, s, dw.row(h * problem.pseudo_heads + p)[s]);
    }
  }
}

void collapse_forward(const CollapseProblem& problem, const CollapseTensors& t) {
  const int64_t heads = problem.heads, dim = problem.head_dim;
  Matrix y(problem.batch * problem.seqlen * heads, dim);
  for_each_product(problem, [&](int64_t b, int64_t n, int64_t h, int64_t g, int64_t p) {
    const double weight = collapse_weight(problem, t.r, h, g, p);
    double* sum = y.row((b * problem.seqlen + n) * heads + h);
    for (int64_t d = 0; d < dim; ++d) sum[d] += weight * load(t.x, {b, g, n, p, d});
  });
  for (int64_t row = 0; row < y.rows; ++row) {
    const Index at{row / heads / problem.seqlen, row % heads, row / heads % problem.seqlen, 0, 0};
    for (int64_t d = 0; d < dim; ++d) store(t.y, {at.batch, at.head, at.seq, 0, d}, y.row(row)[d]);
  }
}

void collapse_backward(const CollapseProblem& problem, const CollapseTensors& t) {
  const int64_t heads = problem.heads, pseudo = problem.pseudo_heads, dim = problem.head_dim;
  Matrix dx(problem.batch * problem.seqlen * heads * pseudo, dim);  // [batch, seqlen, heads, pseudo, dim]
  Matrix dr(heads * heads, pseudo);                                 // per head: only [h, h, p] is used
  for_each_product(problem, [&](int64_t b, int64_t n, int64_t h, int64_t g, int64_t p) {
    const double weight = collapse_weight(problem, t.r, h, g, p);
    double* sum = dx.row(((b * problem.seqlen + n) * heads + g) * pseudo + p);
    for (int64_t d = 0; d < dim; ++d) {
      const double dy = load(t.dy, {b, h, n, 0, d});
      sum[d] += weight * dy;
      dr.row(h * heads + g)[p] += dy * load(t.x, {b, g, n, p, d});
    }
  });
  for (int64_t row = 0; row < dx.rows; ++row) {
    const int64_t p = row % pseudo, h = row / pseudo % heads, token = row / pseudo / heads;
    for (int64_t d = 0; d < dim; ++d) {
      store(t.dx, {token / problem.seqlen, h, token % problem.seqlen, p, d}, dx.row(row)[d]);
    }
  }
  for (int64_t h = 0; h < heads; ++h) {
    for (int64_t p = 0; p < pseudo; ++p) {
      if (!problem.global) store(t.dr, h, p, 0, dr.row(h * heads + h)[p]);
      for (int64_t g = 0; problem.global && g < heads; ++g) store(t.dr, h, g, p, dr.row(h * heads + g)[p]);
    }
  }
}

}  // namespace plait::reference
