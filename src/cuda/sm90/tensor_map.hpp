// Tensor maps for the copy engine, encoded on the host for each launch: no device memory, no synchronisation.
// Called by the launch functions of sm90.
#pragma once

#include <cuda.h>

#include "core/problem.hpp"

namespace plait::cuda {

// Tiles of up to `tile_rows` rows of a 16-bit tensor of canonical order without pseudo-heads. Rows have two dimensions
// in the map, so that a copy can end at any row: of a tile that ends before row `end` and has `rows` rows, the
// coordinates are {column, tile_rows - rows, head, end, batch}; the tile's other rows become zeros. A copy is 64
// columns wide, swizzled as tile::WgmmaTile; columns past `dim` are zeros.
CUtensorMap row_tile_map(const CanonicalTensor& tensor, int64_t dim, int64_t rows, int64_t heads, int64_t batch,
                         int tile_rows);

// Whether there is such a map: rows of unit stride, 16-byte aligned, steps between rows, heads and batches above zero.
bool has_row_tile_map(const CanonicalTensor& tensor, int64_t rows, int64_t heads, int64_t batch);

}  // namespace plait::cuda
