// Small kernels that every CUDA backend shares in a backward call: delta, and the gradient of the sinks.
// Called by naive and mma before and after their own kernels. No allocation, no synchronisation.
#pragma once

#include <cuda_runtime_api.h>

#include "core/problem.hpp"

namespace plait::cuda::aux {

// What launch_delta does on the way, if asked.
struct DeltaExtras {
  float2* row_pairs =
      nullptr;               // like delta: LSE in log2 units (+inf where it is -inf: no key adds anything), and delta
  float* zeroed = nullptr;   // 16-byte aligned, becomes zero
  int64_t zeroed_bytes = 0;  // a multiple of 16
};

// delta, contiguous fp32 [batch (1 if packed), heads_q, seqlen_q * rows_per_position()]: dO . O - dLSE, and 0 for a row
// whose LSE is -inf and for rows past cu_seqlens[-1].
void launch_delta(const AttentionProblem& problem, const AttentionTensors& tensors, float* delta, cudaStream_t stream,
                  const DeltaExtras& extras = {});

// dsink[h] = -sum over rows of exp(sink[h] - LSE) delta, in a fixed order. Needs problem.has_sinks.
void launch_dsinks(const AttentionProblem& problem, const AttentionTensors& tensors, const float* delta,
                   cudaStream_t stream);

}  // namespace plait::cuda::aux
