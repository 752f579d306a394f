"""gradcheck of every op path on the float64 reference backend; second derivatives are refused."""

import oracle
import plait
import pytest
import torch
from torch.autograd import gradcheck

REFERENCE = {"backend": "reference"}


def leaf(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("options", [
    {},
    {"causal": True},
    {"window": (1, 1), "scale": 0.7},
    {"softcap": 1.5, "causal": True},
    {"layout": "bshd"},
], ids=str)  # fmt: skip
def test_attention(options):
    shapes = ((1, 2, 3, 2), (1, 1, 4, 2), (1, 1, 4, 3))
    tensors = [leaf(*shape) for shape in shapes]
    if options.get("layout") == "bshd":
        tensors = [x.detach().transpose(1, 2).requires_grad_() for x in tensors]
    assert gradcheck(lambda *t: plait.flash_attention(*t, return_lse=True, **options, **REFERENCE), tensors)


def test_attention_with_sinks():
    tensors = [leaf(1, 2, 3, 2), leaf(1, 1, 4, 2), leaf(1, 1, 4, 2), leaf(2)]
    assert gradcheck(
        lambda q, k, v, s: plait.flash_attention(q, k, v, sinks=s, causal=True, return_lse=True, **REFERENCE), tensors
    )


def test_lse_alone():
    tensors = [leaf(1, 2, 3, 2), leaf(1, 1, 4, 2), leaf(1, 1, 4, 2)]
    assert gradcheck(lambda *t: plait.flash_attention(*t, return_lse=True, **REFERENCE)[1], tensors)


def test_packed():
    cu = torch.tensor([0, 2, 2, 4], dtype=torch.int32)
    call = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "causal": True, **REFERENCE}
    tensors = [leaf(4, 2, 2), leaf(4, 1, 2), leaf(4, 1, 2)]
    assert gradcheck(lambda *t: plait.flash_attention_varlen(*t, return_lse=True, **call), tensors)


@pytest.mark.parametrize("rope", [False, True])
@pytest.mark.parametrize("mode", ["joint", "interleaved", "global"])
def test_iha(mode, rope):
    tensors = [leaf(1, 2, 2, 2), leaf(1, 1, 3, 2), leaf(1, 1, 3, 2), leaf(2, 2, 2), leaf(1, 2, 1), leaf(1, 2, 1)]
    options = {"mode": "joint", "causal": True, **REFERENCE}
    if mode != "joint":
        options["mode"] = "interleaved"
        tensors.append(leaf(2, 2) if mode == "interleaved" else leaf(2, 2, 2))
    if rope:
        options["rope"] = oracle.rope_tables(6, 1, torch.float64)

    def call(*t):
        return plait.iha_attention(*t[:6], collapse=t[6] if len(t) > 6 else None, return_lse=True, **options)

    assert gradcheck(call, tensors)


@pytest.mark.parametrize("style", [None, "half", "pairs"])
def test_premix(style):
    rope = None if style is None else oracle.rope_tables(3, 2, torch.float64)
    options = {} if style is None else {"rope": rope, "rope_style": style}
    assert gradcheck(lambda x, w: plait.premix(x, w, **options, **REFERENCE), [leaf(2, 2, 3, 5), leaf(2, 3, 2)])


@pytest.mark.parametrize("form", ["per_head", "global"])
def test_collapse(form):
    r = leaf(2, 3) if form == "per_head" else leaf(2, 2, 3)
    collapse = torch.ops.plait.collapse_forward
    assert gradcheck(lambda x, r: collapse(x, r, False, "bhsd", "reference"), [leaf(1, 2, 2, 3, 2), r])


def test_merge_states():
    parts = [leaf(1, 2, 2, 3), leaf(1, 2, 2, 3), leaf(1, 2, 2), leaf(1, 2, 2)]
    assert gradcheck(lambda *t: plait.merge_states(t[:2], t[2:]), parts)


@pytest.mark.parametrize("needed", ["q", "k", "v"])
def test_only_what_requires_gradients_gets_them(needed):
    tensors = {n: torch.randn(1, 2, 3, 4, requires_grad=n == needed) for n in "qkv"}
    plait.flash_attention(**tensors).sum().backward()
    assert all((t.grad is not None) == (n == needed) for n, t in tensors.items())


@pytest.mark.parametrize("use", ["out", "lse", "neither"])
def test_unused_results_need_no_gradient(use):
    q, k, v = (torch.randn(1, 2, 3, 4, requires_grad=True) for _ in range(3))
    out, lse = plait.flash_attention(q, k, v, return_lse=True)
    loss = {"out": out.sum(), "lse": lse.sum(), "neither": (q * 0).sum()}[use]
    loss.backward()
    if use == "lse":
        assert (v.grad == 0).all() and (q.grad != 0).any()
    if use == "neither":
        assert v.grad is None


def test_second_derivatives_are_refused():
    attention = [torch.randn(1, 2, 3, 4, requires_grad=True) for _ in range(3)]
    cases = {
        "attention": (lambda: plait.flash_attention(*attention), attention[0]),
        "premix": (lambda: plait.premix(attention[0], weights), attention[0]),
        "collapse": (
            lambda: torch.ops.plait.collapse_forward(attention[0][..., None], ones, False, "bhsd", "auto"),
            attention[0],
        ),
        "merge_states": (lambda: plait.merge_states([attention[0]], [attention[1][..., 0]])[0], attention[0]),
    }
    weights, ones = torch.randn(2, 2, 2, requires_grad=True), torch.ones(2, 4, requires_grad=True)
    for name, (call, x) in cases.items():
        (gradient,) = torch.autograd.grad(call().square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match=f"{name}: plait offers no second derivatives"):
            gradient.sum().backward()
