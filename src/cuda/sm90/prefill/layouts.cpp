// Refuses tensors that the copy engine cannot read; see layouts.hpp.
#include "cuda/sm90/prefill/layouts.hpp"

#include <fmt/format.h>

#include <string>

#include "plait/error.hpp"

namespace plait::cuda::sm90 {
namespace {

// A tensor that cuda_sm90, asked for by name, cannot read.
[[noreturn]] void refuse_tensor(const AttentionProblem& p, const std::string& name, const CanonicalTensor& t) {
  const bool pseudo = p.mode != HeadMode::kPlain;
  const std::string apart = !pseudo
                                ? ""
                                : "; with pseudo-heads batches whole rows apart, and where a head's virtual rows are "
                                  "not one stride apart (bshd, packed) P of 2, 4, 8 or 16";
  throw Error(
      ErrorCode::kUnsupported, name,
      fmt::format("cuda_sm90 cannot read it. required: strides of {} (batch), {} (head), {} (position), {}{} (dim) "
                  "elements, an address of 16 n + {} bytes. supported by cuda_sm90: a dim stride of 1, the others "
                  "multiples of 8 above zero, an address of 16 n bytes{}. missing: such a tensor. way out: use backend "
                  "auto, or a contiguous copy of {}{}",
                  t.batch_stride, t.head_stride, t.seq_stride,
                  pseudo ? fmt::format("{} (pseudo-head), ", t.pseudo_stride) : "", t.dim_stride,
                  reinterpret_cast<uintptr_t>(t.data) % 16, apart, name, pseudo && !p.packed ? " in bhsd" : ""));
}

}  // namespace

PrefillLayouts readable_layouts(const AttentionProblem& p, const AttentionTensors& t, int64_t cache_rows, int group) {
  const PrefillLayouts layouts = PrefillLayouts::of(p, t, cache_rows, group);
  const bool empty = p.seqlen_q == 0 || p.seqlen_kv == 0;
  if (p.backend == Backend::kCudaSm90 && !empty) {
    const std::string cache = p.cached ? "_cache" : "";
    if (!layouts.q) refuse_tensor(p, "q", t.q);
    if (!layouts.k) refuse_tensor(p, "k" + cache, t.k);
    if (!layouts.v) refuse_tensor(p, "v" + cache, t.v);
  }
  return layouts;
}

}  // namespace plait::cuda::sm90
