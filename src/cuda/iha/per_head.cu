// Collapse per head, forward and backward, and the ordered sum of weight gradients: memory-bound, no tensor cores.
// Called by iha.cu.
#include "cuda/iha/fragments.cuh"
#include "cuda/iha/kernels.hpp"
#include "cuda/runtime/launch.cuh"

namespace plait::cuda::iha {
namespace {

constexpr int kThreads = 256;
constexpr int kPseudoStep = 4;  // pseudo-heads whose gradient a thread accumulates in one pass

// Columns [first, first + 8) of a row, zeros past `count`: as they are, and in fp32.
template <class T>
__device__ __forceinline__ uint4 load_words(const T* row, const TokenRows& rows, int first, int count) {
  if (rows.vector) return __ldcs(reinterpret_cast<const uint4*>(row + first));
  uint32_t words[kTileElems / 2] = {};
#pragma unroll
  for (int i = 0; i < kTileElems; ++i) {
    if (i >= count) break;
    words[i / 2] |= uint32_t{reinterpret_cast<const uint16_t&>(row[(first + i) * rows.dim_stride])} << (i % 2 * 16);
  }
  return {words[0], words[1], words[2], words[3]};
}

struct Columns {
  float value[kTileElems];
};

template <class T>
__device__ __forceinline__ Columns columns_of(const uint4& words) {
  const uint32_t word[4] = {words.x, words.y, words.z, words.w};
  Columns c;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = ptx::unpack<T>(word[i]);
    c.value[2 * i] = pair.x, c.value[2 * i + 1] = pair.y;
  }
  return c;
}

template <class T>
__device__ __forceinline__ void store_columns(T* row, const TokenRows& rows, int first, int count, const Columns& c) {
  const uint4 words = {ptx::pack<T>(c.value[0], c.value[1]), ptx::pack<T>(c.value[2], c.value[3]),
                       ptx::pack<T>(c.value[4], c.value[5]), ptx::pack<T>(c.value[6], c.value[7])};
  store_tile(row, rows, first, count, words);
}

// A thread: eight columns of one head of one token.
template <class T>
__global__ void __launch_bounds__(kThreads) per_head_forward_kernel(const __grid_constant__ Job job) {
  const int tiles = job.columns.tiles();
  const Division unit = divide(int64_t{blockIdx.x} * kThreads + threadIdx.x, tiles);
  if (unit.quotient >= job.tokens * job.heads) return;
  const Division place = divide(unit.quotient, job.heads);
  const int tile = static_cast<int>(unit.remainder), head = static_cast<int>(place.remainder);
  const Token token = token_at(job, place.quotient);
  const int first = job.columns.first(tile), count = job.columns.count(tile);
  const T* wide = row_pointer<T>(job.wide_in, token) + head * job.wide_in.head_stride;
  Columns sum = {};
  for (int p0 = 0; p0 < job.pseudo; p0 += kPseudoStep) {
    uint4 x[kPseudoStep] = {};
#pragma unroll
    for (int i = 0; i < kPseudoStep; ++i) {
      if (p0 + i < job.pseudo) {
        x[i] = load_words(wide + (p0 + i) * job.wide_in.pseudo_stride, job.wide_in, first, count);
      }
    }
#pragma unroll
    for (int i = 0; i < kPseudoStep; ++i) {
      if (p0 + i >= job.pseudo) break;
      const float weight =
          load_weight<T>(job.weights, head * job.weights.head_stride + (p0 + i) * job.weights.pseudo_stride);
      const Columns c = columns_of<T>(x[i]);
#pragma unroll
      for (int e = 0; e < kTileElems; ++e) sum.value[e] += weight * c.value[e];
    }
  }
  store_columns(row_pointer<T>(job.narrow_out, token) + head * job.narrow_out.head_stride, job.narrow_out, first, count,
                sum);
}

// The sum of the block's values, in a fixed order, in thread 0.
__device__ __forceinline__ float block_sum(float value, float* warps) {
  for (int step = 16; step > 0; step /= 2) value += __shfl_down_sync(kAllLanes, value, step);
  __syncthreads();
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  value = 0.0f;
  for (int w = 0; w < kThreads / 32; ++w) value += warps[w];
  return value;
}

// A block: one head, every slices-th run of tokens; dx, and its share of dr.
template <class T>
__global__ void __launch_bounds__(kThreads, ptx::kCapability >= 80 ? 3 : 2)
    per_head_backward_kernel(const __grid_constant__ Job job, int64_t slices) {
  __shared__ float warps[kThreads / 32];
  const int head = static_cast<int>(blockIdx.x % job.heads);
  const int64_t slice = blockIdx.x / job.heads;
  const int tiles = job.columns.tiles(), tile = static_cast<int>(threadIdx.x) % tiles, per_pass = kThreads / tiles;
  const int first = job.columns.first(tile), count = job.columns.count(tile);
  const int64_t begin = slice * per_pass + threadIdx.x / tiles;
  const int64_t end = static_cast<int>(threadIdx.x) < per_pass * tiles ? job.tokens : 0;  // some threads may be left
  for (int p0 = 0; p0 < job.pseudo; p0 += kPseudoStep) {
    float weight[kPseudoStep], sum[kPseudoStep] = {};
#pragma unroll
    for (int i = 0; i < kPseudoStep; ++i) {
      weight[i] = p0 + i < job.pseudo ? load_weight<T>(job.weights, job.pseudo, head * job.pseudo + p0 + i, 0) : 0.0f;
    }
    for (int64_t number = begin; number < end; number += slices * per_pass) {
      const Token token = token_at(job, number);
      const T* narrow = row_pointer<T>(job.narrow_in, token) + head * job.narrow_in.head_stride;
      const T* wide = row_pointer<T>(job.wide_in, token) + head * job.wide_in.head_stride;
      T* out = row_pointer<T>(job.wide_out, token) + head * job.wide_out.head_stride;
      const uint4 narrow_words = load_words(narrow, job.narrow_in, first, count);
      uint4 words[kPseudoStep] = {};
#pragma unroll
      for (int i = 0; i < kPseudoStep; ++i) {
        if (p0 + i < job.pseudo) {
          words[i] = load_words(wide + (p0 + i) * job.wide_in.pseudo_stride, job.wide_in, first, count);
        }
      }
      const Columns dy = columns_of<T>(narrow_words);
#pragma unroll
      for (int i = 0; i < kPseudoStep; ++i) {
        if (p0 + i >= job.pseudo) break;
        const Columns x = columns_of<T>(words[i]);
        Columns dx;
#pragma unroll
        for (int e = 0; e < kTileElems; ++e) {
          dx.value[e] = weight[i] * dy.value[e];
          sum[i] += dy.value[e] * x.value[e];
        }
        store_columns(out + (p0 + i) * job.wide_out.pseudo_stride, job.wide_out, first, count, dx);
      }
    }
#pragma unroll
    for (int i = 0; i < kPseudoStep; ++i) {
      const float total = block_sum(sum[i], warps);
      if (threadIdx.x == 0 && p0 + i < job.pseudo) {
        job.partials[slice * job.heads * job.pseudo + head * job.pseudo + p0 + i] = total;
      }
    }
  }
}

constexpr int kReduceElems = 32, kReduceWays = kThreads / kReduceElems;

// 32 elements of a weight gradient: each warp sums every eighth partial, warp 0 sums the warps.
template <class T>
__global__ void __launch_bounds__(kThreads) reduce_kernel(const __grid_constant__ ReduceJobs jobs) {
  __shared__ float ways[kReduceWays][kReduceElems];
  int64_t block = blockIdx.x;
  int j = 0;
  while (j + 1 < jobs.count) {
    const int64_t blocks = (int64_t{jobs.job[j].wide_count} * jobs.job[j].narrow + kReduceElems - 1) / kReduceElems;
    if (block < blocks) break;
    block -= blocks;
    ++j;
  }
  const ReduceJob& job = jobs.job[j];
  const int64_t elems = int64_t{job.wide_count} * job.narrow;
  const int64_t at = block * kReduceElems + threadIdx.x % kReduceElems;
  const int way = static_cast<int>(threadIdx.x) / kReduceElems;
  float sum = 0.0f;
  if (at < elems) {
#pragma unroll 8
    for (int64_t b = way; b < job.blocks; b += kReduceWays) sum += job.partials[b * elems + at];
  }
  ways[way][threadIdx.x % kReduceElems] = sum;
  __syncthreads();
  if (way != 0 || at >= elems) return;
  for (int w = 1; w < kReduceWays; ++w) sum += ways[w][threadIdx.x];
  const int row = job.wide_begin + static_cast<int>(at / job.narrow);
  const int64_t to = row / job.pseudo * job.out.head_stride + row % job.pseudo * job.out.pseudo_stride +
                     at % job.narrow * job.out.narrow_stride;
  if (job.out.is_float) {
    static_cast<float*>(job.out.data)[to] = sum;
  } else {
    static_cast<T*>(job.out.data)[to] = static_cast<T>(sum);
  }
}

}  // namespace

void launch_per_head_forward(DType dtype, const Job& job, cudaStream_t stream) {
  const auto kernel =
      dtype == DType::kFloat16 ? per_head_forward_kernel<__half> : per_head_forward_kernel<__nv_bfloat16>;
  launch(kernel, ceil_div(job.tokens * job.heads * job.columns.tiles(), kThreads), kThreads, 0, stream, job);
}

void launch_per_head_backward(DType dtype, const Job& job, int64_t slices, cudaStream_t stream) {
  const auto kernel =
      dtype == DType::kFloat16 ? per_head_backward_kernel<__half> : per_head_backward_kernel<__nv_bfloat16>;
  launch(kernel, slices * job.heads, kThreads, 0, stream, job, slices);
}

void launch_reduce(DType dtype, const ReduceJobs& jobs, cudaStream_t stream) {
  const auto kernel = dtype == DType::kFloat16 ? reduce_kernel<__half> : reduce_kernel<__nv_bfloat16>;
  int64_t blocks = 0;
  for (int j = 0; j < jobs.count; ++j) {
    blocks += ceil_div(int64_t{jobs.job[j].wide_count} * jobs.job[j].narrow, kReduceElems);
  }
  launch(kernel, blocks, kThreads, 0, stream, jobs);
}

}  // namespace plait::cuda::iha
