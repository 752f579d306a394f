// split_kv of cuda_sm90: the keys of each row tile in ranges that go to blocks of their own. How a problem is cut, what
// lies where in the workspace, and about how long it takes: plain C++, no CUDA call.
// Called by the planner, the cuda_sm90 backend's run() and launch.cuh.
#pragma once

#include <cstdint>

#include "core/problem.hpp"
#include "cuda/sm90/prefill/key_ranges.hpp"
#include "cuda/sm90/prefill/tile.hpp"
#include "cuda/sm90/prefill/workspace.hpp"
#include "plait/device.hpp"

namespace plait::cuda::sm90 {

struct RangeLayout {
  // Query heads of a key head that are rows of one tile, position by position, so that few queries fill it.
  int group = 1;
  KeyRanges ranges;
  int64_t rows = 0;  // of all sequences and heads: of a range's results
  int64_t counter_bytes = 0, out_bytes = 0, lse_bytes = 0;
  double clocks = 0;  // of the whole call, about

  RangeLayout(const AttentionProblem& problem, const DeviceInfo& device);
  int64_t workspace_bytes() const { return counter_bytes + out_bytes + lse_bytes; }
  // Ranges, keys, rows and row tiles are counted in 32 bits.
  bool in_limits() const { return ranges.count > 0; }
};

// One range's problem for the kernel, with `group` heads as rows: fp32 results without sinks.
inline AttentionProblem range_problem(const AttentionProblem& p, int group) {
  AttentionProblem inner = p;
  inner.heads_q /= group, inner.seqlen_q *= group;
  inner.has_sinks = false, inner.out_dtype = DType::kFloat32;
  return inner;
}

// About how many clocks a call takes without ranges.
double split_q_clocks(const AttentionProblem& problem, const DeviceInfo& device);

}  // namespace plait::cuda::sm90
