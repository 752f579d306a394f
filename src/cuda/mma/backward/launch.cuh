// Launches the kernels of a backward call: delta, then dK and dV with a sum of dQ, or dK and dV and apart from them dQ.
// Called by variant.cu.in, one instantiation for each dtype and head-dim bucket.
#pragma once

#include <algorithm>

#include "cuda/aux/aux.hpp"
#include "cuda/mma/backward/backward.hpp"
#include "cuda/mma/backward/convert.cuh"
#include "cuda/mma/backward/kernel.cuh"
#include "cuda/runtime/launch.cuh"

namespace plait::cuda::mma {

// The caller's workspace, cut up: see workspace.hpp.
struct BackwardWorkspace {
  float* delta;
  float2* row_pairs;
  float* dq_sum;

  BackwardWorkspace(const AttentionProblem& p, void* workspace) {
    char* at = static_cast<char*>(workspace);
    const int64_t delta_bytes = backward_delta_bytes(p);
    delta = reinterpret_cast<float*>(at);
    row_pairs = reinterpret_cast<float2*>(at + delta_bytes);
    dq_sum = reinterpret_cast<float*>(at + 3 * delta_bytes);
  }
};

inline BackwardParams backward_params(const AttentionProblem& p, const AttentionTensors& t,
                                      const BackwardWorkspace& workspace) {
  const auto vectors = [&](const CanonicalTensor& tensor, int64_t dim) {
    return row_layout(p, tensor, dim).path != LoadPath::kAny;
  };
  BackwardParams params{};
  params.problem = p, params.tensors = t, params.row_pairs = workspace.row_pairs;
  const float softcap = static_cast<float>(p.softcap), scale = static_cast<float>(p.scale);
  // A scale of 0 leaves nothing to cap, and an inverse of 0 says that there is no softcap.
  const float inverse_softcap = softcap > 0.0f ? scale / softcap : 0.0f;
  params.factor =
      inverse_softcap != 0.0f ? ScoreFactor{softcap * kLog2e, inverse_softcap} : ScoreFactor{scale * kLog2e, 0.0f};
  params.q = row_layout(p, t.q, p.head_dim), params.k = row_layout(p, t.k, p.head_dim);
  params.v = row_layout(p, t.v, p.head_dim_v), params.dout = row_layout(p, t.dout, p.head_dim_v);
  params.vector_dq = vectors(t.dq, p.head_dim), params.vector_dk = vectors(t.dk, p.head_dim);
  params.vector_dv = vectors(t.dv, p.head_dim_v);
  return params;
}

// What the blocks of one unit read and add to again and again should stay in this part of the L2.
inline constexpr int64_t kUnitGroupBytes = 24 << 20;

template <class C>
BlockOrder block_order(const AttentionProblem& p) {
  const int64_t heads = C::kKeysResident ? p.heads_kv : p.heads_q;
  const int64_t units = (p.packed ? 1 : p.batch) * heads * p.joint_passes();
  const int64_t sequences = p.packed ? p.batch : 1;
  const int64_t stream_rows = (C::kKeysResident ? p.seqlen_q * (p.heads_q / p.heads_kv) : p.seqlen_kv) *
                              p.rows_per_position() / (sequences > 0 ? sequences : 1);
  const int64_t unit_bytes = (stream_rows + 1) * C::kHeadDim * (C::kKeysResident ? 8 : 4);
  const int64_t all = tiles_bound(p, C::kResident, C::kKeysResident);
  return {p.packed ? all : all / p.batch, units, std::clamp<int64_t>(kUnitGroupBytes / unit_bytes, 1, units)};
}

template <class C>
void launch_side(BackwardParams params, cudaStream_t stream) {
  if (params.problem.batch == 0 && !params.problem.packed) return;  // packed: the rows past cu_seqlens[-1]
  params.order = block_order<C>(params.problem);
  const RowLayout& first = C::kKeysResident ? params.q : params.k;
  const RowLayout& second = C::kKeysResident ? params.dout : params.v;
  using Loader = TileLoader<typename C::T, C::kStream, C::kHeadDim, C::kThreads>;
  params.plain_stream = Loader::steps_evenly(first) && Loader::steps_evenly(second) &&
                        !(C::kKeysResident && params.tensors.dout.dtype == DType::kFloat32);
  launch(backward_kernel<C>, params.order.tiles * params.order.units, C::kThreads, C::kTile.smem_bytes(), stream,
         params);
}

template <class T, catalog::BackwardTile kTile>
void launch_tile(const AttentionProblem& p, const AttentionTensors& t, void* workspace, cudaStream_t stream) {
  using Keys = Config<T, kTile, Side::kKeys>;
  const BackwardWorkspace parts(p, workspace);
  BackwardParams params = backward_params(p, t, parts);
  if (p.deterministic) {
    aux::launch_delta(p, t, parts.delta, stream, {parts.row_pairs});
    launch_side<Config<T, kTile, Side::kKeysAlone>>(params, stream);
    launch_side<Config<T, kTile, Side::kRows>>(params, stream);
    return;
  }
  params.dq_sum = parts.dq_sum;
  params.dq_slots = backward_dq_slots(p, Keys::kStream);
  const int64_t heads = p.heads_q * p.joint_passes();
  const int64_t dq_bytes = (p.packed ? 1 : p.batch) * heads * params.dq_slots * Keys::kDqTileElems * 4;
  aux::launch_delta(p, t, parts.delta, stream, {parts.row_pairs, parts.dq_sum, dq_bytes});
  launch_side<Keys>(params, stream);
  launch(convert_dq_kernel<Keys>, tiles_bound(p, Keys::kStream, false) * heads, Keys::kThreads, 0, stream, params);
}

// Compiles the tiles of the bucket and launches `chosen` of them.
template <class T, int kHeadDim, size_t kIndex = 0>
void launch_chosen_tile(const catalog::BackwardTile& chosen, const AttentionProblem& p, const AttentionTensors& t,
                        void* workspace, cudaStream_t stream) {
  constexpr const catalog::BackwardTiles& kTiles = catalog::backward_tiles(kHeadDim);
  if constexpr (kIndex < kTiles.size()) {
    if (chosen == kTiles[kIndex]) return launch_tile<T, kTiles[kIndex]>(p, t, workspace, stream);
    launch_chosen_tile<T, kHeadDim, kIndex + 1>(chosen, p, t, workspace, stream);
  } else {
    throw Error(ErrorCode::kInternal, "device", "a tile was planned that the bucket does not have");
  }
}

template <class T, int kHeadDim>
void launch_backward(const AttentionProblem& problem, const AttentionTensors& tensors, void* workspace,
                     int64_t smem_limit_bytes, cudaStream_t stream) {
  launch_chosen_tile<T, kHeadDim>(catalog::backward_tile(kHeadDim, smem_limit_bytes), problem, tensors, workspace,
                                  stream);
}

}  // namespace plait::cuda::mma
