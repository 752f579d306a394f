"""The functions of flash-attn 2 over plait: same names, argument order, defaults, layouts and results.

Called by users in place of `flash_attn`: `from plait.compat.flash_attn_2 import flash_attn_func`. Tensors are
`[batch, length, heads, head_dim]` or packed `[total, heads, head_dim]`; window (-1, -1) is none; causal is aligned
bottom-right. An argument off its default that plait does not have is refused by name. num_splits is a hint of speed
and is ignored; max_seqlen_* change no result. With return_attn_probs the log-sum-exp `[batch, heads, length]` or
`[heads, total]` is differentiable, and the third result is None: plait never forms the probabilities.
"""

from __future__ import annotations

from torch import Tensor

import plait
from plait._options import check_flags
from plait.compat._flash_attn import call, refuse, unpack, with_kvcache

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

Result = Tensor | tuple[Tensor, Tensor, None]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """q `[B, Sq, Hq, D]`, k `[B, Sk, Hk, D]`, v `[B, Sk, Hk, Dv]`; see `plait.flash_attention`."""
    check_flags(return_attn_probs=return_attn_probs)
    refuse(dropout_p=dropout_p, alibi_slopes=alibi_slopes)
    out, lse = call(
        plait.flash_attention,
        q,
        k,
        v,
        causal=causal,
        window=window_size,
        scale=softmax_scale,
        softcap=softcap,
        deterministic=deterministic,
        return_lse=True,
        layout="bshd",
    )
    return (out, lse, None) if return_attn_probs else out


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """kv `[B, Sk, 2, Hk, D]`: keys and values stacked."""
    k, v = unpack("kv", kv, 2, 2, "[batch, length, 2, heads, head_dim]")
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """qkv `[B, S, 3, H, D]`: queries, keys and values stacked."""
    q, k, v = unpack("qkv", qkv, 3, 2, "[batch, length, 3, heads, head_dim]")
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Result:
    """q `[total_q, Hq, D]`, k `[total_k, Hk, D]`, v `[total_k, Hk, Dv]`; see `plait.flash_attention_varlen`."""
    check_flags(return_attn_probs=return_attn_probs)
    refuse(dropout_p=dropout_p, alibi_slopes=alibi_slopes, block_table=block_table)
    out, lse = call(
        plait.flash_attention_varlen,
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        causal=causal,
        window=window_size,
        scale=softmax_scale,
        softcap=softcap,
        deterministic=deterministic,
        return_lse=True,
    )
    return (out, lse, None) if return_attn_probs else out


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """kv `[total_k, 2, Hk, D]`: keys and values stacked."""
    k, v = unpack("kv", kv, 2, 1, "[total, 2, heads, head_dim]")
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """qkv `[total, 3, H, D]`: queries, keys and values stacked."""
    q, k, v = unpack("qkv", qkv, 3, 1, "[total, 3, heads, head_dim]")
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal, window_size, softcap,
        alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Caches `[B, S, Hk, D]`, or pages `[pages, page, Hk, D]` of any size; see `plait.attention_with_kvcache`.

    The rotary tables may have the dtype of q or be float32. As plait and flash-attn place them differently, turned
    queries have to be as many as the new keys, and causal (or windowed) where they are several. Gradients are refused.
    """
    refuse(cache_leftpad=cache_leftpad, alibi_slopes=alibi_slopes)
    return with_kvcache(
        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, block_table, softmax_scale,
        causal, window_size, softcap, rotary_interleaved, return_softmax_lse,
    )  # fmt: skip
