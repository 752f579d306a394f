// Shared-memory tiles as wgmma and the copy engine see them: 128-byte swizzle, operand descriptors.
// Called by the kernels of cuda_sm90, and by a test on the host: plain arithmetic.
#pragma once

#include <cstdint>

namespace plait::tile {

inline constexpr int kSwizzleBytes = 128;  // of a row of a block; the pattern repeats every 8 rows
inline constexpr int kSwizzleRows = 8;
inline constexpr int kBlockColumns = kSwizzleBytes / 2;  // of 16-bit elements
inline constexpr int kSwizzleAlignBytes = kSwizzleBytes * kSwizzleRows;
inline constexpr int kWgmmaDepth = 16;  // k of one instruction

// An operand in shared memory. leading, stride: bytes between patterns (8 rows of 128 bytes) along the two dimensions.
constexpr uint64_t wgmma_descriptor(uint32_t address, uint32_t leading_bytes, uint32_t stride_bytes) {
  constexpr uint64_t kSwizzle128 = 1;
  const auto field = [](uint32_t bytes) { return static_cast<uint64_t>(bytes >> 4 & 0x3fff); };
  return field(address) | field(leading_bytes) << 16 | field(stride_bytes) << 32 | kSwizzle128 << 62;
}

// What to add to a descriptor for an operand `bytes` (a multiple of 16) further on; addresses end far below 2^18.
constexpr uint64_t descriptor_step(int bytes) { return static_cast<uint64_t>(bytes) >> 4; }

// The descriptor of an operand `steps` such steps further on. Only its low word changes.
constexpr uint64_t advance_descriptor(uint64_t descriptor, uint64_t steps) {
  const auto low = static_cast<uint32_t>(descriptor) + static_cast<uint32_t>(steps);
  return descriptor >> 32 << 32 | low;
}

// kRows rows of kColumns 16-bit elements: blocks of 64 columns one behind the other, rows of 128 bytes in each, whose
// 16-byte chunks are permuted by the row. At an address that is a multiple of kSwizzleAlignBytes.
template <int kTileRows, int kColumns>
struct WgmmaTile {
  static constexpr int kRows = kTileRows;
  static_assert(kRows % kSwizzleRows == 0 && kColumns % kBlockColumns == 0);
  static constexpr int kBlocks = kColumns / kBlockColumns;
  static constexpr int kBlockBytes = kRows * kSwizzleBytes;
  static constexpr int kBytes = kBlocks * kBlockBytes;

  // Of 16-byte chunk `chunk` of row `row`.
  static constexpr int chunk_bytes(int row, int chunk) {
    constexpr int kChunks = kSwizzleBytes / 16;
    return chunk / kChunks * kBlockBytes + row * kSwizzleBytes + (chunk % kChunks ^ row % kSwizzleRows) * 16;
  }

  // Operand whose rows are m or n and whose columns are k ("K-major"). `row`: the first one, a multiple of 8.
  static constexpr uint64_t rows_operand(uint32_t address, int row = 0) {
    return wgmma_descriptor(address + static_cast<uint32_t>(row) * kSwizzleBytes, 16, kSwizzleAlignBytes);
  }
  // From its first 16 columns to the step-th 16.
  static constexpr uint64_t rows_operand_step(int step) {
    constexpr int kSteps = kBlockColumns / kWgmmaDepth;
    return descriptor_step(step / kSteps * kBlockBytes + step % kSteps * kWgmmaDepth * 2);
  }

  // Operand whose rows are k and whose columns are n ("MN-major"), from block `block` of columns on.
  static constexpr uint64_t columns_operand(uint32_t address, int block = 0) {
    return wgmma_descriptor(address + static_cast<uint32_t>(block) * kBlockBytes, kBlockBytes, kSwizzleAlignBytes);
  }
  // From its first 16 rows to the step-th 16.
  static constexpr uint64_t columns_operand_step(int step) {
    return descriptor_step(step * kWgmmaDepth * kSwizzleBytes);
  }
};

}  // namespace plait::tile
