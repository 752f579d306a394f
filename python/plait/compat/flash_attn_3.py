"""The functions of flash-attn 3 over plait: same names, argument order, defaults, layouts and results.

Called by users in place of `flash_attn_interface`: `from plait.compat.flash_attn_3 import flash_attn_func`. Tensors
are `[batch, length, heads, head_dim]` or packed `[total, heads, head_dim]`; window (-1, -1) is none; causal is aligned
bottom-right. An argument off its default that plait does not have is refused by name. num_splits, pack_gqa, sm_margin
and scheduler_metadata are hints of speed and are ignored; max_seqlen_* change no result. The log-sum-exp is
`[batch, heads, length]` or `[heads, total]`, and differentiable.
"""

from __future__ import annotations

import torch
from torch import Tensor

import plait
from plait._options import check_flags, check_optional_tensors, check_tensors
from plait.compat._flash_attn import call, refuse, unpack, with_kvcache

__all__ = ["flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]

Result = Tensor | tuple[Tensor, Tensor]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """q `[B, Sq, Hq, D]`, k `[B, Sk, Hk, D]`, v `[B, Sk, Hk, Dv]`; see `plait.flash_attention`."""
    check_flags(return_attn_probs=return_attn_probs)
    refuse(qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, attention_chunk=attention_chunk)
    return call(
        plait.flash_attention,
        q,
        k,
        v,
        causal=causal,
        window=window_size,
        scale=softmax_scale,
        softcap=softcap,
        deterministic=deterministic,
        return_lse=return_attn_probs,
        layout="bshd",
    )


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """qkv `[B, S, 3, H, D]` stacked, or `[B, S, Hq + 2 Hk, D]` one after the other, with num_heads_q = Hq."""
    if isinstance(qkv, Tensor) and qkv.dim() == 4:
        heads = qkv.shape[2]
        if num_heads_q is None or not 0 < num_heads_q < heads or (heads - num_heads_q) % 2 != 0:
            raise ValueError(f"num_heads_q: got {num_heads_q} for {heads} heads in qkv, expected Hq of Hq + 2 Hk heads")
        heads_kv = (heads - num_heads_q) // 2
        q, k, v = qkv.split([num_heads_q, heads_kv, heads_kv], dim=2)
    else:
        q, k, v = unpack("qkv", qkv, 3, 2, "[batch, length, 3, heads, head_dim] or [batch, length, heads, head_dim]")
    return flash_attn_func(
        q, k, v, softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size, attention_chunk, softcap,
        deterministic=deterministic, sm_margin=sm_margin, return_attn_probs=return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """q `[total_q, Hq, D]`, k `[total_k, Hk, D]`, v `[total_k, Hk, Dv]`; see `plait.flash_attention_varlen`.

    seqused_q and seqused_k, int32 `[batch]`, say how many rows of each sequence count, from its start; rows of q past
    them give 0 and -inf.
    """
    check_flags(return_attn_probs=return_attn_probs)
    refuse(qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, attention_chunk=attention_chunk)
    if seqused_q is not None or seqused_k is not None:
        check_tensors(q=q, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
        check_optional_tensors(q, seqused_q=seqused_q, seqused_k=seqused_k)
        cu_seqlens_q, cu_seqlens_k = _in_use(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    return call(
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
        return_lse=return_attn_probs,
    )


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Result:
    """Caches `[B, S, Hk, D]`, or pages `[pages, page, Hk, D]` of any size; see `plait.attention_with_kvcache`.

    The rotary tables may have the dtype of q or be float32. As plait and flash-attn place them differently, turned
    queries have to be as many as the new keys, and causal (or windowed) where they are several. Gradients are refused.
    """
    refuse(
        qv=qv, cache_leftpad=cache_leftpad, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k_new=cu_seqlens_k_new,
        rotary_seqlens=rotary_seqlens, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale,
        attention_chunk=attention_chunk,
    )  # fmt: skip
    return with_kvcache(
        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, page_table, softmax_scale,
        causal, window_size, softcap, rotary_interleaved, return_softmax_lse,
    )  # fmt: skip


def _in_use(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, seqused_q: Tensor | None, seqused_k: Tensor | None
) -> tuple[Tensor, Tensor]:
    """cu_seqlens in which each sequence is three: rows in use, then queries without keys, then keys without queries."""
    for name, cu_seqlens in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if cu_seqlens.dim() != 1 or cu_seqlens.shape != cu_seqlens_q.shape or len(cu_seqlens) == 0:
            raise ValueError(f"{name}: got shape {list(cu_seqlens.shape)}, expected [batch + 1]")
    end_q, used_q = _ends("seqused_q", cu_seqlens_q, seqused_q)
    end_k, used_k = _ends("seqused_k", cu_seqlens_k, seqused_k)
    cu_q = torch.stack([used_q, end_q, end_q], dim=1).flatten()
    cu_k = torch.stack([used_k, used_k, end_k], dim=1).flatten()
    return torch.cat([cu_seqlens_q[:1], cu_q]), torch.cat([cu_seqlens_k[:1], cu_k])


def _ends(name: str, cu_seqlens: Tensor, used: Tensor | None) -> tuple[Tensor, Tensor]:
    """Where each sequence ends, and where its part in use does; int32 `[batch]` both."""
    begin, end = cu_seqlens[:-1], cu_seqlens[1:]
    if used is None:
        return end, end
    if used.shape != end.shape:
        raise ValueError(f"{name}: got shape {list(used.shape)}, expected [batch] = {list(end.shape)}")
    if used.device != end.device:
        raise ValueError(f"{name}: got device {used.device}, expected that of cu_seqlens, {end.device}")
    if used.device.type == "cpu" and not torch.compiler.is_compiling():
        wrong = ((used < 0) | (used > end - begin)).nonzero()
        if len(wrong):
            b = int(wrong[0])
            raise ValueError(f"{name}: got {used[b]} in sequence {b} of length {end[b] - begin[b]}")
    return end, begin + used
