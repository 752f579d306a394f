// merge_states and its gradients: a warp per row; the parts' views travel as kernel parameters, no workspace.
// Called through naive.hpp.
#include <algorithm>
#include <string>

#include "cuda/naive/naive.hpp"
#include "cuda/naive/tile.cuh"
#include "cuda/runtime/launch.cuh"

namespace plait::cuda::naive {
namespace {

constexpr int kLanes = 32;
constexpr int kRowsPerBlock = kThreads / kLanes;
constexpr int kGradParts = 64;  // of one backward launch

struct Part {
  CanonicalTensor out;
  RowTensor lse;
};
struct Parts {
  int count;
  Part part[kMostMergeParts];
};
struct GradParts {
  int count;
  Part part[kGradParts], grad[kGradParts];
};
constexpr size_t kParameterBytes = 32764;  // of a kernel, sm_70 and newer
static_assert(sizeof(Parts) + 1024 < kParameterBytes && sizeof(GradParts) + 1024 < kParameterBytes);

struct MergeShape {
  int64_t batch, heads, rows, dim;
};
struct Place {
  int64_t batch, head, row;
  bool inside;
};

// The row of the thread's warp.
__device__ Place own_row(const MergeShape& s) {
  const int64_t index = int64_t{blockIdx.x} * kRowsPerBlock + threadIdx.x / kLanes;
  return {index / (s.heads * s.rows), index / s.rows % s.heads, index % s.rows, index < s.batch * s.heads * s.rows};
}
__device__ int64_t offset(const CanonicalTensor& t, const Place& at) {
  return at.batch * t.batch_stride + at.head * t.head_stride + at.row * t.seq_stride;
}
__device__ float& lse_at(const RowTensor& t, const Place& at) {
  return static_cast<float*>(t.data)[at.batch * t.batch_stride + at.head * t.head_stride + at.row * t.row_stride];
}
__device__ float element(const CanonicalTensor& t, int64_t row, int64_t d) {
  return load(t.data, t.dtype, row + d * t.dim_stride);
}
__device__ float weight_of(float part, float merged) { return part == -INFINITY ? 0.0f : expf(part - merged); }

__device__ float merged_lse(const Parts& parts, const Place& at) {
  float max = -INFINITY;
  for (int i = 0; i < parts.count; ++i) {
    const float lse = lse_at(parts.part[i].lse, at);
    max = isnan(lse) || isnan(max) ? NAN : fmaxf(max, lse);
  }
  if (!isfinite(max)) return max;  // all empty, or a NaN or +inf that came in
  float sum = 0.0f;
  for (int i = 0; i < parts.count; ++i) sum += expf(lse_at(parts.part[i].lse, at) - max);
  return max + logf(sum);
}

__global__ void __launch_bounds__(kThreads)
    merge_kernel(const __grid_constant__ Parts parts, const __grid_constant__ Part result,
                 const __grid_constant__ MergeShape shape) {
  const Place at = own_row(shape);
  if (!at.inside) return;
  const float merged = merged_lse(parts, at);
  const int64_t to = offset(result.out, at);
  for (int64_t d = threadIdx.x % kLanes; d < shape.dim; d += kLanes) {
    float sum = 0.0f;
    for (int i = 0; i < parts.count; ++i) {
      const float weight = weight_of(lse_at(parts.part[i].lse, at), merged);
      if (weight == 0.0f) continue;  // an empty part may hold anything
      sum = fmaf(weight, element(parts.part[i].out, offset(parts.part[i].out, at), d), sum);
    }
    store(result.out.data, result.out.dtype, to + d * result.out.dim_stride, sum);
  }
  if (threadIdx.x % kLanes == 0) lse_at(result.lse, at) = merged;
}

__device__ float warp_sum(float value) {
  for (int step = kLanes / 2; step > 0; step /= 2) value += __shfl_xor_sync(kAllLanes, value, step);
  return value;
}

// d out_i = w_i dout;  d lse_i = w_i (dout . out_i - dout . out + dlse), w_i = exp(lse_i - lse).
__global__ void __launch_bounds__(kThreads)
    merge_backward_kernel(const __grid_constant__ GradParts parts, const __grid_constant__ Part result,
                          const __grid_constant__ Part grad, const __grid_constant__ MergeShape shape) {
  const Place at = own_row(shape);
  if (!at.inside) return;
  const int lane = threadIdx.x % kLanes;
  const int64_t out = offset(result.out, at), dout = offset(grad.out, at);
  const float merged = lse_at(result.lse, at), from_lse = grad.lse.data != nullptr ? lse_at(grad.lse, at) : 0.0f;
  float mean = 0.0f;  // dout . out
  for (int64_t d = lane; d < shape.dim; d += kLanes) {
    mean = fmaf(element(grad.out, dout, d), element(result.out, out, d), mean);
  }
  mean = warp_sum(mean);
  for (int i = 0; i < parts.count; ++i) {
    const Part &part = parts.part[i], &to = parts.grad[i];
    const float weight = weight_of(lse_at(part.lse, at), merged);
    const int64_t from_row = offset(part.out, at), to_row = offset(to.out, at);
    float dot = 0.0f;
    for (int64_t d = lane; d < shape.dim; d += kLanes) {
      const float gradient = element(grad.out, dout, d);
      if (weight != 0.0f) dot = fmaf(gradient, element(part.out, from_row, d), dot);
      store(to.out.data, to.out.dtype, to_row + d * to.out.dim_stride, weight == 0.0f ? 0.0f : weight * gradient);
    }
    dot = warp_sum(dot);
    if (lane == 0) lse_at(to.lse, at) = weight == 0.0f ? 0.0f : weight * (dot - mean + from_lse);
  }
}

// [batch, heads, rows, dim] of a view in the layout of the call.
CanonicalTensor rows_of(const MergeArgs& args, const TensorView& v) {
  if (args.packed) return {v.data, v.dtype, 0, v.stride[1], v.stride[0], 0, v.stride[2]};
  const bool bhsd = args.layout == Layout::kBhsd;
  return {v.data, v.dtype, v.stride[0], v.stride[bhsd ? 1 : 2], v.stride[bhsd ? 2 : 1], 0, v.stride[3]};
}
RowTensor lse_of(const TensorView& v) {
  if (v.rank == 2) return {v.data, v.dtype, 0, v.stride[0], v.stride[1]};
  return {v.data, v.dtype, v.stride[0], v.stride[1], v.stride[2]};
}
Part part_of(const MergeArgs& args, const TensorView& out, const TensorView& lse) {
  return {rows_of(args, out), lse_of(lse)};
}
MergeShape shape_of(const MergeArgs& args, const TensorView& out) {
  if (args.packed) return {1, out.shape[1], out.shape[0], out.shape[2]};
  const bool bhsd = args.layout == Layout::kBhsd;
  return {out.shape[0], out.shape[bhsd ? 1 : 2], out.shape[bhsd ? 2 : 1], out.shape[3]};
}
int64_t blocks_of(const MergeShape& s) { return (s.batch * s.heads * s.rows + kRowsPerBlock - 1) / kRowsPerBlock; }

}  // namespace

void merge_states(const MergeArgs& args, const AttentionOutputs& outputs, cudaStream_t stream) {
  if (args.parts > kMostMergeParts) {
    throw Error(ErrorCode::kUnsupported, "outs",
                "got " + std::to_string(args.parts) + " parts, a launch takes at most " +
                    std::to_string(kMostMergeParts) + " on a GPU; merge groups of them first");
  }
  Parts parts{};
  parts.count = static_cast<int>(args.parts);
  for (int i = 0; i < parts.count; ++i) parts.part[i] = part_of(args, args.outs[i], args.lses[i]);
  const MergeShape shape = shape_of(args, outputs.out);
  launch(merge_kernel, blocks_of(shape), kThreads, 0, stream, parts, part_of(args, outputs.out, outputs.lse), shape);
}

void merge_states_backward(const MergeArgs& args, const AttentionOutputs& outputs, const TensorView& dout,
                           const TensorView* dlse, const TensorView* douts, const TensorView* dlses,
                           cudaStream_t stream) {
  const MergeShape shape = shape_of(args, outputs.out);
  const Part result = part_of(args, outputs.out, outputs.lse);
  const Part grad{rows_of(args, dout), dlse != nullptr ? lse_of(*dlse) : RowTensor{}};
  for (int64_t first = 0; first < args.parts; first += kGradParts) {
    GradParts parts{};
    parts.count = static_cast<int>(std::min<int64_t>(kGradParts, args.parts - first));
    for (int i = 0; i < parts.count; ++i) {
      parts.part[i] = part_of(args, args.outs[first + i], args.lses[first + i]);
      parts.grad[i] = part_of(args, douts[first + i], dlses[first + i]);
    }
    launch(merge_backward_kernel, blocks_of(shape), kThreads, 0, stream, parts, result, grad, shape);
  }
}

}  // namespace plait::cuda::naive
