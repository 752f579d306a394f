// One way to launch a kernel: checked, on the caller's stream, with as much dynamic shared memory as it asks for.
// Called by the launch functions of every kernel folder, in .cu files.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <iterator>

#include "cuda/runtime/check.hpp"

namespace plait::cuda {

inline constexpr int64_t kMaxBlocks = 0x7fffffff;      // grid.x
inline constexpr int kDefaultSharedBytes = 48 * 1024;  // more has to be asked for, per kernel and device

template <class... Params>
void allow_shared_bytes(void (*kernel)(Params...), int shared_bytes) {
  if (shared_bytes <= kDefaultSharedBytes) return;
  check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                             shared_bytes),
        "cudaFuncSetAttribute");
}

// `blocks` 0: nothing is launched. Grids are one-dimensional: heads and batches above 65,535 need no other limit.
template <class... Params, class... Args>
void launch(void (*kernel)(Params...), int64_t blocks, int threads, int shared_bytes, cudaStream_t stream,
            const Args&... args) {
  if (blocks == 0) return;
  if (blocks > kMaxBlocks) {
    throw Error(ErrorCode::kUnsupported, "q",
                "needs " + std::to_string(blocks) + " thread blocks, a launch has at most " +
                    std::to_string(kMaxBlocks) + "; split the batch");
  }
  allow_shared_bytes(kernel, shared_bytes);
  kernel<<<dim3(static_cast<unsigned>(blocks)), dim3(static_cast<unsigned>(threads)), static_cast<size_t>(shared_bytes),
           stream>>>(args...);
  check(cudaGetLastError(), "kernel launch");
}

// The same for a kernel that calls ptx::wait_for_grid() before it touches what the kernel before it in the stream
// writes: from sm_90 on it starts while that one runs.
template <class... Params, class... Args>
void launch_dependent(void (*kernel)(Params...), int64_t blocks, int threads, int shared_bytes, int compute_capability,
                      cudaStream_t stream, const Args&... args) {
  constexpr int kFirstDependent = 90;
#if defined(__CUDA_ARCH_LIST__)
  constexpr int kBuiltFor[] = {__CUDA_ARCH_LIST__};
  constexpr bool kBuilt = kBuiltFor[std::size(kBuiltFor) - 1] >= 10 * kFirstDependent;
#else
  constexpr bool kBuilt = false;
#endif
  if (!kBuilt || compute_capability < kFirstDependent || blocks == 0 || blocks > kMaxBlocks) {
    launch(kernel, blocks, threads, shared_bytes, stream, args...);
    return;
  }
  allow_shared_bytes(kernel, shared_bytes);
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, kernel, args...), "kernel launch");
}

// A kernel of clusters of `cluster` neighbouring blocks, for sm_90, that calls ptx::wait_for_grid() before it touches
// what the kernel before it writes. `large`: of more blocks than every GPU with clusters has.
template <class... Params, class... Args>
void launch_clusters(void (*kernel)(Params...), dim3 blocks, unsigned cluster, int threads, int shared_bytes,
                     bool large, cudaStream_t stream, const Args&... args) {
  allow_shared_bytes(kernel, shared_bytes);
  if (large) {
    check(
        cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
        "cudaFuncSetAttribute");
  }
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = cluster, attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 2;
  check(cudaLaunchKernelEx(&config, kernel, args...), "kernel launch");
}

}  // namespace plait::cuda
