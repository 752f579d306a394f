"""Public functions of Interleaved Head Attention (arXiv 2602.21371): mixing, attention, folding, the window rule.

Called by users as plait.* and plait.functional.*, and by nn.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from plait._options import (
    attention_forward,
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
    whole_number,
)

# What premix_qkv calls the tensors of each of its three premixes.
_PREMIX_NAMES = (
    {"x": "q", "w": "w_q", "cu_seqlens": "cu_seqlens_q", "cu_seqlens_other": "cu_seqlens_k"},
    *({"x": x, "w": f"w_{x}", "cu_seqlens": "cu_seqlens_k"} for x in "kv"),
)


def premix(
    x: Tensor,
    w: Tensor,
    *,
    rope: tuple[Tensor, Tensor] | None = None,
    rope_style: str = "half",
    layout: str = "bhsd",
    backend: str = "auto",
) -> Tensor:
    """Mixes heads into pseudo-heads: `y[b, n, h, p] = sum_s w[h, p, s] * x[b, n, s]`; differentiable in x and w.

    Args:
        x: `[B, H, N, D]` (layout "bhsd") or `[B, N, H, D]` ("bshd").
        w: `[H, P, H]`, float32 or the dtype of x.
        rope: `(cos, sin)`, each `[positions, D_rot / 2]` float32 (float64 with float64 x), `positions >= N`,
            `D_rot <= D`: turns position n by table row n. No gradients flow into the tables.
        rope_style: "half" (dims i and i + D_rot/2 turn together, as in LLaMA) or "pairs" (2i and 2i + 1).
        backend: as in `flash_attention`.

    Returns:
        `[B, H, N, P, D]` or `[B, N, H, P, D]` in the dtype of x. Gradients are deterministic; dw has the dtype of w.
    """
    check_tensors(x=x, w=w)
    cos, sin = rope_tables(rope)
    for name, text in (("rope_style", rope_style), ("layout", layout), ("backend", backend)):
        check_text(name, text)
    given = x
    (x,) = autocast(x)
    check_cast(x, given, wide=True, w=w)
    return torch.ops.plait.premix_forward(x, w, cos, sin, None, None, rope_style, "token", 0, layout, backend)


def iha_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w_q: Tensor,
    w_k: Tensor,
    w_v: Tensor,
    *,
    mode: str = "joint",
    mask: str = "flat",
    collapse: Tensor | None = None,
    rope: tuple[Tensor, Tensor] | None = None,
    rope_style: str = "half",
    rope_index: str = "row",
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
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
    """Interleaved Head Attention: heads mixed into P pseudo-heads, attention among those, back to heads.

    joint: pseudo-head p of the queries meets pseudo-head p of the keys, one softmax over all (p, m):
    `out[n, h] = sum_{p, m} exp(scale * q~[n, p] . k~[m, p]) v~[m, p] / sum_{p, m} exp(...)`.
    interleaved: token (n, p) is row `n * P + p` of a sequence of length `N * P`; plain attention there, then the
    collapse `out[n, h] = sum_p r[h, p] o[n, h, p]`, or over all heads, `sum_{g, p} r[h, g, p] o[n, g, p]`.

    Args:
        q, k, v: as in `flash_attention`, or packed `[total, H, D]` with cu_seqlens_q and cu_seqlens_k (int32, in
            tokens).
        w_q: `[Hq, P, Hq]`; w_k, w_v: `[Hk, P, Hk]`; float32 or the dtype of q. See `premix`.
        mode: "joint" or "interleaved". mask: "flat" (causal on rows) or "token" (a row sees its whole token), both for
            interleaved.
        collapse: the r of the formula, `[Hq, P]` or `[Hq, Hq, P]`, float32 or the dtype of the attention's output;
            required in interleaved mode, refused in joint.
        rope: `(cos, sin)` `[positions, D_rot / 2]`, turns queries and keys; queries stand at `i + Sk - Sq`. Positions
            restart in each packed sequence.
        rope_index: interleaved only: "row" turns row n * P + p by its own number (tables of N * P rows), "token" by n.
            joint always turns by n.
        window: in positions (joint) or rows (interleaved), as is causal.
        The others as in `flash_attention`.

    Returns:
        out like q with last size Dv; with return_lse lse `[B, Hq, Sq]`, interleaved `[B, Hq, Sq * P]` before the
        collapse; packed `[Hq, ...]`. Differentiable in q, k, v, the weights, collapse and sinks.
    """
    refuse_unknown(iha_attention, not_offered)
    check_flags(return_lse=return_lse)
    check_tensors(q=q, k=k, v=v, w_q=w_q, w_k=w_k, w_v=w_v)
    check_optional_tensors(q, sinks=sinks, collapse=collapse, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    options = attention_options(
        mode=mode,
        mask=mask,
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
    for name, text in (("rope_style", rope_style), ("rope_index", rope_index)):
        check_text(name, text)
    cos, sin = rope_tables(rope)
    _check_mode(mode, collapse)
    packed = cu_seqlens_q is not None
    if packed != (cu_seqlens_k is not None):
        missing = "cu_seqlens_k" if packed else "cu_seqlens_q"
        raise ValueError(f"{missing}: is missing; packed input needs cu_seqlens_q and cu_seqlens_k")
    _check_inputs({"q": q, "k": k, "v": v}, {"w_q": w_q, "w_k": w_k, "w_v": w_v}, packed, layout)

    given = q
    q, k, v = autocast(q, k, v)
    check_cast(q, given, wide=True, w_q=w_q, w_k=w_k, w_v=w_v, **({} if collapse is None else {"collapse": collapse}))
    if rope_index not in ("row", "token"):
        raise ValueError(f"rope_index: got {rope_index!r}, expected 'row' or 'token'")
    index = rope_index if mode == "interleaved" else "token"
    length = 2 if layout == "bhsd" else 1
    offset = 0 if packed else k.shape[length] - q.shape[length]
    lengths = (cu_seqlens_q, cu_seqlens_k)
    mix = torch.ops.plait.premix_qkv_forward
    q, k, v = call_renamed(
        _PREMIX_NAMES, mix, q, k, v, w_q, w_k, w_v, cos, sin, *lengths, rope_style, index, offset, layout, backend
    )
    out, lse = attention_forward(q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, *options)
    if collapse is not None:
        out = call_renamed({"x": "q"}, torch.ops.plait.collapse_forward, out, collapse, packed, layout, backend)
    return (out, lse) if return_lse else out


def fold_premix_into_projection(weight: Tensor, w: Tensor) -> Tensor:
    """The projection weight that does what `weight` followed by a P = 1 premix does, so that nothing is mixed later.

    `folded[h * D + d] = sum_s w[h, 0, s] * weight[s * D + d]`, exact up to rounding.

    Args:
        weight: `[H * D, hidden]` of the projection, as torch.nn.Linear keeps it. w: `[H, 1, H]`.

    Returns:
        `[H * D, hidden]` in the dtype of weight.
    """
    check_tensors(weight=weight, w=w)
    if w.dim() != 3 or w.shape[0] != w.shape[2] or w.shape[1] != 1 or w.shape[0] == 0:
        raise ValueError(f"w: got {list(w.shape)}, expected [H, 1, H]; only P = 1 folds into a projection")
    heads = w.shape[0]
    if weight.dim() != 2 or weight.shape[0] % heads != 0:
        raise ValueError(f"weight: got {list(weight.shape)}, expected [H * D, hidden] with H = {heads} as w has")
    wide = torch.promote_types(weight.dtype, w.dtype)
    return (w[:, 0].to(wide) @ weight.to(wide).reshape(heads, -1)).reshape(weight.shape).to(weight.dtype)


def flop_matched_window(N: int, P: int, *, mode: str = "joint", tile: int = 128) -> tuple[int, float]:
    """The window at which IHA visits as many key tiles as plain causal attention on N positions.

    joint: `N / (2 P) - 1` where its visits, P times, reach the causal count; else the smallest `tile * t + 1` that
    does. interleaved: the same rule over `N * P` rows. N is rounded up to tiles first.

    Returns:
        (left, visit_ratio): `window=(left, 0)` with causal, in positions (joint) or rows (interleaved), -1 for P = 1;
        and the key tiles visited, relative to plain causal attention: near 1 for long sequences, well above it where
        the window is about a tile or less (2.8 at N = 512, P = 4). Raises ValueError for N, P or tile below 1 and
        for `2 P > N`.
    """
    N, P, tile = (whole_number(name, value) for name, value in (("N", N), ("P", P), ("tile", tile)))
    check_text("mode", mode)
    return torch.ops.plait.flop_matched_window(N, P, mode, tile)


def _check_mode(mode: str, collapse: Tensor | None) -> None:
    if mode not in ("joint", "interleaved"):
        raise ValueError(f"mode: got '{mode}', expected 'joint' or 'interleaved'")
    if mode == "joint" and collapse is not None:
        raise ValueError("collapse: joint mode has none; pass collapse=None, or mode='interleaved'")
    if mode == "interleaved" and collapse is None:
        raise ValueError(
            "collapse: is missing; interleaved mode needs a tensor [Hq, P] (per head) or [Hq, Hq, P] (all heads)"
        )


def _check_inputs(tensors: dict[str, Tensor], weights: dict[str, Tensor], packed: bool, layout: str) -> None:
    """What the ops would refuse under names that the caller did not use."""
    rank, shape = (3, "[total, H, D]") if packed else (4, "[B, S, H, D]" if layout == "bshd" else "[B, H, S, D]")
    heads_axis = 1 if packed or layout != "bshd" else 2
    P = None
    for (name, tensor), (w_name, w) in zip(tensors.items(), weights.items(), strict=True):
        if tensor.dim() != rank:
            raise ValueError(f"{name}: got shape {list(tensor.shape)}, expected {shape}")
        heads, letters = tensor.shape[heads_axis], "Hq" if name == "q" else "Hk"
        fits = w.dim() == 3 and w.shape[0] == heads and w.shape[2] == heads and w.shape[1] > 0
        if not fits or (P is not None and w.shape[1] != P):
            raise ValueError(
                f"{w_name}: got shape {list(w.shape)}, expected [{letters}, P, {letters}] = "
                f"[{heads}, {P or 'P'}, {heads}] (the heads of {name}, and one P >= 1 in w_q, w_k and w_v)"
            )
        P = w.shape[1]
