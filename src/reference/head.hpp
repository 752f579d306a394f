// One head of one sequence in float64, the score of a pair and the mask, each written from its definition.
// Called by attention.cpp and attention_backward.cpp.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "reference/access.hpp"

namespace plait::reference {

// Softmax rows of one head: positions [begin, begin + length), `per_position` pseudo-heads of each from `pseudo` on.
struct Slice {
  int64_t batch, head, begin, length, pseudo, per_position, dim;

  int64_t rows() const { return length * per_position; }
  Index index(int64_t row, int64_t d) const {
    return {batch, head, begin + row / per_position, pseudo + row % per_position, d};
  }
};

inline Matrix read(const CanonicalTensor& tensor, const Slice& slice) {
  Matrix matrix(slice.rows(), slice.dim);
  for (int64_t r = 0; r < matrix.rows; ++r) {
    for (int64_t d = 0; d < matrix.cols; ++d) matrix.row(r)[d] = load(tensor, slice.index(r, d));
  }
  return matrix;
}

inline void write(const CanonicalTensor& tensor, const Slice& slice, const Matrix& matrix) {
  for (int64_t r = 0; r < matrix.rows; ++r) {
    for (int64_t d = 0; d < matrix.cols; ++d) store(tensor, slice.index(r, d), matrix.row(r)[d]);
  }
}

// The rows of `head` in one pass over the keys: pseudo-head `pass` in joint mode, all virtual rows in interleaved mode.
inline Slice query_slice(const AttentionProblem& problem, const Sequence& sequence, int64_t head, int64_t pass,
                         int64_t dim) {
  return {sequence.batch, head, sequence.q_begin, sequence.q_len, pass, problem.rows_per_position(), dim};
}
inline Slice key_slice(const AttentionProblem& problem, const Sequence& sequence, int64_t head, int64_t pass,
                       int64_t dim) {
  return {sequence.kv_batch, head, sequence.kv_begin, sequence.kv_len, pass, problem.rows_per_position(), dim};
}

// One matrix per pass that shares the softmax: P in joint mode, else one.
template <class MakeSlice>
std::vector<Matrix> read_passes(const AttentionProblem& problem, const CanonicalTensor& tensor, MakeSlice slice_of,
                                const Sequence& sequence, int64_t head, int64_t dim) {
  std::vector<Matrix> passes;
  for (int64_t pass = 0; pass < problem.joint_passes(); ++pass) {
    passes.push_back(read(tensor, slice_of(problem, sequence, head, pass, dim)));
  }
  return passes;
}

// S after the cap: scale q.k, then softcap * tanh(S / softcap).
inline double score(const AttentionProblem& problem, const double* q, const double* k) {
  const double logit = problem.scale * dot(q, k, problem.head_dim);
  return problem.softcap > 0.0 ? problem.softcap * std::tanh(logit / problem.softcap) : logit;
}

// Whether softmax row `row` of a sequence sees key `key` (both virtual in interleaved mode). The last row meets the
// last key: a row stands at row + (Sk - Sq), times P in interleaved mode.
inline bool visible(const AttentionProblem& problem, const Sequence& sequence, int64_t row, int64_t key) {
  const int64_t per = problem.rows_per_position();
  const int64_t ahead = key - (row + (sequence.kv_len - sequence.q_len) * per);  // > 0: the key is in the future
  if (problem.window_left >= 0 && -ahead > problem.window_left) return false;
  if (problem.window_right >= 0 && ahead > problem.window_right) return false;
  if (!problem.causal) return true;
  if (problem.mode == HeadMode::kInterleaved && problem.mask == PseudoMask::kToken) {
    return key / per <= row / per + sequence.kv_len - sequence.q_len;
  }
  return ahead <= 0;
}

// Sinks have the dtype of the LSE: float64 with float64 inputs, else float32.
inline DType sinks_dtype(const AttentionProblem& problem) {
  return problem.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
}
inline double sink_of(const AttentionProblem& problem, const AttentionTensors& tensors, int64_t head) {
  if (!problem.has_sinks) return -std::numeric_limits<double>::infinity();
  return load(tensors.sinks, sinks_dtype(problem), head * tensors.sinks_stride);
}

// Zeroes a packed tensor [heads, seqlen, pseudo, dim].
inline void fill_zero(const CanonicalTensor& tensor, int64_t heads, int64_t seqlen, int64_t pseudo, int64_t dim) {
  for (int64_t h = 0; h < heads; ++h) {
    const Slice all{0, h, 0, seqlen, 0, pseudo, dim};
    write(tensor, all, Matrix(all.rows(), dim));
  }
}

}  // namespace plait::reference
