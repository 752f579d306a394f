// From a token's number to its rows, its position in the rotary tables, and tiles of eight columns in and out.
// Called by the kernels of this folder. What the device reads (cu_seqlens) is never trusted.
#pragma once

#include "cuda/common/lanes.hpp"
#include "cuda/iha/params.hpp"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/mma.cuh"

namespace plait::cuda::iha {

// Where a block works.
struct Place {
  int job, segment;
  int64_t block;  // among the blocks of the segment
};

template <class Layout>
__device__ __forceinline__ Place find_place(const Jobs<Layout>& jobs, int64_t block) {
  int j = 0;
  while (j + 1 < jobs.count && block >= jobs.job[j + 1].first_block) ++j;
  block -= jobs.job[j].first_block;
  return {j, static_cast<int>(block / jobs.job[j].blocks), block % jobs.job[j].blocks};
}

struct Token {
  int64_t batch, position;
};

struct Division {
  int64_t quotient, remainder;
};

// a / b of numbers >= 0: in 32 bits where they fit.
__device__ __forceinline__ Division divide(int64_t a, int64_t b) {
  if (((a | b) >> 32) != 0) return {a / b, a % b};
  const uint32_t quotient = static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
  return {quotient, static_cast<uint32_t>(a) - quotient * static_cast<uint32_t>(b)};
}

__device__ __forceinline__ Token token_at(const Job& job, int64_t token) {
  const Division d = divide(token, job.seqlen);
  return {d.quotient, d.remainder};
}

// Positions at or past it (packed tail) read as zeros. Without sequences all are tail, whatever cu_seqlens[0] says.
__device__ __forceinline__ int64_t positions_end(const Job& job) {
  if (job.cu_seqlens == nullptr) return job.seqlen;
  if (job.sequences == 0) return 0;
  const int64_t end = job.cu_seqlens[job.sequences];
  return end < 0 ? 0 : end > job.seqlen ? job.seqlen : end;
}

// The sequence that holds `position`: the last of those that begin at or before it. Called by whole warps: the lanes
// probe 32 places at a time.
__device__ inline int64_t find_sequence(const Job& job, int64_t position, int lane) {
  int64_t low = 0, high = job.sequences + 1;  // entries below `low` are <= position, those from `high` on are not
  while (low < high) {
    const int64_t step = (high - low + 31) / 32, probe = low + lane * step;
    const bool below = probe < high && job.cu_seqlens[probe] <= position;
    const int count = __popc(__ballot_sync(kAllLanes, below));
    if (count == 0) break;
    const int64_t next = low + count * step;
    low += (count - 1) * step + 1;
    high = next < high ? next : high;
  }
  return low > job.sequences ? job.sequences - 1 : low > 0 ? low - 1 : 0;
}

// The position of a token as the rotary tables count; -1 if it does not turn: a sequence without keys, outside the
// tables, or nothing turns at all. Called by whole warps.
__device__ inline int64_t rotary_position(const Job& job, int64_t position, int64_t end, int lane) {
  const RotaryTables& r = job.rotary;
  if (r.dim == 0 || position >= end) return -1;
  int64_t at = position + r.offset;
  if (job.cu_seqlens != nullptr) {
    const int64_t i = find_sequence(job, position, lane), begin = job.cu_seqlens[i];
    at -= begin;
    if (r.cu_seqlens_other != nullptr) {
      const int64_t keys = int64_t{r.cu_seqlens_other[i + 1]} - r.cu_seqlens_other[i];
      if (keys == 0) return -1;
      at += keys - (job.cu_seqlens[i + 1] - begin);
    }
  }
  const int64_t rows = r.by_row ? r.rows / job.pseudo : r.rows;
  return at >= 0 && at < rows ? at : -1;
}

// Waits until at most `pending` of the thread's cp.async groups are unfinished.
__device__ __forceinline__ void wait_stages(int pending) {
  if (pending >= 2) {
    ptx::cp_async_wait<2>();
  } else if (pending == 1) {
    ptx::cp_async_wait<1>();
  } else {
    ptx::cp_async_wait<0>();
  }
}

template <class T>
__device__ __forceinline__ T* row_pointer(const TokenRows& rows, const Token& token) {
  return static_cast<T*>(rows.data) + token.batch * rows.batch_stride + token.position * rows.seq_stride;
}

// Columns [first, first + count) of a row of any stride to 16 bytes of shared memory, zeros past `count`.
template <class T>
__device__ __forceinline__ void load_elements(uint32_t target, const T* row, int64_t stride, int first, int count) {
  uint32_t words[kTileElems / 2];
#pragma unroll
  for (int i = 0; i < kTileElems / 2; ++i) {
    uint32_t pair[2];
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      const int column = 2 * i + b;
      pair[b] = column < count ? reinterpret_cast<const uint16_t&>(row[(first + column) * stride]) : 0;
    }
    words[i] = pair[0] | pair[1] << 16;
  }
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(target), "r"(words[0]), "r"(words[1]), "r"(words[2]),
               "r"(words[3])
               : "memory");
}

// Starts the copy of 16 bytes to shared memory, or does nothing: a predicate, no branch.
__device__ __forceinline__ void fetch_16_if(uint32_t target, uint64_t source, bool wanted) {
  if constexpr (ptx::kLevel == 75) {
    if (wanted) ptx::cp_async_16(target, reinterpret_cast<const void*>(source), true);
  } else {
    asm volatile(
        "{.reg .pred p;\n setp.ne.b32 p, %2, 0;\n @p cp.async.cg.shared.global [%0], [%1], 16;\n}" ::"r"(target),
        "l"(source), "r"(static_cast<int>(wanted))
        : "memory");
  }
}

// 16 bytes that nothing here reads again.
__device__ __forceinline__ void store_16(uint64_t target, const uint4& v, bool inside) {
  asm volatile("{.reg .pred p;\n setp.ne.b32 p, %5, 0;\n @p st.global.v4.u32 [%0], {%1,%2,%3,%4};\n}" ::"l"(target),
               "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(static_cast<int>(inside))
               : "memory");
}

template <class T>
__device__ __forceinline__ void store_tile(T* row, const TokenRows& rows, int first, int count, const uint4& value) {
  if (rows.vector) {
    store_16(reinterpret_cast<uint64_t>(row + first), value, count > 0);
    return;
  }
  const uint32_t words[kTileElems / 2] = {value.x, value.y, value.z, value.w};
#pragma unroll
  for (int i = 0; i < kTileElems; ++i) {
    const uint16_t bits = static_cast<uint16_t>(words[i / 2] >> (i % 2 * 16));
    if (i < count) row[(first + i) * rows.dim_stride] = reinterpret_cast<const T&>(bits);
  }
}

}  // namespace plait::cuda::iha
