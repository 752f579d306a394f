// A warpgroup that multiplies: 64 query rows of a tile through all keys that they see.
// Called by kernel.cuh.
#pragma once

#include "cuda/sm90/prefill/epilogue.cuh"
#include "cuda/sm90/prefill/products.cuh"
#include "cuda/sm90/prefill/softmax.cuh"

namespace plait::cuda::sm90 {

template <class T, catalog::Sm90PrefillTile kTile>
struct PrefillConsumer {
  using Storage = PrefillStorage<T, kTile>;
  using Products = PrefillProducts<T, kTile>;
  using Scores = typename Products::Scores;
  using Output = typename Products::Output;
  using Weights = typename Products::Weights;
  using Rows = SoftmaxRows<2>;
  using KeyRing = RingPosition<kTile.stages>;
  static constexpr int kHeadDim = kTile.head_dim, kKeys = kTile.tile_keys, kWarpRows = 16;
  static constexpr bool kStaged = kTile.stages_output(), kAhead = kTile.scores_ahead();
  static_assert(kTile.query_parts() == (kStaged ? 1 : kTile.warpgroups));
  static constexpr int kKeyTiles = kKeys / 8, kEarly = kKeyTiles * kTile.early_eighths / 8;

  struct Position {
    RingPosition<kTile.work_slots> work;
    RingPosition<kTile.query_slots> query;
    KeyRing key;  // of keys; values are as far, or one tile behind
  };

  const PrefillParams& params;
  Storage& storage;
  int warpgroup, lane;

  // All row tiles that the producer finds. Scores of one tile of keys are computed while those of the tile before weigh
  // values, also from one row tile to the next.
  __device__ __forceinline__ void run() const {
    Position at;
    at.query.advance(warpgroup % kTile.query_parts());
    KeyRange keys;
    int skipped;
    if (!find_rows(at, keys, skipped)) return;
    skip(at.key, skipped);
    Output out;
    Scores scores;
    Weights weights;
    Rows rows;
    float factor[2];
    Products::clear(out);
    wait_queries(at);
    wait_keys(at.key);
    multiply_keys(scores, at);
    ptx::wgmma_wait<0>();
    ptx::hold(scores[0]);
    release_scored(at, keys);
    weigh(scores, rows, factor, at, keys);
    weigh_rest(scores, rows);
    Products::pack_weights(weights, scores);
    bool landed = false;  // the next keys
#pragma unroll 1
    for (;;) {
      const KeyRing values = at.key;
      bool held = true;  // the slot of the values
      at.key.advance();
      if (keys.first > keys.end) [[likely]] {
        keys.first -= kKeys;
        if (!landed) wait_keys(at.key);
        multiply_keys(scores, at);
        wait_values(values);
        Products::multiply_values(out, weights, storage.v[values.slot]);
        ptx::wgmma_wait<1>();
        ptx::hold(scores[0]);
      } else {
        wait_values(values);
        Products::multiply_values(out, weights, storage.v[values.slot]);
        const PrefillWork& work = storage.work[at.work.slot];
        const bool last = work.last;  // pass: the row tile is done
        uint64_t& work_empty = storage.works.empty[at.work.slot];
        uint64_t& query_empty = storage.queries_empty[at.query.slot];
        const uint32_t stage = ptx::shared_address(storage.q[at.query.slot]);
        if (kStaged && !last) release(query_empty);
        at.work.advance();
        at.query.advance(kTile.query_parts());
        if (keys.end > 0) held = leave_out(out, at, values, held, keys.end / kKeys);  // others need these tiles
        const bool more = find_rows(at, keys, skipped);
        KeyRing unseen = at.key;
        const bool few = skipped < kTile.stages;  // then nothing that is waited for needs their values' slots
        if (few) {
          skip(storage.keys, at.key, skipped);
        } else {
          held = leave_out(out, at, values, held, skipped);
        }
        const auto multiply_first_keys = [&] {
          if (more) {
            wait_queries(at);
            wait_keys(at.key);
          }
          multiply_keys(scores, at);  // without more, of whatever lies there
        };
        if (last) {
          if (kAhead) multiply_first_keys();
          const int row = warp() * kWarpRows;
          finish_rows(factor, rows, params, work, row, lane);
          ptx::wgmma_wait<kAhead ? 1 : 0>();
          ptx::hold(out[0]);
          if (!kStaged && held) {
            release(storage.values.empty[values.slot]);
            held = false;
          }
          store_output<T, typename Storage::QueryTile, kStaged>(out[0], factor, params, work, row,
                                                                work.tile * kTile.rows() + row, stage, lane);
          if (kStaged) release(query_empty);
          if (few) skip(storage.values, unseen, skipped);
          ptx::mbarrier_arrive(ptx::shared_address(&work_empty));  // each thread: see Ring
          if (!kAhead) multiply_first_keys();
          ptx::wgmma_wait<0>();
          ptx::hold(scores[0]);
          if (!more) return;
          Products::clear(out);
          rows = Rows();
        } else {  // the next pass: O is not touched, and scores are where they are in the branch above
          multiply_first_keys();
          if (few) skip(storage.values, unseen, skipped);
          ptx::mbarrier_arrive(ptx::shared_address(&work_empty));
          ptx::wgmma_wait<0>();
          ptx::hold(scores[0]);
        }
      }
      release_scored(at, keys);
      const bool raised = weigh(scores, rows, factor, at, keys);
      KeyRing next = at.key;
      next.advance();
      landed = ptx::mbarrier_test(ptx::shared_address(&storage.keys.full[next.slot]), next.parity);
      // A loop in this branch keeps the compiler from moving exponentials behind the next wait. These values landed
      // long ago; a slot that was released may have been filled again, for a phase that ends later or never.
      if (raised && held) [[unlikely]]
        wait_values(values);
      ptx::wgmma_wait<0>();  // not in a branch of warps: the warpgroup takes it together
      ptx::hold(out[0]);
      if (raised) [[unlikely]]
        Rows::rescale(out, factor);
      if (held) release(storage.values.empty[values.slot]);
      weigh_rest(scores, rows);
      Products::pack_weights(weights, scores);
    }
  }

 private:
  // The warp has scores: it has read these keys, and if they are the last ones the queries.
  __device__ __forceinline__ void release_scored(const Position& at, const KeyRange& keys) const {
    release(storage.keys.empty[at.key.slot]);
    if (!kStaged && keys.first <= keys.end) release(storage.queries_empty[at.query.slot]);
  }

  // The warp has read a slot.
  __device__ __forceinline__ void release(uint64_t& empty) const {
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(ptx::shared_address(&empty));
  }

  // Leaves out tiles of keys and values that other warpgroups of the block need.
  __device__ __forceinline__ void skip(KeyRing& at, int tiles) const {
#pragma unroll 1
    for (; tiles > 0; --tiles) {
      KeyRing values = at;
      skip(storage.values, values, 1);
      skip(storage.keys, at, 1);
    }
  }
  __device__ __forceinline__ void skip(Ring<kTile.stages>& ring, KeyRing& at, int tiles) const {
#pragma unroll 1
    for (; tiles > 0; --tiles, at.advance()) {
      wait(ring, at);
      release(ring.empty[at.slot]);
    }
  }

  // The same while values are weighed: their slot has to be free before the others can fill. Returns whether it is held
  // still: no.
  __device__ __forceinline__ bool leave_out(Output& out, Position& at, const KeyRing& values, bool held,
                                            int tiles) const {
    if (held) {
      ptx::wgmma_wait<0>();
      ptx::hold(out[0]);
      release(storage.values.empty[values.slot]);
    }
    skip(at.key, tiles);
    return false;
  }

  // Of the block's consumers. Read anew each time: registers are short.
  static __device__ __forceinline__ int warp() {
    unsigned thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return static_cast<int>(thread / 32);
  }

  // The same for all lanes, which the compiler then knows.
  static __device__ __forceinline__ int uniform(int x) { return __shfl_sync(kAllLanes, x, 0); }

  // Waits for the next row tile. `skipped`: tiles of keys ahead of those in `keys`. False: there are no more.
  __device__ __forceinline__ bool find_rows(const Position& at, KeyRange& keys, int& skipped) const {
    const int slot = at.work.slot;
    skipped = 0;
    ptx::mbarrier_wait(ptx::shared_address(&storage.works.full[slot]), at.work.parity);
    const PrefillWork& work = storage.work[slot];
    if (work.tile < 0) return false;
    const KeyRange range = storage.ranges[slot][warp()];
    keys = {uniform(range.first), uniform(range.end), uniform(range.whole_from), uniform(range.whole_to)};
    skipped = static_cast<int>(static_cast<unsigned>(uniform(work.key_count) - 1 - keys.first) / kKeys);
    return true;
  }

  __device__ __forceinline__ void wait_queries(const Position& at) const {
    const uint64_t& full = storage.queries_full[at.work.slot][warpgroup % kTile.query_parts()];
    ptx::mbarrier_wait(ptx::shared_address(&full), at.work.parity);
  }
  __device__ __forceinline__ void wait_keys(const KeyRing& at) const { wait(storage.keys, at); }
  __device__ __forceinline__ void wait_values(const KeyRing& at) const { wait(storage.values, at); }
  __device__ __forceinline__ void wait(const Ring<kTile.stages>& ring, const KeyRing& at) const {
    ptx::mbarrier_wait(ptx::shared_address(&ring.full[at.slot]), at.parity);
  }

  __device__ __forceinline__ void multiply_keys(Scores& scores, const Position& at) const {
    const int slot = kTile.query_slots == kTile.query_parts() ? warpgroup : at.query.slot;  // of queries: the only one
    Products::multiply_keys(scores, storage.q[slot], storage.k[at.key.slot], warpgroup);
  }

  // Scores of the keys from keys.first on become probabilities, the last of them in weigh_rest(). Returns whether out
  // is to be multiplied by `factor`.
  __device__ __forceinline__ bool weigh(Scores& scores, Rows& rows, float (&factor)[2], const Position& at,
                                        const KeyRange& keys) const {
    if (keys.first < keys.whole_from || keys.first + kKeys > keys.whole_to) [[unlikely]] {
      if (params.score.transform) transform_scores(scores, params.score);
      const int2* bounds = storage.bounds[at.work.slot] + warp() * kWarpRows;
      if (keys.first < keys.whole_from) {
        apply_bounds(scores, bounds, keys.first, lane);
      } else {
        apply_bounds<false>(scores, bounds, keys.first, lane);
      }
    }
    const bool raised = raise_references(scores, params.score.to_log2, rows, factor);
    exponentiate<0, kEarly>(scores, params.score.to_log2, rows);
    return raised;
  }
  __device__ __forceinline__ void weigh_rest(Scores& scores, Rows& rows) const {
    exponentiate<kEarly, kKeyTiles>(scores, params.score.to_log2, rows);
  }
};

}  // namespace plait::cuda::sm90
