// The gradient of the attention sinks: one block sums the rows of a head, always in the same order.
// Called through aux.hpp.
#include "cuda/aux/aux.hpp"
#include "cuda/common/rows.cuh"
#include "cuda/runtime/launch.cuh"

namespace plait::cuda::aux {
namespace {

constexpr int kThreads = 512;

// A fully masked row with a sink has LSE = sink and delta = -dLSE: it adds dLSE.
__global__ void __launch_bounds__(kThreads)
    dsinks_kernel(const __grid_constant__ AttentionProblem p, const __grid_constant__ AttentionTensors t,
                  const float* delta) {
  __shared__ float sums[kThreads];
  const int64_t head = blockIdx.x, rows = p.seqlen_q * p.rows_per_position();
  const float sink = static_cast<const float*>(t.sinks)[head * t.sinks_stride];
  const Sequence whole{0, 0, p.seqlen_q, 0, 0, 0};
  float sum = 0.0f;
  for (int64_t batch = 0; batch < (p.packed ? 1 : p.batch); ++batch) {
    for (int64_t row = threadIdx.x; row < rows; row += kThreads) {
      const float lse =
          static_cast<const float*>(t.lse.data)[batch * t.lse.batch_stride + lse_offset(p, t.lse, whole, head, row)];
      const float value = delta[(batch * p.heads_q + head) * rows + row];
      // An external LSE of -inf, and the rows past cu_seqlens[-1]: delta is 0, the exponential infinite.
      if (value != 0.0f) sum -= (sink == lse ? 1.0f : expf(sink - lse)) * value;
    }
  }
  sums[threadIdx.x] = sum;
  __syncthreads();
  for (int half = kThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    __syncthreads();
  }
  if (threadIdx.x == 0) static_cast<float*>(t.dsinks)[head * t.dsinks_stride] = sums[0];
}

}  // namespace

void launch_dsinks(const AttentionProblem& problem, const AttentionTensors& tensors, const float* delta,
                   cudaStream_t stream) {
  launch(dsinks_kernel, problem.heads_q, kThreads, 0, stream, problem, tensors, delta);
}

}  // namespace plait::cuda::aux
