// Whether the copy engine can read a problem's tensors, and how. Plain C++.
// Called by the cuda_sm90 backend's run() and launch.cuh.
#pragma once

#include "cuda/sm90/prefill/tile.hpp"
#include "cuda/sm90/row_tile.hpp"

namespace plait::cuda::sm90 {

struct PrefillLayouts {
  std::optional<RowTileLayout> q, k, v;
  std::optional<RowTileLayout> out;  // for O from where the queries were; may be missing
  int group = 1;                     // query heads that are rows of one tile of q
  size_t tile_index = 0;             // of catalog::kSm90PrefillTiles: of the tile that the copies bring

  // cache_rows: of a dense cache, else 0. `group`: of a key head, if the copy engine can read their rows in turn.
  static PrefillLayouts of(const AttentionProblem& p, const AttentionTensors& t, int64_t cache_rows, int group) {
    PrefillLayouts found;
    found.tile_index = prefill_tile_index(p);
    const catalog::Sm90PrefillTile& tile = catalog::kSm90PrefillTiles[found.tile_index];
    const int64_t batch = p.packed ? 1 : p.batch, batch_kv = p.cached ? cache_rows : batch;
    found.k = row_tile_layout(p, t.k, p.head_dim, p.seqlen_kv, p.heads_kv, batch_kv, tile.tile_keys);
    found.v = row_tile_layout(p, t.v, p.head_dim_v, p.seqlen_kv, p.heads_kv, batch_kv, tile.tile_keys);
    // Columns of the queries that no copy fills have to stay zero.
    if (tile.stages_output() && p.head_dim > tile.head_dim - tile::kBlockColumns) {
      AttentionProblem outer = p;  // O has no pseudo-heads in joint mode
      if (p.mode == HeadMode::kJoint) outer.mode = HeadMode::kPlain, outer.pseudo_heads = 1;
      found.out = row_tile_layout(outer, t.out, p.head_dim_v, p.seqlen_q, p.heads_q, batch, tile.rows());
    }
    if (group > 1) {  // as the pseudo-heads of interleaved rows
      AttentionProblem rows = p;
      rows.mode = HeadMode::kInterleaved, rows.pseudo_heads = group;
      CanonicalTensor q = t.q;
      q.pseudo_stride = t.q.head_stride, q.head_stride *= group;
      found.q = row_tile_layout(rows, q, p.head_dim, p.seqlen_q, p.heads_q / group, batch, tile.query_rows);
      if (found.q) found.group = group;
    }
    if (!found.q) found.q = row_tile_layout(p, t.q, p.head_dim, p.seqlen_q, p.heads_q, batch, tile.query_rows);
    return found;
  }
  bool complete() const { return q && k && v; }
};

// The same. Throws Error kUnsupported where they are not complete and the call asks for cuda_sm90.
PrefillLayouts readable_layouts(const AttentionProblem& problem, const AttentionTensors& tensors, int64_t cache_rows,
                                int group);

}  // namespace plait::cuda::sm90
