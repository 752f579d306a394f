// Merges the results of key ranges: O = sum_i weight_i O_i, the weights from their LSEs and the sink, always in one
// order. Called through split_d.hpp.
#include "cuda/common/element.cuh"
#include "cuda/common/rows.cuh"
#include "cuda/common/softmax.cuh"
#include "cuda/mma/split_d/split_d.hpp"
#include "cuda/runtime/launch.cuh"

namespace plait::cuda::mma {
namespace {

constexpr int kMergeThreads = catalog::kSplitDMaxHeadDim / 4;  // four columns each

struct MergeParams {
  AttentionProblem problem;
  AttentionTensors tensors;
  const float *out, *lse;  // [ranges, batch, heads_q, rows, head_dim_v], and without head_dim_v
  int64_t rows;            // of all sequences and heads
  int ranges;
};

// The largest LSE of a row's ranges, in log2 units, and the sum of their weights relative to it. Called by one warp.
__device__ __forceinline__ float2 sum_weights(const MergeParams& params, int64_t row, int lane) {
  float reference = -FLT_MAX, sum = 0.0f;
  for (int i = lane; i < params.ranges; i += 32) {
    const float lse = params.lse[i * params.rows + row] * kLog2e, raised = fmaxf(reference, lse);
    sum = sum * ptx::exp2_approx(reference - raised) + ptx::exp2_approx(lse - raised);
    reference = raised;
  }
  float highest = reference;
  for (int step = 16; step > 0; step /= 2) highest = fmaxf(highest, __shfl_xor_sync(kAllLanes, highest, step));
  sum *= ptx::exp2_approx(reference - highest);
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
  return make_float2(highest, sum);
}

// A block merges a row.
__global__ void __launch_bounds__(kMergeThreads, 2) merge_kernel(const __grid_constant__ MergeParams params) {
  __shared__ float weights[kMergeThreads];
  __shared__ float2 total;
  const AttentionProblem& p = params.problem;
  const AttentionTensors& t = params.tensors;
  const int thread = static_cast<int>(threadIdx.x), column = 4 * thread;
  const int64_t row = blockIdx.x, of_head = p.seqlen_q * p.rows_per_position(), index = row / of_head;
  const int64_t head = index % p.heads_q, at = row % of_head;
  const Sequence sequence{index / p.heads_q, 0, p.seqlen_q, 0, 0, 0};
  if (thread < 32) {
    const float2 found = sum_weights(params, row, thread);
    if (thread == 0) total = found;
  }
  __syncthreads();
  float4 merged{};
  for (int first = 0; first < params.ranges; first += kMergeThreads) {
    const int count = min(params.ranges - first, kMergeThreads);
    if (first > 0) __syncthreads();  // the weights before have been used
    if (thread < count) {
      weights[thread] = ptx::exp2_approx(params.lse[(first + thread) * params.rows + row] * kLog2e - total.x);
    }
    __syncthreads();
    if (column >= p.head_dim_v) continue;
    const float* from = params.out + (first * params.rows + row) * p.head_dim_v + column;
    const int64_t stride = params.rows * p.head_dim_v;
#pragma unroll 8
    for (int i = 0; i < count; ++i, from += stride) {
      const float4 part = *reinterpret_cast<const float4*>(from);
      merged.x = fmaf(part.x, weights[i], merged.x), merged.y = fmaf(part.y, weights[i], merged.y);
      merged.z = fmaf(part.z, weights[i], merged.z), merged.w = fmaf(part.w, weights[i], merged.w);
    }
  }
  const float sink = p.has_sinks ? static_cast<const float*>(t.sinks)[head * t.sinks_stride] : -CUDART_INF_F;
  const RowResult result = finish_row(total.x, total.y, sink);
  if (thread == 0 && t.lse.data != nullptr) {
    static_cast<float*>(t.lse.data)[lse_offset(p, t.lse, sequence, head, at)] = result.lse;
  }
  if (column >= p.head_dim_v) return;
  const int64_t offset = query_offset(p, t.out, sequence, head, at, 0) + column * t.out.dim_stride;
  const float columns[4] = {merged.x, merged.y, merged.z, merged.w};
#pragma unroll
  for (int i = 0; i < 4; ++i)
    store(t.out.data, p.out_dtype, offset + i * t.out.dim_stride, columns[i] * result.out_factor);
}

}  // namespace

AttentionTensors range_tensors(const KeyRangeLayout& layout, const AttentionProblem& p, const AttentionTensors& t,
                               void* workspace) {
  AttentionTensors inner = t;
  if (layout.heads_are_rows) {
    inner.q.seq_stride = t.q.head_stride;
    inner.q.head_stride = t.q.head_stride * (p.heads_q / p.heads_kv);
  }
  const AttentionProblem& of = layout.problem;
  const int64_t per = of.rows_per_position(), head_rows = of.seqlen_q * per, dim = of.head_dim_v;
  inner.out = {workspace, DType::kFloat32, of.heads_q * head_rows * dim, head_rows * dim, per * dim, dim, 1};
  inner.lse = {static_cast<char*>(workspace) + layout.out_bytes, DType::kFloat32, of.heads_q * head_rows, head_rows, 1};
  inner.sinks = nullptr;
  return inner;
}

void merge_ranges(const KeyRangeLayout& layout, const AttentionProblem& p, const AttentionTensors& t,
                  const void* workspace, cudaStream_t stream) {
  const auto* out = static_cast<const float*>(workspace);
  const auto* lse = reinterpret_cast<const float*>(static_cast<const char*>(workspace) + layout.out_bytes);
  launch(merge_kernel, layout.rows, kMergeThreads, 0, stream,
         MergeParams{p, t, out, lse, layout.rows, layout.ranges.count});
}

}  // namespace plait::cuda::mma
