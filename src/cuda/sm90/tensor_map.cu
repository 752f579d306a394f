// Encodes tensor maps through the driver, which is looked up at run time: nothing links libcuda.
// Called by the launch functions of sm90.
#include <algorithm>
#include <array>
#include <string>

#include "cuda/runtime/check.hpp"
#include "cuda/sm90/tensor_map.hpp"

namespace plait::cuda::sm90 {
namespace {

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

RowTileMap row_tile_map(const CanonicalTensor& t, const RowTileLayout& layout) {
  static const auto encode = find_encoder();
  constexpr int kElementBytes = 2;
  // Coordinates count from `ahead` elements before the tensor; what lies there is never read.
  auto* base = static_cast<char*>(t.data) - layout.ahead * kElementBytes;
  std::array<cuuint64_t, kMapRank> extents;
  std::array<cuuint64_t, kMapRank - 1> strides;
  std::array<cuuint32_t, kMapRank> box, every;
  std::ranges::copy(layout.extents, extents.begin());
  std::ranges::transform(layout.strides, strides.begin(),
                         [](int64_t step) { return static_cast<cuuint64_t>(step * kElementBytes); });
  std::ranges::copy(layout.box, box.begin());
  every.fill(1);
  const CUtensorMapDataType type =
      t.dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  RowTileMap result{{}, layout.index};
  const CUresult status = encode(&result.map, type, kMapRank, base, extents.data(), strides.data(), box.data(),
                                 every.data(), CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    throw Error(ErrorCode::kDevice, "device",
                "cuTensorMapEncodeTiled failed with code " + std::to_string(static_cast<int>(status)));
  }
  return result;
}

}  // namespace plait::cuda::sm90
