// Copies of host tensors in the memory of a GPU: strides, gaps and NaN poison as on the host, guards around them.
// Called by tests/cuda.
#pragma once

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <list>
#include <memory>
#include <string>
#include <vector>

#include "support/edge_pages.hpp"
#include "support/place.hpp"

namespace plait::testing {

inline void check_cuda(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw Failure(fmt::format("{}: {}", what, cudaGetErrorString(error)));
}

// Makes a device current for a scope.
class OnDevice {
 public:
  explicit OnDevice(int32_t index) {
    check_cuda(cudaGetDevice(&before_), "cudaGetDevice");
    if (before_ != index) check_cuda(cudaSetDevice(index), "cudaSetDevice");
  }
  ~OnDevice() { cudaSetDevice(before_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_ = 0;
};

// A stream that does not wait for the default stream.
class Stream {
 public:
  explicit Stream(int32_t index = 0) {
    const OnDevice device(index);
    check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  }
  ~Stream() { cudaStreamDestroy(stream_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  cudaStream_t get() const { return stream_; }
  void wait() const { check_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize"); }

 private:
  cudaStream_t stream_ = nullptr;
};

// Whether every tensor begins or ends where mapped memory does (to 16 bytes).
enum class Edge { kNone, kBegin, kEnd };

struct MirrorOptions {
  bool exact = false;       // no guards: compute-sanitizer then knows the ends of every tensor
  bool misaligned = false;  // tensors start one element past a 256-byte boundary
  Edge edge = Edge::kNone;
};

class DeviceMirror final : public Place {
 public:
  DeviceMirror(DeviceInfo device, int32_t index, cudaStream_t stream, MirrorOptions options = {})
      : device_(std::move(device)), index_(index), stream_(stream), options_(options) {}
  ~DeviceMirror() override {
    cudaStreamSynchronize(stream_);
    const OnDevice current(index_);
    for (const Block& block : blocks_) {
      if (block.pages == nullptr) cudaFree(block.base);
    }
  }
  DeviceMirror(const DeviceMirror&) = delete;
  DeviceMirror& operator=(const DeviceMirror&) = delete;

  TensorView in(const TensorView& host) override { return mirrored(host, false); }
  TensorView out(const TensorView& host) override { return mirrored(host, true); }
  void* workspace(int64_t bytes) override {
    if (bytes == 0) return nullptr;
    return allocate(nullptr, static_cast<size_t>(bytes), 0).data;
  }
  DeviceInfo device() const override { return device_; }
  Executor executor() const override { return Executor::on_stream(stream_); }
  cudaStream_t stream() const { return stream_; }

  // The numbers that the host tensor has now, in the stream.
  void send(const TensorView& host) {
    Block* block = find(host);
    if (block == nullptr) throw Failure("send: a tensor that the mirror does not hold");
    copy(block->data, block->host, block->bytes, cudaMemcpyHostToDevice);
  }

  void finish() override {
    for (Block& block : blocks_) {
      std::vector<std::byte> now(block.whole);
      copy(now.data(), block.base, block.whole, cudaMemcpyDeviceToHost);
      check_cuda(cudaStreamSynchronize(stream_), "the call");
      const size_t before = static_cast<size_t>(static_cast<std::byte*>(block.data) - block.base);
      const auto intact = [&](size_t begin, size_t end) {
        return std::all_of(now.begin() + static_cast<std::ptrdiff_t>(begin),
                           now.begin() + static_cast<std::ptrdiff_t>(end), [](std::byte b) { return b == kFill; });
      };
      if (!intact(0, before) || !intact(before + block.bytes, block.whole)) {
        throw Failure(block.host == nullptr ? "a run wrote beside its workspace" : "a run wrote beside a tensor");
      }
      if (block.host == nullptr) continue;
      if (block.written) {
        std::memcpy(block.host, now.data() + before, block.bytes);
      } else if (std::memcmp(block.host, now.data() + before, block.bytes) != 0) {
        throw Failure("a run changed one of its inputs");
      }
    }
    check_cuda(cudaStreamSynchronize(stream_), "the call");
  }

 private:
  // NaN in every floating dtype, so that a read past a tensor shows in the results too.
  static constexpr std::byte kFill{0xff};
  static constexpr size_t kGuard = 256, kEdgeAlign = 16, kWorkspaceAlign = 64;

  struct Block {
    void* host;                 // null: workspace
    size_t bytes;               // of the tensor
    std::byte* base = nullptr;  // of the allocation
    size_t whole = 0;           // of the allocation
    void* data = nullptr;       // of the tensor
    bool written = false;
    std::unique_ptr<EdgePages> pages;
  };

  void copy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
    check_cuda(cudaMemcpyAsync(to, from, bytes, kind, stream_), "cudaMemcpyAsync");
  }

  Block& allocate(void* host, size_t bytes, size_t shift) {
    const OnDevice current(index_);
    const size_t guard = options_.exact ? 0 : kGuard;
    Block& block = blocks_.emplace_back(host, bytes);
    if (options_.edge != Edge::kNone) {
      block.pages = std::make_unique<EdgePages>(bytes);
      block.base = block.pages->begin(), block.whole = block.pages->bytes();
      const size_t align = host == nullptr ? kWorkspaceAlign : kEdgeAlign;
      const size_t at = options_.edge == Edge::kBegin ? 0 : (block.whole - bytes) / align * align;
      block.data = block.base + at;
    } else {
      block.whole = bytes + shift + 2 * guard;
      void* memory = nullptr;
      check_cuda(cudaMalloc(&memory, block.whole), "cudaMalloc");
      block.base = static_cast<std::byte*>(memory);
      block.data = block.base + guard + shift;
    }
    check_cuda(cudaMemsetAsync(block.base, static_cast<int>(kFill), block.whole, stream_), "cudaMemsetAsync");
    if (host != nullptr) copy(block.data, host, bytes, cudaMemcpyHostToDevice);
    return block;
  }

  static size_t span_bytes(const TensorView& view) {
    int64_t last = 0;
    for (int i = 0; i < view.rank; ++i) last += (view.shape[i] - 1) * view.stride[i];
    return static_cast<size_t>((last + 1) * dtype_bytes(view.dtype));
  }

  Block* find(const TensorView& view) {
    const auto* begin = static_cast<const std::byte*>(view.data);
    for (Block& block : blocks_) {
      const auto* host = static_cast<const std::byte*>(block.host);
      if (host != nullptr && host <= begin && begin + span_bytes(view) <= host + block.bytes) return &block;
    }
    return nullptr;
  }

  TensorView mirrored(TensorView view, bool written) {
    view.device = {DeviceKind::kCuda, index_};
    if (view.numel() == 0) {
      view.data = nullptr;
      return view;
    }
    Block* block = find(view);
    const auto shift = static_cast<size_t>(options_.misaligned ? dtype_bytes(view.dtype) : 0);
    if (block == nullptr) block = &allocate(view.data, span_bytes(view), shift);
    block->written |= written;
    const auto offset = static_cast<std::byte*>(view.data) - static_cast<std::byte*>(block->host);
    view.data = static_cast<std::byte*>(block->data) + offset;
    return view;
  }

  DeviceInfo device_;
  int32_t index_;
  cudaStream_t stream_;
  MirrorOptions options_;
  std::list<Block> blocks_;
};

// One backend of a GPU; every thread has its own stream.
class CudaTarget final : public Target {
 public:
  // smem_limit_bytes: plans as for a GPU with no more shared memory per block; 0: as much as there is.
  explicit CudaTarget(Backend backend, int32_t index = 0, MirrorOptions options = {}, int64_t smem_limit_bytes = 0)
      : backend_(backend), index_(index), options_(options), device_(DeviceInfo::cuda(index)) {
    if (smem_limit_bytes > 0) device_.smem_per_block_bytes = std::min(device_.smem_per_block_bytes, smem_limit_bytes);
  }

  Backend backend() const override { return backend_; }
  bool splits() const override { return tensor_cores(); }
  bool reads_indices() const override { return false; }
  std::unique_ptr<Place> place(int32_t = 1, bool = false) const override { return mirror(options_); }
  std::unique_ptr<DeviceMirror> mirror(MirrorOptions options = {}) const {
    options.exact |= options_.exact;
    return std::make_unique<DeviceMirror>(device_, index_, stream_of_thread(), options);
  }
  std::unique_ptr<DeviceMirror> mirror_on(cudaStream_t stream) const {
    return std::make_unique<DeviceMirror>(device_, index_, stream, options_);
  }
  const DeviceInfo& device() const { return device_; }
  std::string name() const { return backend_name(backend_); }

 private:
  cudaStream_t stream_of_thread() const {
    thread_local std::vector<std::unique_ptr<Stream>> streams;
    const auto at = static_cast<size_t>(index_);
    if (streams.size() <= at) streams.resize(at + 1);
    if (streams[at] == nullptr) streams[at] = std::make_unique<Stream>(index_);
    return streams[at]->get();
  }

  Backend backend_;
  int32_t index_;
  MirrorOptions options_;
  DeviceInfo device_;
};

}  // namespace plait::testing
