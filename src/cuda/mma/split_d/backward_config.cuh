// How the split_d backward shares out its tiles, and what lies in shared memory.
// Called by backward.cuh.
#pragma once

#include "cuda/mma/backward/block.cuh"
#include "cuda/mma/split_d/chunks.cuh"
#include "cuda/mma/split_d/exchange.cuh"

namespace plait::cuda::mma {

// What block.cuh asks of a configuration, and the tiles. Side kKeysAlone: dK and dV; kRows: dQ.
template <class T_, catalog::SplitDBackwardTile kTile_, Side kSide_>
struct SplitDConfig {
  using T = T_;
  static constexpr catalog::SplitDBackwardTile kTile = kTile_;
  static constexpr bool kKeysResident = kSide_ != Side::kRows;
  static constexpr int kHeadDim = kTile.head_dim, kResident = kTile.resident, kStream = kTile.stream;
  static constexpr int kStages = kTile.stages(), kThreads = kTile.threads();
  static constexpr int kSecondStages = kTile.buffers - kStages;  // of the stream's second tensor
  static constexpr bool kSecondLate = kSecondStages < kStages;   // its buffer is filled again as soon as it is read
  static constexpr int kDqTileElems = 0;                         // dQ is never summed in memory
  static constexpr int kChunks = kHeadDim / kChunkColumns;
  static constexpr int kResidentBytes = kResident * kHeadDim * 2, kStreamBytes = kStream * kHeadDim * 2;  // of a tile

  // Scores: softmax rows by keys, in kScoreTiles tiles of kM x 16 by kN x 8 (along the resident side), each made by
  // kSources neighbouring warps.
  static constexpr int kRows = kKeysResident ? kStream : kResident, kKeys = kKeysResident ? kResident : kStream;
  static constexpr int kM = (kKeysResident ? kTile.stream : kTile.warp_resident()) / 16;
  static constexpr int kN = (kKeysResident ? kTile.warp_resident() : kTile.stream) / 8;
  static constexpr int kScoreTiles = kTile.score_tiles();
  static constexpr int kSources = catalog::kSplitDWarps / kScoreTiles, kSlices = kSources / 2;
  using Sum = Exchange<kM, kN, kSources>;
  static_assert(!Sum::kShape.own_in_registers());

  // Gradients: a warp has kGradM x 16 rows and every kGradWarps-th group of 16 columns.
  static constexpr int kGradWarps = catalog::kSplitDWarps / kTile.row_warps;
  static constexpr int kGradM = kResident / 16 / kTile.row_warps, kGroups = kHeadDim / 16 / kGradWarps;
  static_assert(kGroups * 16 * kGradWarps == kHeadDim && kGradM * 16 * kTile.row_warps == kResident);

  // Byte offset of the 16 x 8 block (row_block, key_block) of P, dS behind it: rows of 16 bytes, where its sums were.
  static constexpr int kBlockBytes = 16 * 8 * 2;
  static constexpr int score_block(int row_block, int key_block) {
    const int tile = kKeysResident ? key_block / kN : row_block / kM;
    const int inside = row_block % kM * kN + key_block % kN;
    return tile * Sum::kShape.bytes() + inside / Sum::kKept * Sum::kTargetBytes + inside % Sum::kKept * 2 * kBlockBytes;
  }
  static constexpr int kNextBlock = Sum::kKept > 1 ? 2 * kBlockBytes : Sum::kTargetBytes;  // from an even key block
};

// The tiles follow: resident first (K, Q) and second (V, dO), then all of stream first and of stream second.
template <class C>
struct SplitDBackwardStorage {
  alignas(128) BlockState state;
  char pad[catalog::SplitDBackwardTile::kStateBytes - sizeof(BlockState)];
  float2 row_pairs[C::kTile.row_bytes() / 8];  // of the stream rows per stage, or of the resident rows
  alignas(128) char exchange[C::kScoreTiles * C::Sum::kShape.bytes()];
};

}  // namespace plait::cuda::mma
