// Merges the results of key ranges: O = sum_i weight_i O_i, the weights from their LSEs and the sink.
// Called through merge_ranges.hpp.
#include <algorithm>

#include "cuda/aux/merge_ranges.hpp"
#include "cuda/common/divisor.hpp"
#include "cuda/common/element.cuh"
#include "cuda/common/loader.cuh"
#include "cuda/common/rows.cuh"
#include "cuda/common/softmax.cuh"
#include "cuda/ptx/grid.cuh"
#include "cuda/runtime/launch.cuh"

namespace plait::cuda::aux {
namespace {

constexpr int kThreads = 256, kColumns = 8;  // columns of a thread; head dims of tensor cores are multiples of it
constexpr int kRangesAtOnce = 8;             // that a thread has under way
constexpr int64_t kMostLanes = 32;           // of a row

struct MergeParams {
  AttentionProblem problem;
  AttentionTensors tensors;
  RangeResults results;
  int lanes_log2;     // threads of a row, or of a column block of it
  int column_blocks;  // of a row
  unsigned blocks;    // column blocks of all rows
  int head_rows;      // of a head, or of heads that alternate
  bool vectors;       // O takes a thread's columns at once
  Divisor by_column_blocks, by_head_rows, by_group, by_heads;
};

// A row's reference (log2 units) and sum of weights relative to it, and a thread's columns of the weighted sum of O.
struct Merged {
  float reference = -FLT_MAX, sum = 0.0f;
  float out[kColumns] = {};
};

// Some ranges from `first` on. `lse`, `out`: the row's, and the thread's columns of it, in range `first`.
__device__ __forceinline__ void add_ranges(Merged& merged, int count, const float* lse, int64_t rows, const float* out,
                                           int64_t range_out) {
  float weight[kRangesAtOnce];
  float4 part[kRangesAtOnce][2];
  float highest = merged.reference;
#pragma unroll
  for (int i = 0; i < kRangesAtOnce; ++i) {
    weight[i] = -CUDART_INF_F;
    part[i][0] = part[i][1] = {};
    if (i >= count) continue;
    weight[i] = lse[i * rows] * kLog2e;
    part[i][0] = reinterpret_cast<const float4*>(out + i * range_out)[0];
    part[i][1] = reinterpret_cast<const float4*>(out + i * range_out)[1];
  }
#pragma unroll
  for (int i = 0; i < kRangesAtOnce; ++i) highest = fmaxf(highest, weight[i]);
  const float factor = ptx::exp2_approx(merged.reference - highest);
  merged.reference = highest;
  merged.sum *= factor;
#pragma unroll
  for (int c = 0; c < kColumns; ++c) merged.out[c] *= factor;
#pragma unroll
  for (int i = 0; i < kRangesAtOnce; ++i) {
    if (i >= count) break;
    const float w = ptx::exp2_approx(weight[i] - highest);
    merged.sum += w;
    if (w == 0.0f) continue;  // whatever lies there
    const float* columns = reinterpret_cast<const float*>(part[i]);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) merged.out[c] = fmaf(columns[c], w, merged.out[c]);
  }
}

__device__ __forceinline__ void store_columns(const MergeParams& params, int64_t offset, const float (&x)[kColumns]) {
  const CanonicalTensor& out = params.tensors.out;
  const DType dtype = params.problem.out_dtype;
  if (!params.vectors) {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) store(out.data, dtype, offset + i * out.dim_stride, x[i]);
  } else if (dtype == DType::kFloat32) {
    auto* to = reinterpret_cast<float4*>(static_cast<float*>(out.data) + offset);
    to[0] = make_float4(x[0], x[1], x[2], x[3]);
    to[1] = make_float4(x[4], x[5], x[6], x[7]);
  } else {
    uint32_t words[kColumns / 2];
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) {
      words[i] = dtype == DType::kFloat16 ? ptx::pack<__half>(x[2 * i], x[2 * i + 1])
                                          : ptx::pack<__nv_bfloat16>(x[2 * i], x[2 * i + 1]);
    }
    *reinterpret_cast<uint4*>(static_cast<uint16_t*>(out.data) + offset) =
        make_uint4(words[0], words[1], words[2], words[3]);
  }
}

__global__ void __launch_bounds__(kThreads) merge_kernel(const __grid_constant__ MergeParams params) {
  const AttentionProblem& p = params.problem;
  const AttentionTensors& t = params.tensors;
  const RangeResults& r = params.results;
  const int thread = static_cast<int>(threadIdx.x), lane = thread & ((1 << params.lanes_log2) - 1);
  const unsigned index = blockIdx.x * static_cast<unsigned>(kThreads >> params.lanes_log2) +
                         static_cast<unsigned>(thread >> params.lanes_log2);
  if (index >= params.blocks) return;
  const unsigned row = params.by_column_blocks.divide(index), block = index - row * params.column_blocks;
  const int column = ((static_cast<int>(block) << params.lanes_log2) + lane) * kColumns;
  const int dim = static_cast<int>(p.head_dim_v);
  if (column >= dim) return;
  const unsigned all_heads = params.by_head_rows.divide(row), in_head = row - all_heads * params.head_rows;
  const unsigned at = params.by_group.divide(in_head), batch = params.by_heads.divide(all_heads);
  const unsigned heads = static_cast<unsigned>(p.heads_q), group = static_cast<unsigned>(r.group);
  const unsigned head = all_heads * group - batch * heads + in_head - at * group;
  const float sink = p.has_sinks ? static_cast<const float*>(t.sinks)[head * t.sinks_stride] : -CUDART_INF_F;
  const Sequence sequence{batch, 0, p.seqlen_q, 0, 0, 0};
  const float *lse = r.lse + row, *out = r.out + int64_t{row} * dim + column;
  const int64_t range_out = r.rows * dim;
  Merged merged;
  ptx::wait_for_grid();
#pragma unroll 1
  for (int first = 0; first < r.count; first += kRangesAtOnce) {
    add_ranges(merged, r.count - first, lse, r.rows, out, range_out);
    lse += kRangesAtOnce * r.rows, out += kRangesAtOnce * range_out;
  }
  const RowResult result = finish_row(merged.reference, merged.sum, sink);
  if (column == 0 && t.lse.data != nullptr) {
    static_cast<float*>(t.lse.data)[lse_offset(p, t.lse, sequence, head, at)] = result.lse;
  }
#pragma unroll
  for (int c = 0; c < kColumns; ++c) merged.out[c] *= result.out_factor;
  store_columns(params, query_offset(p, t.out, sequence, head, at, 0) + column * t.out.dim_stride, merged.out);
}

}  // namespace

void merge_ranges(const RangeResults& results, const AttentionProblem& p, const AttentionTensors& t,
                  int compute_capability, cudaStream_t stream) {
  const int64_t columns = p.head_dim_v / kColumns, head_rows = p.seqlen_q * p.rows_per_position() * results.group;
  int lanes_log2 = 0;
  while (int64_t{1} << lanes_log2 < std::min(columns, kMostLanes)) ++lanes_log2;
  const int64_t lanes = int64_t{1} << lanes_log2, column_blocks = (columns + lanes - 1) / lanes;
  const int64_t blocks = results.rows * column_blocks;
  const bool vectors = row_layout(p, t.out, p.head_dim_v, dtype_bytes(p.out_dtype)).path != LoadPath::kAny;
  launch_dependent(
      merge_kernel, (blocks * lanes + kThreads - 1) / kThreads, kThreads, 0, compute_capability, stream,
      MergeParams{p, t, results, lanes_log2, static_cast<int>(column_blocks), static_cast<unsigned>(blocks),
                  static_cast<int>(head_rows), vectors, Divisor::of(column_blocks), Divisor::of(head_rows),
                  Divisor::of(results.group), Divisor::of(p.heads_q / results.group)});
}

}  // namespace plait::cuda::aux
