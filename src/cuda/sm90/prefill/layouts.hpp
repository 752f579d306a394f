// Whether the copy engine can read a problem's tensors, and how. Plain C++.
// Called by the cuda_sm90 backend's run() and launch.cuh.
#pragma once

#include "cuda/sm90/prefill/tile.hpp"
#include "cuda/sm90/row_tile.hpp"

namespace plait::cuda::sm90 {

struct PrefillLayouts {
  std::optional<RowTileLayout> q, k, v;

  // cache_rows: of a dense cache, else 0.
  static PrefillLayouts of(const AttentionProblem& p, const AttentionTensors& t, int64_t cache_rows) {
    const catalog::Sm90PrefillTile& tile = prefill_tile(p);
    const int64_t batch = p.packed ? 1 : p.batch, batch_kv = p.cached ? cache_rows : batch;
    return {row_tile_layout(p, t.q, p.head_dim, p.seqlen_q, p.heads_q, batch, tile.query_rows),
            row_tile_layout(p, t.k, p.head_dim, p.seqlen_kv, p.heads_kv, batch_kv, tile.tile_keys),
            row_tile_layout(p, t.v, p.head_dim_v, p.seqlen_kv, p.heads_kv, batch_kv, tile.tile_keys)};
  }
  bool complete() const { return q && k && v; }
};

// The same. Throws Error kUnsupported where they are not complete and the call asks for cuda_sm90.
PrefillLayouts readable_layouts(const AttentionProblem& problem, const AttentionTensors& tensors, int64_t cache_rows);

}  // namespace plait::cuda::sm90
