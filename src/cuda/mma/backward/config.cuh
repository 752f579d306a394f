// Compile-time facts of a backward kernel: who is resident, how warps divide the tiles, what lies where in shared
// memory; and its parameters. Called by every file of this folder and by the split_d backward.
#pragma once

#include <cstdint>

#include "catalog/mma_backward_tiles.hpp"
#include "cuda/common/loader.cuh"

namespace plait::cuda::mma {

enum class Side {
  kKeys,       // a block owns a tile of keys, walks query rows, makes dK and dV and adds to dQ
  kKeysAlone,  // the same without dQ
  kRows,       // a block owns a tile of query rows, walks keys, makes dQ
};

template <class T_, catalog::BackwardTile kTile_, Side kSide_>
struct Config {
  using T = T_;
  static constexpr catalog::BackwardTile kTile = kTile_;
  static constexpr Side kSide = kSide_;
  static constexpr bool kKeysResident = kSide != Side::kRows, kAddsDq = kSide == Side::kKeys;
  static constexpr int kHeadDim = kTile.head_dim, kResident = kTile.resident, kStream = kTile.stream;
  static constexpr int kStages = kTile.stages;
  static constexpr bool kHeld = kTile.resident_in_registers;  // the resident tiles, as operands of the scores
  static constexpr int kThreads = kTile.threads(), kWarps = kThreads / 32;

  // A warp's part of the score tile: kScoreM x 16 resident rows, kScoreK x 16 stream rows.
  static constexpr int kWarpsR = kTile.warps_resident, kWarpsS = kTile.warps_stream;
  static constexpr int kScoreM = kResident / 16 / kWarpsR, kScoreK = kStream / 16 / kWarpsS;
  static constexpr int kWarpRows = 16 * kScoreM, kWarpStream = 16 * kScoreK;
  // Its part of dK and dV (dQ): the same resident rows, every kWarpsS-th group of 16 columns.
  static constexpr int kGradN = kHeadDim / 16 / kWarpsS;
  // Its part of the dQ tile of side kKeys: kDqM x 16 rows, every kDqWarpsN-th group of 16 columns.
  static constexpr int kDqWarpsM = kTile.dq_warps, kDqWarpsN = kWarps / kDqWarpsM;
  static constexpr int kDqM = kStream / 16 / kDqWarpsM, kDqN = kHeadDim / 16 / kDqWarpsN;
  static constexpr bool kShares = kAddsDq || kWarpsS > 1;  // dS is read by other warps
  static constexpr int kDqTileElems = kStream * kHeadDim;

  static_assert(kScoreM * 16 * kWarpsR == kResident && kScoreK * 16 * kWarpsS == kStream);
  static_assert(kGradN * 16 * kWarpsS == kHeadDim);
  static_assert(kDqM * 16 * kDqWarpsM == kStream && kDqN * 16 * kDqWarpsN == kHeadDim);
  static_assert((kWarpsS & (kWarpsS - 1)) == 0 && (kDqWarpsN & (kDqWarpsN - 1)) == 0, "column groups are interleaved");
  static_assert(kWarpRows <= 32, "one lane holds the interval of one row");
  static_assert(kStream <= catalog::kBackwardMaxStreamRows);

  // Byte offsets in shared memory. Tiles are swizzled, rows of kHeadDim (dS: kStream) elements.
  static constexpr int kFirstBytes = 0;                                               // K (Q)
  static constexpr int kSecondBytes = kTile.resident_bytes();                         // V (dO)
  static constexpr int kStreamBytes = 2 * kTile.resident_bytes();                     // Q (K), then dO (V), per stage
  static constexpr int kDsBytes = kStreamBytes + 2 * kStages * kTile.stream_bytes();  // dS^T (dS), per buffer
  static constexpr int kScoreBytes = kTile.score_buffers() * kTile.score_bytes();
  static constexpr int kPBytes = kDsBytes + kScoreBytes;                       // P^T as operand registers
  static constexpr int kRowBytes = kPBytes + (kWarpsS > 1 ? kScoreBytes : 0);  // RowPair per softmax row
  static constexpr int kStateBytes = kRowBytes + kTile.row_bytes();            // BlockState
  static_assert(kStateBytes + catalog::kBackwardStateBytes == kTile.smem_bytes());
};

// Shared memory per block of the GPUs that a compilation serves: kernels of larger tiles are left empty there.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
inline constexpr int kArchSharedBytes = 64 * 1024;
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
inline constexpr int kArchSharedBytes = 163 * 1024;
#else
inline constexpr int kArchSharedBytes = 227 * 1024;
#endif

// Order of blocks. Units (a head of a batch entry and pass) are taken in groups small enough for the L2; inside a group
// all units' first tiles come first, because with a causal mask the first (rows: last) tile is the longest.
struct BlockOrder {
  int64_t tiles, units, group;
};

struct ScoreFactor {
  float log2;             // scale * log2(e), or softcap * log2(e) under softcap
  float inverse_softcap;  // scale / softcap; 0: no softcap
};

// Read from constant memory, where it costs no registers.
struct BackwardParams {
  AttentionProblem problem;
  AttentionTensors tensors;
  const float2* row_pairs;  // aux::DeltaExtras: [batch (1 if packed), heads_q, rows]
  float* dq_sum;            // [batch (1), heads_q, passes, dq_slots, kStream x kHeadDim]
  int64_t dq_slots;         // row tiles, per batch entry and head
  BlockOrder order;
  ScoreFactor factor;
  RowLayout q, k, v, dout;
  bool plain_stream;                     // q and dout (kRows: k and v) go through load_rows()
  bool vector_dq, vector_dk, vector_dv;  // 16-byte stores are possible
};

}  // namespace plait::cuda::mma
