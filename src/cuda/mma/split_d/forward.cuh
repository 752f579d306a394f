// The key loop of the split_d forward: scores by slices of the head dim, a softmax shared by all warps, O by columns.
// Called by forward_kernel.cuh.
#pragma once

#include "cuda/common/apply_mask.cuh"
#include "cuda/mma/prefill/mainloop.cuh"
#include "cuda/mma/split_d/chunks.cuh"
#include "cuda/mma/split_d/exchange.cuh"

namespace plait::cuda::mma {

// The tiles of k and q follow: their size depends on head_dim.
template <class T, catalog::SplitDTile kTile>
struct SplitDStorage {
  alignas(128) T v[kTile.keys * kTile.out_dim];
  T p[kTile.rows * kTile.probability_columns()];  // probabilities
  char exchange[kTile.exchange_bytes()];
  float maxima[kTile.slots()][kTile.rows];  // of a row, by the warps that share it; at the end its sums
  float factors[kTile.rows];                // what O is multiplied by; at the end references, then the last factors
  int2 bounds[kTile.rows];                  // [lo, hi) of each row, counted from work.key_begin
  alignas(kTile.kWorkBytes) PrefillWork work;
};

template <class T, catalog::SplitDTile kTile>
struct SplitDForward {
  static constexpr int kThreads = kTile.threads(), kKeys = kTile.keys, kSlices = kTile.slices();
  // Of O, a warp has kBlocks x 16 rows and every kOutWarps-th group of 16 columns.
  static constexpr int kOutWarps = catalog::kSplitDWarps / kTile.out_row_warps;
  static constexpr int kBlocks = kTile.rows / 16 / kTile.out_row_warps, kOutGroups = kTile.out_dim / 16 / kOutWarps;
  static constexpr int kScoreM = kTile.warp_rows / 16, kScoreN = kTile.warp_keys / 16;
  static constexpr int kColumns = kTile.probability_columns();
  static_assert(kOutGroups * 16 * kOutWarps == kTile.out_dim);
  using Storage = SplitDStorage<T, kTile>;
  using Sum = Exchange<kScoreM, 2 * kScoreN, kSlices>;
  using Output = float[kBlocks][2 * kOutGroups][4];
  using KeyLoader = ChunkLoader<T, kKeys, kThreads>;
  using QueryLoader = ChunkLoader<T, kTile.rows, kThreads>;

  // Of this thread's two rows; meaningful in warps that keep scores.
  struct Softmax {
    float reference[2] = {-FLT_MAX, -FLT_MAX}, sum[2] = {0.0f, 0.0f};
  };

  const PrefillParams& params;
  Storage& storage;
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
  __device__ __forceinline__ int depth_chunks() const { return (params.q.dim + kChunkColumns - 1) / kChunkColumns; }
  __device__ __forceinline__ uint32_t keys() const { return ptx::shared_address(&storage) + sizeof(Storage); }
  __device__ __forceinline__ uint32_t queries() const { return keys() + depth_chunks() * kKeys * kChunkRowBytes; }

  __device__ __forceinline__ void load_queries(const PrefillWork& work, int pass) const {
    const int first = work.tile * kTile.rows;
    const int rows = static_cast<int>(work.sequence.q_len * params.problem.rows_per_position()) - first;
    const int64_t offset = query_offset(params.problem, params.tensors.q, work.sequence, work.head, 0, pass);
    QueryLoader::load(queries(), params.q, static_cast<const T*>(params.tensors.q.data) + offset, first, rows,
                      depth_chunks(), threadIdx.x);
  }
  __device__ __forceinline__ void load_keys(const PrefillWork& work, int pass, int first_key) const {
    const T* from =
        static_cast<const T*>(params.tensors.k.data) + work.k_offset + pass * params.tensors.k.pseudo_stride;
    KeyLoader::load(keys(), params.k, from, static_cast<int>(work.key_begin) + first_key, work.key_count - first_key,
                    depth_chunks(), threadIdx.x);
  }
  __device__ __forceinline__ void load_values(const PrefillWork& work, int pass, int first_key) const {
    const T* from =
        static_cast<const T*>(params.tensors.v.data) + work.v_offset + pass * params.tensors.v.pseudo_stride;
    KeyLoader::load(ptx::shared_address(storage.v), params.v, from, static_cast<int>(work.key_begin) + first_key,
                    work.key_count - first_key, kTile.out_dim / kChunkColumns, threadIdx.x);
  }

  // The first queries and keys.
  __device__ __forceinline__ void start(const PrefillWork& work) const {
    if (work.key_count > 0) {
      load_queries(work, 0);
      load_keys(work, 0, 0);
    }
    ptx::cp_async_commit();
  }

  // All keys, behind start(). The scores of a tile are made before p v of the tile before, so that two barriers a tile
  // are enough. Keys and values take turns: keys arrive during p v, values during the scores.
  __device__ __forceinline__ void run(Output& out, Softmax& rows) const {
    const PrefillWork& work = storage.work;
    const int passes = static_cast<int>(params.problem.joint_passes()), key_count = work.key_count;
    if (key_count == 0) return;
    int pass = 0, first_key = 0;
    bool raised = false, first = true;
    ptx::cp_async_wait<0>();
    __syncthreads();
#pragma unroll 1
    while (pass < passes) {
      typename Sum::Partial partial = {};
      typename Sum::Kept scores;
      multiply_queries(partial);
      Sum::put(exchange(), partial, slice(), lane);
      const bool last = first_key + kKeys >= key_count;
      const int next_pass = last ? pass + 1 : pass, next_key = last ? 0 : first_key + kKeys;
      ptx::cp_async_wait<0>();
      // Partial scores, and probabilities, factors and values of the tile before, are there; the keys are read.
      const bool rescale = __syncthreads_or(raised);
      if (keeps()) Sum::template take<kSlices>(scores, exchange(), partial, slice(), 0, lane);
      if (next_pass < passes) {
        if (last) load_queries(work, next_pass);
        load_keys(work, next_pass, next_key);
      }
      ptx::cp_async_commit();
      if (keeps()) find_highest(scores, first_key);
      if (!first) add_values(out, rescale);
      ptx::cp_async_wait<0>();
      __syncthreads();  // maxima and the next keys are there; values, probabilities and factors are read
      const float2 highest = row_highest();
      load_values(work, pass, first_key);
      ptx::cp_async_commit();
      raised = keeps() && soften(scores, rows, highest);
      pass = next_pass, first_key = next_key, first = false;
    }
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
    multiply_slice<T, kSlices, kTile.rows, kKeys>(partial, queries() + row_warp() * kTile.warp_rows * kChunkRowBytes,
                                                  keys() + key_warp() * kTile.warp_keys * kChunkRowBytes, slice(),
                                                  (params.q.dim + 31) / 32, lane);
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
    if (!keeps()) return highest;
#pragma unroll
    for (int other = 0; other < kTile.slots(); ++other) {
      highest.x = fmaxf(highest.x, storage.maxima[other][kept_row()]);
      highest.y = fmaxf(highest.y, storage.maxima[other][kept_row() + 8]);
    }
    return highest;
  }

  // Scores become probabilities in shared memory. Whether a row's reference was raised; `factors` holds by how much.
  __device__ __forceinline__ bool soften(const typename Sum::Kept& scores, Softmax& rows, float2 highest) const {
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
