// wide[token, r, :] = turn(sum_s weight(r, s) * narrow[token, s, :]): premix forward, and the collapse's gradient of x.
// Called by iha.cu through expand_kernel; see README.md.
#pragma once

#include "cuda/iha/expand_rows.cuh"

namespace plait::cuda::iha {

// The tokens that a warp works on, every stride-th: where the next one is. In shared memory, registers are scarce.
struct TokenWalk {
  Token token;
  int64_t batches, positions, left, end;  // a step; tokens left; positions from `end` on read as zeros

  __device__ __forceinline__ TokenWalk(const Job& job, int64_t first, int64_t stride)
      : token(token_at(job, first)),
        batches(stride / job.seqlen),
        positions(stride % job.seqlen),
        end(positions_end(job)) {
    left = first < job.tokens ? (job.tokens - first + stride - 1) / stride : 0;
  }
  __device__ __forceinline__ void advance(int64_t seqlen) {
    token.batch += batches, token.position += positions, --left;
    if (token.position >= seqlen) token.position -= seqlen, ++token.batch;
  }
};

// Starts the copy of the next token into a stage, head i from `offsets`[i] bytes on, and takes a step; returns where
// its wide rows go, with the lowest bit set if they turn (0: there is no next one). Called by whole warps.
template <class T>
__device__ __forceinline__ uint64_t fetch_item(const Job& job, const ExpandWarp& warp, unsigned char* stage,
                                               const int64_t* offsets, TokenWalk* next) {
  TokenWalk walk = *next;
  if (walk.left <= 0) return 0;
  const Token token = walk.token;
  const bool inside = token.position < walk.end;
  const char* row = reinterpret_cast<const char*>(row_pointer<T>(job.narrow_in, token));
  const int head = warp.lane / ExpandLayout::kTiles, step = 32 / ExpandLayout::kTiles;
  uint32_t to = ptx::shared_address(stage) + head * ExpandLayout::kPitch + warp.lane % ExpandLayout::kTiles * 16;
  const int count = inside ? warp.count : 0;
  if (job.narrow_in.vector) {
#pragma unroll 2
    for (int h = head; h < job.heads; h += step, to += step * ExpandLayout::kPitch) {
      ptx::cp_async_16(to, row + offsets[h] + warp.first * sizeof(T), count > 0);
    }
  } else {
    for (int h = head; h < job.heads; h += step, to += step * ExpandLayout::kPitch) {
      load_elements(to, reinterpret_cast<const T*>(row + offsets[h]), job.narrow_in.dim_stride, warp.first, count);
    }
  }
  int64_t position = -1;
  if (warp.table_rows > 0) {
    position = rotary_position(job, token.position, walk.end, warp.lane);
    fetch_angles(job.rotary, reinterpret_cast<float*>(stage + job.heads * ExpandLayout::kPitch), warp.table_rows, 4,
                 warp.first_tile * (kTileElems / 2), position, warp.lane);
  }
  walk.advance(job.seqlen);
  __syncwarp();  // every lane has read the walk
  if (warp.lane == 0) *next = walk;
  __syncwarp();
  return reinterpret_cast<uint64_t>(row_pointer<T>(job.wide_out, token)) | (position >= 0 ? 1 : 0);
}

// Weights, offsets and 16 zero bytes of a block; the caller synchronises.
template <class T, int kSteps>
__device__ __forceinline__ void prepare_expand(const Job& job, const ExpandLayout& layout, unsigned char* shared,
                                               int wide_begin, int wide_count) {
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  if (thread == 0) *reinterpret_cast<uint4*>(shared) = {0, 0, 0, 0};
  fill_fragments<T>(
      reinterpret_cast<uint4*>(shared + ExpandLayout::kHeaderBytes),
      reinterpret_cast<uint4*>(shared + layout.low_offset), job.weights.is_float, (wide_count + 15) / 16, kSteps,
      [&](int row, int k) {
        return row < wide_count && k < job.heads ? load_weight<T>(job.weights, job.pseudo, wide_begin + row, k) : 0.0f;
      });
  int64_t* offsets = reinterpret_cast<int64_t*>(shared + layout.offsets_offset);
  for (int i = thread; i < wide_count; i += threads) {
    const int row = wide_begin + i;
    const int64_t elems = row / job.pseudo * job.wide_out.head_stride + row % job.pseudo * job.wide_out.pseudo_stride;
    offsets[i] = elems * static_cast<int64_t>(sizeof(T));
  }
  for (int head = thread; head < job.heads; head += threads) {
    offsets[layout.wide_step + head] = head * job.narrow_in.head_stride * static_cast<int64_t>(sizeof(T));
  }
}

// One segment of a job, in shared memory: this block's share of its tokens. Called by the whole block.
template <class T, int kSteps>
__device__ __forceinline__ void run_segment(const Job& job, const ExpandLayout& layout, unsigned char* shared,
                                            int segment, int64_t block_number) {
  constexpr int kTiles = ExpandLayout::kTiles, kPitch = ExpandLayout::kPitch, kStages = ExpandLayout::kStages;
  const int warp_number = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int wide_begin = segment * layout.wide_step;
  const int wide_count = min(layout.wide_step, job.heads * job.pseudo - wide_begin);
  prepare_expand<T, kSteps>(job, layout, shared, wide_begin, wide_count);

  // A warp stays with one chunk of columns.
  const int64_t chunks = (job.columns.tiles() + kTiles - 1) / kTiles;
  const int64_t number = block_number * layout.warps + warp_number, slots = job.blocks * layout.warps / chunks;
  const int64_t* offsets = reinterpret_cast<const int64_t*>(shared + layout.offsets_offset);
  ExpandWarp warp;
  warp.lane = lane, warp.first_tile = static_cast<int>(number % chunks) * kTiles;
  warp.first = job.columns.first(warp.first_tile + lane % kTiles);
  warp.count = job.columns.count(warp.first_tile + lane % kTiles);
  warp.table_rows = job.rotary.dim == 0 ? 0 : job.rotary.by_row ? job.pseudo : 1;
  unsigned char* const stages = shared + layout.warp_offset + warp_number * layout.warp_bytes;
  TokenWalk* walk = reinterpret_cast<TokenWalk*>(stages + layout.warp_bytes - sizeof(TokenWalk));
  if (lane == 0) *walk = TokenWalk(job, number / chunks < slots ? number / chunks : job.tokens, slots);
  __syncthreads();

  const bool vector = job.wide_out.vector, split = job.weights.is_float, pairs = job.rotary.pairs,
             by_row = job.rotary.by_row;
  const bool by_odd_row = by_row && kTileElems % job.pseudo != 0;  // rows 8 apart turn by different angles
  const int left = job.rotary.dim / 2 - warp.first_tile * (kTileElems / 2), pseudo = job.pseudo;
  const uint32_t zeros = ptx::shared_address(shared),
                 staging = ptx::shared_address(stages) + kStages * layout.stage_bytes;
  uint64_t out[kStages] = {};
  for (int n = 0;; ++n) {
    unsigned char* const stage = stages + n % kStages * layout.stage_bytes;
    if (n >= kStages) {
      if (out[0] == 0) break;
      ptx::cp_async_wait<kStages - 1>();
      __syncwarp();
      uint32_t b[kSteps][kTiles][2];
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
#pragma unroll
        for (int n = 0; n < kTiles; n += 2) {
          uint32_t r[4];
          ptx::ldmatrix_x4_trans(r,
                                 block_address(ptx::shared_address(stage), kPitch, k * 16, job.heads, n, lane, zeros));
          b[k][n][0] = r[0], b[k][n][1] = r[1], b[k][n + 1][0] = r[2], b[k][n + 1][1] = r[3];
        }
      }
      const bool turns = (out[0] & 1) != 0;
      const float* table = reinterpret_cast<const float*>(stage + job.heads * kPitch);
      const auto angles_of = [&](int row) { return table + (by_row ? row % pseudo : 0) * kTiles * kTileElems; };
      const float* upper = angles_of(lane / 4);
#pragma unroll 1
      for (int first_row = 0; first_row < wide_count; first_row += 16) {
        const uint32_t at = zeros + first_row * kSteps * (kFragmentBytes / 16) + lane * 16;
        WideBlock<T, kSteps> block;
        block.multiply(b, at + ExpandLayout::kHeaderBytes, at + layout.low_offset, split);
        if (turns) {
          const float* lower = upper;
          if (by_odd_row) {
            upper = angles_of(wide_begin + first_row + lane / 4);
            lower = angles_of(wide_begin + first_row + lane / 4 + 8);
          }
          block.turn(upper, lower, pairs, left, lane);
        }
        __syncwarp();  // the rows before have been read by every lane, as has the stage
        block.put(staging, lane);
        __syncwarp();
        store_rows<T>(job.wide_out, vector, out[0] & ~uint64_t{1}, offsets + first_row, staging, wide_count - first_row,
                      warp);
      }
      __syncwarp();
    }
    out[0] = out[1];
    out[1] = fetch_item<T>(job, warp, stage, offsets + layout.wide_step, walk);
    ptx::cp_async_commit();
  }
}

// Large jobs are worked on one after the other by all blocks, so that they end together; small ones side by side.
template <class T, int kSteps>
// Without stmatrix (before sm_90) two steps of heads need more than the 128 registers of two blocks.
__global__ void __launch_bounds__(kMaxWarps * 32, kSteps <= (ptx::kCapability >= 90 ? 2 : 1) ? 2 : 1)
    expand_kernel(const __grid_constant__ Jobs<ExpandLayout> jobs) {
  extern __shared__ __align__(16) unsigned char shared[];
  const ExpandLayout& layout = jobs.layout;
  // The job in shared memory, after 16 zero bytes: there its address costs no register.
  static_assert(sizeof(Job) % 4 == 0 && 16 + sizeof(Job) <= ExpandLayout::kHeaderBytes);
  const Job& job = *reinterpret_cast<const Job*>(shared + 16);
  const auto choose = [&](int j) {
    __syncthreads();  // the job and the weights before have been read by all
    for (int i = static_cast<int>(threadIdx.x); i < static_cast<int>(sizeof(Job) / 4); i += blockDim.x) {
      reinterpret_cast<uint32_t*>(shared + 16)[i] = reinterpret_cast<const uint32_t*>(&jobs.job[j])[i];
    }
    __syncthreads();
  };
  Place place = jobs.in_turn ? Place{0, 0, blockIdx.x} : find_place(jobs, blockIdx.x);
  do {
    choose(place.job);
    do {
      run_segment<T, kSteps>(job, layout, shared, place.segment, place.block);
    } while (jobs.in_turn && ++place.segment < job.segments && (__syncthreads(), true));
    place.segment = 0;
  } while (jobs.in_turn && ++place.job < jobs.count);
}

}  // namespace plait::cuda::iha
