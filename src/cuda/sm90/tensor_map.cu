// Encodes tensor maps through the driver, which is looked up at run time: nothing links libcuda.
// Called by the launch functions of sm90.
#include <algorithm>
#include <array>

#include "cuda/runtime/check.hpp"
#include "cuda/sm90/tensor_map.hpp"
#include "cuda/tile/wgmma_tile.hpp"

namespace plait::cuda {
namespace {

constexpr int kElementBytes = 2, kRank = 5, kAlignBytes = 16;
constexpr int64_t kMostStep = int64_t{1} << 40;  // bytes

// Elements from one row, head, batch to the next. Where there is one, its stride says nothing: any legal step will do.
struct Steps {
  int64_t row, head, batch;
};
Steps steps_of(const CanonicalTensor& t, int64_t rows, int64_t heads, int64_t batch) {
  constexpr int64_t kAny = kAlignBytes / kElementBytes;
  return {rows > 1 ? t.seq_stride : kAny, heads > 1 ? t.head_stride : kAny, batch > 1 ? t.batch_stride : kAny};
}

decltype(&cuTensorMapEncodeTiled) find_encoder() {
  constexpr unsigned kFirstVersion = 12000;
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, kFirstVersion, cudaEnableDefault, &found),
        "cudaGetDriverEntryPointByVersion");
  if (found != cudaDriverEntryPointSuccess) {
    throw Error(ErrorCode::kDevice, "device", "the driver has no cuTensorMapEncodeTiled");
  }
  return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
}

}  // namespace

bool has_row_tile_map(const CanonicalTensor& t, int64_t rows, int64_t heads, int64_t batch) {
  const Steps steps = steps_of(t, rows, heads, batch);
  const auto maps = [](int64_t step) {
    return step > 0 && step < kMostStep / kElementBytes && step * kElementBytes % kAlignBytes == 0;
  };
  return t.data != nullptr && t.dim_stride == 1 && maps(steps.row) && maps(steps.head) && maps(steps.batch) &&
         reinterpret_cast<uintptr_t>(t.data) % kAlignBytes == 0;
}

CUtensorMap row_tile_map(const CanonicalTensor& t, int64_t dim, int64_t rows, int64_t heads, int64_t batch,
                         int tile_rows) {
  static const auto encode = find_encoder();
  const Steps steps = steps_of(t, rows, heads, batch);
  const auto bytes = [](int64_t stride) { return static_cast<cuuint64_t>(stride * kElementBytes); };
  // Coordinates `end` count from tile_rows rows before the tensor; what lies there is never read.
  auto* base = static_cast<char*>(t.data) - tile_rows * steps.row * kElementBytes;
  const std::array<cuuint64_t, kRank> extents{static_cast<cuuint64_t>(dim), static_cast<cuuint64_t>(tile_rows),
                                              static_cast<cuuint64_t>(heads), static_cast<cuuint64_t>(rows + 1),
                                              static_cast<cuuint64_t>(batch)};
  const std::array<cuuint64_t, kRank - 1> strides{bytes(steps.row), bytes(steps.head), bytes(steps.row),
                                                  bytes(steps.batch)};
  const std::array<cuuint32_t, kRank> box{tile::kBlockColumns, static_cast<cuuint32_t>(tile_rows), 1, 1, 1};
  const std::array<cuuint32_t, kRank> every{1, 1, 1, 1, 1};
  const CUtensorMapDataType type =
      t.dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  CUtensorMap map;
  const CUresult status = encode(&map, type, kRank, base, extents.data(), strides.data(), box.data(), every.data(),
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    throw Error(ErrorCode::kDevice, "device",
                "cuTensorMapEncodeTiled failed with code " + std::to_string(static_cast<int>(status)));
  }
  return map;
}

}  // namespace plait::cuda
