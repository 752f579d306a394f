// Tensor-core forward attention for few query rows, parallel over key ranges (split_kv); also over a KV cache.
// Called by the cuda_mma backend's run().
#pragma once

#include "core/problem.hpp"
#include "cuda/mma/decode/workspace.hpp"
#include "cuda/runtime/stream.hpp"
#include "plait/plan.hpp"

namespace plait::cuda::mma {

// The counters of launch_decode(), zero before it.
struct Arrivals {
  int* data = nullptr;
  int64_t count = 0;
  Arrivals() = default;
  Arrivals(const DecodeLayout& layout, void* workspace)
      : data(reinterpret_cast<int*>(static_cast<char*>(workspace) + layout.out_bytes + layout.stats_bytes)),
        count(layout.arrivals) {}
};

// Before the attention, in one launch at most: counters to zero, and in a cache step the new keys and values into the
// cache and the queries into `queries`, of query_copy_bytes(). Returns the tensors that the attention reads, as
// prepared_tensors() does without a launch.
AttentionTensors prepared_tensors(const KvCacheProblem& problem, const KvCacheTensors& tensors, void* queries);
void launch_prepare(const Arrivals& arrivals, Stream stream);
AttentionTensors launch_prepare(const Arrivals& arrivals, const KvCacheProblem& problem, const KvCacheTensors& tensors,
                                void* queries, Stream stream);

// O and LSE of a plain, joint or interleaved problem, not packed, inside layout.in_limits(). T: __half or
// __nv_bfloat16, as problem.dtype says; kHeadDim: the layout's bucket. `workspace`: layout.workspace_bytes(), as
// launch_prepare() left it. `cache_rows`: rows or pages of a cache. No synchronisation.
template <class T, int kHeadDim>
void launch_decode(const DecodeLayout& layout, const AttentionProblem& problem, const AttentionTensors& tensors,
                   int64_t cache_rows, void* workspace, int compute_capability, Stream stream);

}  // namespace plait::cuda::mma
