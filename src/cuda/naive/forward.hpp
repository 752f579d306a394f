// The attention forward of this folder with what a cached call adds to it.
// Called by attention_forward() and by the KV cache step.
#pragma once

#include <cuda_runtime_api.h>

#include "core/problem.hpp"

namespace plait::cuda::naive {

// Where the keys of a cached problem come from.
struct CacheSource {
  int64_t rows = 0;     // rows of a dense cache, pages of a paged one
  bool raw = false;     // pseudo keys and values are mixed on the fly: k, v hold source heads
  TensorView w_k, w_v;  // raw: [heads_kv, pseudo, heads_kv]
};

void launch_forward(const AttentionProblem& problem, const AttentionTensors& tensors, const CacheSource& source,
                    cudaStream_t stream);

}  // namespace plait::cuda::naive
