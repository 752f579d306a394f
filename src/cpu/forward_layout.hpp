// Where the forward pass keeps things in its workspace, and how it cuts a problem into tasks.
// Called by plan.cpp (base null: bytes only) and by attention_forward.cpp.
#pragma once

#include "cpu/tiles.hpp"

namespace plait::cpu {

// Lane tiles of all sequences for one key head: exact when dense, an upper bound when packed (lengths are contents).
inline int64_t lane_tiles_bound(const AttentionProblem& p) {
  const AttentionShape shape(p);
  const int64_t lanes = p.seqlen_q * shape.per * shape.group;
  return p.packed ? ceil_div(lanes, kLanes) + p.batch : p.batch * ceil_div(lanes, kLanes);
}

// Lane tiles that one task takes through the keys together, so that a packed key tile serves several: as many as still
// leave each worker a few tasks. It never changes a result.
inline int64_t forward_block_tiles(const AttentionProblem& p, const Plan& plan) {
  int64_t block = plan.splits > 1 ? 1 : 4;
  while (block > 1 && lane_tiles_bound(p) * p.heads_kv / block < 8 * plan.workers) block /= 2;
  return block;
}

struct ForwardLayout {
  int64_t block_tiles;
  // Per sequence, [batch + 1]: first lane tile and first task.
  int64_t *tile_begin, *task_begin;
  // split_kv only, per (lane tile, key head): whose turn it is to merge, and the merged state so far.
  Turn* turns;
  float* states;  // [lane tiles, heads_kv, dim_v * kLanes + kLaneStatsFloats]
  int64_t state_floats;
  // One worker's scratch.
  struct Scratch {
    float *q, *out, *stats;  // [block_tiles][dim, kLanes], [block_tiles][dim_v, kLanes], [block_tiles][3, kLanes]
    float *rows, *keys, *values, *scores;  // [kLanes, stride], [kKeys, stride], [kKeys, stride_v], [kKeys, kLanes]
  };
  char* scratch;
  int64_t scratch_bytes, total_bytes;

  ForwardLayout(const AttentionProblem& p, const Plan& plan, void* base) {
    const AttentionShape shape(p);
    Carver carver(base);
    block_tiles = forward_block_tiles(p, plan);
    state_floats = shape.dim_v * kLanes + 3 * kLanes;
    tile_begin = carver.take<int64_t>(p.batch + 1);
    task_begin = carver.take<int64_t>(p.batch + 1);
    const int64_t states_count = plan.splits > 1 ? lane_tiles_bound(p) * p.heads_kv : 0;
    turns = carver.take<Turn>(states_count);
    states = carver.take<float>(states_count * state_floats);
    Carver one(nullptr);
    carve(one, shape);
    scratch_bytes = one.bytes();
    scratch = carver.take<char>(scratch_bytes * plan.workers);
    total_bytes = carver.bytes();
  }

  Scratch worker(const AttentionShape& shape, int32_t index) const {
    Carver carver(scratch + index * scratch_bytes);
    return carve(carver, shape);
  }

 private:
  Scratch carve(Carver& carver, const AttentionShape& shape) const {
    Scratch s;
    s.q = carver.take<float>(block_tiles * shape.dim * kLanes);
    s.out = carver.take<float>(block_tiles * shape.dim_v * kLanes);
    s.stats = carver.take<float>(block_tiles * 3 * kLanes);
    s.rows = carver.take<float>(kLanes * std::max(shape.stride, shape.stride_v));
    s.keys = carver.take<float>(kKeys * shape.stride);
    s.values = carver.take<float>(kKeys * shape.stride_v);
    s.scores = carver.take<float>(kKeys * kLanes);
    return s;
  }
};

}  // namespace plait::cpu
