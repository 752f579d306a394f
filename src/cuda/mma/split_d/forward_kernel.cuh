// The split_d forward kernel: a block takes one tile of query rows of one head through all keys that they see.
// Called by forward_launch.cuh.
#pragma once

#include "cuda/mma/split_d/columns.cuh"
#include "cuda/mma/split_d/forward.cuh"
#include "cuda/mma/split_d/ranges.hpp"

namespace plait::cuda::mma {

struct SplitDParams : PrefillParams {
  KeyRanges ranges;
  unsigned blocks;  // of a range
};

// Leaves of the block's keys those of its range.
__device__ __forceinline__ void keep_range(PrefillWork& work, const KeyRanges& ranges, unsigned range) {
  if (ranges.keys == 0) return;
  const int64_t begin = int64_t{range} * ranges.keys, work_end = work.key_begin + work.key_count;
  const int64_t lo = max(work.key_begin, begin), hi = min(work_end, begin + ranges.keys);
  work.key_begin = lo;
  work.key_count = static_cast<int>(max(hi - lo, int64_t{0}));
}

// O and LSE. `range`: the outermost index of both. All threads, behind the key loop.
template <class T, catalog::SplitDTile kTile>
__device__ __forceinline__ void store_split_d_output(const SplitDForward<T, kTile>& loop,
                                                     const typename SplitDForward<T, kTile>::Output& out,
                                                     const typename SplitDForward<T, kTile>::Softmax& rows,
                                                     unsigned range) {
  auto& storage = loop.storage;
  const AttentionProblem& problem = loop.params.problem;
  const AttentionTensors& tensors = loop.params.tensors;
  const PrefillWork& work = storage.work;
  Sequence at = work.sequence;
  at.batch += int64_t{range} * problem.batch;
  const int lane = loop.lane, first_row = work.tile * kTile.rows;
  const int rows_left = static_cast<int>(work.sequence.q_len * problem.rows_per_position()) - first_row;
  __syncthreads();  // factors of the last step are read
  if (loop.keeps()) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = quad_sum(rows.sum[half]);
      if (lane % 4 != 0) continue;
      storage.maxima[loop.slot()][loop.kept_row() + 8 * half] = sum;
      if (loop.slot() == 0) storage.factors[loop.kept_row() + 8 * half] = rows.reference[half];
    }
  }
  __syncthreads();
  if (const int row = static_cast<int>(threadIdx.x); row < kTile.rows) {
    const bool sink_counts = problem.has_sinks && !work.sequence.tail;
    const float sink =
        sink_counts ? static_cast<const float*>(tensors.sinks)[work.head * tensors.sinks_stride] : -CUDART_INF_F;
    float sum = 0.0f;
    for (int slot = 0; slot < kTile.slots(); ++slot) sum += storage.maxima[slot][row];
    const RowResult result = finish_row(storage.factors[row], sum, sink);
    storage.factors[row] = result.out_factor;
    if (tensors.lse.data != nullptr && row < rows_left) {
      static_cast<float*>(tensors.lse.data)[lse_offset(problem, tensors.lse, at, work.head, first_row + row)] =
          result.lse;
    }
  }
  __syncthreads();
  using Loop = SplitDForward<T, kTile>;
#pragma unroll
  for (int i = 0; i < 2 * Loop::kBlocks; ++i) {
    const int row = loop.out_row() + 8 * i + lane / 4;
    if (row >= rows_left) continue;
    const int64_t offset = query_offset(problem, tensors.out, at, work.head, first_row + row, 0);
    const float factor = storage.factors[row];
    if (problem.out_dtype == DType::kFloat32) {
      store_columns<Loop::kOutWarps>(static_cast<float*>(tensors.out.data) + offset, loop.params.out, out[i / 2],
                                     i % 2 * 2, factor, loop.out_warp(), lane);
    } else {
      store_columns<Loop::kOutWarps>(static_cast<T*>(tensors.out.data) + offset, loop.params.out, out[i / 2], i % 2 * 2,
                                     factor, loop.out_warp(), lane);
    }
  }
}

template <class T, catalog::SplitDTile kTile>
__device__ __forceinline__ void run_split_d_forward(const SplitDParams& params, SplitDStorage<T, kTile>& storage) {
  const AttentionProblem& problem = params.problem;
  const AttentionTensors& tensors = params.tensors;
  const SplitDForward<T, kTile> loop{
      {params, storage}, static_cast<int>(threadIdx.x / 32), static_cast<int>(threadIdx.x % 32)};
  const unsigned range = params.ranges.count > 1 ? blockIdx.x / params.blocks : 0;
  {
    const PrefillOrder::Place place = params.order.place(blockIdx.x - range * params.blocks);
    PrefillWork work = find_work(problem, tensors, params.order, place, kTile.rows);
    if (work.tile < 0) return;
    const RowMask mask = RowMask::of(problem, work.sequence.q_len, work.sequence.kv_len);
    const int64_t row_begin = int64_t{work.tile} * kTile.rows;
    const int64_t row_end = min(mask.row_count(), row_begin + kTile.rows);
    find_keys(work, mask, row_begin, row_end);
    keep_range(work, params.ranges, range);
    work.k_offset = key_row_offset(problem, tensors.k, work.sequence, work.head_kv, 0, 0);
    work.v_offset = key_row_offset(problem, tensors.v, work.sequence, work.head_kv, 0, 0);
    loop.start(work);
    if (const int i = static_cast<int>(threadIdx.x); i < kTile.rows) {
      storage.bounds[i] = row_bounds(mask, work, row_begin + i, row_end);
    }
    if (threadIdx.x == 0) storage.work = work;
  }
  __syncthreads();
  typename SplitDForward<T, kTile>::Output out{};
  typename SplitDForward<T, kTile>::Softmax rows;
  loop.run(out, rows);
  store_split_d_output(loop, out, rows, range);
}

// kChoice: which of the bucket's tiles.
template <class T, int kOutDim, int kChoice>
__global__ void __launch_bounds__(catalog::split_d_tiles(kOutDim)[kChoice].threads(), 1)
    split_d_forward_kernel(const __grid_constant__ SplitDParams params) {
  constexpr catalog::SplitDTile kTile = catalog::split_d_tiles(kOutDim)[kChoice];
  extern __shared__ __align__(128) char split_d_shared[];
  if constexpr (kTile.smem_bytes(kChunkColumns) <= kArchSharedBytes) {
    run_split_d_forward(params, *reinterpret_cast<SplitDStorage<T, kTile>*>(split_d_shared));
  }
}

}  // namespace plait::cuda::mma
