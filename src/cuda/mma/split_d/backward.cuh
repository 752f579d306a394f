// One block of the split_d backward: loads, scores by slices of the head dim, P and dS, gradients by columns.
// Called by backward_kernel.cuh.
#pragma once

#include "cuda/mma/backward/softmax.cuh"
#include "cuda/mma/split_d/backward_config.cuh"
#include "cuda/mma/split_d/columns.cuh"

namespace plait::cuda::mma {

template <class C>
struct SplitDBackward {
  using T = typename C::T;
  using Sum = typename C::Sum;
  using Storage = SplitDBackwardStorage<C>;
  using Gradient = float[C::kGradM][2 * C::kGroups][4];

  const BackwardParams& params;
  Storage& storage;
  int warp, lane;

  __device__ __forceinline__ uint32_t resident_first() const { return ptx::shared_address(&storage) + sizeof(Storage); }
  __device__ __forceinline__ uint32_t resident_second() const { return resident_first() + C::kResidentBytes; }
  __device__ __forceinline__ uint32_t stream_first(int step) const {
    return resident_second() + C::kResidentBytes + step % C::kStages * C::kStreamBytes;
  }
  __device__ __forceinline__ uint32_t stream_second(int step) const {
    return resident_second() + C::kResidentBytes + (C::kStages + step % C::kSecondStages) * C::kStreamBytes;
  }

  template <int kRows>
  __device__ __forceinline__ void load_tile(uint32_t target, const CanonicalTensor& tensor, const RowLayout& layout,
                                            int64_t offset, int first, int rows) const {
    using Loader = ChunkLoader<T, kRows, C::kThreads>;
    const int thread = static_cast<int>(threadIdx.x);
    if (tensor.dtype == DType::kFloat32) {  // dout
      Loader::load_float(target, layout, static_cast<const float*>(tensor.data) + offset, first, rows, C::kChunks,
                         thread);
    } else {
      Loader::load(target, layout, static_cast<const T*>(tensor.data) + offset, first, rows, C::kChunks, thread);
    }
  }
  template <int kCount>
  __device__ __forceinline__ void load_pairs(float2* target, const float2* pairs, int first, int rows) const {
    if (const int row = static_cast<int>(threadIdx.x); row < kCount) {
      ptx::cp_async_8(ptx::shared_address(target + row), pairs + first + row, first + row < rows);
    }
  }

  __device__ __forceinline__ void load_resident() const {
    const BlockState& state = storage.state;
    const AttentionProblem& p = params.problem;
    const AttentionTensors& t = params.tensors;
    const Work& work = state.work;
    const int first = work.tile * C::kResident, rows = state.resident_rows - first;
    if constexpr (C::kKeysResident) {
      load_tile<C::kResident>(resident_first(), t.k, params.k,
                              key_row_offset(p, t.k, work.sequence, work.head, 0, work.pass), first, rows);
      load_tile<C::kResident>(resident_second(), t.v, params.v,
                              key_row_offset(p, t.v, work.sequence, work.head, 0, work.pass), first, rows);
    } else {
      load_tile<C::kResident>(resident_first(), t.q, params.q,
                              query_offset(p, t.q, work.sequence, work.head, 0, work.pass), first, rows);
      load_tile<C::kResident>(resident_second(), t.dout, params.dout,
                              query_offset(p, t.dout, work.sequence, work.head, 0, 0), first, rows);
      load_pairs<C::kResident>(storage.row_pairs, params.row_pairs + state.pairs, first, state.resident_rows);
    }
  }

  // The stream tiles of a step: first (q, k) with what belongs to its rows, second (dO, v).
  template <bool kFirst, bool kSecond>
  __device__ __forceinline__ void load_stream(int step) const {
    const BlockState& state = storage.state;
    const AttentionTensors& t = params.tensors;
    const StreamTile at = stream_tile(state, step);
    const int first = at.tile * C::kStream, rows = state.stream_rows - first;
    const CanonicalTensor &one = C::kKeysResident ? t.q : t.k, &two = C::kKeysResident ? t.dout : t.v;
    if constexpr (kFirst) {
      load_tile<C::kStream>(stream_first(step), one, C::kKeysResident ? params.q : params.k,
                            state.first + at.head * one.head_stride, first, rows);
    }
    if constexpr (kSecond) {
      load_tile<C::kStream>(stream_second(step), two, C::kKeysResident ? params.dout : params.v,
                            state.second + at.head * two.head_stride, first, rows);
    }
    if constexpr (kFirst && C::kKeysResident) {
      const int64_t rows_per_head = params.problem.seqlen_q * params.problem.rows_per_position();
      load_pairs<C::kStream>(storage.row_pairs + step % C::kStages * C::kStream,
                             params.row_pairs + state.pairs + at.head * rows_per_head, first, state.stream_rows);
    }
  }

  // Which of the warps of its score tile this is, and its score tile's part of the resident rows and of the exchange.
  __device__ __forceinline__ int source() const { return warp % C::kSources; }
  __device__ __forceinline__ int score_tile() const { return warp / C::kSources; }
  __device__ __forceinline__ uint32_t exchange() const {
    return ptx::shared_address(storage.exchange) + score_tile() * Sum::kShape.bytes();
  }

  // This warp's slice of q k^T (the first half of the sources) or of dO v^T.
  __device__ __forceinline__ void multiply_scores(typename Sum::Partial& partial, int step) const {
    const bool second = source() >= C::kSlices;
    const uint32_t resident =
        (second ? resident_second() : resident_first()) + score_tile() * C::kTile.warp_resident() * kChunkRowBytes;
    const uint32_t stream = second ? stream_second(step) : stream_first(step);
    multiply_slice<T, C::kSlices, C::kRows, C::kKeys>(partial, C::kKeysResident ? stream : resident,
                                                      C::kKeysResident ? resident : stream, source() % C::kSlices,
                                                      ((second ? params.v.dim : params.q.dim) + 31) / 32, lane);
  }

  // P and dS of the kept blocks, in place of their sums. Between barriers; `partial` went through Sum::put().
  __device__ __forceinline__ void differentiate(const typename Sum::Partial& partial, int step) const {
    if (source() >= Sum::kTargets) return;
    const BlockState& state = storage.state;
    typename Sum::Kept s, dp;
    Sum::keep(s, partial, source());
    Sum::keep(dp, partial, source());
    Sum::template add<C::kSlices>(s, exchange(), source(), 0, lane);
    Sum::template add<C::kSlices>(dp, exchange(), source(), C::kSlices, lane);
    __syncwarp();  // the sums are read
    const int tile = stream_tile(state, step).tile, resident = score_tile() * C::kTile.warp_resident();
    const int row = (C::kKeysResident ? 0 : resident) + 16 * Sum::row_block(source()) + lane / 4;
    const int first_row = (C::kKeysResident ? tile * C::kStream : state.work.tile * C::kResident) + row;
    const int first_key = C::kKeysResident ? state.work.tile * C::kResident + resident : tile * C::kStream;
    const int key = first_key + 8 * Sum::column_block(source()) + lane % 4 * 2;
    const bool whole = tile >= state.whole.begin && tile < state.whole.end;
    const float2* pairs = storage.row_pairs + (C::kKeysResident ? step % C::kStages * C::kStream : 0) + row;
    const uint32_t to = exchange() + source() * Sum::kTargetBytes + lane * 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 pair = pairs[8 * half];
      int lo = 0, hi = 0;
      if (!whole) {
        const int64_t r = first_row + 8 * half;
        const Interval seen = r < state.mask.row_count() ? state.mask.row(r) : Interval{};
        lo = static_cast<int>(seen.lo) - key, hi = static_cast<int>(seen.hi) - key;
      }
#pragma unroll
      for (int b = 0; b < Sum::kKept; ++b) {
        float probability[2], gradient[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const bool visible = whole || (8 * b + e >= lo && 8 * b + e < hi);
          float x = s[b][2 * half + e], slope = 1.0f;
          if (params.factor.inverse_softcap != 0.0f) {
            x = 1.0f - __fdividef(2.0f, ptx::exp2_approx(x * params.factor.inverse_softcap * (2.0f * kLog2e)) + 1.0f);
            slope = fmaf(-x, x, 1.0f);
          }
          const float probable = ptx::exp2_approx(fmaf(x, params.factor.log2, -pair.x));
          probability[e] = visible ? probable : 0.0f;
          gradient[e] = visible ? probable * (dp[b][2 * half + e] - pair.y) * slope : 0.0f;
        }
        const uint32_t at = to + b * 2 * C::kBlockBytes + half * 128;
        if constexpr (C::kKeysResident) ptx::store_shared_4(at, ptx::pack<T>(probability[0], probability[1]));
        ptx::store_shared_4(at + C::kBlockBytes, ptx::pack<T>(gradient[0], gradient[1]));
      }
    }
  }

  // Columns and rows of the gradients that this warp has.
  __device__ __forceinline__ int grad_warp() const { return warp % C::kGradWarps; }
  __device__ __forceinline__ int grad_row_warp() const { return warp / C::kGradWarps; }

  // dK (dQ), and dV.
  __device__ __forceinline__ void add_first(Gradient& gradient, int step) const {
    add_gradient(gradient, stream_first(step), C::kBlockBytes);
  }
  __device__ __forceinline__ void add_second(Gradient& gradient, int step) const {
    add_gradient(gradient, stream_second(step), 0);
  }

  // Operand A: P (block_bytes 0) or dS. Keys are its rows on side kKeysAlone, softmax rows on side kRows.
  __device__ __forceinline__ void add_gradient(Gradient& gradient, uint32_t stream, int block_bytes) const {
    const int across = C::kKeysResident ? lane / 8 % 2 : lane / 16;
    const int down = C::kKeysResident ? lane % 8 + lane / 16 * 8 : lane % 16;
    uint32_t scores = ptx::shared_address(storage.exchange) + block_bytes + across * C::kNextBlock + down * 16;
    // The row warps' parts of the resident side are whole score tiles, or there is one of both.
    static_assert(C::kTile.row_warps == 1 || C::kScoreTiles == C::kTile.row_warps || C::kScoreTiles == 1);
    if constexpr (C::kTile.row_warps > 1) {
      constexpr int kSecond = C::kKeysResident ? C::score_block(0, 2 * C::kGradM) : C::score_block(C::kGradM, 0);
      scores += grad_row_warp() * kSecond;
    }
    multiply_groups<T, C::kStream / 16, C::kStream, C::kGradWarps>(
        gradient,
        [&](uint32_t(&a)[4], int i, int k) {
          if constexpr (C::kKeysResident) {
            ptx::ldmatrix_x4_trans(a, scores + C::score_block(k, 2 * i));
          } else {
            ptx::ldmatrix_x4(a, scores + C::score_block(i, 2 * k));
          }
        },
        stream, grad_warp(), lane);
  }

  // A gradient's rows, times `factor`. `tensor`: of dq, dk or dv.
  __device__ __forceinline__ void store(const CanonicalTensor& tensor, int64_t dim, bool vectors,
                                        const Gradient& gradient, float factor) const {
    const AttentionProblem& p = params.problem;
    const Work& work = storage.state.work;
    const RowLayout layout{
        0, 0, tensor.dim_stride, 1, static_cast<int32_t>(dim), vectors ? LoadPath::kRows : LoadPath::kAny};
#pragma unroll
    for (int i = 0; i < 2 * C::kGradM; ++i) {
      const int row = work.tile * C::kResident + grad_row_warp() * C::kGradM * 16 + 8 * i + lane / 4;
      if (row >= storage.state.resident_rows) continue;
      const int64_t offset = C::kKeysResident ? key_row_offset(p, tensor, work.sequence, work.head, row, work.pass)
                                              : query_offset(p, tensor, work.sequence, work.head, row, work.pass);
      store_columns<C::kGradWarps>(static_cast<T*>(tensor.data) + offset, layout, gradient[i / 2], i % 2 * 2, factor,
                                   grad_warp(), lane);
    }
  }
};

}  // namespace plait::cuda::mma
