"""Fake kernels: the shapes, dtypes and strides that each op returns, and the refusals that it makes.

Registered when plait is imported; called by torch.compile, export, FakeTensorMode and for meta tensors. Sizes may be
symbolic. Refusals come from the same planner as in the real kernels, asked with the hints of symbolic sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false

from plait._options import split_qkv
from plait._padding import warn_of_padding

# plait::DType and plait::DeviceKind of include/plait/tensor.hpp. Meta tensors stand for tensors of the host.
_DTYPES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, torch.float64: 3, torch.int32: 4}
_DTYPE_OTHER = 5
_DEVICES = {"cpu": 0, "meta": 0, "cuda": 1}
_DEVICE_OTHER = 2


def describe(tensors: Sequence[Tensor | None], meta_as: torch.device | None = None) -> list[int] | None:
    """The tensors as numbers, as bindings/torch/plan.cpp reads them; None where a size has no hint.

    meta_as: the device that meta tensors stand for.
    """
    numbers: list[int] = []
    for tensor in tensors:
        if tensor is None:
            numbers.append(-1)
            continue
        device = meta_as if meta_as is not None and tensor.device.type == "meta" else tensor.device
        numbers += [
            tensor.dim(),
            _DTYPES.get(tensor.dtype, _DTYPE_OTHER),
            _DEVICES.get(device.type, _DEVICE_OTHER),
            device.index or 0 if device.type == "cuda" else 0,
        ]
        extents = [_hint(extent) for extent in (*tensor.shape, *tensor.stride())]
        if None in extents:
            return None
        numbers += extents
    return numbers


def raise_refusal(code: int, text: str) -> str:
    """Returns the text of a plan (code 0), or raises its refusal."""
    if code == 1:
        raise ValueError(text)
    if code != 0:
        raise RuntimeError(text)
    return text


def _hint(extent: int | torch.SymInt) -> int | None:
    if not isinstance(extent, torch.SymInt):
        return extent
    return int(extent.node.hint) if extent.node.has_hint() else None


def _check(plan: Callable, tensors: Sequence[Tensor | None], *options: object) -> None:
    """Raises what the real kernel would raise; sizes without a hint are left to the real kernel."""
    numbers = describe(tensors)
    hints = [_hint(option) for option in options]
    unknown = any(
        isinstance(option, torch.SymInt) and hint is None for option, hint in zip(options, hints, strict=True)
    )
    if numbers is not None and not unknown:
        raise_refusal(*plan(numbers, *hints))


def _row_major(like: Tensor, axis: int) -> bool:
    """Whether `axis` is outside `axis + 1` in memory (heads and positions); see empty_ordered in convert.hpp."""
    return not guard_or_false(like.stride(axis) < like.stride(axis + 1))


def _empty_ordered(shape: Sequence[int], dtype: torch.dtype, like: Tensor, axis: int) -> Tensor:
    order = list(range(len(shape)))
    if axis + 1 < len(shape) and not _row_major(like, axis):
        order[axis], order[axis + 1] = order[axis + 1], order[axis]
    stride: list[int] = [1] * len(shape)
    step: int = 1
    for dim in reversed(order):
        stride[dim] = step
        step = step * torch.sym_max(shape[dim], 1)
    return torch.empty_strided(shape, stride, dtype=dtype, device=like.device)


def _lse_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


@torch.library.register_fake("plait::attention_forward")
def _attention_forward(q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, *options):
    _check(torch.ops.plait.plan_attention, (q, k, v, sinks, cu_seqlens_q, cu_seqlens_k), False, "", *options)
    warn_of_padding(q, v, options[-3])
    mode, out_dtype, layout = options[0], options[-2], options[-1]
    packed = cu_seqlens_q is not None
    leading = q.shape[:-2] if mode == "joint" else q.shape[:-1]
    out = _empty_ordered((*leading, v.shape[-1]), out_dtype or q.dtype, q, 0 if packed else 1)
    rows = q.shape[-2] if mode == "interleaved" else 1
    if packed:
        shape = (q.shape[1], q.shape[0] * rows)
    else:
        heads, seqlen = (q.shape[1], q.shape[2]) if layout == "bhsd" else (q.shape[2], q.shape[1])
        shape = (q.shape[0], heads, seqlen * rows)
    return out, q.new_empty(shape, dtype=_lse_dtype(q.dtype))


@torch.library.register_fake("plait::attention_backward")
def _attention_backward(dout, out, lse, dlse, q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, *options):
    _check(
        torch.ops.plait.plan_attention,
        (q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, out, lse, dout, dlse),
        True,
        "",
        *options,
    )
    dsinks = q.new_empty((0,), dtype=_lse_dtype(q.dtype)) if sinks is None else torch.empty_like(sinks)
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), dsinks


def _with_kvcache(q: Tensor, v_cache: Tensor, options: Sequence) -> tuple[Tensor, Tensor]:
    out_dtype, layout = options[-2], options[-1]
    out = _empty_ordered((*q.shape[:-1], v_cache.shape[-1]), out_dtype or q.dtype, q, 1)
    heads, seqlen = (q.shape[1], q.shape[2]) if layout == "bhsd" else (q.shape[2], q.shape[1])
    return out, q.new_empty((q.shape[0], heads, seqlen), dtype=_lse_dtype(q.dtype))


@torch.library.register_fake("plait::attention_with_kvcache_")
def _attention_with_kvcache(
    q, k_cache, v_cache, k_new, v_new, cache_seqlens, block_table, cache_batch_idx, cos, sin, sinks, *options
):
    tensors = (q, k_cache, v_cache, k_new, v_new, cache_seqlens, block_table, cache_batch_idx, cos, sin, sinks)
    _check(torch.ops.plait.plan_attention_with_kvcache, tensors, *options)
    return _with_kvcache(q, v_cache, options)


@torch.library.register_fake("plait::iha_attention_with_kvcache_")
def _iha_attention_with_kvcache(
    q, k_new, v_new, k_cache, v_cache, w_q, w_k, w_v, cache_seqlens, cache_batch_idx, cos, sin, sinks, *options
):
    tensors = (q, k_new, v_new, k_cache, v_cache, w_q, w_k, w_v, cache_seqlens, cache_batch_idx, cos, sin, sinks)
    _check(torch.ops.plait.plan_iha_attention_with_kvcache, tensors, *options)
    return _with_kvcache(q, v_cache, options)


@torch.library.register_fake("plait::merge_states_forward")
def _merge_states_forward(outs, lses, packed, layout):
    if len(outs) == 0 or len(outs) != len(lses):
        raise ValueError(
            f"lses: got {len(outs)} outs and {len(lses)} lses, expected the same number of both, at least one"
        )
    results = _empty_ordered(outs[0].shape, outs[0].dtype, outs[0], 0 if packed else 1), torch.empty_like(lses[0])
    _check(torch.ops.plait.check_merge, (*outs, *lses, *results), len(outs), packed, layout)
    return results


@torch.library.register_fake("plait::merge_states_backward")
def _merge_states_backward(dout, dlse, out, lse, outs, lses, packed, layout):
    _check(torch.ops.plait.check_merge, (*outs, *lses, out, lse), len(outs), packed, layout)
    return [torch.empty_like(part) for part in outs], [torch.empty_like(part) for part in lses]


@torch.library.register_fake("plait::premix_forward")
def _premix_forward(x, w, cos, sin, cu_seqlens, cu_seqlens_other, *options):
    _check(torch.ops.plait.plan_premix, (x, w, cos, sin, cu_seqlens, cu_seqlens_other), False, *options)
    shape = (*x.shape[:-1], w.shape[1], x.shape[-1])
    return _empty_ordered(shape, x.dtype, x, 1 if cu_seqlens is None else 0)


@torch.library.register_fake("plait::premix_backward")
def _premix_backward(dy, x, w, cos, sin, cu_seqlens, cu_seqlens_other, *options):
    _check(torch.ops.plait.plan_premix, (x, w, cos, sin, cu_seqlens, cu_seqlens_other), True, *options)
    return torch.empty_like(x), torch.empty_like(w)


@torch.library.register_fake("plait::premix_qkv_forward")
def _premix_qkv_forward(q, k, v, w_q, w_k, w_v, cos, sin, cu_seqlens_q, cu_seqlens_k, *options):
    each = split_qkv(q, k, v, w_q, w_k, w_v, cos, sin, cu_seqlens_q, cu_seqlens_k, *options)
    _check_together(q, k, v)
    return tuple(_numbered(i, _premix_forward, *one) for i, one in enumerate(each))


@torch.library.register_fake("plait::premix_qkv_backward")
def _premix_qkv_backward(dq, dk, dv, q, k, v, w_q, w_k, w_v, cos, sin, cu_seqlens_q, cu_seqlens_k, *options):
    each = split_qkv(q, k, v, w_q, w_k, w_v, cos, sin, cu_seqlens_q, cu_seqlens_k, *options)
    _check_together(q, k, v)
    gradients = [_numbered(i, _premix_backward, dy, *each[i]) for i, dy in enumerate((dq, dk, dv))]
    return *(dx for dx, _ in gradients), *(dw for _, dw in gradients)


def _check_together(*xs: Tensor) -> None:
    for i, x in enumerate(xs):
        if x.device != xs[0].device:
            raise ValueError(
                f"x[{i}]: got device {x.device}, expected {xs[0].device} as the first tensor has; move one of them"
            )


def _numbered(number: int, function: Callable, *tensors: object):
    """Calls `function`; a refusal of one of its tensors gives the number, as libplait does in a call over several."""
    try:
        return function(*tensors)
    except (ValueError, RuntimeError) as refusal:
        name, _, rest = str(refusal).partition(":")
        if name not in ("x", "w", "cu_seqlens", "cu_seqlens_other", "rope cos", "rope sin"):
            raise
        raise type(refusal)(f"{name}[{number}]:{rest}") from None


@torch.library.register_fake("plait::collapse_forward")
def _collapse_forward(x, r, packed, layout, backend):
    _check(torch.ops.plait.plan_collapse, (x, r), False, packed, layout, backend)
    return _empty_ordered((*x.shape[:-2], x.shape[-1]), x.dtype, x, 0 if packed else 1)


@torch.library.register_fake("plait::collapse_backward")
def _collapse_backward(dy, x, r, packed, layout, backend):
    _check(torch.ops.plait.plan_collapse, (x, r), True, packed, layout, backend)
    return torch.empty_like(x), torch.empty_like(r)
