// What a block works on: resident tile, stream tiles that its mask intervals meet, and where their data lies.
// Called by kernel.cuh and convert.cuh, and by the split_d backward.
#pragma once

#include "core/mask.hpp"
#include "cuda/mma/backward/config.cuh"

namespace plait::cuda::mma {

struct Work {
  DeviceSequence sequence;
  int64_t index;  // of the sequence
  int64_t head, pass;
  int tile;  // resident
  bool exists;
};

struct TileRange {
  int begin, end;  // stream tiles [begin, end)
};

// In shared memory: in registers it would cost spills.
struct BlockState {
  Work work;
  RowMask mask;
  TileRange met, whole;              // stream tiles that the mask meets; of these, those without mask and softcap
  int64_t first, second, pairs, dq;  // elements: of the first head's Q and dO (K and V), RowPairs and dQ tiles
  int heads, steps;                  // of the stream
  int resident_rows, stream_rows;    // that the sequence has
};
static_assert(sizeof(BlockState) <= catalog::kBackwardStateBytes);

template <class C>
__device__ __forceinline__ Work find_work(const BackwardParams& params) {
  const AttentionProblem& p = params.problem;
  const BlockOrder& order = params.order;
  const int64_t block = blockIdx.x, first = block / (order.group * order.tiles) * order.group;
  const int64_t units = order.units - first < order.group ? order.units - first : order.group;
  const int64_t inside = block - first * order.tiles;
  int64_t tile = inside / units, unit = first + inside % units;
  const int64_t passes = p.joint_passes(), heads = C::kKeysResident ? p.heads_kv : p.heads_q;
  const int64_t pass = unit % passes, head = unit / passes % heads;
  int64_t index = unit / passes / heads;
  if (p.packed) {
    const TileOfSequence found = find_tile(p, params.tensors, tile, C::kResident, C::kKeysResident);
    index = found.sequence, tile = found.tile;
  } else if (!C::kKeysResident) {
    tile = order.tiles - 1 - tile;
  }
  if (index < 0) return {{}, 0, 0, 0, 0, false};
  return {device_sequence(p, params.tensors, index), index, head, pass, static_cast<int>(tile), true};
}

// The first of begin .. end for which `holds`; it holds for all that follow.
template <class Holds>
__device__ __forceinline__ int first_tile(int begin, int end, const Holds& holds) {
  while (begin < end) {
    const int middle = (begin + end) / 2;
    if (holds(middle)) {
      end = middle;
    } else {
      begin = middle + 1;
    }
  }
  return begin;
}

// Sets `met` and `whole` for the resident rows from `first` on.
template <class C>
__device__ __forceinline__ void find_ranges(BlockState& state, int64_t first) {
  const RowMask& mask = state.mask;
  constexpr int64_t kStream = C::kStream;
  if constexpr (C::kKeysResident) {
    const int64_t rows = mask.row_count(), last = min(first + C::kResident, mask.key_count());
    const auto first_row = [&](int tile) { return mask.row(tile * kStream); };
    const auto last_row = [&](int tile) { return mask.row(min((tile + 1) * kStream, rows) - 1); };
    const int tiles = static_cast<int>((rows + kStream - 1) / kStream);
    state.met.begin = first_tile(0, tiles, [&](int tile) { return last_row(tile).hi > first; });
    state.met.end = first_tile(state.met.begin, tiles, [&](int tile) { return first_row(tile).lo >= last; });
    state.whole.begin = first_tile(state.met.begin, state.met.end,
                                   [&](int tile) { return first_row(tile).hi >= first + C::kResident; });
    state.whole.end = first_tile(state.whole.begin, state.met.end, [&](int tile) { return last_row(tile).lo > first; });
  } else {
    const int64_t last = min(first + C::kResident, mask.row_count()) - 1;
    const Interval upper = mask.row(first), lower = mask.row(last);
    state.met.begin = static_cast<int>(upper.lo / kStream);
    state.met.end = static_cast<int>((lower.hi + kStream - 1) / kStream);
    state.whole.begin = static_cast<int>((lower.lo + kStream - 1) / kStream);
    state.whole.end = static_cast<int>(upper.hi / kStream);
  }
}

// What step `step` works on. Not carried from step to step: registers are short.
struct StreamTile {
  int head, tile;  // head: counted from the first
};
__device__ __forceinline__ StreamTile stream_tile(const BlockState& state, int step) {
  const int head = state.heads == 1 ? 0 : step / (state.met.end - state.met.begin);
  return {head, state.met.begin + step - head * (state.met.end - state.met.begin)};
}

// First row tile of a sequence in dQ's workspace: tiles of different sequences never overlap.
__device__ __forceinline__ int64_t first_dq_slot(const AttentionProblem& p, const Sequence& s, int64_t index,
                                                 int stream_rows) {
  return p.packed ? s.q_begin * p.rows_per_position() / stream_rows + index : 0;
}
// Elements of dQ's workspace before a sequence's first row tile.
template <class C>
__device__ __forceinline__ int64_t dq_offset(const BackwardParams& params, const Sequence& s, int64_t index,
                                             int64_t head, int64_t pass) {
  const AttentionProblem& p = params.problem;
  const int64_t unit = (s.batch * p.heads_q + head) * p.joint_passes() + pass;
  return (unit * params.dq_slots + first_dq_slot(p, s, index, C::kStream)) * C::kDqTileElems;
}

template <class C>
__device__ __forceinline__ float* dq_tile(const BackwardParams& params, const BlockState& state, int step) {
  const StreamTile at = stream_tile(state, step);
  const int64_t head_elems = params.problem.joint_passes() * params.dq_slots * C::kDqTileElems;
  return params.dq_sum + state.dq + at.head * head_elems + int64_t{at.tile} * C::kDqTileElems;
}

template <class C>
__device__ __forceinline__ BlockState make_state(const BackwardParams& params) {
  const AttentionProblem& p = params.problem;
  const AttentionTensors& t = params.tensors;
  const Work work = find_work<C>(params);
  const Sequence& s = work.sequence;
  const int64_t group = p.heads_q / p.heads_kv, per = p.rows_per_position();
  const int64_t head_q = C::kKeysResident ? work.head * group : work.head;
  BlockState state{work, RowMask::of(p, s.q_len, s.kv_len), {0, 0}, {0, 0}, 0, 0, 0, 0, 1, 0, 0, 0};
  if (work.exists && !work.sequence.tail) find_ranges<C>(state, int64_t{work.tile} * C::kResident);
  if (params.factor.inverse_softcap != 0.0f) state.whole = {0, 0};
  const int tiles = state.met.begin < state.met.end ? state.met.end - state.met.begin : 0;
  state.pairs = (s.batch * p.heads_q + head_q) * p.seqlen_q * per + s.q_begin * per;
  if constexpr (C::kKeysResident) {
    state.heads = static_cast<int>(group);
    state.first = query_offset(p, t.q, s, head_q, 0, work.pass);
    state.second = query_offset(p, t.dout, s, head_q, 0, 0);
    state.dq = dq_offset<C>(params, s, work.index, head_q, work.pass);
  } else {
    state.first = key_row_offset(p, t.k, s, work.head / group, 0, work.pass);
    state.second = key_row_offset(p, t.v, s, work.head / group, 0, work.pass);
  }
  const int rows = static_cast<int>(s.q_len * per), keys = static_cast<int>(s.kv_len * per);
  state.resident_rows = C::kKeysResident ? keys : rows;
  state.stream_rows = C::kKeysResident ? rows : keys;
  state.steps = state.heads * tiles;
  return state;
}

}  // namespace plait::cuda::mma
