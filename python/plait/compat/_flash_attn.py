"""What flash_attn_2 and flash_attn_3 share: refusals, unpacking and the cache call. Called by those two modules."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import plait
from plait._options import call_renamed, check_flags, check_optional_tensors, check_tensors, window_of

_ELSEWHERE = "use torch.nn.functional.scaled_dot_product_attention or torch.nn.attention.flex_attention"
_FIXED_LENGTHS = "pass q as [batch, length, heads, head_dim], one length for all sequences, or make one call for each"
_NO_FP8 = "plait has no fp8; scale the tensors into float16 or bfloat16"

# What plait does not have, and the way out.
_WAYS_OUT = {
    "dropout_p": f"plait does not offer dropout; pass 0.0, or {_ELSEWHERE}",
    "alibi_slopes": f"plait does not offer ALiBi; {_ELSEWHERE}",
    "qv": "plait has no second query against the values; concatenate it to q, and the values to k, with softmax_scale",
    "q_descale": _NO_FP8,
    "k_descale": _NO_FP8,
    "v_descale": _NO_FP8,
    "attention_chunk": "plait has no chunked attention; pack the chunks as sequences with flash_attn_varlen_func",
    "block_table": "plait reads pages in flash_attn_with_kvcache; call that, or gather the pages into k and v",
    "cache_leftpad": "plait's caches start at index 0; move each sequence to the start of its row",
    "cu_seqlens_q": _FIXED_LENGTHS,
    "cu_seqlens_k_new": _FIXED_LENGTHS,
    "rotary_seqlens": "plait turns by the position in the cache; turn q and k before the call and pass no tables",
}


# flash-attn's names of plait's arguments.
_NAMES = {
    "window": "window_size",
    "scale": "softmax_scale",
    "k_new": "k",
    "v_new": "v",
}


def call(function: Callable, *tensors: Tensor, **options: object) -> Tensor | tuple[Tensor, ...]:
    """A function of plait, its refusals in flash-attn's names."""
    return call_renamed(_NAMES, function, *tensors, **options)


def refuse(**arguments: object) -> None:
    """Raises ValueError for the first argument that is neither None nor zero: plait does not have it."""
    for name, value in arguments.items():
        if value is None or (isinstance(value, (int, float)) and value == 0):
            continue
        got = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise ValueError(f"{name}: got {got}; {_WAYS_OUT[name]}")


def unpack(name: str, packed: Tensor, parts: int, dim: int, shape: str) -> tuple[Tensor, ...]:
    """The views of a stacked tensor: `parts` along `dim`."""
    if not isinstance(packed, Tensor) or packed.dim() != dim + 3 or packed.shape[dim] != parts:
        got = list(packed.shape) if isinstance(packed, Tensor) else type(packed).__name__
        raise ValueError(f"{name}: got {got}, expected {shape}")
    return packed.unbind(dim)


def with_kvcache(
    q: Tensor,  # [B, Sq, Hq, D]
    k_cache: Tensor,  # [B_cache, S_max, Hk, D] or [pages, page, Hk, D]
    v_cache: Tensor,
    k: Tensor | None,  # [B, Sn, Hk, D]
    v: Tensor | None,
    rotary_cos: Tensor | None,
    rotary_sin: Tensor | None,
    cache_seqlens: Tensor | int | None,
    cache_batch_idx: Tensor | None,
    block_table: Tensor | None,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    rotary_interleaved: bool,
    return_softmax_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """flash_attn_with_kvcache of both libraries. Without cache_seqlens every sequence fills its cache."""
    check_flags(return_softmax_lse=return_softmax_lse)
    check_tensors(q=q, k_cache=k_cache, v_cache=v_cache)
    check_optional_tensors(q, k=k, v=v, block_table=block_table)
    for name, tensor, rank in (("q", q, 4), ("k_cache", k_cache, 4), ("v_cache", v_cache, 4), ("k", k, 4)):
        if tensor is not None and tensor.dim() != rank:
            raise ValueError(
                f"{name}: got shape {list(tensor.shape)}, expected rank {rank}, [batch, length, heads, dim]"
            )
    if block_table is not None and block_table.dim() != 2:
        raise ValueError(f"block_table: got shape {list(block_table.shape)}, expected [batch, pages]")
    if cache_seqlens is None:
        if k is not None:
            raise ValueError("cache_seqlens: is missing; with k and v it says where they go")
        cache_seqlens = k_cache.shape[1] if block_table is None else block_table.shape[1] * k_cache.shape[1]
    if rotary_cos is not None:
        _check_rotation(q, k, causal or call(window_of, window_size) != (-1, -1))
    return call(
        plait.attention_with_kvcache,
        q,
        k_cache,
        v_cache,
        k_new=k,
        v_new=v,
        cache_seqlens=cache_seqlens,
        block_table=block_table,
        cache_batch_idx=cache_batch_idx,
        rotary_cos=_wide(rotary_cos),
        rotary_sin=_wide(rotary_sin),
        rotary_interleaved=rotary_interleaved,
        causal=causal,
        window=window_size,
        scale=softmax_scale,
        softcap=softcap,
        return_lse=return_softmax_lse,
        layout="bshd",
    )


def _wide(table: Tensor | None) -> Tensor | None:
    """Rotary tables in float32: flash-attn takes them in the dtype of q, and computes in float32."""
    return table.float() if isinstance(table, Tensor) and table.dtype in (torch.float16, torch.bfloat16) else table


def _check_rotation(q: Tensor, k: Tensor | None, by_row: bool) -> None:
    """Raises where plait's queries stand elsewhere: flash-attn turns row i of q by `cache_seqlens + i` (without causal
    and window, all rows by `cache_seqlens`), plait the last row of q as the last of k."""
    if k is None:
        raise ValueError("rotary_cos: got tables without k and v; flash-attn turns only together with an append")
    if q.shape[1] != k.shape[1]:
        raise ValueError(
            f"rotary_cos: got {q.shape[1]} queries for {k.shape[1]} new keys, placed differently by flash-attn "
            "and plait; turn q and k before the call and pass no tables"
        )
    if q.shape[1] > 1 and not by_row:
        raise ValueError(
            f"rotary_cos: got {q.shape[1]} queries with causal=False, all of which flash-attn turns by one position; "
            "pass causal=True, or turn q and k before the call and pass no tables"
        )
