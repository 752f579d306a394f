// Rows of any dtype and stride to fp32 tile buffers and back; transposition into lanes.
// Included by the attention and iha translation units, once per Highway target.
#if defined(PLAIT_CPU_TILE_IO_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef PLAIT_CPU_TILE_IO_INL_H
#undef PLAIT_CPU_TILE_IO_INL_H
#else
#define PLAIT_CPU_TILE_IO_INL_H
#endif

#include <cstdint>
#include <cstring>

#include "cpu/microkernel-inl.h"
#include "cpu/tiles.hpp"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace plait::cpu::HWY_NAMESPACE {

using I32 = hn::RebindToSigned<F32>;
using U32 = hn::RebindToUnsigned<F32>;
using U16 = hn::Rebind<uint16_t, F32>;

// The 16-bit formats as storage; the arithmetic is fp32.
struct Half {
  uint16_t bits;
};
struct Brain {
  uint16_t bits;
};

HWY_INLINE Vec to_float(const float* from) { return hn::LoadU(F32(), from); }
HWY_INLINE Vec to_float(const Brain* from) {
  const U32 u;
  return hn::BitCast(F32(), hn::ShiftLeft<16>(hn::PromoteTo(u, hn::LoadU(U16(), &from->bits))));
}
// On the bits too: Highway's own conversion loses infinities and NaN on SSE4.
HWY_INLINE Vec to_float(const Half* from) {
  const F32 d;
  const U32 u;
  const auto bits = hn::PromoteTo(u, hn::LoadU(U16(), &from->bits));
  const auto sign = hn::ShiftLeft<16>(hn::And(bits, hn::Set(u, 0x8000)));
  const auto size = hn::BitCast(I32(), hn::And(bits, hn::Set(u, 0x7fff)));
  const auto rebias = hn::Set(u, (127u - 15u) << 23);
  const auto normal = hn::Add(hn::ShiftLeft<13>(hn::BitCast(u, size)), rebias);
  const auto special = hn::RebindMask(u, hn::Gt(size, hn::Set(I32(), 0x7bff)));
  const Vec tiny = hn::Mul(hn::ConvertTo(d, size), hn::Set(d, 0x1p-24f));
  const Vec large = hn::BitCast(d, hn::Add(normal, hn::IfThenElseZero(special, rebias)));
  const Vec value = hn::IfThenElse(hn::RebindMask(d, hn::Lt(size, hn::Set(I32(), 0x400))), tiny, large);
  return hn::Or(value, hn::BitCast(d, sign));
}

// Rounding to nearest even on the bits, alike on every target; NaN stays NaN, overflow becomes infinity.
HWY_INLINE void from_float(Vec value, float* to) { hn::StoreU(value, F32(), to); }
HWY_INLINE void from_float(Vec value, Brain* to) {
  const U32 u;
  const auto bits = hn::BitCast(u, value);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(u, 1));
  const auto rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(u, 0x7fff))));
  const auto nan = hn::RebindMask(u, hn::IsNaN(value));
  const auto quiet = hn::Or(hn::ShiftRight<16>(bits), hn::Set(u, 0x40));
  hn::StoreU(hn::DemoteTo(U16(), hn::BitCast(I32(), hn::IfThenElse(nan, quiet, rounded))), U16(), &to->bits);
}
HWY_INLINE void from_float(Vec value, Half* to) {
  const U32 u;
  const I32 i;
  const auto bits = hn::BitCast(u, value);
  const auto sign = hn::And(bits, hn::Set(u, 0x80000000u));
  const auto size = hn::Xor(bits, sign);
  // Normal halves: rebias the exponent, round at bit 13; a carry reaches the exponent and, at the top, infinity.
  const auto odd = hn::And(hn::ShiftRight<13>(size), hn::Set(u, 1));
  const auto normal =
      hn::ShiftRight<13>(hn::Add(hn::Sub(size, hn::Set(u, (127u - 15u) << 23)), hn::Add(odd, hn::Set(u, 0xfff))));
  // Subnormal halves are multiples of 2^-24, the last bit of 0.5: the fp32 addition rounds.
  const Vec half = hn::Set(F32(), 0.5f);
  const auto tiny = hn::Sub(hn::BitCast(u, hn::Add(hn::BitCast(F32(), size), half)), hn::BitCast(u, half));
  const auto signed_size = hn::BitCast(i, size);
  auto result = hn::IfThenElse(hn::RebindMask(u, hn::Lt(signed_size, hn::Set(i, 0x38800000))), tiny, normal);
  result = hn::IfThenElse(hn::RebindMask(u, hn::Gt(signed_size, hn::Set(i, 0x477fffff))), hn::Set(u, 0x7c00), result);
  result = hn::IfThenElse(hn::RebindMask(u, hn::Gt(signed_size, hn::Set(i, 0x7f800000))), hn::Set(u, 0x7e00), result);
  result = hn::Or(result, hn::ShiftRight<16>(sign));
  hn::StoreU(hn::DemoteTo(U16(), hn::BitCast(i, result)), U16(), &to->bits);
}

// Copies [0, dim) to fp32 and zeroes up to padded(dim). Returns whether every element is finite.
template <class T>
bool load_row(const T* from, int64_t dim_stride, int64_t dim, float* HWY_RESTRICT to) {
  const F32 d;
  Vec check = hn::Zero(d);
  for (int64_t begin = 0; begin < dim; begin += kColumnPad) {
    const T* block = from + begin * dim_stride;
    T gathered[kColumnPad] = {};
    if (dim_stride != 1 || begin + kColumnPad > dim) {
      const int64_t count = std::min(kColumnPad, dim - begin);
      for (int64_t i = 0; i < count; ++i) gathered[i] = block[i * dim_stride];
      block = gathered;
    }
    for (int64_t i = 0; i < kColumnPad; i += kVectorLanes) {
      const Vec value = to_float(block + i);
      check = hn::MulAdd(value, hn::Zero(d), check);
      hn::Store(value, d, to + begin + i);
    }
  }
  return hn::AllTrue(d, hn::Eq(check, hn::Zero(d)));
}

// Rounds [0, dim) of factor * from into the tensor. `from` is readable up to padded(dim).
template <class T>
void store_row(const float* HWY_RESTRICT from, float factor, int64_t dim_stride, int64_t dim, T* to) {
  const Vec scale = hn::Set(F32(), factor);
  for (int64_t begin = 0; begin < dim; begin += kColumnPad) {
    const bool direct = dim_stride == 1 && begin + kColumnPad <= dim;
    T rounded[kColumnPad];
    T* block = direct ? to + begin : rounded;
    for (int64_t i = 0; i < kColumnPad; i += kVectorLanes) {
      from_float(hn::Mul(hn::Load(F32(), from + begin + i), scale), block + i);
    }
    if (direct) continue;
    const int64_t count = std::min(kColumnPad, dim - begin);
    for (int64_t i = 0; i < count; ++i) to[(begin + i) * dim_stride] = rounded[i];
  }
}

// One row at element offset `offset` of a tensor.
inline bool load_row(const CanonicalTensor& t, int64_t offset, int64_t dim, float* to) {
  switch (t.dtype) {
    case DType::kBFloat16:
      return load_row(static_cast<const Brain*>(t.data) + offset, t.dim_stride, dim, to);
    case DType::kFloat16:
      return load_row(static_cast<const Half*>(t.data) + offset, t.dim_stride, dim, to);
    default:
      return load_row(static_cast<const float*>(t.data) + offset, t.dim_stride, dim, to);
  }
}
inline void store_row(const CanonicalTensor& t, int64_t offset, int64_t dim, const float* from, float factor) {
  switch (t.dtype) {
    case DType::kBFloat16:
      return store_row(from, factor, t.dim_stride, dim, static_cast<Brain*>(t.data) + offset);
    case DType::kFloat16:
      return store_row(from, factor, t.dim_stride, dim, static_cast<Half*>(t.data) + offset);
    default:
      return store_row(from, factor, t.dim_stride, dim, static_cast<float*>(t.data) + offset);
  }
}

// Keys [begin, end) of a sequence to fp32 rows. Sets finite[i] for each, or returns whether all are (finite null).
HWY_INLINE bool load_keys(const AttentionProblem& problem, const KvCacheIndex& cache, const CanonicalTensor& t,
                          const SequenceTiles& tiles, const AttentionShape& shape, int64_t kv_head, int64_t pass,
                          Interval keys, int64_t dim, int64_t stride, float* to, bool* finite = nullptr) {
  bool all = true;
  for (int64_t key = keys.lo; key < keys.hi; ++key, to += stride) {
    const int64_t position = shape.per == 1 ? key : key / shape.per;
    const int64_t pseudo = shape.per == 1 ? pass : key % shape.per;
    const int64_t offset = key_offset(problem, cache, t, tiles.seq, kv_head, position) + pseudo * t.pseudo_stride;
    const bool ok = load_row(t, offset, dim, to);
    if (finite != nullptr) finite[key - keys.lo] = ok;
    all &= ok;
  }
  return all;
}

// The lanes of a tile (of q, out or dout) to fp32 rows [lanes, stride]. Returns whether all are finite.
HWY_INLINE bool load_lanes(const CanonicalTensor& t, const SequenceTiles& tiles, const AttentionShape& shape,
                           int64_t kv_head, int64_t pass, int64_t tile, int64_t dim, int64_t stride, float* to) {
  bool finite = true;
  for (int64_t lane = 0; lane < tiles.lane_count(tile); ++lane, to += stride) {
    const int64_t head = kv_head * shape.group + tiles.head_of(tile, lane);
    const int64_t row = tiles.row_of(tile, lane);
    finite &= load_row(t, row_offset(t, tiles.seq.batch, tiles.seq.q_begin, head, row, shape, pass), dim, to);
  }
  return finite;
}

// to [dim, kLanes] = factor * from [lanes, stride] transposed; lanes past the last are zero up to a whole pad.
HWY_INLINE void transpose_lanes(const float* HWY_RESTRICT from, int64_t stride, int64_t lanes, int64_t dim,
                                float factor, float* HWY_RESTRICT to) {
  for (int64_t begin = 0; begin < padded(lanes); begin += kColumnPad) {
    const int64_t count = std::min(kColumnPad, lanes - begin);
    const float* block = from + begin * stride;
    for (int64_t i = 0; i < dim; ++i) {
      float* HWY_RESTRICT row = to + i * kLanes + begin;
      for (int64_t lane = 0; lane < count; ++lane) row[lane] = factor * block[lane * stride + i];
      for (int64_t lane = count; lane < kColumnPad; ++lane) row[lane] = 0.0f;
    }
  }
}

}  // namespace plait::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // PLAIT_CPU_TILE_IO_INL_H
