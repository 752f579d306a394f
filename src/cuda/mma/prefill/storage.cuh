// What a launch tells the prefill kernel, and its shared memory.
// Called by mainloop.cuh; the parameters also by the split_d forward.
#pragma once

#include "catalog/mma_tiles.hpp"
#include "cuda/common/apply_mask.cuh"
#include "cuda/common/loader.cuh"
#include "cuda/common/schedule.cuh"

namespace plait::cuda::mma {

struct PrefillParams {
  AttentionProblem problem;
  AttentionTensors tensors;
  RowLayout q, k, v, out;
  bool key_rows;  // k and v go through load_rows()
  bool straight;  // ... whole tiles need no zeros, and scores no transform
  ScoreScale score;
  PrefillOrder order;
};

// Where a thread copies the next tile from, if params.key_rows. In shared memory: the products need every register.
template <class T>
struct alignas(16) PrefillSources {
  const T *k, *v;
};

template <class T, catalog::PrefillTile kTile>
struct PrefillStorage {
  alignas(128) T q[kTile.rows() * kTile.head_dim];  // each warp reads and (as staging for O) writes its own rows only
  T k[kTile.kStages][kTile.tile_keys * kTile.head_dim];
  T v[kTile.kStages][kTile.tile_keys * kTile.head_dim];
  PrefillSources<T> sources[kTile.threads()];  // each thread's own
  int2 bounds[kTile.rows()];                   // [lo, hi) of each row, counted from work.key_begin
  alignas(kTile.kWorkBytes) PrefillWork work;
};

}  // namespace plait::cuda::mma
