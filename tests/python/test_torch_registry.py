"""plait as a flash implementation of torch: offered, activated only on demand, right results, given back."""

import contextlib
import subprocess
import sys
from unittest import mock

import plait
import pytest
import torch
from plait.integrations import torch_flash
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

if not hasattr(torch.nn.attention, "register_flash_attention_impl"):
    pytest.skip("this torch has no registry of flash implementations", allow_module_level=True)

GIVES_BACK = hasattr(torch.nn.attention, "restore_flash_attention_impl")
ONE_WAY = "torch 2.10 cannot give back what it replaced"


@pytest.fixture
def active():
    if not GIVES_BACK:
        pytest.skip(ONE_WAY)
    torch_flash.register()
    torch.nn.attention.activate_flash_attention_impl("plait")
    yield
    torch.nn.attention.restore_flash_attention_impl()


def inputs(Sq=9, Sk=9, H=4, D=16, dtype=torch.float32, transposed=False, grad=True):
    make = lambda S: torch.randn(2, S, H, D).transpose(1, 2) if transposed else torch.randn(2, H, S, D)  # noqa: E731
    return [make(S).to(dtype).requires_grad_(grad) for S in (Sq, Sk, Sk)]


def ran(call):
    """The result of a call, and which of plait's functions it ended in."""
    names = ("flash_attention", "attention_backward")
    with contextlib.ExitStack() as stack:
        spies = {n: stack.enter_context(mock.patch.object(plait, n, wraps=getattr(plait, n))) for n in names}
        result = call()
    return result, {name for name, spy in spies.items() if spy.called}


def test_offered_and_never_activated_on_import():
    script = """
import torch, plait, plait.integrations.torch_flash as torch_flash
assert "plait" not in torch.nn.attention.list_flash_attention_impls()
torch_flash.register(); torch_flash.register()
assert "plait" in torch.nn.attention.list_flash_attention_impls()
assert torch.nn.attention.current_flash_attention_impl() is None
torch.nn.attention.activate_flash_attention_impl("plait")
assert torch.nn.attention.current_flash_attention_impl() == "plait"
"""
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True, timeout=100)


def test_without_a_registry(monkeypatch):
    monkeypatch.delattr(torch.nn.attention, "register_flash_attention_impl")
    with pytest.raises(RuntimeError, match="no registry.*plait.flash_attention"):
        torch_flash.register()


CASES = {
    "full": {},
    "causal": {"is_causal": True},
    "more keys": {"Sk": 13},
    "causal, more queries": {"Sq": 13, "is_causal": True},  # top-left, unlike plait's own functions
    "transposed": {"transposed": True, "is_causal": True},
    "scale": {"scale": 0.3},
    "head dim 5": {"D": 5},
}


@pytest.mark.parametrize("case", CASES)
def test_results_and_gradients(case, active):
    options = dict(CASES[case])
    shape = {n: options.pop(n) for n in ("Sq", "Sk", "D", "transposed") if n in options}
    tensors = inputs(**shape)
    with sdpa_kernel(SDPBackend.MATH):
        wide = [x.detach().double().requires_grad_() for x in tensors]
        expected = scaled_dot_product_attention(*wide, **options)
        dout = torch.randn_like(expected)
        expected_grads = torch.autograd.grad(expected, wide, dout)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out, forward_ops = ran(lambda: scaled_dot_product_attention(*tensors, **options))
        grads, backward_ops = ran(lambda: torch.autograd.grad(out, tensors, dout.float()))
    assert forward_ops == {"flash_attention"} and backward_ops == {"attention_backward"}
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)
    for got, want in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)


def test_shared_heads_and_half_types(active):
    for dtype, bar in ((torch.bfloat16, 2e-2), (torch.float16, 2e-3)):
        q, k, v = inputs(dtype=dtype, grad=False)
        k, v = k[:, :2], v[:, :2]
        out, ops = ran(lambda q=q, k=k, v=v: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
        with sdpa_kernel(SDPBackend.MATH):
            want = scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True, enable_gqa=True)
        assert ops == {"flash_attention"}
        torch.testing.assert_close(out.double(), want, rtol=bar, atol=bar)


def test_other_calls_stay_torchs(active):
    q, k, v = inputs(Sk=13, grad=False)
    calls = {
        "mask": lambda: scaled_dot_product_attention(q, k, v, attn_mask=torch.zeros(9, 13)),
        "causal, more keys": lambda: scaled_dot_product_attention(q, k, v, is_causal=True),
        "float64": lambda: scaled_dot_product_attention(q.double(), k.double(), v.double()),
    }
    got = {name: ran(call) for name, call in calls.items()}
    torch.nn.attention.restore_flash_attention_impl()
    for name, (out, ops) in got.items():
        assert ops == set(), name
        assert torch.equal(out, calls[name]()), name
    tensors = inputs(grad=True)
    torch.nn.attention.activate_flash_attention_impl("plait")
    out = scaled_dot_product_attention(*tensors, attn_mask=torch.zeros(9, 9))
    _, ops = ran(lambda: torch.autograd.grad(out.sum(), tensors))
    assert ops == set()


@pytest.mark.parametrize("transposed", [False, True])
def test_strides_are_what_torch_promises(active, transposed):
    aten = torch.ops.aten
    tensors = [x[..., :12] for x in inputs(transposed=transposed, grad=False)]  # with gaps
    meta = [x.to("meta") if x.is_contiguous() else torch.empty_strided(x.shape, x.stride(), device="meta")
            for x in tensors]  # fmt: skip
    forward = aten._scaled_dot_product_flash_attention_for_cpu
    results, promised = forward(*tensors), forward(*meta)
    results += aten._scaled_dot_product_flash_attention_for_cpu_backward(
        results[0], *tensors, *results, 0.0, False
    )  # fmt: skip
    promised += aten._scaled_dot_product_flash_attention_for_cpu_backward(promised[0], *meta, *promised, 0.0, False)
    for got, want in zip(results, promised, strict=True):
        assert (got.shape, got.stride(), got.dtype) == (want.shape, want.stride(), want.dtype)


@pytest.mark.skipif(not GIVES_BACK, reason=ONE_WAY)
def test_given_back():
    q, k, v = inputs(grad=False)
    before = scaled_dot_product_attention(q, k, v, is_causal=True)
    torch_flash.register()
    torch.nn.attention.activate_flash_attention_impl("plait")
    assert torch.nn.attention.current_flash_attention_impl() == "plait"
    torch.nn.attention.restore_flash_attention_impl()
    after, ops = ran(lambda: scaled_dot_product_attention(q, k, v, is_causal=True))
    assert ops == set() and torch.equal(before, after)
    assert torch.nn.attention.current_flash_attention_impl() is None
