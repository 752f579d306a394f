// What the split_d forward reads: where q, k and v lie in shared memory, and their copies.
// Called by forward.cuh.
#pragma once

#include "cuda/mma/prefill/mainloop.cuh"
#include "cuda/mma/split_d/chunks.cuh"

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

// A tile of keys in the order of the loop: the keys from `key` on, counted from work.key_begin, of a joint pass.
template <int kKeys>
struct KeyTile {
  int pass = 0, key = 0;

  __device__ __forceinline__ bool first() const { return pass == 0 && key == 0; }
  __device__ __forceinline__ KeyTile next(int key_count) const {
    if (key + kKeys < key_count) return {pass, key + kKeys};
    return {pass + 1, 0};
  }
};

template <class T, catalog::SplitDTile kTile>
struct SplitDInputs {
  static constexpr int kThreads = kTile.threads(), kKeys = kTile.keys, kOutChunks = kTile.out_dim / kChunkColumns;
  // For every head_dim of the bucket, not for small ones only: copies of whole tiles have code of their own.
  static constexpr bool kServesBucket = kTile.smem_bytes(kTile.out_dim) <= kArchSharedBytes;
  static constexpr int kWholeChunks = kServesBucket ? kOutChunks : 0;
  using Storage = SplitDStorage<T, kTile>;
  using At = KeyTile<kKeys>;
  using KeyLoader = ChunkLoader<T, kKeys, kThreads>;
  using QueryLoader = ChunkLoader<T, kTile.rows, kThreads>;

  const PrefillParams& params;
  Storage& storage;

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
  __device__ __forceinline__ void load_keys(const PrefillWork& work, const At& at) const {
    const T* from =
        static_cast<const T*>(params.tensors.k.data) + work.k_offset + at.pass * params.tensors.k.pseudo_stride;
    KeyLoader::template load<kWholeChunks>(keys(), params.k, from, static_cast<int>(work.key_begin) + at.key,
                                           work.key_count - at.key, depth_chunks(), threadIdx.x);
  }
  __device__ __forceinline__ void load_values(const PrefillWork& work, const At& at) const {
    const T* from =
        static_cast<const T*>(params.tensors.v.data) + work.v_offset + at.pass * params.tensors.v.pseudo_stride;
    KeyLoader::template load<kWholeChunks>(ptx::shared_address(storage.v), params.v, from,
                                           static_cast<int>(work.key_begin) + at.key, work.key_count - at.key,
                                           kOutChunks, threadIdx.x);
  }
};

}  // namespace plait::cuda::mma
