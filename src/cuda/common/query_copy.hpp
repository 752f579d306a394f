// The copy of the queries that a cache step turns and mixes: plain C++, no CUDA call.
// Used by the planner and the cache steps of naive and mma.
#pragma once

#include <cstdint>

#include "core/problem.hpp"

namespace plait::cuda {

inline bool copies_queries(const KvCacheProblem& p) { return p.has_rope || p.iha; }

// [batch, heads_q, seqlen_q, pseudo, head_dim], contiguous; 0 without a copy.
inline int64_t query_copy_bytes(const KvCacheProblem& p, DType dtype) {
  const AttentionProblem& a = p.attention;
  if (!copies_queries(p)) return 0;
  return a.batch * a.heads_q * a.seqlen_q * (p.iha ? a.pseudo_heads : 1) * a.head_dim * dtype_bytes(dtype);
}

inline CanonicalTensor query_copy(const KvCacheProblem& p, DType dtype, void* data) {
  const AttentionProblem& a = p.attention;
  const int64_t pseudo = p.iha ? a.pseudo_heads : 1, row = pseudo * a.head_dim;
  return {data, dtype, a.heads_q * a.seqlen_q * row, a.seqlen_q * row, row, a.head_dim, 1};
}

}  // namespace plait::cuda
