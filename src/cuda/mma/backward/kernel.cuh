// The backward kernel: one block owns a resident tile and walks the stream tiles that meet it.
// Called by launch.cuh.
#pragma once

#include "cuda/mma/backward/block.cuh"
#include "cuda/mma/backward/step.cuh"
#include "cuda/mma/backward/tile_io.cuh"

namespace plait::cuda::mma {

// RowPairs of `kCount` softmax rows from `first` on; rows past the end become 0.
template <int kCount, int kThreads>
__device__ __forceinline__ void load_row_pairs(uint32_t target, const float2* pairs, int first, int rows) {
  static_assert(kThreads % kCount == 0 || kCount % kThreads == 0);
#pragma unroll
  for (int i = 0; i < kCount; i += kThreads) {
    const int row = static_cast<int>(threadIdx.x) + i;
    if (kCount < kThreads && row >= kCount) return;
    ptx::cp_async_8(target + row * 8, pairs + first + row, first + row < rows);
  }
}

template <class C>
__device__ __forceinline__ void load_resident(const Place<C>& w, const BackwardParams& params,
                                              const BlockState& state) {
  using T = typename C::T;
  const AttentionProblem& p = params.problem;
  const AttentionTensors& t = params.tensors;
  using Loader = TileLoader<T, C::kResident, C::kHeadDim, C::kThreads>;
  const Work& work = state.work;
  const Sequence& s = work.sequence;
  const int first = work.tile * C::kResident, rows = state.resident_rows - first;
  const int thread = static_cast<int>(threadIdx.x);
  const uint32_t first_tile = w.shared + C::kFirstBytes, second_tile = w.shared + C::kSecondBytes;
  if constexpr (C::kKeysResident) {
    Loader::load(first_tile, params.k,
                 static_cast<const T*>(t.k.data) + key_row_offset(p, t.k, s, work.head, 0, work.pass), first, rows,
                 thread);
    Loader::load(second_tile, params.v,
                 static_cast<const T*>(t.v.data) + key_row_offset(p, t.v, s, work.head, 0, work.pass), first, rows,
                 thread);
  } else {
    Loader::load(first_tile, params.q,
                 static_cast<const T*>(t.q.data) + query_offset(p, t.q, s, work.head, 0, work.pass), first, rows,
                 thread);
    if (t.dout.dtype == DType::kFloat32) {
      load_float_tile<T, C::kResident, C::kHeadDim, C::kThreads>(
          second_tile, params.dout,
          static_cast<const float*>(t.dout.data) + query_offset(p, t.dout, s, work.head, 0, 0), first, rows);
    } else {
      Loader::load(second_tile, params.dout,
                   static_cast<const T*>(t.dout.data) + query_offset(p, t.dout, s, work.head, 0, 0), first, rows,
                   thread);
    }
    load_row_pairs<C::kResident, C::kThreads>(w.row_tile(0), params.row_pairs + state.pairs, first,
                                              state.resident_rows);
  }
}

template <class C>
__device__ __forceinline__ void load_stream(const Place<C>& w, const BackwardParams& params, const BlockState& state,
                                            int step) {
  using T = typename C::T;
  const AttentionTensors& t = params.tensors;
  using Loader = TileLoader<T, C::kStream, C::kHeadDim, C::kThreads>;
  const StreamTile at = stream_tile(state, step);
  const int head = at.head, first = at.tile * C::kStream, rows = state.stream_rows - first;
  const int thread = static_cast<int>(threadIdx.x);
  const CanonicalTensor& first_tensor = C::kKeysResident ? t.q : t.k;
  const CanonicalTensor& second_tensor = C::kKeysResident ? t.dout : t.v;
  const RowLayout& first_layout = C::kKeysResident ? params.q : params.k;
  const RowLayout& second_layout = C::kKeysResident ? params.dout : params.v;
  const T* first_data = static_cast<const T*>(first_tensor.data) + state.first + head * first_tensor.head_stride;
  const int64_t second_offset = state.second + head * second_tensor.head_stride;
  const T* second_data = static_cast<const T*>(second_tensor.data) + second_offset;
  if (params.plain_stream) {  // one branch
    Loader::load_rows(w.stream_first(step), first_layout, Loader::own_chunk(first_layout, first_data, first, thread),
                      rows, thread);
    Loader::load_rows(w.stream_second(step), second_layout,
                      Loader::own_chunk(second_layout, second_data, first, thread), rows, thread);
  } else {
    Loader::load_any(w.stream_first(step), first_layout, first_data, first, rows, thread);
    if (C::kKeysResident && t.dout.dtype == DType::kFloat32) {
      load_float_tile<T, C::kStream, C::kHeadDim, C::kThreads>(
          w.stream_second(step), second_layout, static_cast<const float*>(t.dout.data) + second_offset, first, rows);
    } else {
      Loader::load_any(w.stream_second(step), second_layout, second_data, first, rows, thread);
    }
  }
  if constexpr (C::kKeysResident) {
    const int64_t rows_per_head = params.problem.seqlen_q * params.problem.rows_per_position();
    load_row_pairs<C::kStream, C::kThreads>(w.row_tile(step), params.row_pairs + state.pairs + head * rows_per_head,
                                            first, state.stream_rows);
  }
}

// Gradients go through the resident tiles' shared memory to rows of 16 bytes.
template <class C>
__device__ __forceinline__ void store_gradients(const Place<C>& w, const BackwardParams& params, const Work& work,
                                                const Gradients<C>& sum) {
  using T = typename C::T;
  const AttentionProblem& p = params.problem;
  const AttentionTensors& t = params.tensors;
  constexpr int kM = C::kScoreM, kN = C::kGradN, kD = C::kHeadDim;
  const uint32_t first = w.shared + C::kFirstBytes, second = w.shared + C::kSecondBytes;
  __syncthreads();  // the resident tiles are not read any more
  round_to_tile<T, kM, kN, C::kWarpsS, kD>(first, w.r * C::kWarpRows, w.s, sum.first, static_cast<float>(p.scale));
  if constexpr (C::kKeysResident) {
    round_to_tile<T, kM, kN, C::kWarpsS, kD>(second, w.r * C::kWarpRows, w.s, sum.second, 1.0f);
  }
  __syncthreads();
  const int row = work.tile * C::kResident;
  if constexpr (C::kKeysResident) {
    store_tile<T, C::kResident, kD, C::kThreads>(
        first, key_rows(p, t.dk, work.sequence, work.head, work.pass, p.head_dim), row, params.vector_dk);
    store_tile<T, C::kResident, kD, C::kThreads>(
        second, key_rows(p, t.dv, work.sequence, work.head, work.pass, p.head_dim_v), row, params.vector_dv);
  } else {
    store_tile<T, C::kResident, kD, C::kThreads>(
        first, query_rows(p, t.dq, work.sequence, work.head, work.pass, p.head_dim), row, params.vector_dq);
  }
}

// Three stages and two buffers of P and dS. Behind the barrier of a step: P and dS of all warps, and the next tile, are
// there, and everyone has left the step before, whose stage and buffer are free.
template <class C>
__device__ __forceinline__ void walk_with_one_barrier(const Place<C>& w, const HeldTiles<C>& held,
                                                      const BackwardParams& params, const BlockState& state,
                                                      Gradients<C>& sum) {
  FirstOperands<C> first;
  first.load(w, held, 0);
#pragma unroll 1
  for (int step = 0; step < state.steps; ++step) {
    score_step<C>(w, held, first, params, state, step, sum);
    ptx::cp_async_wait<0>();
    __syncthreads();
    float* dq = C::kAddsDq ? dq_tile<C>(params, state, step) : nullptr;
    if (step + 2 < state.steps) load_stream(w, params, state, step + 2);
    ptx::cp_async_commit();
    gather_step<C>(w, dq, step, sum, [&] { first.load(w, held, step + 1); });
  }
}

// One or two stages, one buffer of P and dS.
template <class C>
__device__ __forceinline__ void walk_with_two_barriers(Place<C> w, const HeldTiles<C>& held,
                                                       const BackwardParams& params, const BlockState& state,
                                                       Gradients<C>& sum) {
#pragma unroll 1
  for (int step = 0; step < state.steps; ++step) {
    // Addresses are made anew in each step: kept, they would cost spills.
    asm volatile("" : "+r"(w.shared), "+r"(w.warp), "+r"(w.r), "+r"(w.s));
    ptx::cp_async_wait<0>();
    __syncthreads();  // this step's tiles are there; everyone has finished the step before
    if (C::kStages == 2 && step + 1 < state.steps) {
      load_stream(w, params, state, step + 1);
      ptx::cp_async_commit();
    }
    FirstOperands<C> first;
    first.load(w, held, step);
    score_step<C>(w, held, first, params, state, step, sum);
    __syncthreads();  // dS (and P) of all warps are there
    float* dq = C::kAddsDq ? dq_tile<C>(params, state, step) : nullptr;
    gather_step<C>(w, dq, step, sum, [] {});
    if (C::kStages == 1 && step + 1 < state.steps) {
      __syncthreads();
      load_stream(w, params, state, step + 1);
      ptx::cp_async_commit();
    }
  }
}

template <class C>
__device__ __forceinline__ void run_block(const BackwardParams& params, unsigned char* shared) {
  BlockState& state = *reinterpret_cast<BlockState*>(shared + C::kStateBytes);
  if (threadIdx.x < 32) {
    const BlockState made = make_state<C>(params);
    if (threadIdx.x == 0) state = made;
  }
  __syncthreads();
  if (!state.work.exists) return;
  const int warp = static_cast<int>(threadIdx.x / 32);
  const Place<C> w{ptx::shared_address(shared), warp, warp / C::kWarpsS, warp % C::kWarpsS};
  Gradients<C> sum = {};
  if (state.steps > 0) {
    load_resident(w, params, state);
    load_stream(w, params, state, 0);
    ptx::cp_async_commit();
    if (C::kStages > 2 && state.steps > 1) load_stream(w, params, state, 1);
    ptx::cp_async_commit();
    ptx::cp_async_wait<1>();
    __syncthreads();
    HeldTiles<C> held;
    if constexpr (C::kHeld) held.load(w);
    if constexpr (C::kStages > 2) {
      walk_with_one_barrier<C>(w, held, params, state, sum);
    } else {
      walk_with_two_barriers<C>(w, held, params, state, sum);
    }
  }
  store_gradients(w, params, state.work, sum);
}

template <class C>
__global__ __launch_bounds__(C::kThreads, C::kTile.blocks_per_sm) void backward_kernel(
    const __grid_constant__ BackwardParams params) {
  if constexpr (C::kTile.smem_bytes() <= kArchSharedBytes) {
    extern __shared__ __align__(128) unsigned char shared[];
    run_block<C>(params, shared);
  }
}

}  // namespace plait::cuda::mma
