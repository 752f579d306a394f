// The key loop of the split_d forward: scores by slices of the head dim, a softmax shared by all warps, O by columns.
// Called by forward_kernel.cuh.
#pragma once

#include "cuda/common/apply_mask.cuh"
#include "cuda/mma/split_d/exchange.cuh"
#include "cuda/mma/split_d/inputs.cuh"

namespace plait::cuda::mma {

template <class T, catalog::SplitDTile kTile>
struct SplitDForward : SplitDInputs<T, kTile> {
  using Inputs = SplitDInputs<T, kTile>;
  using Inputs::params, Inputs::storage, Inputs::kKeys;
  static constexpr int kSlices = kTile.slices();
  // Of O, a warp has kBlocks x 16 rows and every kOutWarps-th group of 16 columns.
  static constexpr int kOutWarps = catalog::kSplitDWarps / kTile.out_row_warps;
  static constexpr int kBlocks = kTile.rows / 16 / kTile.out_row_warps, kOutGroups = kTile.out_dim / 16 / kOutWarps;
  static constexpr int kScoreM = kTile.warp_rows / 16, kScoreN = kTile.warp_keys / 16;
  static constexpr int kColumns = kTile.probability_columns();
  static_assert(kOutGroups * 16 * kOutWarps == kTile.out_dim);
  using Sum = Exchange<kScoreM, 2 * kScoreN, kSlices>;
  using Output = float[kBlocks][2 * kOutGroups][4];
  using At = typename Inputs::At;

  struct Softmax {  // of the thread's two rows; meaningful in warps that keep scores
    float reference[2] = {-FLT_MAX, -FLT_MAX}, sum[2] = {0.0f, 0.0f};
  };

  int warp, lane;

  // Warps of one score tile have neighbouring numbers.
  __device__ __forceinline__ int slice() const { return warp % kSlices; }
  __device__ __forceinline__ int row_warp() const { return warp / kSlices % kTile.row_warps(); }
  __device__ __forceinline__ int key_warp() const { return warp / kSlices / kTile.row_warps(); }
  __device__ __forceinline__ bool keeps() const { return Sum::kTargets == kSlices || slice() < Sum::kTargets; }
  // First row and key of the kept scores, and which of the row's warps this is.
  __device__ __forceinline__ int kept_row() const {
    return row_warp() * kTile.warp_rows + Sum::row_block(slice()) * 16 + lane / 4;
  }
  __device__ __forceinline__ int kept_key() const {
    return key_warp() * kTile.warp_keys + Sum::column_block(slice()) * 8;
  }
  __device__ __forceinline__ int slot() const { return kept_key() / 8 / Sum::kKept; }
  __device__ __forceinline__ int out_warp() const { return warp % kOutWarps; }
  __device__ __forceinline__ int out_row() const { return warp / kOutWarps * kBlocks * 16; }
  __device__ __forceinline__ uint32_t exchange() const {
    return ptx::shared_address(storage.exchange) + warp / kSlices * kTile.exchange().bytes();
  }
  // Half of the warps do what has no order between two barriers in another one. Each shares its part of the
  // multiprocessor with one of the other half: while one waits, the other multiplies. It takes registers: not on GPUs
  // that use the tile for small head dims only, and beside 192 registers of O not around the scores.
  static constexpr bool kHalves = Inputs::kServesBucket, kSoftmaxHalves = kHalves && sizeof(Output) <= 160 * 4;
  __device__ __forceinline__ bool other_half() const { return warp >= catalog::kSplitDWarps / 2; }

  // The first queries and keys.
  __device__ __forceinline__ void start(const PrefillWork& work) const {
    if (work.key_count > 0) {
      Inputs::load_queries(work, 0);
      Inputs::load_keys(work, {});
    }
    ptx::cp_async_commit();
  }

  // All keys, behind start(). The scores of a tile are made before p v of the tile before, so that two barriers a tile
  // are enough. Keys and values take turns: keys arrive during p v, values during the scores.
  __device__ __forceinline__ void run(Output& out, Softmax& rows) const {
    const PrefillWork& work = storage.work;
    const int passes = static_cast<int>(params.problem.joint_passes()), key_count = work.key_count;
    if (key_count == 0) return;
    At now;
    bool raised = false;
    typename Sum::Kept scores;
    ptx::cp_async_wait<0>();
    __syncthreads();
#pragma unroll 1
    while (now.pass < passes) {
      typename Sum::Partial partial = {};
      if (kSoftmaxHalves && !now.first() && !other_half()) raised = soften(scores, rows);
      multiply_queries(partial);
      Sum::put(exchange(), partial, slice(), lane);
      if (kSoftmaxHalves && !now.first() && other_half()) raised = soften(scores, rows);
      if (keeps()) Sum::keep(scores, partial, slice());
      ptx::cp_async_wait<0>();
      // Partial scores, and probabilities, factors and values of the tile before, are there; the keys are read.
      const bool rescale = __syncthreads_or(raised);
      if (const At next = now.next(key_count); next.pass < passes) {
        if (next.pass != now.pass) Inputs::load_queries(work, next.pass);
        Inputs::load_keys(work, next);
      }
      ptx::cp_async_commit();
      if (!kHalves || !other_half()) take_scores(scores, now.key);
      if (!now.first()) add_values(out, rescale);
      if (kHalves && other_half()) take_scores(scores, now.key);
      ptx::cp_async_wait<0>();
      __syncthreads();  // maxima and the next keys are there; values, probabilities and factors are read
      Inputs::load_values(work, now);
      ptx::cp_async_commit();
      if (!kSoftmaxHalves) raised = soften(scores, rows);
      now = now.next(key_count);
    }
    if (kSoftmaxHalves) raised = soften(scores, rows);
    ptx::cp_async_wait<0>();
    const bool rescale = __syncthreads_or(raised);
    add_values(out, rescale);
  }

 private:
  // O += p v; before that O times the factors.
  __device__ __forceinline__ void add_values(Output& out, bool rescale) const {
    if (rescale) scale_output(out);
    using Fragment = tile::Fragments<kColumns>;
    const uint32_t probabilities =
        ptx::shared_address(storage.p) + out_row() * kColumns * 2 + Fragment::lane_bytes(lane);
    multiply_groups<T, kKeys / 16, kKeys, kOutWarps>(
        out, [&](uint32_t(&a)[4], int i, int k) { Fragment::load(a, probabilities, i, k); },
        ptx::shared_address(storage.v), out_warp(), lane);
  }

  __device__ __forceinline__ void scale_output(Output& out) const {
#pragma unroll
    for (int i = 0; i < 2 * kBlocks; ++i) {
      const float factor = storage.factors[out_row() + 8 * i + lane / 4];
#pragma unroll
      for (int n = 0; n < 2 * kOutGroups; ++n) {
        out[i / 2][n][i % 2 * 2] *= factor;
        out[i / 2][n][i % 2 * 2 + 1] *= factor;
      }
    }
  }

  // This warp's slice of q k^T.
  __device__ __forceinline__ void multiply_queries(typename Sum::Partial& partial) const {
    multiply_slice<T, kSlices, kTile.rows, kKeys>(
        partial, Inputs::queries() + row_warp() * kTile.warp_rows * kChunkRowBytes,
        Inputs::keys() + key_warp() * kTile.warp_keys * kChunkRowBytes, slice(), (params.q.dim + 31) / 32, lane);
  }

  // The whole scores of this warp's blocks.
  __device__ __forceinline__ void take_scores(typename Sum::Kept& scores, int first_key) const {
    if (!keeps()) return;
    Sum::template add<Sum::kParts>(scores, exchange(), slice(), 0, lane);
    find_highest(scores, first_key);
  }

  // Products become scores, and the highest of each row goes to `maxima`.
  __device__ __forceinline__ void find_highest(typename Sum::Kept& scores, int first_key) const {
    if (params.score.transform) {
#pragma unroll
      for (int b = 0; b < Sum::kKept; ++b) {
#pragma unroll
        for (int e = 0; e < 4; ++e) scores[b][e] = params.score.score(scores[b][e]);
      }
    }
    mask_scores(scores, first_key);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float highest = -CUDART_INF_F;
#pragma unroll
      for (int b = 0; b < Sum::kKept; ++b) {
        highest = fmaxf(highest, fmaxf(scores[b][2 * half], scores[b][2 * half + 1]));
      }
      highest = quad_max(highest);
      if (lane % 4 == 0) storage.maxima[slot()][kept_row() + 8 * half] = highest;
    }
  }

  // Of the thread's two rows, over all warps that share them.
  __device__ __forceinline__ float2 row_highest() const {
    float2 highest{-CUDART_INF_F, -CUDART_INF_F};
#pragma unroll
    for (int other = 0; other < kTile.slots(); ++other) {
      highest.x = fmaxf(highest.x, storage.maxima[other][kept_row()]);
      highest.y = fmaxf(highest.y, storage.maxima[other][kept_row() + 8]);
    }
    return highest;
  }

  // Scores become probabilities in shared memory. Whether a row's reference was raised; `factors` holds by how much.
  __device__ __forceinline__ bool soften(const typename Sum::Kept& scores, Softmax& rows) const {
    if (!keeps()) return false;
    const float2 highest = row_highest();
    const int row = kept_row();
    const uint32_t to = ptx::shared_address(storage.p) + lane % 4 * 4;
    bool raised = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float reached = (half == 0 ? highest.x : highest.y) * params.score.to_log2;
      float factor = 1.0f;
      if (reached > rows.reference[half] + kSlackLog2) {
        factor = ptx::exp2_approx(rows.reference[half] - reached);
        rows.reference[half] = reached;
        rows.sum[half] *= factor;
        raised = true;
      }
      if (slot() == 0 && lane % 4 == 0) storage.factors[row + 8 * half] = factor;
#pragma unroll
      for (int b = 0; b < Sum::kKept; ++b) {
        float p[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          p[e] = ptx::exp2_approx(fmaf(scores[b][2 * half + e], params.score.to_log2, -rows.reference[half]));
          rows.sum[half] += p[e];
        }
        ptx::store_shared_4(to + tile::Swizzle<kColumns>::offset(row + 8 * half, kept_key() / 8 + b) * 2,
                            ptx::pack<T>(p[0], p[1]));
      }
    }
    return raised;
  }

  // Keys outside their row's [lo, hi) become -inf, if the tile has any.
  __device__ __forceinline__ void mask_scores(typename Sum::Kept& scores, int first_key) const {
    const int2 first = storage.bounds[0], last = storage.bounds[kTile.rows - 1];
    if (first_key >= last.x && first_key + kKeys <= first.y) return;
    const int key = first_key + kept_key() + lane % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int2 seen = storage.bounds[kept_row() + 8 * half];
      const int lo = seen.x - key, hi = seen.y - key;
#pragma unroll
      for (int b = 0; b < Sum::kKept; ++b) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& score = scores[b][2 * half + e];
          score = 8 * b + e >= lo && 8 * b + e < hi ? score : -CUDART_INF_F;
        }
      }
    }
  }
};

}  // namespace plait::cuda::mma
