// delta = dO . O - dLSE per softmax row: one read of dO and O, at the speed of memory.
// Called through aux.hpp. A row is read by 2^n lanes, 16 bytes each at a time where its layout allows.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/aux/aux.hpp"
#include "cuda/common/rows.cuh"
#include "cuda/common/softmax.cuh"
#include "cuda/ptx/level.cuh"
#include "cuda/runtime/launch.cuh"

namespace plait::cuda::aux {
namespace {

constexpr int kThreads = 256;
// Enough loads in flight; bounds the registers. Turing has room for 1024 threads.
constexpr int kBlocksPerSm = ptx::kCapability >= 80 ? 5 : 4;
constexpr int kRowsPerBlock = 128;  // of one head
constexpr int kVectorBytes = 16;

__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(float x) { return x; }

template <class T>
struct alignas(kVectorBytes) Vector {
  static constexpr int kElems = kVectorBytes / sizeof(T);
  T elems[kElems];
};

template <class T>
__device__ __forceinline__ Vector<T> load(const T* from) {
  return *reinterpret_cast<const Vector<T>*>(from);
}

// This block's share of the bytes to be cleared.
__device__ __forceinline__ void clear_share(const DeltaExtras& extras) {
  constexpr int64_t kBlockVectors = 1024;  // of 16 bytes, at a time
  const int64_t vectors = extras.zeroed_bytes / kVectorBytes;
  auto* to = reinterpret_cast<float4*>(extras.zeroed);
  for (int64_t first = blockIdx.x * kBlockVectors; first < vectors; first += gridDim.x * kBlockVectors) {
#pragma unroll
    for (int i = 0; i < kBlockVectors / kThreads; ++i) {
      const int64_t at = first + i * kThreads + threadIdx.x;
      if (at < vectors) to[at] = float4{};
    }
  }
}

// A lane's share of dO . O of one row.
template <class T>
__device__ float strided_dot(const AttentionTensors& t, int64_t out_at, int64_t dout_at, int dim, int lane, int lanes) {
  const T* out = static_cast<const T*>(t.out.data) + out_at;
  const T* dout = static_cast<const T*>(t.dout.data) + dout_at;
  float sum = 0.0f;
  for (int d = lane; d < dim; d += lanes) {
    sum = fmaf(to_float(out[d * t.out.dim_stride]), to_float(dout[d * t.dout.dim_stride]), sum);
  }
  return sum;
}

// Rows past cu_seqlens_q[batch] belong to no sequence.
__device__ int64_t used_rows(const AttentionProblem& p, const AttentionTensors& t) {
  return (p.packed ? clamped(t.cu_seqlens_q[p.batch], 0, p.seqlen_q) : p.seqlen_q) * p.rows_per_position();
}

__device__ __forceinline__ int64_t row_offset(const CanonicalTensor& t, int64_t batch, int64_t head, int64_t row,
                                              int64_t per) {
  const int64_t base = batch * t.batch_stride + head * t.head_stride;
  if (per == 1) return base + row * t.seq_stride;  // spares a division, which costs more than the row's dot product
  return base + row / per * t.seq_stride + row % per * t.pseudo_stride;
}

// kLanes lanes a row, 16 bytes each and as often as the row needs it; 0: by element, 32 lanes.
template <class T, int kLanes>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    delta_kernel(const __grid_constant__ AttentionProblem p, const __grid_constant__ AttentionTensors t, float* delta,
                 const __grid_constant__ DeltaExtras extras, unsigned blocks_per_head) {
  constexpr int kRowLanes = kLanes == 0 ? 32 : kLanes, kStep = kThreads / kRowLanes;
  // Rows of a thread whose loads are in flight together.
  constexpr int kTogether = kLanes == 0 || kStep == kRowsPerBlock ? 1 : 2;
  const int64_t per = p.rows_per_position(), rows = p.seqlen_q * per, used = used_rows(p, t);
  const unsigned index = blockIdx.x / blocks_per_head, heads = static_cast<unsigned>(p.heads_q);
  const int64_t batch = index / heads, head = index % heads;
  const int64_t first = int64_t{blockIdx.x % blocks_per_head} * kRowsPerBlock;
  const int64_t end = min(first + kRowsPerBlock, rows), readable = min(end, used);
  const int lane = static_cast<int>(threadIdx.x) % kRowLanes;
  const float* lse = static_cast<const float*>(t.lse.data) + batch * t.lse.batch_stride + head * t.lse.head_stride;
  const float* dlse = static_cast<const float*>(t.dlse.data) + batch * t.dlse.batch_stride + head * t.dlse.head_stride;
  clear_share(extras);
  // Every lane of a warp takes every turn: the sums below need them all. Rows past `used` may hold NaN.
#pragma unroll 1
  for (int64_t group = first + threadIdx.x / kRowLanes; group - threadIdx.x / kRowLanes < end;
       group += kTogether * kStep) {
    float row_lse[kTogether], sum[kTogether] = {};
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int64_t row = group + i * kStep;
      row_lse[i] = row < readable ? lse[row * t.lse.row_stride] : -INFINITY;
    }
    if constexpr (kLanes == 0) {
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int64_t row = group + i * kStep;
        if (row >= readable) continue;
        sum[i] = strided_dot<T>(t, row_offset(t.out, batch, head, row, per), row_offset(t.dout, batch, head, row, per),
                                static_cast<int>(p.head_dim_v), lane, kRowLanes);
      }
    } else {
      constexpr int kElems = Vector<T>::kElems;
      for (int d = lane * kElems; d < p.head_dim_v; d += kLanes * kElems) {
        Vector<T> out[kTogether] = {}, dout[kTogether] = {};
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          const int64_t row = group + i * kStep;
          if (row >= readable) continue;
          out[i] = load(static_cast<const T*>(t.out.data) + row_offset(t.out, batch, head, row, per) + d);
          dout[i] = load(static_cast<const T*>(t.dout.data) + row_offset(t.dout, batch, head, row, per) + d);
        }
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
#pragma unroll
          for (int e = 0; e < kElems; ++e) sum[i] = fmaf(to_float(out[i].elems[e]), to_float(dout[i].elems[e]), sum[i]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
#pragma unroll
      for (int distance = kRowLanes / 2; distance > 0; distance /= 2) {
        sum[i] += __shfl_xor_sync(kAllLanes, sum[i], distance);
      }
      const int64_t row = group + i * kStep;
      if (row >= end || lane != 0) continue;
      const bool empty = row_lse[i] == -INFINITY;
      if (t.dlse.data != nullptr && !empty) sum[i] -= dlse[row * t.dlse.row_stride];
      const float value = empty ? 0.0f : sum[i];
      delta[index * rows + row] = value;
      if (extras.row_pairs != nullptr) {
        extras.row_pairs[index * rows + row] = {empty ? INFINITY : row_lse[i] * kLog2e, value};
      }
    }
  }
}

bool takes_vectors(const CanonicalTensor& t, int64_t dim) {
  const int64_t elems = kVectorBytes / dtype_bytes(t.dtype);
  return t.dim_stride == 1 && dim % elems == 0 && reinterpret_cast<uintptr_t>(t.data) % kVectorBytes == 0 &&
         t.batch_stride % elems == 0 && t.head_stride % elems == 0 && t.seq_stride % elems == 0 &&
         t.pseudo_stride % elems == 0;
}

template <class T, int kLanes>
void launch_lanes(const AttentionProblem& p, const AttentionTensors& t, float* delta, const DeltaExtras& extras,
                  cudaStream_t stream) {
  const int64_t rows = p.seqlen_q * p.rows_per_position(), blocks = (rows + kRowsPerBlock - 1) / kRowsPerBlock;
  launch(delta_kernel<T, kLanes>, (p.packed ? 1 : p.batch) * p.heads_q * blocks, kThreads, 0, stream, p, t, delta,
         extras, static_cast<unsigned>(blocks));
}

template <class T>
void run(const AttentionProblem& p, const AttentionTensors& t, float* delta, const DeltaExtras& extras,
         cudaStream_t stream) {
  constexpr int64_t kElems = Vector<T>::kElems;
  if (!takes_vectors(t.out, p.head_dim_v) || !takes_vectors(t.dout, p.head_dim_v)) {
    launch_lanes<T, 0>(p, t, delta, extras, stream);
  } else if (p.head_dim_v <= 4 * kElems) {
    launch_lanes<T, 4>(p, t, delta, extras, stream);
  } else if (p.head_dim_v <= 8 * kElems) {
    launch_lanes<T, 8>(p, t, delta, extras, stream);
  } else {
    launch_lanes<T, 16>(p, t, delta, extras, stream);
  }
}

}  // namespace

void launch_delta(const AttentionProblem& problem, const AttentionTensors& tensors, float* delta, cudaStream_t stream,
                  const DeltaExtras& extras) {
  switch (problem.out_dtype) {
    case DType::kFloat16:
      return run<__half>(problem, tensors, delta, extras, stream);
    case DType::kBFloat16:
      return run<__nv_bfloat16>(problem, tensors, delta, extras, stream);
    default:
      return run<float>(problem, tensors, delta, extras, stream);
  }
}

}  // namespace plait::cuda::aux
