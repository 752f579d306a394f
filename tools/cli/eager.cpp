// One softmax row at a time, fp32 sums, everything else rounded to the input dtype.
// Called through eager.hpp.
#include "eager.hpp"

#include <cmath>
#include <limits>

#include "tensors.hpp"

namespace plait::cli {
namespace {

// Element offsets of a tensor of the problem: [batch, heads, length, pseudo, dim] in its layout.
struct Grid {
  int64_t heads, length, pseudo, dim;
  bool heads_first;

  int64_t at(int64_t b, int64_t h, int64_t s, int64_t p) const {
    const int64_t outer = heads_first ? (b * heads + h) * length + s : (b * length + s) * heads + h;
    return (outer * pseudo + p) * dim;
  }
};

// The vectors of softmax row (or key) `row` in pass `pass`: positions or virtual rows.
struct Place {
  int64_t position, pseudo;
};

class Eager {
 public:
  Eager(const Problem& problem, const EagerInputs& inputs)
      : problem_(problem),
        in_(inputs),
        q_(grid(problem.heads, problem.seqlen_q, problem.pseudo_heads, problem.head_dim)),
        k_(grid(problem.kv_heads(), problem.kv_length(), problem.pseudo_heads, problem.head_dim)),
        v_(grid(problem.kv_heads(), problem.kv_length(), problem.pseudo_heads, problem.value_dim())),
        out_(grid(problem.heads, problem.seqlen_q, problem.interleaved() ? problem.pseudo_heads : 1,
                  problem.value_dim())),
        out_dtype_(problem.options.out_dtype.value_or(problem.dtype)),
        scale_(problem.options.scale.value_or(1.0 / std::sqrt(static_cast<double>(problem.head_dim)))) {
    result_.out.assign(in_.dout.size(), 0.0);
    result_.lse.assign(in_.dlse.size(), 0.0);
    result_.dq.assign(in_.q.size(), 0.0);
    dsinks_.assign(in_.sinks.size(), 0.0);
    variance_.assign(in_.sinks.size(), 0.0);
    dk_.assign(in_.k.size(), 0.0f);
    dv_.assign(in_.v.size(), 0.0f);
  }

  EagerResults run() {
    for (int64_t b = 0; b < problem_.batch; ++b) {
      for (int64_t h = 0; h < problem_.heads; ++h) {
        for (int64_t row = 0; row < problem_.rows(); ++row) {
          forward_row(b, h, row);
          backward_row(b, h, row);
        }
      }
    }
    for (const float value : dk_) result_.dk.push_back(round(value));
    for (const float value : dv_) result_.dv.push_back(round(value));
    for (const double value : variance_) result_.dsinks_sigma.push_back(std::sqrt(value));
    return std::move(result_);
  }

 private:
  Grid grid(int64_t heads, int64_t length, int64_t pseudo, int64_t dim) const {
    return {heads, length, pseudo, dim, problem_.options.layout == Layout::kBhsd && !problem_.packed};
  }

  Place place(int64_t row, int64_t pass) const {
    const int64_t group = problem_.pseudo_heads;
    return problem_.interleaved() ? Place{row / group, row % group} : Place{row, pass};
  }

  float round(double value) const { return static_cast<float>(round_to(problem_.dtype, value)); }

  int64_t kv_head(int64_t h) const { return h / (problem_.heads / problem_.kv_heads()); }

  int64_t lse_at(int64_t b, int64_t h, int64_t row) const {
    const int64_t rows = problem_.rows();
    return problem_.packed ? (h * problem_.batch + b) * rows + row : (b * problem_.heads + h) * rows + row;
  }

  static float dot(const double* a, const double* b, int64_t count) {
    float sum = 0;
    for (int64_t i = 0; i < count; ++i) sum += static_cast<float>(a[i]) * static_cast<float>(b[i]);
    return sum;
  }

  // Calls body(slot, key place) for every visible (pass, key) of the row.
  template <class Body>
  void for_each_key(int64_t row, const Body& body) const {
    const auto [lo, hi] = problem_.interval(row);
    size_t slot = 0;
    for (int64_t pass = 0; pass < problem_.passes(); ++pass) {
      for (int64_t key = lo; key < hi; ++key) body(slot++, pass, place(key, pass));
    }
  }

  // Fills scores_ and probs_, writes out and lse.
  void forward_row(int64_t b, int64_t h, int64_t row) {
    const bool has_sink = !in_.sinks.empty();
    const float cap = static_cast<float>(problem_.options.softcap);
    scores_.clear();
    float top = has_sink ? static_cast<float>(in_.sinks[h]) : -std::numeric_limits<float>::infinity();
    for_each_key(row, [&](size_t, int64_t pass, Place key) {
      const Place query = place(row, pass);
      const float product = round(dot(&in_.q[q_.at(b, h, query.position, query.pseudo)],
                                      &in_.k[k_.at(b, kv_head(h), key.position, key.pseudo)], k_.dim));
      float score = round(product * scale_);
      if (cap > 0) score = round(cap * std::tanh(score / cap));
      scores_.push_back(score);
      top = std::max(top, score);
    });
    float sum = has_sink ? std::exp(static_cast<float>(in_.sinks[h]) - top) : 0.0f;
    for (const float score : scores_) sum += std::exp(score - top);
    result_.lse[lse_at(b, h, row)] = sum > 0 ? top + std::log(sum) : -std::numeric_limits<double>::infinity();
    probs_.clear();
    for (const float score : scores_) probs_.push_back(round(std::exp(score - top) / sum));
    sums_.assign(static_cast<size_t>(v_.dim), 0.0f);
    for_each_key(row, [&](size_t slot, int64_t, Place key) {
      const double* value = &in_.v[v_.at(b, kv_head(h), key.position, key.pseudo)];
      for (int64_t d = 0; d < v_.dim; ++d) sums_[d] += probs_[slot] * static_cast<float>(value[d]);
    });
    const Place query = place(row, 0);
    double* out = &result_.out[out_.at(b, h, query.position, query.pseudo)];
    for (int64_t d = 0; d < v_.dim; ++d) out[d] = round(sums_[d]);
  }

  // Uses scores_ and probs_ of forward_row.
  void backward_row(int64_t b, int64_t h, int64_t row) {
    const float cap = static_cast<float>(problem_.options.softcap);
    const Place out_place = place(row, 0);
    const double* dout = &in_.dout[out_.at(b, h, out_place.position, out_place.pseudo)];
    const double* out = &result_.out[out_.at(b, h, out_place.position, out_place.pseudo)];
    const float delta = dot(dout, out, v_.dim) - static_cast<float>(in_.dlse[lse_at(b, h, row)]);
    dprobs_.clear();
    for_each_key(row, [&](size_t, int64_t, Place key) {
      dprobs_.push_back(round(dot(dout, &in_.v[v_.at(b, kv_head(h), key.position, key.pseudo)], v_.dim)));
    });
    dq_.assign(static_cast<size_t>(problem_.passes() * k_.dim), 0.0f);
    for_each_key(row, [&](size_t slot, int64_t pass, Place key) {
      float dscore = round(probs_[slot] * (dprobs_[slot] - delta));
      if (cap > 0) dscore = round(dscore * (1 - (scores_[slot] / cap) * (scores_[slot] / cap)));
      const Place query = place(row, pass);
      const int64_t key_at = k_.at(b, kv_head(h), key.position, key.pseudo);
      const double* q = &in_.q[q_.at(b, h, query.position, query.pseudo)];
      for (int64_t d = 0; d < k_.dim; ++d) {
        dq_[pass * k_.dim + d] += dscore * static_cast<float>(in_.k[key_at + d]);
        dk_[key_at + d] += static_cast<float>(scale_) * dscore * static_cast<float>(q[d]);
      }
      const int64_t value_at = v_.at(b, kv_head(h), key.position, key.pseudo);
      for (int64_t d = 0; d < v_.dim; ++d) dv_[value_at + d] += probs_[slot] * static_cast<float>(dout[d]);
    });
    for (int64_t pass = 0; pass < problem_.passes(); ++pass) {
      const Place query = place(row, pass);
      double* dq = &result_.dq[q_.at(b, h, query.position, query.pseudo)];
      for (int64_t d = 0; d < k_.dim; ++d) dq[d] = round(scale_ * dq_[pass * k_.dim + d]);
    }
    if (!in_.sinks.empty()) add_sink_error(h, in_.sinks[h], result_.lse[lse_at(b, h, row)], delta, dout, out);
  }

  // dsink sums -weight * delta over rows: delta carries the rounding of out, weight that of an fp32 logit of the size
  // of LSE (and of the sums in it), and each sum one of fp32.
  void add_sink_error(int64_t h, double sink, double lse, double delta, const double* dout, const double* out) {
    constexpr double kLogitRoundings = 4;
    const double weight = std::exp(sink - lse);
    double squares = 0;
    for (int64_t d = 0; d < v_.dim; ++d) squares += dout[d] * out[d] * dout[d] * out[d];
    dsinks_[h] -= weight * delta;
    const double of_out = weight * roundoff(out_dtype_) * std::sqrt(squares);
    const double of_sum = roundoff(DType::kFloat32) * dsinks_[h];
    const double of_lse = weight * delta * kLogitRoundings * roundoff(DType::kFloat32) * lse;
    variance_[h] += of_out * of_out + of_sum * of_sum + of_lse * of_lse;
  }

  const Problem& problem_;
  const EagerInputs& in_;
  Grid q_, k_, v_, out_;
  DType out_dtype_;
  double scale_;
  EagerResults result_;
  std::vector<float> dk_, dv_;
  std::vector<double> dsinks_, variance_;                   // running sums by head
  std::vector<float> scores_, probs_, dprobs_, sums_, dq_;  // of the row at hand
};

}  // namespace

EagerResults eager_attention(const Problem& problem, const EagerInputs& inputs) { return Eager(problem, inputs).run(); }

}  // namespace plait::cli
