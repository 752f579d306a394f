// Stages of the contract kernel: the rows of a few tokens with their rotary angles, and the rows that leave.
// Called by contract.cuh. A stage holds, per token, [wide + heads][pitch bytes] and then the angles
// [table_rows][cos, sin][columns / 2] fp32. Functions are called by the whole block where they do not say otherwise.
#pragma once

#include "cuda/iha/fragments.cuh"
#include "cuda/iha/rotation.cuh"
#include "cuda/ptx/shared.cuh"

namespace plait::cuda::iha {

// What a block works with; it lives in shared memory, as registers are scarce. kColumns: of the layout.
template <int kColumns>
struct Block {
  static constexpr int kPitch = ContractLayout::pitch(kColumns), kTiles = kColumns / kTileElems;
  int64_t end, slot, slots,
      number;  // positions that exist; every slots-th stage from `slot` on; among the job's blocks
  int wide, rows, heads, table_offset, table_rows, token_bytes, first_tile;
  int stages;  // that this block works through

  __device__ void fill(const Job& job, const ContractLayout& layout, int64_t block) {
    const int64_t chunks = (job.columns.tiles() + kTiles - 1) / kTiles;
    end = positions_end(job), slot = block / chunks, slots = job.blocks / chunks, number = block;
    wide = job.wide_count, heads = job.heads, rows = wide + (job.narrow_in.data != nullptr ? heads : 0);
    table_offset = (wide + heads) * kPitch;
    table_rows = job.rotary.dim == 0 ? 0 : job.rotary.by_row ? job.pseudo : 1;
    token_bytes = table_offset + table_rows * kColumns * 4;
    first_tile = static_cast<int>(block % chunks) * kTiles;
    stages = static_cast<int>(((job.tokens + layout.tokens - 1) / layout.tokens - slot + slots - 1) / slots);
  }
  static __device__ unsigned char* memory() {
    extern __shared__ __align__(16) unsigned char shared[];
    return shared;
  }
  static __device__ uint32_t zeros() { return ptx::shared_address(memory()); }
  static __device__ uint4* weights() { return reinterpret_cast<uint4*>(memory() + ContractLayout::kHeaderBytes); }
  // Bytes from a token's first row to each: the wide rows, the narrow ones that are read, the narrow ones written.
  static __device__ int64_t* offsets(const ContractLayout& l) {
    return reinterpret_cast<int64_t*>(memory() + l.offsets_offset);
  }
  static __device__ TokenEntry* entries(const ContractLayout& l, int ring_slot) {
    return reinterpret_cast<TokenEntry*>(memory() + l.offsets_offset) - (l.stages + 2 - ring_slot) * l.tokens;
  }
};

// Writes down the tokens of the block's stage `number`. Called by one warp.
template <class T, int kColumns>
__device__ inline void describe_stage(const Job& job, const ContractLayout& layout, const Block<kColumns>& block,
                                      int64_t number, TokenEntry* entries, int lane) {
  const int64_t at = (block.slot + number * block.slots) * layout.tokens + lane;
  const bool exists = lane < layout.tokens && at < job.tokens;
  const Token token = exists ? token_at(job, at) : Token{0, 0};
  const bool inside = exists && token.position < block.end;
  int64_t position = -1;
  if (block.table_rows > 0 && job.cu_seqlens == nullptr) {
    position = rotary_position(job, token.position, block.end, lane);
  } else if (block.table_rows > 0) {
    for (int i = 0; i < layout.tokens; ++i) {
      const int64_t found = rotary_position(job, __shfl_sync(kAllLanes, token.position, i), block.end, lane);
      if (i == lane) position = found;
    }
  }
  if (lane >= layout.tokens) return;
  const auto pointer = [&](const TokenRows& rows, bool there) {
    return there && rows.data != nullptr ? reinterpret_cast<uint64_t>(row_pointer<T>(rows, token)) : 0;
  };
  entries[lane] = {pointer(job.wide_in, inside), pointer(job.narrow_in, inside), pointer(job.narrow_out, exists),
                   inside ? position : -1};
}

// A thread that moves rows between memory and shared memory: a tile of every kStep-th row. Where its rows are, it keeps
// in registers if there are not too many.
template <class T, int kColumns>
class Mover {
  using B = Block<kColumns>;
  static constexpr int kStep = ContractLayout::kMoverWarps * 32 / B::kTiles, kWide = 16, kNarrow = 4;

 public:
  __device__ __forceinline__ Mover(const Job& job, const ContractLayout& layout, const B& block, int thread)
      : warp_(thread / 32),
        lane_(thread % 32),
        row_(thread / B::kTiles),
        tile_(thread % B::kTiles),
        first_(job.columns.first(block.first_tile + tile_)),
        count_(job.columns.count(block.first_tile + tile_)) {
    const int64_t* offsets = B::offsets(layout);
    const auto held = [&](int row, int count, int base) {
      return (row < count ? offsets[base + row] : 0) + first_ * static_cast<int64_t>(sizeof(T));
    };
#pragma unroll
    for (int k = 0; k < kWide; ++k) wide_[k] = held(row_ + k * kStep, block.wide, 0);
#pragma unroll
    for (int k = 0; k < kNarrow; ++k) {
      narrow_[k] = held(row_ + k * kStep, block.heads, block.wide);
      out_[k] = held(row_ + k * kStep, block.heads, block.wide + block.heads);
    }
    const bool few = block.wide <= kWide * kStep && block.heads <= kNarrow * kStep;
    fetch_held_ = few && job.wide_in.vector && (job.narrow_in.data == nullptr || job.narrow_in.vector);
    store_held_ = few && job.narrow_out.vector;
  }

  // Starts the copy of a stage.
  __device__ __forceinline__ void fetch(const Job& job, const ContractLayout& layout, const B& block,
                                        unsigned char* stage, const TokenEntry* entries) const {
    const int wide_rows = block.wide, narrow_rows = block.rows - wide_rows;
    uint32_t to = ptx::shared_address(stage) + tile_ * 16 + row_ * B::kPitch;
    for (int i = 0; i < layout.tokens; ++i, to += block.token_bytes) {
      const uint64_t wide = entries[i].wide, narrow = entries[i].narrow;
      if (!fetch_held_ || wide == 0 || count_ == 0) {
        fetch_rows(job, layout, block, to, wide, narrow);
        continue;
      }
#pragma unroll
      for (int k = 0; k < kWide; ++k) {
        if (k % 5 == 0 && k * kStep >= wide_rows) break;
        fetch_16_if(to + k * kStep * B::kPitch, wide + wide_[k], row_ + k * kStep < wide_rows);
      }
#pragma unroll
      for (int k = 0; k < kNarrow; ++k) {
        fetch_16_if(to + (wide_rows + k * kStep) * B::kPitch, narrow + narrow_[k], row_ + k * kStep < narrow_rows);
      }
    }
    if (block.table_rows == 0) return;
    constexpr int kQuadsLog2 = kColumns == 128 ? 5 : 4;
    for (int i = warp_; i < layout.tokens; i += ContractLayout::kMoverWarps) {
      float* table = reinterpret_cast<float*>(stage + i * block.token_bytes + block.table_offset);
      fetch_angles(job.rotary, table, block.table_rows, kQuadsLog2, block.first_tile * (kTileElems / 2),
                   entries[i].position, lane_);
    }
  }

  // Stores the narrow rows of a stage from staging [tokens][heads][pitch bytes].
  __device__ __forceinline__ void store(const Job& job, const ContractLayout& layout, const B& block,
                                        const unsigned char* staging, const TokenEntry* entries) const {
    const int heads = block.heads;
    uint32_t from = ptx::shared_address(staging) + tile_ * 16 + row_ * B::kPitch;
    for (int i = 0; i < layout.tokens; ++i, from += heads * B::kPitch) {
      const uint64_t out = entries[i].out;
      if (out == 0) continue;
      if (store_held_) {
        uint4 words[kNarrow];
#pragma unroll
        for (int k = 0; k < kNarrow; ++k) {  // rows past the last are read as the last
          words[k] = ptx::load_shared_16(from + min(k * kStep, heads - 1 - row_) * B::kPitch);
        }
#pragma unroll
        for (int k = 0; k < kNarrow; ++k) {
          store_16(out + out_[k], words[k], row_ + k * kStep < heads && count_ > 0);
        }
        continue;
      }
      const int64_t* offsets = B::offsets(layout) + block.wide + heads;
#pragma unroll 1
      for (int row = row_; row < heads; row += kStep) {
        store_tile(reinterpret_cast<T*>(out + offsets[row]), job.narrow_out, first_, count_,
                   ptx::load_shared_16(from + (row - row_) * B::kPitch));
      }
    }
  }

 private:
  // A token's rows where there are too many, or one element at a time.
  __device__ __forceinline__ void fetch_rows(const Job& job, const ContractLayout& layout, const B& block, uint32_t to,
                                             uint64_t wide, uint64_t narrow) const {
    const int64_t* offsets = B::offsets(layout);
    const int count = wide != 0 ? count_ : 0;
#pragma unroll 1
    for (int row = row_; row < block.rows; row += kStep, to += kStep * B::kPitch) {
      const bool is_wide = row < block.wide;
      const T* from = reinterpret_cast<const T*>((is_wide ? wide : narrow) + offsets[row]);
      const TokenRows& rows = is_wide ? job.wide_in : job.narrow_in;
      if (rows.vector) {
        ptx::cp_async_16(to, from + first_, count > 0);
      } else {
        load_elements(to, from, rows.dim_stride, first_, count);
      }
    }
  }

  int64_t wide_[kWide], narrow_[kNarrow], out_[kNarrow];  // bytes from the token's first row
  int warp_, lane_, row_, tile_, first_, count_;
  bool fetch_held_, store_held_;
};

// Turns 16 neighbouring elements backwards; `left` pairs at most.
template <class T>
__device__ __forceinline__ void turn_words(uint4* at, const float (&cos)[kTileElems], const float (&sin)[kTileElems],
                                           bool pairs, int left) {
  const uint4 x = at[0], y = at[1];
  uint32_t words[8] = {x.x, x.y, x.z, x.w, y.x, y.y, y.z, y.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float c0 = cos[2 * i], c1 = cos[2 * i + 1], s0 = -sin[2 * i], s1 = -sin[2 * i + 1];
    if (pairs) {
      turn_packed<T>(words[2 * i], words[2 * i + 1], c0, c1, s0, s1, true, left - 2 * i);
    } else {
      turn_packed<T>(words[i], words[i + 4], c0, c1, s0, s1, false, left);
    }
  }
  at[0] = {words[0], words[1], words[2], words[3]}, at[1] = {words[4], words[5], words[6], words[7]};
}

// Turns the wide rows of a stage backwards, in place, each by its own pseudo-head's angles. Called by the whole block.
template <class T, int kColumns>
__device__ __forceinline__ void turn_stage(const Job& job, const ContractLayout& layout, const Block<kColumns>& block,
                                           unsigned char* stage) {
  constexpr int kUnits = kColumns / 16, kPairs = kColumns / 2, kPitch = Block<kColumns>::kPitch;
  const int unit = static_cast<int>(threadIdx.x) % kUnits, first_row = static_cast<int>(threadIdx.x) / kUnits;
  const int left = job.rotary.dim / 2 - (block.first_tile * (kTileElems / 2) + unit * kTileElems);
  if (left <= 0) return;
  for (int i = 0; i < layout.tokens; ++i, stage += block.token_bytes) {
#pragma unroll 1
    for (int row = first_row; row < block.wide; row += static_cast<int>(blockDim.x) / kUnits) {
      uint4* at = reinterpret_cast<uint4*>(stage + row * kPitch + unit * 32);
      const float* cos = reinterpret_cast<const float*>(stage + block.table_offset) +
                         (job.wide_begin + row) % job.pseudo * 2 * kPairs + unit * kTileElems;
      float c[kTileElems], s[kTileElems];
#pragma unroll
      for (int e = 0; e < kTileElems; e += 4) {
        *reinterpret_cast<float4*>(c + e) = *reinterpret_cast<const float4*>(cos + e);
        *reinterpret_cast<float4*>(s + e) = *reinterpret_cast<const float4*>(cos + kPairs + e);
      }
      turn_words<T>(at, c, s, job.rotary.pairs, left);
    }
  }
}

}  // namespace plait::cuda::iha
