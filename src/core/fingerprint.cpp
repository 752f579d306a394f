// A hash of every field of a problem, so that a plan is only used for the problem it was made for.
// Called by plan() and by the run functions of api/.
#include "core/problem.hpp"

namespace plait {
namespace {

class Fingerprint {
 public:
  template <class T>
  Fingerprint& add(T value) {
    const auto* bytes = reinterpret_cast<const unsigned char*>(&value);
    for (size_t i = 0; i < sizeof(T); ++i) hash_ = (hash_ ^ bytes[i]) * kPrime;
    return *this;
  }
  uint64_t value() const { return hash_; }

 private:
  static constexpr uint64_t kOffset = 14695981039346656037ULL, kPrime = 1099511628211ULL;  // FNV-1a, 64 bits
  uint64_t hash_ = kOffset;
};

}  // namespace

uint64_t AttentionProblem::fingerprint() const {
  return Fingerprint()
      .add(op)
      .add(mode)
      .add(mask)
      .add(batch)
      .add(heads_q)
      .add(heads_kv)
      .add(seqlen_q)
      .add(seqlen_kv)
      .add(pseudo_heads)
      .add(head_dim)
      .add(head_dim_v)
      .add(dtype)
      .add(out_dtype)
      .add(device.kind)
      .add(device.index)
      .add(packed)
      .add(cached)
      .add(new_keys)
      .add(page_size)
      .add(causal)
      .add(window_left)
      .add(window_right)
      .add(scale)
      .add(softcap)
      .add(has_sinks)
      .add(deterministic)
      .add(split_size)
      .add(strategy)
      .add(backend)
      .value();
}

uint64_t KvCacheProblem::fingerprint() const {
  return Fingerprint()
      .add(attention.fingerprint())
      .add(cache_rows)
      .add(has_rope)
      .add(rope_style)
      .add(rope_dim)
      .add(rope_rows)
      .add(iha)
      .add(kind)
      .add(weight_dtype)
      .value();
}

uint64_t PremixProblem::fingerprint() const {
  return Fingerprint()
      .add(op)
      .add(batch)
      .add(heads)
      .add(seqlen)
      .add(pseudo_heads)
      .add(head_dim)
      .add(dtype)
      .add(weight_dtype)
      .add(device.kind)
      .add(device.index)
      .add(packed)
      .add(has_rope)
      .add(rope_style)
      .add(rope_index)
      .add(rope_dim)
      .add(rope_offset)
      .add(rope_rows)
      .add(backend)
      .value();
}

uint64_t fingerprint(std::span<const PremixProblem> problems) {
  Fingerprint all;
  for (const PremixProblem& problem : problems) all.add(problem.fingerprint());
  return all.value();
}

uint64_t CollapseProblem::fingerprint() const {
  return Fingerprint()
      .add(op)
      .add(batch)
      .add(heads)
      .add(seqlen)
      .add(pseudo_heads)
      .add(head_dim)
      .add(dtype)
      .add(weight_dtype)
      .add(device.kind)
      .add(device.index)
      .add(global)
      .add(backend)
      .value();
}

}  // namespace plait
