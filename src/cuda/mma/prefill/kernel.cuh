// The prefill kernel: a block takes one tile of query rows of one head through all keys that they see.
// Called by launch.cuh.
#pragma once

#include "cuda/mma/prefill/epilogue.cuh"

namespace plait::cuda::mma {

// kChoice: which of the bucket's tiles.
template <class T, int kHeadDim, int kChoice>
__global__ void __launch_bounds__(catalog::prefill_tiles(kHeadDim)[kChoice].threads(),
                                  catalog::prefill_tiles(kHeadDim)[kChoice].blocks_per_multiprocessor)
    prefill_kernel(const __grid_constant__ PrefillParams params) {
  constexpr catalog::PrefillTile kTile = catalog::prefill_tiles(kHeadDim)[kChoice];
  using Mainloop = PrefillMainloop<T, kTile>;
  extern __shared__ __align__(128) char shared[];
  auto& storage = *reinterpret_cast<PrefillStorage<T, kTile>*>(shared);
  const AttentionProblem& problem = params.problem;
  const AttentionTensors& tensors = params.tensors;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  const Mainloop mainloop{params, storage, warp, lane};
  {
    PrefillWork work = find_work(problem, tensors, params.order, params.order.place(blockIdx.x), kTile.rows());
    if (work.tile < 0) return;
    mainloop.load_queries(work, 0);  // on their way while the keys are found
    const RowMask mask = RowMask::of(problem, work.sequence.q_len, work.sequence.kv_len);
    const int64_t row_begin = int64_t{work.tile} * kTile.rows();
    const int64_t row_end = min(mask.row_count(), row_begin + kTile.rows());
    find_keys(work, mask, row_begin, row_end);
    work.k_offset = key_row_offset(problem, tensors.k, work.sequence, work.head_kv, 0, 0);
    work.v_offset = key_row_offset(problem, tensors.v, work.sequence, work.head_kv, 0, 0);
    mainloop.start(work);
    for (int i = threadIdx.x; i < kTile.rows(); i += kTile.threads()) {
      storage.bounds[i] = row_bounds(mask, work, row_begin + i, row_end);
    }
    if (threadIdx.x == 0) storage.work = work;
  }
  __syncthreads();

  typename Mainloop::Output out{};
  SoftmaxRows<Mainloop::kRows> softmax;
  mainloop.run(out, softmax);
  __syncwarp();
  const PrefillWork& work = storage.work;
  const int64_t first_row = int64_t{work.tile} * kTile.rows() + warp * kTile.warp_rows;
  const int64_t rows_left = work.sequence.q_len * problem.rows_per_position() - first_row;
  store_output<T, kTile.head_dim>(
      out, softmax, storage.q + warp * kTile.warp_rows * kTile.head_dim,
      OutputRows{params, work, first_row, static_cast<int>(min(rows_left, int64_t{kTile.warp_rows}))}, lane);
}

}  // namespace plait::cuda::mma
