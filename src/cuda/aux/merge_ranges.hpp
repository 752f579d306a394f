// split_kv in two kernels: one writes fp32 results of each range of keys to the workspace, the other merges them.
// The tensors of a range's problem, and the merge.
// Called by the cuda backends' run(). No allocation, no synchronisation.
#pragma once

#include <cuda_runtime_api.h>

#include "core/problem.hpp"

namespace plait::cuda::aux {

// Results of all ranges, contiguous: O [count, batch, heads_q / group, rows of a head x group, head_dim_v], and LSE
// without the last dimension; O of a row whose LSE is -inf is not read. `rows`: of one range. group > 1: so many heads
// in a row share a key head, and their rows alternate.
struct RangeResults {
  float *out, *lse;
  int64_t rows;
  int count, group;
};

// Tensors of `problem`, which is that of one range (its heads, rows and head dim), whose O and LSE are the first
// range's.
inline AttentionTensors range_tensors(const AttentionProblem& problem, const AttentionTensors& tensors,
                                      const RangeResults& results) {
  AttentionTensors inner = tensors;
  const int64_t per = problem.rows_per_position(), rows = problem.seqlen_q * per, dim = problem.head_dim_v;
  inner.out = {results.out, DType::kFloat32, problem.heads_q * rows * dim, rows * dim, per * dim, dim, 1};
  inner.lse = {results.lse, DType::kFloat32, problem.heads_q * rows, rows, 1};
  inner.sinks = nullptr;
  return inner;
}

// O and LSE of the caller's problem, with its sinks; the ranges always in one order. Starts while the kernel before it
// in the stream ends, where the GPU can.
void merge_ranges(const RangeResults& results, const AttentionProblem& problem, const AttentionTensors& tensors,
                  int compute_capability, cudaStream_t stream);

}  // namespace plait::cuda::aux
