// narrow[token, s, :] = turn back(sum_r weight(r, s) * wide[token, r, :]) and, from the same read, the weight gradient
// sum_{token, column} wide[r] * narrow_in[s]: premix backward; one of the two alone: collapse forward and backward.
// Called by iha.cu through contract_kernel; see README.md.
#pragma once

#include "cuda/iha/contract_gradient.cuh"
#include "cuda/iha/contract_rows.cuh"
#include "cuda/ptx/barrier.cuh"

namespace plait::cuda::iha {

// mma truncates what it adds: after so many stages the gradient moves on to sums that round to nearest.
inline constexpr int kFlushStages = 64;

// Weights, row offsets and empty sums; the caller synchronises.
template <class T, int kNarrowTiles, int kColumns>
__device__ __forceinline__ void prepare_block(const Job& job, const ContractLayout& layout,
                                              const Block<kColumns>& block) {
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  if (job.narrow_out.data != nullptr) fill_row_weights<T>(job, block.weights(), kNarrowTiles);
  int64_t* offsets = block.offsets(layout);
  for (int row = thread; row < block.wide; row += threads) {
    const int wide_row = job.wide_begin + row;
    const int64_t elems =
        wide_row / job.pseudo * job.wide_in.head_stride + wide_row % job.pseudo * job.wide_in.pseudo_stride;
    offsets[row] = elems * static_cast<int64_t>(sizeof(T));
  }
  for (int head = thread; head < block.heads; head += threads) {
    offsets[block.wide + head] = head * job.narrow_in.head_stride * static_cast<int64_t>(sizeof(T));
    offsets[block.wide + block.heads + head] = head * job.narrow_out.head_stride * static_cast<int64_t>(sizeof(T));
  }
  if (job.partials == nullptr) return;
  float* sums = reinterpret_cast<float*>(block.memory() + layout.sums_offset);
  for (int i = thread; i < block.wide * kNarrowTiles * kTileElems; i += threads) sums[i] = 0.0f;
}

// The warps of a block go through its stages each with its role, and all meet once per stage, at places of their own;
// twice where wide rows turn first.
struct RoleBarriers {
  static __device__ __forceinline__ void all() { ptx::named_barrier<1, ContractLayout::kThreads>(); }
  static __device__ __forceinline__ void gradient() { ptx::named_barrier<2, 32 * ContractLayout::kGradientWarps>(); }
};

// Loads begin before stage 0; a role has nothing to work on then, and in the step behind the last stage.
template <int kColumns>
__device__ __forceinline__ bool has_stage(const Block<kColumns>& block, int n) {
  return n >= 0 && n < block.stages;
}

// Loads run ahead of the stage that is worked on, its narrow rows leave one stage later.
template <class T, int kColumns>
__device__ __forceinline__ void move_rows(const Job& job, const ContractLayout& layout, const Block<kColumns>& block,
                                          int thread) {
  const int ahead = layout.stages - 1, ring = layout.stages + 2;
  unsigned char *stages = block.memory() + layout.stage_offset, *staging = block.memory() + layout.staging_offset;
  const bool makes_rows = job.narrow_out.data != nullptr;
  const Mover<T, kColumns> mover(job, layout, block, thread);
  int slot = 0, turning = 0, entry = 0, entry_before = ring - 1, half = 0;  // slot, entry: of stage n + ahead
  for (int n = 1 - layout.stages; n <= block.stages; ++n) {
    wait_stages(ahead - 1);
    RoleBarriers::all();  // stage n is there, and stage n - 1 has been worked on
    if (makes_rows && n > 0) {
      mover.store(job, layout, block, staging + half * layout.staging_bytes, block.entries(layout, entry_before));
    }
    if (n + ahead < block.stages) {
      mover.fetch(job, layout, block, stages + slot * layout.stage_bytes, block.entries(layout, entry));
    }
    ptx::cp_async_commit();
    slot = slot + 1 < layout.stages ? slot + 1 : 0;
    entry = entry + 1 < ring ? entry + 1 : 0;
    if (!has_stage(block, n)) continue;
    if (job.rotary.by_row) {
      turn_stage<T>(job, layout, block, stages + turning * layout.stage_bytes);
      turning = turning + 1 < layout.stages ? turning + 1 : 0;
      RoleBarriers::all();
    }
    half ^= 1;
    entry_before = entry_before + 1 < ring ? entry_before + 1 : 0;
  }
}

template <class T, int kNarrowTiles, int kColumns>
__device__ __forceinline__ void make_rows(const Job& job, const ContractLayout& layout, const Block<kColumns>& block,
                                          int warp, int lane) {
  unsigned char *stages = block.memory() + layout.stage_offset, *staging = block.memory() + layout.staging_offset;
  const bool makes_rows = job.narrow_out.data != nullptr;
  const RowsRole<T, kNarrowTiles, kColumns> role(job, block, warp, lane);
  const int ahead = layout.stages - 1, ring = layout.stages + 2;
  int slot = 0, half = 0, entry = 1;  // entry: of stage n + ahead + 1, which the last of these warps describes
  for (int n = 1 - layout.stages; n <= block.stages; ++n) {
    RoleBarriers::all();
    if (warp == ContractLayout::kRowsWarps - 1) {
      describe_stage<T>(job, layout, block, n + ahead + 1, block.entries(layout, entry), lane);
      entry = entry + 1 < ring ? entry + 1 : 0;
    }
    if (!has_stage(block, n)) continue;
    unsigned char* stage = stages + slot * layout.stage_bytes;
    if (job.rotary.by_row) {
      turn_stage<T>(job, layout, block, stage);
      RoleBarriers::all();
    }
    half ^= 1;
    if (makes_rows) role.work(layout, block, stage, staging + half * layout.staging_bytes);
    slot = slot + 1 < layout.stages ? slot + 1 : 0;
  }
}

template <class T, int kNarrowTiles, int kColumns>
__device__ __forceinline__ void sum_gradient(const Job& job, const ContractLayout& layout, const Block<kColumns>& block,
                                             int warp, int lane) {
  unsigned char* stages = block.memory() + layout.stage_offset;
  GradientRole<T, kNarrowTiles, kColumns> role(job, block, warp, lane);
  // The warps move their sums slice by slice, a barrier behind each.
  const int slices = job.partials != nullptr ? GradientRole<T, kNarrowTiles, kColumns>::slices(block.wide) : 0;
  int slot = 0;
  for (int n = 1 - layout.stages; n <= block.stages; ++n) {
    RoleBarriers::all();
    if (!has_stage(block, n)) continue;
    unsigned char* stage = stages + slot * layout.stage_bytes;
    if (job.rotary.by_row) {
      turn_stage<T>(job, layout, block, stage);
      RoleBarriers::all();
    }
    if (slices > 0) role.work(job, layout, block, slices, stage);
    const bool flushes = (n + 1) % kFlushStages == 0 || n + 1 == block.stages;
    for (int turn = 0; flushes && turn < slices; ++turn) {
      role.flush(reinterpret_cast<float*>(block.memory() + layout.sums_offset), turn, block.wide);
      RoleBarriers::gradient();
    }
    slot = slot + 1 < layout.stages ? slot + 1 : 0;
  }
}

template <class T, int kNarrowTiles, int kColumns>
__global__ void __launch_bounds__(ContractLayout::kThreads, 1)
    contract_kernel(const __grid_constant__ Jobs<ContractLayout> jobs) {
  constexpr int kRowsWarps = ContractLayout::kRowsWarps, kMovers = kRowsWarps + ContractLayout::kGradientWarps;
  using B = Block<kColumns>;
  static_assert(sizeof(Job) % 4 == 0 && 16 + sizeof(B) + sizeof(Job) <= ContractLayout::kHeaderBytes);
  const ContractLayout& layout = jobs.layout;
  // The job and the block in shared memory, after 16 zero bytes: there their addresses cost no register.
  B& block = *reinterpret_cast<B*>(B::memory() + 16);
  const Job& job = *reinterpret_cast<const Job*>(B::memory() + 16 + sizeof(B));
  const Place place = find_place(jobs, blockIdx.x);
  if (threadIdx.x < sizeof(Job) / 4) {
    reinterpret_cast<uint32_t*>(B::memory() + 16 + sizeof(B))[threadIdx.x] =
        reinterpret_cast<const uint32_t*>(&jobs.job[place.job])[threadIdx.x];
  }
  if (threadIdx.x == 0) {
    *reinterpret_cast<uint4*>(B::memory()) = {0, 0, 0, 0};
    block.fill(jobs.job[place.job], layout, place.block);
  }
  __syncthreads();
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  prepare_block<T, kNarrowTiles>(job, layout, block);
  __syncthreads();
  if (warp == kMovers) describe_stage<T>(job, layout, block, 0, block.entries(layout, 0), lane);
  __syncthreads();
  if (warp < kRowsWarps) {
    make_rows<T, kNarrowTiles>(job, layout, block, warp, lane);
  } else if (warp < kMovers) {
    sum_gradient<T, kNarrowTiles>(job, layout, block, warp - kRowsWarps, lane);
  } else {
    move_rows<T>(job, layout, block, static_cast<int>(threadIdx.x) - kMovers * 32);
  }
  if (job.partials == nullptr) return;
  __syncthreads();
  const float* sums = reinterpret_cast<const float*>(B::memory() + layout.sums_offset);
  float* out = job.partials + block.number * block.wide * block.heads;
  for (int i = static_cast<int>(threadIdx.x); i < block.wide * block.heads; i += static_cast<int>(blockDim.x)) {
    out[i] = sums[i / block.heads * kNarrowTiles * kTileElems + i % block.heads];
  }
}

}  // namespace plait::cuda::iha
