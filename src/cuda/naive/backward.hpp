// The two kernels of a backward call, which read delta and write each gradient element once.
// Called by attention_backward.cu.
#pragma once

#include <cuda_runtime_api.h>

#include "core/problem.hpp"

namespace plait::cuda::naive {

void launch_dq(const AttentionProblem& problem, const AttentionTensors& tensors, const float* delta,
               cudaStream_t stream);
void launch_dkdv(const AttentionProblem& problem, const AttentionTensors& tensors, const float* delta,
                 cudaStream_t stream);

}  // namespace plait::cuda::naive
