"""Public functions of attention over plain heads: forward, backward, packed, merging, explaining.

Called by users as plait.* and plait.functional.*, and by _iha.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from plait._fake import describe, raise_refusal
from plait._options import (
    attention_forward,
    attention_options,
    autocast,
    backward_options,
    check_flags,
    check_max_seqlen,
    check_optional_tensors,
    check_tensors,
    check_text,
    refuse_unknown,
)


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
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
    """Exact softmax attention, differentiable, in memory linear in the lengths.

    `S = scale * q k^T`, then `softcap * tanh(S / softcap)` if asked, mask, softmax over the keys, times v. Query head
    h reads key head `h // (Hq // Hk)`.

    Args:
        q: `[B, Hq, Sq, D]`; k: `[B, Hk, Sk, D]`; v: `[B, Hk, Sk, Dv]`, `Hq % Hk == 0`; with layout "bshd"
            `[B, S, H, D]`. One dtype of float16, bfloat16, float32 (float64 with backend "reference"). Any strides. On
            one device, the CPU or a GPU; calls on a GPU run on torch's current stream and are not waited for.
        causal: row i sees keys up to `i + Sk - Sq` (bottom-right alignment).
        window: `(left, right)`: row i sees keys from `i + Sk - Sq - left` to `i + Sk - Sq + right`, inclusive; -1 or
            None is unbounded. Together with causal both limits hold.
        scale: default `1 / sqrt(D)`. softcap: None or 0 is off.
        sinks: `[Hq]` float32, logits that join each row's softmax denominator only. Differentiable.
        strategy: "auto", "split_q" (parallel over queries), "split_kv" (over keys, then a combine) or "split_d"
            (cuda_mma, head dims above 256). Of the forward, as is split_size; gradients are planned on their own.
        backend: "auto": "cpu" for CPU tensors; for CUDA tensors the first that serves the call of "cuda_sm90" (Hopper:
            forward in head dims up to 256), "cuda_mma" (tensor cores: float16 and bfloat16, head dims in multiples of
            8 up to 1024) and "cuda_naive" (CUDA cores: everything, slow). "reference" is the slow float64 oracle on
            the CPU.
        deterministic: gradients bit-equal from run to run ("cpu" and "cuda_naive": always). The forward always is.
        return_lse: also return the log-sum-exp, differentiable.
        out_dtype: torch.float32 for a float32 output of float16 or bfloat16 inputs; default the dtype of q.
        split_size: keys per split (chooses split_kv): a sequence's result then does not depend on its batch.
        layout: "bhsd" (heads before positions) or "bshd" (positions before heads), of q, k, v and the output.

    Returns:
        out like q with last size Dv, and with return_lse lse `[B, Hq, Sq]` float32 (float64 for float64 inputs),
        natural log, scale included. A row that sees no key gives 0 and -inf (or the sink).

    Under autocast q, k and v are cast to its dtype. Raises ValueError for a wrong argument and RuntimeError where no
    backend serves the call or CUDA refuses it, both with the argument, what was got and the way out; TypeError for a
    keyword that it does not have. Warns once per process where a head dim alone keeps a call from a GPU's tensor cores.
    """
    refuse_unknown(flash_attention, not_offered)
    check_flags(return_lse=return_lse)
    check_tensors(q=q, k=k, v=v)
    check_optional_tensors(q, sinks=sinks)
    options = attention_options(
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
    q, k, v = autocast(q, k, v)
    out, lse = attention_forward(q, k, v, sinks, None, None, *options)
    return (out, lse) if return_lse else out


def flash_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
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
    """`flash_attention` over sequences packed along the first dimension, each on its own.

    Args:
        q: `[total_q, Hq, D]`; k: `[total_k, Hk, D]`; v: `[total_k, Hk, Dv]`.
        cu_seqlens_q, cu_seqlens_k: int32 `[batch + 1]`: sequence b is rows `cu_seqlens[b]` to `cu_seqlens[b + 1]`.
            They start at 0 and never decrease; empty sequences are legal. Rows past the end give 0 and -inf.
        max_seqlen_q, max_seqlen_k: bounds that never change a result (an int, or a 0-dim tensor that is not read).
        The others as in `flash_attention`; layout has no effect on packed tensors.

    Returns:
        out `[total_q, Hq, Dv]`, and with return_lse lse `[Hq, total_q]`.
    """
    refuse_unknown(flash_attention_varlen, not_offered)
    check_flags(return_lse=return_lse)
    check_tensors(q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    check_optional_tensors(q, sinks=sinks)
    check_max_seqlen(max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)
    options = attention_options(
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
    q, k, v = autocast(q, k, v)
    out, lse = attention_forward(q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, *options)
    return (out, lse) if return_lse else out


def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    dlse: Tensor | None = None,
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
    split_size: int | None = None,
    layout: str = "bhsd",
    **not_offered: object,
) -> tuple[Tensor, ...]:
    """The gradients of `flash_attention` (or of the packed form) by hand, for context parallelism and the like.

    `P = exp(S - lse)`, `delta = dout . out - dlse`, `dS = P * (dout v^T - delta)`, `dq = scale * dS k`,
    `dk = scale * dS^T q`, `dv = P^T dout`. out and lse may come from a merge over more keys than k holds: P then does
    not sum to 1. A row with lse = -inf gets zero gradients.

    Args:
        dout: like out. q, k, v, out, lse: as given to and returned by the forward. dlse: like lse, None for zero.
        strategy, split_size: of the backward itself, not of the forward that made out and lse; no backend has any for
            it, so anything but the defaults is refused.
        The others as in the forward.

    Returns:
        (dq, dk, dv), and dsinks as a fourth when sinks are given; shapes and dtypes of their inputs.
    """
    refuse_unknown(attention_backward, not_offered)
    check_tensors(dout=dout, q=q, k=k, v=v, out=out, lse=lse)
    check_optional_tensors(q, dlse=dlse, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, sinks=sinks)
    options = attention_options(
        causal=causal,
        window=window,
        scale=scale,
        softcap=softcap,
        deterministic=deterministic,
        split_size=split_size,
        strategy=strategy,
        backend=backend,
        out_dtype=None,
        layout=layout,
    )
    grads = torch.ops.plait.attention_backward(
        dout, out, lse, dlse, q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, *options
    )
    return tuple(grads) if sinks is not None else tuple(grads[:3])


def merge_states(outs: Sequence[Tensor], lses: Sequence[Tensor], *, layout: str = "bhsd") -> tuple[Tensor, Tensor]:
    """Merges attention results over disjoint sets of keys into the result over all of them; differentiable.

    `lse = log(sum_i exp(lse_i))`, `out = sum_i exp(lse_i - lse) * out_i`. A part with lse = -inf weighs nothing; where
    all are, (0, -inf). Sinks belong to one part only.

    Args:
        outs: n tensors `[B, H, S, Dv]` (layout "bhsd"), `[B, S, H, Dv]` ("bshd") or packed `[total, H, Dv]`.
        lses: n tensors `[B, H, S]`, or packed `[H, total]`, float32 (float64 with float64 outs).

    Returns:
        (out, lse) in the dtypes of the parts. Precision: partial results in float32 (`out_dtype`) lose nothing.
    """
    for name, parts in (("outs", outs), ("lses", lses)):
        if not isinstance(parts, Sequence):
            raise ValueError(f"{name}: got {type(parts).__name__}, expected a sequence of tensors")
    outs, lses = list(outs), list(lses)
    first = next((part for part in outs if isinstance(part, Tensor)), None)
    for name, parts in (("outs", outs), ("lses", lses)):
        for part in parts:
            check_tensors(first, **{name: part})
    check_text("layout", layout)
    packed = len(outs) > 0 and outs[0].dim() == 3
    return torch.ops.plait.merge_states_forward(outs, lses, packed, layout)


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mode: str = "plain",
    mask: str = "flat",
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
    out_dtype: torch.dtype | None = None,
    split_size: int | None = None,
    layout: str = "bhsd",
    backward: bool = False,
    device: str | None = None,
    **not_offered: object,
) -> str:
    """What an attention call would run and why: backend, strategy, tiles, workspace. Nothing runs.

    Args:
        q, k, v: as in `flash_attention` (packed with cu_seqlens); meta tensors will do. In mode "joint" or
            "interleaved" pseudo tensors `[B, H, S, P, D]`, as `premix` returns them.
        backward: the plan of the gradients instead of the forward's.
        device: a device by name, present or not ("cpu", "t4", "a100", "l4", "h100", "h200", ...), or "cuda:0" for a GPU
            of this machine; default the tensors' own. A build without CUDA plans for GPUs too.

    Returns:
        Several lines. Raises what the call itself would raise. strategy and split_size are the forward's: the gradients
        of the call are planned without them.
    """
    refuse_unknown(explain, not_offered)
    check_flags(backward=backward)
    check_tensors(q=q, k=k, v=v)
    check_optional_tensors(q, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, sinks=sinks)
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
    if device is not None:
        check_text("device", device)
    tensors = [q, k, v, sinks, cu_seqlens_q, cu_seqlens_k]
    text = raise_refusal(*torch.ops.plait.plan_attention(describe(tensors), False, device or "", *options))
    if not backward:
        return text
    results, options = _outputs(tensors, options), backward_options(options)
    numbers = describe([*tensors, *results, results[0], None], meta_as=q.device)
    return raise_refusal(*torch.ops.plait.plan_attention(numbers, True, device or "", *options))


def _outputs(tensors: list[Tensor | None], options: tuple) -> tuple[Tensor, Tensor]:
    """out and lse of a call as meta tensors. The op plans for where its tensors are, so the backend is left to it."""
    like = [
        None if t is None else torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in tensors
    ]
    *head, _, _, _, out_dtype, layout = options
    return torch.ops.plait.attention_forward(*like, *head, 0, "auto", "auto", out_dtype, layout)
