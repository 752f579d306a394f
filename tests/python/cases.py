"""Calls of plait beside eager float64 references, compared element by element, forward and every gradient.

Called by test_public_cases*.py and test_fuzz.py.
"""

import oracle
import plait
import torch


def offsets(*lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


def packed_reference(q, k, v, cu_q, cu_k, **options):
    """(out, lse) of packed tensors in float64, one sequence after the other, differentiable."""
    outs, lses = [], []
    for i in range(len(cu_q) - 1):
        rows, keys = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
        one = [x[part].transpose(0, 1)[None] for x, part in ((q, rows), (k, keys), (v, keys))]
        out, lse = oracle.attention(*one, **options)
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, 1)


def near(got, expected, dtype=None, *, terms=1.0):
    """Element by element: a few roundings to the dtype of `got`, and fp32 arithmetic over sums of size `terms`."""
    assert got.shape == expected.shape and torch.isfinite(got).all()
    dtype = dtype or got.dtype
    rounding = {torch.float16: 2**-10, torch.bfloat16: 2**-7, torch.float32: 2**-18}[dtype]
    torch.testing.assert_close(got.double(), expected.double(), rtol=rounding, atol=rounding * terms)


def gradients(call, tensors, dout, dlse=None):
    """out, lse and the gradients of `tensors` through out and, with dlse, lse."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    out, lse = call(*leaves)
    seen = torch.isfinite(lse)
    loss = (out.double() * dout.double()).sum()
    if dlse is not None:
        loss = loss + (lse.masked_fill(~seen, 0).double() * dlse.double()).sum()
    if not loss.requires_grad:  # an empty reference touches nothing
        return out.detach(), lse.detach(), *(torch.zeros_like(x) for x in leaves)
    grads = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    return out.detach(), lse.detach(), *grads


def compare(call, reference, tensors, *, with_lse=True, terms=1.0, out_terms=None):
    """Forward and every gradient of `call` against `reference`, which gets float64 copies.

    terms: of near(), for the gradients, and for the output where out_terms is None.
    """
    out, lse = call(*tensors)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse) if with_lse else None
    got = gradients(call, tensors, dout, dlse)
    expected = gradients(reference, [t.double() for t in tensors], dout, dlse)
    seen = torch.isfinite(expected[1])
    assert torch.equal(got[1][~seen].double(), expected[1][~seen])
    near(got[1][seen], expected[1][seen])
    near(got[0], expected[0], tensors[0].dtype, terms=terms if out_terms is None else out_terms)
    for mine, theirs in zip(got[2:], expected[2:], strict=True):
        near(mine, theirs, tensors[0].dtype, terms=terms)
    return got


def dense(**options):
    return lambda q, k, v: plait.flash_attention(q, k, v, return_lse=True, **options)


def dense_reference(**options):
    return lambda q, k, v: oracle.attention(q, k, v, **options)


def packed(cu_q, cu_k, **options):
    return lambda q, k, v: plait.flash_attention_varlen(
        q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, return_lse=True, **options
    )


def packed_expected(cu_q, cu_k, **options):
    return lambda q, k, v: packed_reference(q, k, v, cu_q, cu_k, **options)
