// What the split_d forward reads: where q, k and v lie in shared memory, and their copies.
// Called by forward.cuh.
#pragma once

#include "cuda/mma/prefill/mainloop.cuh"
#include "cuda/mma/split_d/chunks.cuh"

namespace plait::cuda::mma {

// Of a thread's two rows; meaningful in warps that keep scores.
struct alignas(16) SplitDSoftmax {
  float reference[2] = {-FLT_MAX, -FLT_MAX}, sum[2] = {0.0f, 0.0f};
};
template <int kThreads>
struct SplitDSoftmaxes {
  SplitDSoftmax of[kThreads];
};
template <>
struct SplitDSoftmaxes<0> {};

// The tiles of k (with the second places of its early chunks) and q follow: their size depends on head_dim.
template <class T, catalog::SplitDTile kTile>
struct SplitDStorage {
  alignas(128) T v[kTile.keys * kTile.out_dim];
  T p[kTile.rows * kTile.probability_columns()];  // probabilities
  char exchange[kTile.exchange_bytes()];
  float maxima[kTile.slots()][kTile.rows];  // of a row, by the warps that share it; at the end its sums
  float factors[kTile.rows];                // what O is multiplied by; at the end references, then the last factors
  [[no_unique_address]] SplitDSoftmaxes<kTile.crowded() ? kTile.threads() : 0> softmax;
  int2 bounds[kTile.rows];  // [lo, hi) of each row, counted from work.key_begin
  alignas(kTile.kWorkBytes) PrefillWork work;
};

// A tile of keys in the order of the loop: the keys from `key` on, counted from work.key_begin, of a joint pass.
template <int kKeys>
struct KeyTile {
  int pass = 0, key = 0;
  bool odd = false;  // every other tile

  __device__ __forceinline__ bool first() const { return pass == 0 && key == 0; }
  __device__ __forceinline__ KeyTile next(int key_count) const {
    if (key + kKeys < key_count) return {pass, key + kKeys, !odd};
    return {pass + 1, 0, !odd};
  }
};

template <class T, catalog::SplitDTile kTile>
struct SplitDInputs {
  static constexpr int kThreads = kTile.threads(), kKeys = kTile.keys, kOutChunks = kTile.out_dim / kChunkColumns;
  static constexpr int kKeyChunkBytes = static_cast<int>(kTile.key_chunk_bytes());
  static constexpr bool kServesBucket = kTile.serves_bucket(kArchSharedBytes);
  static constexpr int kEarly = kServesBucket ? kTile.early : 0;
  using Storage = SplitDStorage<T, kTile>;
  using At = KeyTile<kKeys>;
  using KeyLoader = ChunkLoader<T, kKeys, kThreads>;
  using QueryLoader = ChunkLoader<T, kTile.rows, kThreads>;

  const PrefillParams& params;
  int early_chunks;
  Storage& storage;

  __device__ __forceinline__ int depth_chunks() const { return (params.q.dim + kChunkColumns - 1) / kChunkColumns; }
  __device__ __forceinline__ int early() const { return kEarly == 0 ? 0 : early_chunks; }
  // k of every tile, but of odd tiles the early chunks, which lie odd_keys() bytes behind.
  __device__ __forceinline__ uint32_t keys() const { return ptx::shared_address(&storage) + sizeof(Storage); }
  __device__ __forceinline__ int odd_keys() const { return depth_chunks() * kKeyChunkBytes; }
  __device__ __forceinline__ uint32_t queries() const { return keys() + odd_keys() + early() * kKeyChunkBytes; }

  __device__ __forceinline__ void load_queries(const PrefillWork& work, int pass) const {
    const int first = work.tile * kTile.rows;
    const int rows = static_cast<int>(work.sequence.q_len * params.problem.rows_per_position()) - first;
    const int64_t offset = query_offset(params.problem, params.tensors.q, work.sequence, work.head, 0, pass);
    QueryLoader::load(queries(), params.q, static_cast<const T*>(params.tensors.q.data) + offset, first, rows, 0,
                      depth_chunks(), threadIdx.x);
  }
  __device__ __forceinline__ void load_early_keys(const PrefillWork& work, const At& at) const {
    if constexpr (kEarly > 0) {
      load_keys<kEarly>(keys() + (at.odd ? odd_keys() : 0), work, at, 0, early());
    }
  }
  __device__ __forceinline__ void load_other_keys(const PrefillWork& work, const At& at) const {
    load_keys<kOutChunks - kEarly>(keys() + early() * kKeyChunkBytes, work, at, early(), depth_chunks() - early());
  }
  __device__ __forceinline__ void load_values(const PrefillWork& work, const At& at) const {
    const T* from =
        static_cast<const T*>(params.tensors.v.data) + work.v_offset + at.pass * params.tensors.v.pseudo_stride;
    KeyLoader::template load<kServesBucket ? kOutChunks : 0>(ptx::shared_address(storage.v), params.v, from,
                                                             static_cast<int>(work.key_begin) + at.key,
                                                             work.key_count - at.key, 0, kOutChunks, threadIdx.x);
  }

 private:
  // kUsual: how many chunks they are if the head dim is that of the bucket.
  template <int kUsual>
  __device__ __forceinline__ void load_keys(uint32_t to, const PrefillWork& work, const At& at, int first_chunk,
                                            int chunks) const {
    if (chunks == 0) return;
    const T* from =
        static_cast<const T*>(params.tensors.k.data) + work.k_offset + at.pass * params.tensors.k.pseudo_stride;
    KeyLoader::template load<kServesBucket ? kUsual : 0>(to, params.k, from, static_cast<int>(work.key_begin) + at.key,
                                                         work.key_count - at.key, first_chunk, chunks, threadIdx.x);
  }
};

}  // namespace plait::cuda::mma
