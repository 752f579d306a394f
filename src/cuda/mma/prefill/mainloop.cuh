// The key loop of the prefill kernel: two products and an online softmax per key tile, the next tile's keys and values
// in flight. Called by kernel.cuh.
#pragma once

#include "cuda/mma/prefill/storage.cuh"
#include "cuda/tile/products.cuh"

namespace plait::cuda::mma {

template <class T, catalog::PrefillTile kTile>
struct PrefillMainloop {
  static constexpr int kHeadDim = kTile.head_dim, kKeys = kTile.tile_keys;
  static constexpr int kBlocks = kTile.warp_rows / 16;  // of 16 rows, per warp
  static constexpr int kRows = 2 * kBlocks;             // per thread
  static constexpr int kDepth = kHeadDim / 16;          // of 16 columns of q, k and v
  static constexpr int kKeyBlocks = kKeys / 16;
  static constexpr int kTileBytes = kKeys * kHeadDim * sizeof(T);
  // Not where copies pass through registers, nor with three blocks, which leave too few.
  static constexpr bool kStraight = ptx::kLevel >= 80 && kTile.blocks_per_multiprocessor <= 2;
  static_assert(kKeys % 16 == 0 && kTile.warp_rows % 16 == 0);

  using Storage = PrefillStorage<T, kTile>;
  using Fragment = tile::Fragments<kHeadDim>;
  using QueryLoader = TileLoader<T, kTile.warp_rows, kHeadDim, 32>;
  using KeyLoader = TileLoader<T, kKeys, kHeadDim, kTile.threads()>;
  using Scores = float[kBlocks][2 * kKeyBlocks][4];
  using Output = float[kBlocks][2 * kDepth][4];
  using Queries = uint32_t[kTile.query_in_registers ? kDepth : 1][kBlocks][4];

  const PrefillParams& params;
  Storage& storage;
  int warp, lane;

  __device__ __forceinline__ uint32_t query_address() const {
    return ptx::shared_address(storage.q) + warp * kTile.warp_rows * kHeadDim * sizeof(T);
  }

  __device__ __forceinline__ uint32_t queries_at() const { return query_address() + Fragment::lane_bytes(lane); }

  __device__ __forceinline__ void load_queries(const PrefillWork& work, int pass) const {
    const int64_t per = params.problem.rows_per_position();
    const int64_t first = int64_t{work.tile} * kTile.rows() + warp * kTile.warp_rows;
    const int64_t offset = query_offset(params.problem, params.tensors.q, work.sequence, work.head, 0, pass);
    QueryLoader::load(query_address(), params.q, static_cast<const T*>(params.tensors.q.data) + offset, first,
                      static_cast<int>(min(work.sequence.q_len * per - first, int64_t{kTile.warp_rows})), lane);
  }

  // The first tile, behind load_queries().
  __device__ __forceinline__ void start(const PrefillWork& work) const {
    find_sources(work, 0);
    if (work.key_count > 0) load_tile(work, storage.sources[threadIdx.x], work.key_count, 0, 0, 0);
    ptx::cp_async_commit();
  }

  // All keys, behind start() and a barrier. Per tile one barrier: behind it, this tile is there for every warp and
  // every warp has left the tile before, whose stage then takes the next one.
  __device__ __forceinline__ void run(Output& out, SoftmaxRows<kRows>& rows) const {
    const PrefillWork& work = storage.work;
    const int2* bounds = storage.bounds + warp * kTile.warp_rows;
    const int passes = static_cast<int>(params.problem.joint_passes());
    if (work.key_count == 0) {
      ptx::cp_async_wait<0>();  // the queries: their place takes O
      return;
    }
    Queries queries;
    int stage = 0;
    // Kept, and flipped from stage to stage: made anew they would stand between the barrier and the products.
    uint32_t keys = ptx::shared_address(storage.k[0]) + Fragment::lane_bytes_b(lane);
    uint32_t values = ptx::shared_address(storage.v[0]) + Fragment::lane_bytes(lane);
#pragma unroll 1
    for (int pass = 0; pass < passes; ++pass) {
#pragma unroll 1
      for (int first_key = 0;; first_key += kKeys) {
        const int2 first = bounds[0], last = bounds[kTile.warp_rows - 1];
        PrefillSources<T> from = storage.sources[threadIdx.x];
        const int keys_left = work.key_count - first_key - kKeys;
        const bool partial = first_key < last.x || first_key + kKeys > first.y;
        const bool straight = kStraight && params.straight && keys_left >= kKeys && !partial;
        ptx::cp_async_wait<0>();
        __syncthreads();
        if constexpr (kTile.query_in_registers) {
          if (first_key == 0) tile::read_queries<kHeadDim>(queries, queries_at());
        }
        if (straight) {
          attend_straight(out, rows, queries, from, keys, values, stage ^ 1);
        } else {
          const bool next_pass = keys_left <= 0 && pass + 1 < passes;
          if (keys_left > 0) {
            load_tile(work, from, keys_left, pass, first_key + kKeys, stage ^ 1);
          } else if (next_pass) {
            find_sources(work, pass + 1);
            load_tile(work, storage.sources[threadIdx.x], work.key_count, pass + 1, 0, stage ^ 1);
          }
          ptx::cp_async_commit();
          if (kTile.query_in_registers && next_pass) replace_queries(work, pass + 1);
          if (first_key < last.y && first_key + kKeys > first.x) {  // some row of the warp sees some key
            attend(out, rows, queries, first_key, partial, keys, values);
          }
          if (!kTile.query_in_registers && next_pass) replace_queries(work, pass + 1);
        }
        const int flip = stage == 0 ? kTileBytes : -kTileBytes;
        keys += flip;
        values += flip;
        stage ^= 1;
        if (keys_left <= 0) break;
      }
    }
  }

 private:
  __device__ __forceinline__ static const T* keys_of(const CanonicalTensor& tensor, int64_t head_offset, int pass) {
    return static_cast<const T*>(tensor.data) + head_offset + pass * tensor.pseudo_stride;
  }

  __device__ __forceinline__ void find_sources(const PrefillWork& work, int pass) const {
    storage.sources[threadIdx.x] = {
        KeyLoader::own_chunk(params.k, keys_of(params.tensors.k, work.k_offset, pass), work.key_begin, threadIdx.x),
        KeyLoader::own_chunk(params.v, keys_of(params.tensors.v, work.v_offset, pass), work.key_begin, threadIdx.x)};
  }

  // `keys`: that are left from first_key on. `from`: the thread's own.
  __device__ __forceinline__ void load_tile(const PrefillWork& work, const PrefillSources<T>& from, int keys, int pass,
                                            int first_key, int stage) const {
    const uint32_t k_target = ptx::shared_address(storage.k[stage]), v_target = ptx::shared_address(storage.v[stage]);
    if (params.key_rows) {
      storage.sources[threadIdx.x] = {KeyLoader::load_rows(k_target, params.k, from.k, keys, threadIdx.x),
                                      KeyLoader::load_rows(v_target, params.v, from.v, keys, threadIdx.x)};
    } else {
      KeyLoader::load_any(k_target, params.k, keys_of(params.tensors.k, work.k_offset, pass),
                          work.key_begin + first_key, keys, threadIdx.x);
      KeyLoader::load_any(v_target, params.v, keys_of(params.tensors.v, work.v_offset, pass),
                          work.key_begin + first_key, keys, threadIdx.x);
    }
  }

  // Only the warp itself reads its queries, and has done so for the pass before.
  __device__ __forceinline__ void replace_queries(const PrefillWork& work, int pass) const {
    __syncwarp();
    load_queries(work, pass);
    ptx::cp_async_commit();
  }

  // The tile of keys from first_key on, `keys` and `values`: where the lane reads it. partial: some row of the warp
  // does not see all of them.
  __device__ __forceinline__ void attend(Output& out, SoftmaxRows<kRows>& rows, const Queries& queries, int first_key,
                                         bool partial, uint32_t keys, uint32_t values) const {
    Scores scores{};
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      tile::multiply_keys<T, kHeadDim, kTile.query_in_registers>(scores, queries, keys, queries_at(), d);
    }
    if (params.score.transform) transform_scores(scores, params.score);
    if (partial) apply_bounds(scores, storage.bounds + warp * kTile.warp_rows, first_key, lane);
    accumulate(out, rows, scores, values);
  }

  // The same for params.straight, a tile that every row sees whole, and a whole next tile, copied to `stage` between
  // the products: no branch from here to the vote.
  __device__ __forceinline__ void attend_straight(Output& out, SoftmaxRows<kRows>& rows, const Queries& queries,
                                                  PrefillSources<T>& from, uint32_t keys, uint32_t values,
                                                  int stage) const {
    constexpr int kCopies = 2 * KeyLoader::kCopies;  // in groups: each costs some instructions of its own
    const uint32_t k_target = KeyLoader::own_target(ptx::shared_address(storage.k[stage]), threadIdx.x);
    const uint32_t v_target = KeyLoader::own_target(ptx::shared_address(storage.v[stage]), threadIdx.x);
    Scores scores{};
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      tile::multiply_keys<T, kHeadDim, kTile.query_in_registers>(scores, queries, keys, queries_at(), d);
      if (d % 2 != 0) continue;
#pragma unroll
      for (int copy = kCopies * d / kDepth; copy < kCopies * (d + 2) / kDepth; ++copy) {
        if (copy < KeyLoader::kCopies) {
          KeyLoader::copy_whole(k_target, params.k, from.k, copy);
        } else {
          KeyLoader::copy_whole(v_target, params.v, from.v, copy - KeyLoader::kCopies);
        }
      }
    }
    ptx::cp_async_commit();
    storage.sources[threadIdx.x] = from;
    accumulate(out, rows, scores, values);
  }

  __device__ __forceinline__ void accumulate(Output& out, SoftmaxRows<kRows>& rows, Scores& scores,
                                             uint32_t values) const {
    float highest[kRows];
    find_highest(highest, scores);
    rows.raise(highest, params.score.to_log2, out);
    rows.exponentiate(scores, params.score.to_log2);
#pragma unroll
    for (int n = 0; n < kKeyBlocks; ++n) tile::multiply_values<T, kHeadDim>(out, scores, values, n);
  }
};

}  // namespace plait::cuda::mma
