// Attention over a key/value cache: append in place, rotate, attend. Dense, ragged and paged caches.
// Called by C++ users, the C API and the torch shim.
#pragma once

#include <cstdint>
#include <optional>

#include "plait/iha.hpp"

// Public symbols are exported; the library is compiled with hidden visibility.
#pragma GCC visibility push(default)
namespace plait {

// The arguments of a decode or chunked-prefill step. options.mode must be kPlain; options.layout governs q, k_new,
// v_new, out and a dense cache.
//   q            [B, Hq, Sq, D] (bhsd) or [B, Sq, Hq, D] (bshd)
//   k_cache      dense [B_cache, Hk, S_max, D] or [B_cache, S_max, Hk, D]; paged [pages, page, Hk, D]
//   v_cache      like k_cache with Dv
//   k_new, v_new [B, Hk, Sn, D], [B, Hk, Sn, Dv] or bshd: both or none; written at positions cache_seqlens[b] ...
// After the append, row i of q stands at position cache_seqlens[b] + Sn - Sq + i and attends, bottom-right aligned,
// to cache_seqlens[b] + Sn keys.
struct KvCacheArgs {
  TensorView q, k_cache, v_cache;
  std::optional<TensorView> k_new, v_new;
  TensorView cache_seqlens;                   // int32 [B]: keys in the cache before the call
  std::optional<TensorView> block_table;      // int32 [B, max_pages]: page of each block of a sequence; makes it paged
  std::optional<TensorView> cache_batch_idx;  // int32 [B]: row of a dense cache that sequence b uses; default b
  std::optional<Rope> rope;                   // turns k_new and q by absolute positions; index kToken, offset 0
  std::optional<TensorView> sinks;
  AttentionOptions options;
};

// Plans without reading a tensor's contents. Errors as plan_attention_forward.
Plan plan_attention_with_kvcache(const KvCacheArgs& args, const DeviceInfo& device);

// Appends k_new and v_new to the caches in place (the only inputs ever written), all before any reading, then attends.
// Lengths past the cache, rows and pages outside it and two appends to one slot are errors before anything is written
// where the host reads them (CPU). A GPU drops such appends (of two to one slot either may stay), cuts lengths to the
// cache and masks keys of a missing row or page. That none appends where another reads is the caller's to see to.
void attention_with_kvcache(const KvCacheArgs& args, const AttentionOutputs& outputs, const Plan& plan, void* workspace,
                            const Executor& executor);

enum class IhaCacheKind : int32_t {
  kMixed,  // pseudo keys and values [B_cache, Hk, S_max, P, D] or [B_cache, S_max, Hk, P, D]
  kRaw,    // source keys after RoPE and source values [B_cache, Hk, S_max, D] or bshd; mixed on the fly
};

// Joint-mode IHA over a cache. q, k_new, v_new are source heads (rank 4); RoPE by position.
//   w_q [Hq, P, Hq], w_k, w_v [Hk, P, Hk]
struct IhaKvCacheArgs {
  KvCacheArgs attention;  // caches per `kind`; dense only: no block_table
  TensorView w_q, w_k, w_v;
  IhaCacheKind kind = IhaCacheKind::kMixed;
};

// Plan and run as above: k_new and v_new are turned, mixed (kMixed) and appended, then one softmax over all (p, m).
Plan plan_iha_attention_with_kvcache(const IhaKvCacheArgs& args, const DeviceInfo& device);
void iha_attention_with_kvcache(const IhaKvCacheArgs& args, const AttentionOutputs& outputs, const Plan& plan,
                                void* workspace, const Executor& executor);

}  // namespace plait
#pragma GCC visibility pop
