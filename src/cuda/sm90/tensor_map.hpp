// Tensor maps for the copy engine, encoded on the host for each launch: no device memory, no synchronisation.
// Called by the launch functions of sm90.
#pragma once

#include <cuda.h>

#include "cuda/sm90/row_tile.hpp"

namespace plait::cuda::sm90 {

// A 16-bit tensor in tiles of rows. A copy is 64 columns wide, swizzled as tile::WgmmaTile; columns past the tensor's
// and rows that a tile lacks are zeros.
struct RowTileMap {
  CUtensorMap map;
  RowTileIndex index;
};

RowTileMap row_tile_map(const CanonicalTensor& tensor, const RowTileLayout& layout);

}  // namespace plait::cuda::sm90
