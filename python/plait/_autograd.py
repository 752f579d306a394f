"""Gradients of the forward ops: each calls the backward op of its name. Second derivatives are refused.

Registered when plait is imported; called by torch's autograd.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from plait._options import backward_options, split_qkv


def _refuse_second_derivative(name: str) -> Callable:
    def backward(ctx, *grads):
        raise RuntimeError(
            f"{name}: plait offers no second derivatives; call backward() without create_graph=True, or use "
            "torch.nn.functional.scaled_dot_product_attention under torch.nn.attention.SDPBackend.MATH"
        )

    return backward


def _nothing_to_save(ctx, inputs, output) -> None:
    """A refused backward needs nothing."""


def _attention_setup(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output, *inputs[:6])
    ctx.options = backward_options(inputs[6:])


def _attention_backward(ctx, dout, dlse):
    out, lse, *tensors = ctx.saved_tensors
    if dout is None and dlse is None:
        return (None,) * (len(tensors) + len(ctx.options))
    dq, dk, dv, dsinks = torch.ops.plait.attention_backward(dout, out, lse, dlse, *tensors, *ctx.options)
    return dq, dk, dv, (None if tensors[3] is None else dsinks), None, None, *(None,) * len(ctx.options)


def _merge_setup(ctx, inputs, output) -> None:
    outs, lses, packed, layout = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output, *outs, *lses)
    ctx.options = (packed, layout)


def _merge_backward(ctx, dout, dlse):
    out, lse, *parts = ctx.saved_tensors
    outs, lses = parts[: len(parts) // 2], parts[len(parts) // 2 :]
    if dout is None and dlse is None:
        return [None] * len(outs), [None] * len(lses), None, None
    douts, dlses = torch.ops.plait.merge_states_backward(dout, dlse, out, lse, outs, lses, *ctx.options)
    return list(douts), list(dlses), None, None


def _premix_setup(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:6])
    ctx.options = inputs[6:]


def _premix_backward(ctx, dy):
    nothing = (None,) * (4 + len(ctx.options))
    if dy is None:
        return None, None, *nothing
    dx, dw = torch.ops.plait.premix_backward(dy, *ctx.saved_tensors, *ctx.options)
    return dx, dw, *nothing


def _premix_qkv_setup(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:10])
    ctx.options = inputs[10:]


def _premix_qkv_backward(ctx, *gradients):
    """All three at once; where some need no gradient (frozen keys, say), the others one by one."""
    needed = [dy is not None and any(ctx.needs_input_grad[i::3][:2]) for i, dy in enumerate(gradients)]
    rest = (None,) * (4 + len(ctx.options))
    if all(needed):
        return *torch.ops.plait.premix_qkv_backward(*gradients, *ctx.saved_tensors, *ctx.options), *rest
    each = split_qkv(*ctx.saved_tensors, *ctx.options)
    results = [
        torch.ops.plait.premix_backward(dy, *one) if need else (None, None)
        for need, dy, one in zip(needed, gradients, each, strict=True)
    ]
    return *(dx for dx, _ in results), *(dw for _, dw in results), *rest


def _collapse_setup(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:2])
    ctx.options = inputs[2:]


def _collapse_backward(ctx, dy):
    if dy is None:
        return None, None, None, None, None
    dx, dr = torch.ops.plait.collapse_backward(dy, *ctx.saved_tensors, *ctx.options)
    return dx, dr, None, None, None


for _name, _backward, _setup in (
    ("attention", _attention_backward, _attention_setup),
    ("merge_states", _merge_backward, _merge_setup),
    ("premix", _premix_backward, _premix_setup),
    ("premix_qkv", _premix_qkv_backward, _premix_qkv_setup),
    ("collapse", _collapse_backward, _collapse_setup),
):
    torch.library.register_autograd(f"plait::{_name}_forward", _backward, setup_context=_setup)
    torch.library.register_autograd(
        f"plait::{_name}_backward", _refuse_second_derivative(_name), setup_context=_nothing_to_save
    )
