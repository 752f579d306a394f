"""Runs an attention function under an IntervalMask: dense where rows are whole, packed where they are not.

Called by integrations.transformers (plain attention) and integrations.iha_layers (IHA).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

import plait
from plait._options import autocast
from plait.integrations.interval_mask import IntervalMask, from_dense, refuse_mask


def refuse_unsupported(dropout: float, kwargs: dict) -> None:
    """Raises ValueError for what transformers can ask of an attention function and plait does not offer."""
    if dropout > 0.0:
        raise ValueError(
            f"dropout: got {dropout}, plait's attention has no dropout; set attention_dropout=0.0 in the config or "
            "use attn_implementation='sdpa'"
        )
    if kwargs.get("output_attentions"):
        raise ValueError(
            "output_attentions: got True, plait never forms the attention weights; use attn_implementation='eager'"
        )
    for name in ("position_bias", "head_mask"):
        if kwargs.get(name) is not None:
            raise ValueError(f"{name}: plait's attention takes no {name}; use attn_implementation='sdpa' or 'eager'")


def resolve_mask(
    attention_mask: IntervalMask | torch.Tensor | None,
    query: torch.Tensor,  # [batch, heads_q, q_length, head_dim]
    key: torch.Tensor,  # [batch, heads_kv, kv_length, head_dim]
    is_causal: bool,
    sliding_window: int | None,
    kwargs: dict,
) -> IntervalMask:
    """The mask of one call, proven to fit query and key."""
    batch, q_length, kv_length = query.shape[0], query.shape[2], key.shape[2]
    if attention_mask is None:
        window = (-1, -1)
        if sliding_window is not None:
            window = (sliding_window - 1, 0) if is_causal else (sliding_window, sliding_window)
        cu_seqlens = (kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k"))
        if cu_seqlens[0] is None or cu_seqlens[1] is None:
            cu_seqlens = (None, None)
        return IntervalMask(batch, q_length, kv_length, is_causal, window, *cu_seqlens)
    if isinstance(attention_mask, torch.Tensor):
        attention_mask = _reduced_once(attention_mask, batch)
    if attention_mask.shape != (batch, 1, q_length, kv_length):
        raise refuse_mask(
            f"made for {attention_mask.batch} x {attention_mask.q_length} queries and {attention_mask.kv_length} keys, "
            f"the layer has {batch} x {q_length} and {kv_length}"
        )
    return attention_mask


def _reduced_once(mask: torch.Tensor, batch: int) -> IntervalMask:
    """Reduces a dense mask in the first layer that sees it; the others find the result on the tensor."""
    if mask.is_inference():  # counts no versions, so a mask refilled in place would not be noticed
        return from_dense(mask, batch)
    version = mask._version
    known = getattr(mask, "_plait_intervals", None)
    if known is None or known[0] != (version, batch):
        known = ((version, batch), from_dense(mask, batch))
        mask._plait_intervals = known
    return known[1]


def attend_step(
    query: torch.Tensor,  # [batch, heads_q, q_length, head_dim]
    key: torch.Tensor,  # [batch, heads_kv, kv_length, head_dim]
    value: torch.Tensor,  # [batch, heads_kv, kv_length, head_dim_v]
    mask: IntervalMask,
    **options,
) -> torch.Tensor | None:
    """A step of a few queries through the kernels of caches, which read key and value where they lie.

    Returns `[batch, q_length, heads_q, head_dim_v]`; None where the mask or the tensors are not of that kind.
    """
    if mask.key_counts is None or query.shape[0] == 0 or torch.is_grad_enabled() and _trains(query, key, value):
        return None
    if any(cast.dtype != x.dtype for cast, x in zip(autocast(query, key, value), (query, key, value), strict=True)):
        return None  # autocast would cast the cache
    table = None
    if mask.first_keys is not None:
        if key.stride(2) == 0 or value.stride(2) == 0:
            return None
        row_stride, rest = divmod(key.stride(0), key.stride(2))
        if rest != 0 or divmod(value.stride(0), value.stride(2)) != (row_stride, 0):
            return None
        table = mask.block_table(row_stride)
        key, value = (_pages_of_one(x, row_stride) for x in (key, value))
    out = plait.attention_with_kvcache(
        query,
        key,
        value,
        cache_seqlens=mask.key_counts,
        block_table=table,
        causal=mask.causal,
        window=mask.window,
        **options,
    )
    return out.transpose(1, 2)


def _trains(*tensors: torch.Tensor) -> bool:
    return any(x.requires_grad for x in tensors)


def _pages_of_one(cache: torch.Tensor, row_stride: int) -> torch.Tensor:
    """`[pages, 1, heads, head_dim]` over a cache `[batch, heads, length, head_dim]`: page `b * row_stride + i` is key i
    of row b; others, never asked for, overlap them."""
    batch, heads, length, head_dim = cache.shape
    pages = (batch - 1) * row_stride + length
    return cache.as_strided(
        (pages, 1, heads, head_dim), (cache.stride(2), cache.stride(2), cache.stride(1), cache.stride(3))
    )


def attend(
    dense: Callable,
    packed: Callable,
    query: torch.Tensor,  # [batch, heads_q, q_length, head_dim]
    key: torch.Tensor,  # [batch, heads_kv, kv_length, head_dim]
    value: torch.Tensor,  # [batch, heads_kv, kv_length, head_dim_v]
    mask: IntervalMask,
    **options,
) -> torch.Tensor:
    """Calls `dense` on `[batch, length, heads, head_dim]` or `packed` on `[batch * length, heads, head_dim]`.

    Returns `[batch, q_length, heads_q, head_dim_v]`. Tensors that transformers transposed from projections are
    flattened without a copy; a key-value cache in `[batch, heads, length, head_dim]` order is copied when packed.
    """
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    options |= {"causal": mask.causal, "window": mask.window}
    if not mask.packed:
        return dense(query, key, value, layout="bshd", **options)
    out = packed(
        *(x.flatten(0, 1) for x in (query, key, value)),
        cu_seqlens_q=mask.cu_seqlens_q,
        cu_seqlens_k=mask.cu_seqlens_k,
        **options,
    )
    return out.unflatten(0, query.shape[:2])
