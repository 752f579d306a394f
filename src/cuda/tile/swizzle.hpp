// Where an element of a shared-memory tile of 16-bit elements lies, so that ldmatrix and 16-byte copies hit all banks.
// Called by the kernels of cuda_mma and of iha, and by a test that counts bank conflicts on the host.
#pragma once

namespace plait::tile {

inline constexpr int kChunkElems = 8;  // 16 bytes: the unit of ldmatrix rows and of cp.async

// A tile of rows of `kColumns` elements without padding. Chunk c of row r is stored at chunk c ^ f(r): the eight rows
// of an ldmatrix matrix (same c, consecutive r) then lie in eight different groups of four banks.
template <int kColumns>
struct Swizzle {
  static constexpr int kChunks = kColumns / kChunkElems;
  static_assert(kColumns % 32 == 0, "rows of 32 elements at least");

  // Element offset of chunk `chunk` of row `row`.
  static constexpr int offset(int row, int chunk) {
    const int mixed = kChunks % 8 == 0 ? chunk ^ (row & 7) : chunk ^ ((row >> 1) & 3);
    return (row * kChunks + mixed) * kChunkElems;
  }
};

}  // namespace plait::tile
