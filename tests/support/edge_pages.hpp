// Device memory beside which nothing is mapped: an access past its ends is a fault, also by the copy engine, which
// compute-sanitizer does not watch.
// Called by device_mirror.hpp.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <cstddef>

#include "support/place.hpp"

namespace plait::testing {

class EdgePages {
 public:
  // At least `bytes` on the current device.
  explicit EdgePages(size_t bytes) {
    int device = 0;
    cudaGetDevice(&device);
    CUmemLocation here{};
    here.type = CU_MEM_LOCATION_TYPE_DEVICE, here.id = device;
    CUmemAllocationProp what{};
    what.type = CU_MEM_ALLOCATION_TYPE_PINNED, what.location = here;
    size_t page = 0;
    call<&cuMemGetAllocationGranularity>("cuMemGetAllocationGranularity", &page, &what,
                                         CU_MEM_ALLOC_GRANULARITY_MINIMUM);
    bytes_ = (bytes + page - 1) / page * page, page_ = page;
    call<&cuMemAddressReserve>("cuMemAddressReserve", &range_, bytes_ + 2 * page, size_t{0}, CUdeviceptr{0}, 0ull);
    CUmemGenericAllocationHandle memory{};
    call<&cuMemCreate>("cuMemCreate", &memory, bytes_, &what, 0ull);
    call<&cuMemMap>("cuMemMap", range_ + page, bytes_, size_t{0}, memory, 0ull);
    call<&cuMemRelease>("cuMemRelease", memory);  // lives on while it is mapped
    const CUmemAccessDesc access{here, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    call<&cuMemSetAccess>("cuMemSetAccess", range_ + page, bytes_, &access, size_t{1});
  }
  ~EdgePages() {
    try {
      call<&cuMemUnmap>("cuMemUnmap", range_ + page_, bytes_);
      call<&cuMemAddressFree>("cuMemAddressFree", range_, bytes_ + 2 * page_);
    } catch (const Failure&) {  // behind a fault nothing can be freed
    }
  }
  EdgePages(const EdgePages&) = delete;
  EdgePages& operator=(const EdgePages&) = delete;

  std::byte* begin() const { return reinterpret_cast<std::byte*>(range_ + page_); }
  size_t bytes() const { return bytes_; }

 private:
  // A function of the driver, which nothing links.
  template <auto kFunction, class... Args>
  static void call(const char* name, Args... args) {
    static const auto function = [&] {
      void* found = nullptr;
      cudaDriverEntryPointQueryResult result{};
      const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result);
      if (error != cudaSuccess || result != cudaDriverEntryPointSuccess) throw Failure(fmt::format("no {}", name));
      return reinterpret_cast<decltype(kFunction)>(found);
    }();
    const CUresult status = function(args...);
    if (status != CUDA_SUCCESS) throw Failure(fmt::format("{} failed: {}", name, static_cast<int>(status)));
  }

  CUdeviceptr range_ = 0;  // a page that is not mapped, bytes_ that are, another page
  size_t bytes_ = 0, page_ = 0;
};

}  // namespace plait::testing
