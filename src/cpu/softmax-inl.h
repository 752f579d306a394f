// Lane-wise softmax over tiles of scores: a score tile is [keys, kLanes], so maxima and sums run down columns and no
// reduction across a vector is needed. Included by the attention translation units, once per Highway target.
#if defined(PLAIT_CPU_SOFTMAX_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef PLAIT_CPU_SOFTMAX_INL_H
#undef PLAIT_CPU_SOFTMAX_INL_H
#else
#define PLAIT_CPU_SOFTMAX_INL_H
#endif

#include <cstdint>
#include <limits>

#include "cpu/tile_io-inl.h"
#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace plait::cpu::HWY_NAMESPACE {

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();

// 2^x within 2 ulp (2.5 where there is no fused multiply-add), exactly 0 below 2^-126 (and for -inf), inf from
// x = 127.5 on, NaN for NaN. Minimax polynomial of degree 5 for 2^f on [-1/2, 1/2] with p(0) = 1, relative error
// 9.2e-8; adding 1.5 * 2^23 + 127 leaves round(x) + 127 in the low mantissa bits, which shifted into the exponent field
// are 2^round(x).
template <bool kMayOverflow>  // false where x <= 0
HWY_INLINE Vec exp2_lanes(Vec x) {
  const F32 d;
  const Vec bottom = hn::Set(d, -126.0f), magic = hn::Set(d, 12582912.0f + 127.0f);
  const auto vanishes = hn::Lt(x, bottom);
  if constexpr (kMayOverflow) x = hn::IfThenElse(hn::Gt(x, hn::Set(d, 128.0f)), hn::Set(d, 128.0f), x);
  const Vec shifted = hn::Add(x, magic);
  const Vec f = hn::Sub(x, hn::Sub(shifted, magic));
  const Vec scale = hn::BitCast(d, hn::ShiftLeft<23>(hn::BitCast(U32(), shifted)));
  Vec p = hn::MulAdd(f, hn::Set(d, 1.3264726e-3f), hn::Set(d, 9.6715127e-3f));
  p = hn::MulAdd(p, f, hn::Set(d, 5.5507337e-2f));
  p = hn::MulAdd(p, f, hn::Set(d, 2.4022242e-1f));
  p = hn::MulAdd(p, f, hn::Set(d, 6.9314698e-1f));
  p = hn::MulAdd(p, f, hn::Set(d, 1.0f));
  return hn::IfThenZeroElse(vanishes, hn::Mul(p, scale));
}

// The keys that each lane sees, as [lo, hi) within the key tile.
struct LaneMask {
  HWY_ALIGN int32_t lo[kLanes];
  HWY_ALIGN int32_t hi[kLanes];

  // Keys are counted from `keys.lo`. Lanes past the last see nothing.
  void fill(const SequenceTiles& tiles, int64_t tile, const Interval& keys) {
    const int64_t count = keys.hi - keys.lo, lanes = tiles.lane_count(tile);
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const Interval row = lane < lanes ? tiles.mask.row(tiles.row_of(tile, lane)) : Interval{};
      lo[lane] = static_cast<int32_t>(std::clamp<int64_t>(row.lo - keys.lo, 0, count));
      hi[lane] = static_cast<int32_t>(std::clamp<int64_t>(row.hi - keys.lo, 0, count));
    }
  }
  void hide(int64_t lane) { lo[lane] = hi[lane] = 0; }
  bool sees(int64_t lane, int64_t key) const { return key >= lo[lane] && key < hi[lane]; }
  HWY_INLINE hn::Mask<F32> sees(const I32 i, hn::Vec<I32> first, hn::Vec<I32> last, int64_t key) const {
    const auto at = hn::Set(i, static_cast<int32_t>(key));
    return hn::RebindMask(F32(), hn::AndNot(hn::Lt(at, first), hn::Lt(at, last)));
  }
};

// Scores arrive in units of log2 (scale * log2(e) is folded into q), or, with a softcap, divided by it.
struct Softcap {
  bool on;
  float log2_cap;  // softcap * log2(e)
  explicit Softcap(const AttentionProblem& p) : on(p.softcap > 0), log2_cap(static_cast<float>(p.softcap * kLog2E)) {}
};
inline float query_factor(const AttentionProblem& p) {
  return static_cast<float>(p.softcap > 0 ? p.scale / p.softcap : p.scale * kLog2E);
}

// scores = softcap * log2(e) * tanh(scores), then -inf where a lane does not see a key. `mask` null: all is seen.
inline void cap_and_mask(float* scores, int64_t keys, int64_t lanes, const Softcap& softcap, const LaneMask* mask) {
  const F32 d;
  const I32 i;
  for (int64_t lane = 0; lane < lanes; lane += kVectorLanes) {
    const auto first = mask == nullptr ? hn::Zero(i) : hn::Load(i, mask->lo + lane);
    const auto last = mask == nullptr ? hn::Zero(i) : hn::Load(i, mask->hi + lane);
    for (int64_t key = 0; key < keys; ++key) {
      float* at = scores + key * kLanes + lane;
      Vec s = hn::Load(d, at);
      if (softcap.on) s = hn::Mul(hn::Set(d, softcap.log2_cap), hn::Tanh(d, s));
      if (mask != nullptr) s = hn::IfThenElse(mask->sees(i, first, last, key), s, hn::Set(d, -kInfinity));
      hn::Store(s, d, at);
    }
  }
}

// Softmax statistics of a tile's lanes, in units of log2: running maximum, running sum of 2^(s - max).
struct LaneStats {
  float* max;     // [kLanes], -inf: nothing seen
  float* sum;     // [kLanes]
  float* factor;  // [kLanes], what the last update multiplies older sums and outputs by
};
inline constexpr int64_t kLaneStatsFloats = 3 * kLanes;
inline LaneStats lane_stats(float* block) { return {block, block + kLanes, block + 2 * kLanes}; }

HWY_INLINE void reset(const LaneStats& stats) {
  for (int64_t lane = 0; lane < kLanes; ++lane)
    stats.max[lane] = -kInfinity, stats.sum[lane] = 0, stats.factor[lane] = 0;
}

// One step of online softmax: takes in a tile of scores and leaves 2^(s - max) in its place.
inline void online_softmax(float* HWY_RESTRICT scores, int64_t keys, int64_t lanes, const LaneStats& stats) {
  const F32 d;
  for (int64_t lane = 0; lane < lanes; lane += kVectorLanes) {
    float* HWY_RESTRICT column = scores + lane;
    const Vec old_max = hn::Load(d, stats.max + lane);
    Vec even = old_max, odd = old_max;
    int64_t key = 0;
    for (; key + 2 <= keys; key += 2) {
      even = hn::Max(even, hn::Load(d, column + key * kLanes));
      odd = hn::Max(odd, hn::Load(d, column + (key + 1) * kLanes));
    }
    if (key < keys) even = hn::Max(even, hn::Load(d, column + key * kLanes));
    const Vec max = hn::Max(even, odd);
    const Vec base = hn::IfThenZeroElse(hn::Eq(max, hn::Set(d, -kInfinity)), max);  // -inf - -inf would be NaN
    const Vec factor = exp2_lanes<false>(hn::Sub(old_max, base));
    Vec sum = hn::Zero(d);
    for (key = 0; key < keys; ++key) {
      const Vec p = exp2_lanes<false>(hn::Sub(hn::Load(d, column + key * kLanes), base));
      sum = hn::Add(sum, p);
      hn::Store(p, d, column + key * kLanes);
    }
    hn::Store(max, d, stats.max + lane);
    hn::Store(factor, d, stats.factor + lane);
    hn::Store(hn::MulAdd(hn::Load(d, stats.sum + lane), factor, sum), d, stats.sum + lane);
  }
}

// Adds the state (from, from_out) over other keys to (into, into_out); outputs are [dim_v, kLanes], not normalised.
inline void merge_lanes(const LaneStats& from, const float* from_out, const LaneStats& into, float* into_out,
                        int64_t dim_v) {
  const F32 d;
  for (int64_t lane = 0; lane < kLanes; lane += kVectorLanes) {
    const Vec max_a = hn::Load(d, into.max + lane), max_b = hn::Load(d, from.max + lane);
    const Vec max = hn::Max(max_a, max_b);
    const Vec base = hn::IfThenZeroElse(hn::Eq(max, hn::Set(d, -kInfinity)), max);
    const Vec a = exp2_lanes<false>(hn::Sub(max_a, base)), b = exp2_lanes<false>(hn::Sub(max_b, base));
    const Vec sum = hn::MulAdd(hn::Load(d, from.sum + lane), b, hn::Mul(hn::Load(d, into.sum + lane), a));
    hn::Store(max, d, into.max + lane);
    hn::Store(sum, d, into.sum + lane);
    for (int64_t i = 0; i < dim_v; ++i) {
      float* at = into_out + i * kLanes + lane;
      hn::Store(hn::MulAdd(hn::Load(d, from_out + i * kLanes + lane), b, hn::Mul(hn::Load(d, at), a)), d, at);
    }
  }
}

// Backward of one tile: scores become probabilities P = 2^(s - lse), dp becomes dS = P (dp - delta) (1 - t^2).
// Masked elements become exact zeros, whatever their keys hold. `mask` null: all is seen.
inline void softmax_backward(float* HWY_RESTRICT scores, float* HWY_RESTRICT dp, int64_t keys, int64_t lanes,
                             const float* lse_log2, const float* delta, const Softcap& softcap, const LaneMask* mask) {
  const F32 d;
  const I32 i;
  for (int64_t lane = 0; lane < lanes; lane += kVectorLanes) {
    const auto first = mask == nullptr ? hn::Zero(i) : hn::Load(i, mask->lo + lane);
    const auto last = mask == nullptr ? hn::Zero(i) : hn::Load(i, mask->hi + lane);
    const Vec lse = hn::Load(d, lse_log2 + lane), row_delta = hn::Load(d, delta + lane);
    for (int64_t key = 0; key < keys; ++key) {
      float* HWY_RESTRICT score_at = scores + key * kLanes + lane;
      float* HWY_RESTRICT dp_at = dp + key * kLanes + lane;
      Vec s = hn::Load(d, score_at), slope = hn::Set(d, 1.0f);
      if (softcap.on) {
        const Vec t = hn::Tanh(d, s);
        slope = hn::NegMulAdd(t, t, slope);
        s = hn::Mul(hn::Set(d, softcap.log2_cap), t);
      }
      Vec p = exp2_lanes<true>(hn::Sub(s, lse));
      Vec ds = hn::Mul(p, hn::Sub(hn::Load(d, dp_at), row_delta));
      if (softcap.on) ds = hn::Mul(ds, slope);
      if (mask != nullptr) {
        const auto seen = mask->sees(i, first, last, key);
        p = hn::IfThenElseZero(seen, p);
        ds = hn::IfThenElseZero(seen, ds);
      }
      hn::Store(p, d, score_at);
      hn::Store(ds, d, dp_at);
    }
  }
}

// The products of a partial tile that holds NaN or inf: to(key, lane)[..] += weight[key, lane] * from(key, lane)[..]
// over seen pairs only, since 0 * NaN of a masked pair is NaN. Rare, so scalar.
template <class From, class To>
HWY_INLINE void add_seen(const float* weight, int64_t keys, int64_t lanes, const LaneMask& mask, int64_t dim,
                         int64_t to_stride, From from, To to) {
  for (int64_t key = 0; key < keys; ++key) {
    for (int64_t lane = 0; lane < lanes; ++lane) {
      if (!mask.sees(lane, key)) continue;
      const float w = weight[key * kLanes + lane];
      const float* source = from(key, lane);
      float* target = to(key, lane);
      for (int64_t i = 0; i < dim; ++i) target[i * to_stride] += w * source[i];
    }
  }
}

}  // namespace plait::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // PLAIT_CPU_SOFTMAX_INL_H
