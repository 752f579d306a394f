// Where the backward pass keeps things in its workspace, and how it cuts a problem into tasks.
// Called by plan.cpp (base null: bytes only) and by attention_backward.cpp.
#pragma once

#include "cpu/forward_layout.hpp"

namespace plait::cpu {

// Keys whose dk and dv one task owns. From the problem alone: it sets the order of the sums into dq.
inline int64_t backward_chunk(const AttentionProblem& p) {
  const AttentionShape shape(p);
  const int64_t keys = p.seqlen_kv * shape.per, large = 2 * kKeys;
  const int64_t tasks = (p.packed ? 1 : p.batch) * p.heads_kv * shape.passes * ceil_div(keys, large);
  return tasks < 64 ? kKeys : large;
}

inline int64_t backward_tasks_bound(const AttentionProblem& p) {
  const AttentionShape shape(p);
  const int64_t chunks = ceil_div(p.seqlen_kv * shape.per, backward_chunk(p));
  return (p.packed ? chunks + p.batch : chunks * p.batch) * p.heads_kv * shape.passes + lane_tiles_bound(p);
}

struct BackwardLayout {
  int64_t chunk;
  int64_t *tile_begin, *task_begin;  // per sequence, [batch + 1]: first lane tile and first task
  float *lse, *delta;                // [lane tiles, heads_kv, kLanes]: LSE in log2 units and delta of every row
  // Per (lane tile, key head, pass), where a tile can meet several chunks: whose turn it is, and dq summed so far.
  Turn* turns;
  float* dq;  // [lane tiles, heads_kv, passes, kLanes, stride]
  struct Scratch {
    float *keys, *values, *dk, *dv;  // [chunk, stride] and [chunk, stride_v]
    float *q, *q_lanes, *dq;         // [kLanes, stride], [dim, kLanes], [kLanes, stride]
    float *dout, *dout_lanes;        // [kLanes, stride_v], [dim_v, kLanes]
    float *scores, *dp;              // [kKeys, kLanes]
  };
  char* scratch;
  int64_t scratch_bytes, total_bytes;

  BackwardLayout(const AttentionProblem& p, const Plan& plan, void* base) : chunk(backward_chunk(p)) {
    const AttentionShape shape(p);
    Carver carver(base);
    tile_begin = carver.take<int64_t>(p.batch + 1);
    task_begin = carver.take<int64_t>(p.batch + 1);
    const int64_t tiles = lane_tiles_bound(p) * p.heads_kv;
    lse = carver.take<float>(tiles * kLanes);
    delta = carver.take<float>(tiles * kLanes);
    const int64_t sums = p.seqlen_kv * shape.per > chunk ? tiles * shape.passes : 0;
    turns = carver.take<Turn>(sums);
    dq = carver.take<float>(sums * kLanes * shape.stride);
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
    s.keys = carver.take<float>(chunk * shape.stride);
    s.values = carver.take<float>(chunk * shape.stride_v);
    s.dk = carver.take<float>(chunk * shape.stride);
    s.dv = carver.take<float>(chunk * shape.stride_v);
    s.q = carver.take<float>(kLanes * shape.stride);
    s.q_lanes = carver.take<float>(kLanes * shape.dim);
    s.dq = carver.take<float>(kLanes * shape.stride);
    s.dout = carver.take<float>(kLanes * shape.stride_v);
    s.dout_lanes = carver.take<float>(kLanes * shape.dim_v);
    s.scores = carver.take<float>(kKeys * kLanes);
    s.dp = carver.take<float>(kKeys * kLanes);
    return s;
  }
};

}  // namespace plait::cpu
