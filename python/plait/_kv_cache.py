"""Public functions of attention over a key-value cache: append in place, rotate, attend. Inference only.

Called by users as plait.* and plait.functional.*, by plait.compat and by integrations.iha_cache.
"""

from __future__ import annotations

from numbers import Integral

import torch
from torch import Tensor

from plait._options import (
    attention_options,
    autocast,
    call_renamed,
    check_cast,
    check_flags,
    check_optional_tensors,
    check_tensors,
    check_text,
    refuse_unknown,
    rope_tables,
)

# The caller's names of what the op knows as one rope.
_ROTARY = {"rope": "rotary_cos", "rope cos": "rotary_cos", "rope sin": "rotary_sin", "cos": "rotary_cos"}


def attention_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    cache_seqlens: Tensor | int,
    block_table: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    strategy: str = "auto",
    backend: str = "auto",
    deterministic: bool = False,
    return_lse: bool = False,
    out_dtype: torch.dtype | None = None,
    split_size: int | None = None,
    layout: str = "bhsd",
    **not_offered: object,
) -> Tensor | tuple[Tensor, Tensor]:
    """Decoding and chunked prefill: writes new keys and values into the cache, then attends to the cache.

    Sequence b holds `cache_seqlens[b]` keys. The Sn new ones go to positions `cache_seqlens[b]` and following; row i
    of q stands at position `cache_seqlens[b] + Sn - Sq + i` and attends to `cache_seqlens[b] + Sn` keys, bottom-right
    aligned. cache_seqlens itself is not changed.

    Args:
        q: `[B, Hq, Sq, D]`, with layout "bshd" `[B, Sq, Hq, D]`.
        k_cache, v_cache: `[B_cache, Hk, S_max, D]` and `[.., Dv]` in `layout`; with block_table pages
            `[pages, page, Hk, D]` and `[.., Dv]` in any layout, of any page size. Any strides. Changed in place.
        k_new, v_new: `[B, Hk, Sn, D]` and `[B, Hk, Sn, Dv]` in `layout`, both or none.
        cache_seqlens: int32 `[B]`, or one int for all sequences.
        block_table: int32 `[B, max_pages]`: the page of each block of a sequence.
        cache_batch_idx: int32 `[B]`: the row of a dense cache that sequence b uses; default b.
        rotary_cos, rotary_sin: `[positions, D_rot / 2]` float32, `D_rot <= D`: turn q and k_new by position, causal or
            not. What is in the cache is not turned again.
        rotary_interleaved: False turns dims i and i + D_rot/2 together (LLaMA), True 2i and 2i + 1.
        The others as in `flash_attention`.

    Returns:
        out like q with last size Dv, and with return_lse lse `[B, Hq, Sq]`.

    A length past the cache, a cache row or page outside it, a negative position and two sequences that append to one
    slot (a position of a row or page) are errors where the host can see them (CPU tensors), and then nothing has been
    written; on a GPU such a write is dropped, keys of a row or page outside the cache are masked, and of two writes
    into one slot either may stay. Sequences may share rows or pages to read; all appends come before any reading, so
    keep one sequence from appending where another one of the call reads: that is not looked for. Tensors that require
    gradients are refused. CUDA tensors are served as those of flash_attention are.
    """
    refuse_unknown(attention_with_kvcache, not_offered)
    check_flags(return_lse=return_lse, rotary_interleaved=rotary_interleaved)
    check_tensors(q=q, k_cache=k_cache, v_cache=v_cache)
    check_optional_tensors(q, k_new=k_new, v_new=v_new, block_table=block_table, cache_batch_idx=cache_batch_idx)
    check_optional_tensors(q, rotary_cos=rotary_cos, rotary_sin=rotary_sin, sinks=sinks)
    _, _, *options = attention_options(  # the ops have no mode and mask
        causal=causal,
        window=window,
        scale=scale,
        softcap=softcap,
        deterministic=deterministic,
        split_size=split_size,
        strategy=strategy,
        backend=backend,
        out_dtype=out_dtype,
        layout=layout,
    )
    _check_pair(rotary_cos=rotary_cos, rotary_sin=rotary_sin)
    _check_pair(k_new=k_new, v_new=v_new)
    _refuse_gradients(
        q=q, k_cache=k_cache, v_cache=v_cache, k_new=k_new, v_new=v_new, rotary_cos=rotary_cos, rotary_sin=rotary_sin,
        sinks=sinks,
    )  # fmt: skip
    cache_seqlens = _lengths(cache_seqlens, q)
    given = q
    q, k_new, v_new = _autocast(q, k_new, v_new)
    check_cast(q, given, k_cache=k_cache, v_cache=v_cache)
    style = "pairs" if rotary_interleaved else "half"
    out, lse = call_renamed(
        _ROTARY, torch.ops.plait.attention_with_kvcache_, q, k_cache, v_cache, k_new, v_new, cache_seqlens, block_table,
        cache_batch_idx, rotary_cos, rotary_sin, sinks, style, *options,
    )  # fmt: skip
    _mark_changed(k_new, k_cache, v_cache)
    return (out, lse) if return_lse else out


def iha_attention_with_kvcache(
    q: Tensor,
    k_new: Tensor | None,
    v_new: Tensor | None,
    cache: tuple[Tensor, Tensor],
    w_q: Tensor,
    w_k: Tensor,
    w_v: Tensor,
    *,
    cache_kind: str,
    cache_seqlens: Tensor | int,
    cache_batch_idx: Tensor | None = None,
    rope: tuple[Tensor, Tensor] | None = None,
    rope_style: str = "half",
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    strategy: str = "auto",
    backend: str = "auto",
    deterministic: bool = False,
    return_lse: bool = False,
    out_dtype: torch.dtype | None = None,
    split_size: int | None = None,
    layout: str = "bhsd",
    **not_offered: object,
) -> Tensor | tuple[Tensor, Tensor]:
    """Decoding with Interleaved Head Attention, joint mode: `iha_attention` over a cache, as `attention_with_kvcache`.

    Args:
        q: `[B, Hq, Sq, D]`; k_new: `[B, Hk, Sn, D]`; v_new: `[B, Hk, Sn, Dv]`: source heads in `layout`, before
            mixing. k_new and v_new may both be None.
        cache: `(k_cache, v_cache)`, changed in place; any strides.
        cache_kind: "mixed" keeps pseudo keys and values `[B_cache, Hk, S_max, P, D]` and is fast; "raw" keeps the
            source keys after rotation and the source values, `[B_cache, Hk, S_max, D]`, P times smaller, and mixes
            them in every call.
        w_q: `[Hq, P, Hq]`; w_k, w_v: `[Hk, P, Hk]`, float32 or the dtype of q.
        cache_seqlens, cache_batch_idx: as in `attention_with_kvcache`.
        rope: `(cos, sin)` `[positions, D_rot / 2]` float32, turns q and k_new by position. rope_style: "half" or
            "pairs".
        The others as in `flash_attention`; the window is in positions.

    Returns:
        out like q with last size Dv, and with return_lse lse `[B, Hq, Sq]` over all (p, m).
    """
    refuse_unknown(iha_attention_with_kvcache, not_offered)
    check_flags(return_lse=return_lse)
    if not isinstance(cache, (tuple, list)) or len(cache) != 2:
        raise ValueError(f"cache: got {type(cache).__name__}, expected (k_cache, v_cache)")
    k_cache, v_cache = cache
    check_tensors(q=q, k_cache=k_cache, v_cache=v_cache, w_q=w_q, w_k=w_k, w_v=w_v)
    check_optional_tensors(q, k_new=k_new, v_new=v_new, cache_batch_idx=cache_batch_idx, sinks=sinks)
    _, _, *options = attention_options(  # the ops have no mode and mask
        causal=causal,
        window=window,
        scale=scale,
        softcap=softcap,
        deterministic=deterministic,
        split_size=split_size,
        strategy=strategy,
        backend=backend,
        out_dtype=out_dtype,
        layout=layout,
    )
    for name, text in (("cache_kind", cache_kind), ("rope_style", rope_style)):
        check_text(name, text)
    cos, sin = rope_tables(rope)
    _check_pair(k_new=k_new, v_new=v_new)
    _refuse_gradients(
        q=q, k_new=k_new, v_new=v_new, k_cache=k_cache, v_cache=v_cache, w_q=w_q, w_k=w_k, w_v=w_v, sinks=sinks
    )
    cache_seqlens = _lengths(cache_seqlens, q)
    given = q
    q, k_new, v_new = _autocast(q, k_new, v_new)
    check_cast(q, given, k_cache=k_cache, v_cache=v_cache)
    check_cast(q, given, wide=True, w_q=w_q, w_k=w_k, w_v=w_v)
    out, lse = torch.ops.plait.iha_attention_with_kvcache_(
        q, k_new, v_new, k_cache, v_cache, w_q, w_k, w_v, cache_seqlens, cache_batch_idx, cos, sin, sinks, cache_kind,
        rope_style, *options,
    )  # fmt: skip
    _mark_changed(k_new, k_cache, v_cache)
    return (out, lse) if return_lse else out


def _check_pair(**pair: Tensor | None) -> None:
    """Raises where one of two tensors is missing."""
    missing = [name for name, tensor in pair.items() if tensor is None]
    if len(missing) == 1:
        raise ValueError(f"{missing[0]}: is missing; expected both of {' and '.join(pair)}, or none")


def _refuse_gradients(**tensors: Tensor | None) -> None:
    if not torch.is_grad_enabled():
        return
    for name, tensor in tensors.items():
        if tensor is not None and tensor.requires_grad:
            raise ValueError(
                f"{name}: requires gradients, which attention over a cache does not have; call it under "
                "torch.no_grad(), or train with flash_attention or iha_attention"
            )


def _lengths(cache_seqlens: Tensor | int, q: Tensor) -> Tensor:
    """cache_seqlens as a tensor: an int stands for every sequence of the batch."""
    if isinstance(cache_seqlens, Tensor):
        check_tensors(q, cache_seqlens=cache_seqlens)
        return cache_seqlens
    if isinstance(cache_seqlens, bool) or not isinstance(cache_seqlens, (Integral, torch.SymInt)):
        raise ValueError(
            f"cache_seqlens: got {type(cache_seqlens).__name__}, expected an int32 tensor [batch] or a count"
        )
    if cache_seqlens < 0 or cache_seqlens >= 2**31:
        raise ValueError(f"cache_seqlens: got {cache_seqlens}, expected a count of keys")
    return torch.full((q.shape[0] if q.dim() else 0,), cache_seqlens, dtype=torch.int32, device=q.device)


def _autocast(q: Tensor, k_new: Tensor | None, v_new: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The caches keep their dtype; what joins them is cast."""
    if k_new is None or v_new is None:
        return *autocast(q), k_new, v_new
    return autocast(q, k_new, v_new)


def _mark_changed(k_new: Tensor | None, *caches: Tensor) -> None:
    """Tells autograd that the caches have changed, so that it never takes the new contents for the ones it saved."""
    if k_new is not None and (torch.compiler.is_compiling() or k_new.numel() > 0):
        torch.autograd.graph.increment_version(caches)
