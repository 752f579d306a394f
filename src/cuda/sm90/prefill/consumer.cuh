// A warpgroup that multiplies: 64 query rows of a tile through all keys that they see.
// Called by kernel.cuh.
#pragma once

#include "cuda/sm90/prefill/epilogue.cuh"
#include "cuda/sm90/prefill/scores.cuh"

namespace plait::cuda::sm90 {

template <class T, catalog::Sm90PrefillTile kTile>
struct PrefillConsumer : PrefillScores<T, kTile> {
  using Own = PrefillScores<T, kTile>;
  using Own::kBySums, Own::kKeys, Own::kKeyTiles, Own::kStaged, Own::kWarpRows;
  using Own::params, Own::storage, Own::warpgroup, Own::lane;
  using typename Own::KeyRing, typename Own::Position, typename Own::Storage, typename Own::State;
  using typename Own::Products, typename Own::Rows;
  static constexpr int kEarly = kKeyTiles * kTile.early_eighths / 8;
  static_assert(kTile.query_parts() == (kStaged ? 1 : kTile.warpgroups));
  static_assert(kTile.query_slots > kTile.query_parts());  // scores of the next row tile come ahead of the store of O

  // All row tiles that the finder finds. Scores of one tile of keys are computed while those of the tile before weigh
  // values, also from one row tile to the next.
  __device__ __forceinline__ void run() const {
    State s;
    s.at.query.advance(warpgroup % kTile.query_parts());
    int skipped;
    if (!wait_rows(s.at, s.keys, skipped)) return;
    skip(s.at.key, skipped);
    Products::clear(s.out);
    s.settled = 0;
    s.fresh = 1;
    wait_queries(s.at);
    wait_keys(s.at.key);
    multiply_keys(s);
    ptx::wgmma_wait<0>();
    ptx::hold(s.scores[0]);
    do {
      weigh_first(s);
#pragma unroll 1
      while (s.keys.first > s.keys.end) step(s);
    } while (find_next(s));
  }

 private:
  using Own::look, Own::mask, Own::multiply_keys, Own::raise, Own::recover, Own::release_scored;
  using Own::release, Own::skip, Own::uniform, Own::warp;
  using Own::wait_keys, Own::wait_queries, Own::wait_rows, Own::wait_values;

  // From one tile of keys to the next one of the same row tile.
  __device__ __forceinline__ void step(State& s) const {
    const KeyRing values = s.at.key;
    s.at.key = s.next;
    s.keys.first -= kKeys;
    if (!s.landed) [[unlikely]]
      wait_keys(s.at.key);
    multiply_keys(s);
    wait_values(values);
    Products::multiply_values(s.out, s.weights, storage.v[0], values.slot, s.fresh == 0);
    s.fresh = 0;
    ptx::wgmma_wait<1>();
    ptx::hold(s.scores[0]);
    if (!kBySums) release_scored(s);
    const bool known = s.keys.first >= s.keys.whole_from && s.keys.first + kKeys <= s.keys.whole_to;
    bool raised = false;
    float of_tile[2] = {0.0f, 0.0f};
    auto& sum = kBySums ? of_tile : s.rows.sum;
    if (kBySums ? !known || s.settled == 0 : !known) [[unlikely]]
      mask(s);
    const bool by_maxima = !kBySums || !known || s.settled == 0;
    if (by_maxima) raised = raise(s);
    exponentiate<0, kEarly>(s.scores, params.score.to_log2, s.rows, sum);
    look(s);
    // Never by sums, and else they have landed: it keeps the compiler from moving exponentials behind the next wait.
    if (kBySums ? params.works == 0 : raised) wait_values(values);
    ptx::wgmma_wait<0>();  // not in a branch of warps: the warpgroup takes it together
    ptx::hold(s.out[0]);
    if (!kBySums && raised) [[unlikely]]
      Rows::rescale(s.out, s.factor);
    release(storage.values.empty[values.slot]);
    exponentiate<kEarly, kKeyTiles>(s.scores, params.score.to_log2, s.rows, sum);
    if (kBySums) {
      const bool fits = by_maxima || (sum[0] <= kMostSum && sum[1] <= kMostSum);
      const bool done = __all_sync(kAllLanes, fits && !raised);
      Products::pack_weights(s.weights, s.scores);  // while they vote
      if (!done) [[unlikely]] {
        if (!__all_sync(kAllLanes, fits)) {
          raised = recover(s, sum);
          Products::pack_weights(s.weights, s.scores);
        }
        if (raised) Rows::rescale(s.out, s.factor);
      }
      release_scored(s);
      s.rows.sum[0] += sum[0];
      s.rows.sum[1] += sum[1];
    } else {
      Products::pack_weights(s.weights, s.scores);
    }
  }

  // The first tile of keys of a row tile, or of a pass over its keys, whose scores are there.
  __device__ __forceinline__ void weigh_first(State& s) const {
    release_scored(s);
    float sum[2] = {0.0f, 0.0f};
    mask(s);
    const bool raised = raise(s);
    exponentiate<0, kKeyTiles>(s.scores, params.score.to_log2, s.rows, sum);
    if (raised && s.fresh == 0) [[unlikely]]
      Rows::rescale(s.out, s.factor);
    s.rows.sum[0] += sum[0];
    s.rows.sum[1] += sum[1];
    Products::pack_weights(s.weights, s.scores);
    look(s);
  }

  // The end of a row tile, or of a pass over its keys: the product with the last values, and the first scores of what
  // comes next. False: nothing.
  __device__ __forceinline__ bool find_next(State& s) const {
    Position& at = s.at;
    const KeyRing values = at.key;
    bool held = true;  // the slot of the values
    at.key.advance();
    wait_values(values);
    Products::multiply_values(s.out, s.weights, storage.v[0], values.slot, s.fresh == 0);
    s.fresh = 0;
    const PrefillWork& work = storage.work[at.work.slot];
    const bool last = work.last;  // pass: the row tile is done
    uint64_t& work_empty = storage.works.empty[at.work.slot];
    uint64_t& query_empty = storage.queries_empty[at.query.slot];
    const uint32_t stage = ptx::shared_address(storage.q[at.query.slot]);
    if (kStaged && !last) release(query_empty);
    at.work.advance();
    at.query.advance(kTile.query_parts());
    if (s.keys.end > 0) held = leave_out(s.out, at, values, held, s.keys.end / kKeys);  // others need these tiles
    int skipped;
    const bool more = wait_rows(at, s.keys, skipped);
    KeyRing unseen = at.key;
    const bool few = skipped < kTile.stages;  // then nothing that is waited for needs their values' slots
    if (few) {
      skip(storage.keys, at.key, skipped);
    } else {
      held = leave_out(s.out, at, values, held, skipped);
    }
    multiply_first_keys(s, more);
    const int row = warp() * kWarpRows;
    float out_factor[2];
    if (last) finish_rows(out_factor, s.rows, params, work, row, lane);
    ptx::wgmma_wait<1>();
    ptx::hold(s.out[0]);
    if (held) release(storage.values.empty[values.slot]);
    if (last) {
      store_output<T, typename Storage::QueryTile, kStaged>(s.out[0], out_factor, params, work, row,
                                                            work.tile * kTile.rows() + row, stage, lane);
      if (kStaged) release(query_empty);
      s.rows = Rows();
    }
    if (few) skip(storage.values, unseen, skipped);
    s.fresh = uniform(last);
    ptx::mbarrier_arrive(ptx::shared_address(&work_empty));  // each thread: see Ring
    ptx::wgmma_wait<0>();
    ptx::hold(s.scores[0]);
    return more;
  }

  __device__ __forceinline__ void multiply_first_keys(State& s, bool more) const {
    if (more) {
      wait_queries(s.at);
      wait_keys(s.at.key);
    }
    multiply_keys(s);  // without more, of whatever lies there
  }

  // Leaves out tiles of keys while values are weighed: their slot has to be free before the others can fill. Returns
  // whether it is held still: no.
  __device__ __forceinline__ bool leave_out(typename Products::Output& out, Position& at, const KeyRing& values,
                                            bool held, int tiles) const {
    if (held) {
      ptx::wgmma_wait<0>();
      ptx::hold(out[0]);
      release(storage.values.empty[values.slot]);
    }
    skip(at.key, tiles);
    return false;
  }
};

}  // namespace plait::cuda::sm90
