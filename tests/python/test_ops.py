"""The ops themselves: opcheck on each, fake strides, and proof that nothing but plait runs inside them."""

import itertools

import oracle
import plait
import pytest
import torch
from recorder import Recorder, foreign
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck
from torch.profiler import ProfilerActivity, profile

OPS = torch.ops.plait


def attention_options(mode="plain", mask="flat", causal=True, out_dtype=None, layout="bhsd"):
    return (mode, mask, causal, -1, -1, None, 0.0, False, 0, "auto", "auto", out_dtype, layout)


def randn(*shape, grad=False, dtype=torch.float32):
    return torch.randn(*shape).to(dtype).requires_grad_(grad)


def attention_inputs(case, grad):
    """q, k, v, sinks, cu_seqlens_q, cu_seqlens_k and options of one case."""
    dtype = torch.bfloat16 if case == "float32 out" else torch.float32
    make = lambda *shape: randn(*shape, grad=grad, dtype=dtype)  # noqa: E731
    if case == "packed":
        cu = torch.tensor([0, 3, 7], dtype=torch.int32)
        return make(8, 4, 6), make(8, 2, 6), make(8, 2, 5), None, cu, cu, attention_options()
    if case in ("joint", "interleaved"):
        tensors = make(2, 4, 5, 3, 6), make(2, 2, 7, 3, 6), make(2, 2, 7, 3, 5)
        return *tensors, None, None, None, attention_options(case)
    if case == "packed interleaved":
        cu = torch.tensor([0, 3, 7], dtype=torch.int32)
        options = attention_options("interleaved", mask="token")
        return make(8, 4, 2, 6), make(8, 2, 2, 6), make(8, 2, 2, 5), None, cu, cu, options
    if case == "bshd":
        tensors = make(2, 5, 4, 6), make(2, 7, 2, 6), make(2, 7, 2, 5)
        return *tensors, None, None, None, attention_options(layout="bshd")
    tensors = make(2, 4, 5, 6), make(2, 2, 7, 6), make(2, 2, 7, 5)
    if case == "transposed":
        tensors = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_(grad) for x in tensors]
    sinks = randn(4, grad=grad) if case == "sinks" else None
    return *tensors, sinks, None, None, attention_options(out_dtype=torch.float32 if case == "float32 out" else None)


CASES = ["plain", "sinks", "transposed", "bshd", "packed", "joint", "interleaved", "packed interleaved", "float32 out"]


@pytest.mark.parametrize("case", CASES)
def test_opcheck_attention_forward(case):
    *tensors, options = attention_inputs(case, grad=True)
    opcheck(OPS.attention_forward.default, (*tensors, *options))


@pytest.mark.parametrize("case", CASES)
def test_opcheck_attention_backward(case):
    *tensors, options = attention_inputs(case, grad=False)
    out, lse = OPS.attention_forward(*tensors, *options)
    for dout, dlse in ((out, lse), (None, lse), (out, None)):
        opcheck(OPS.attention_backward.default, (dout, out, lse, dlse, *tensors, *options))


def premix_inputs(case, grad):
    x, w = randn(2, 3, 5, 6, grad=grad), randn(3, 2, 3, grad=grad)
    cos, sin, cu, rope = None, None, None, ("half", "token", 0, "bhsd", "auto")
    if case == "rope":
        (cos, sin), rope = oracle.rope_tables(12, 3), ("pairs", "row", 1, "bhsd", "auto")
    if case == "packed":
        x, cu = randn(7, 3, 6, grad=grad), torch.tensor([0, 3, 7], dtype=torch.int32)
    if case == "bshd":
        x, rope = randn(2, 5, 3, 6, grad=grad), (*rope[:3], "bshd", "auto")
    return x, w, cos, sin, cu, cu, *rope


@pytest.mark.parametrize("case", ["plain", "rope", "packed", "bshd"])
def test_opcheck_premix(case):
    opcheck(OPS.premix_forward.default, premix_inputs(case, grad=True))
    arguments = premix_inputs(case, grad=False)
    opcheck(OPS.premix_backward.default, (OPS.premix_forward(*arguments), *arguments))


@pytest.mark.parametrize("case", ["plain", "rope", "packed", "bshd"])
def test_opcheck_premix_qkv(case):
    """Queries of more heads than keys and values."""

    def inputs(grad):
        q, w_q, cos, sin, cu, _, *options = premix_inputs(case, grad)
        heads = [randn(2, 2, 2, grad=grad) for _ in "kv"]
        k, v = (randn(*q.shape, grad=False)[:, :2] if case != "bshd" else randn(*q.shape)[:, :, :2] for _ in "kv")
        return q, k.requires_grad_(grad), v.requires_grad_(grad), w_q, *heads, cos, sin, cu, cu, *options

    opcheck(OPS.premix_qkv_forward.default, inputs(grad=True))
    arguments = inputs(grad=False)
    opcheck(OPS.premix_qkv_backward.default, (*OPS.premix_qkv_forward(*arguments), *arguments))


@pytest.mark.parametrize("form", ["per_head", "global"])
def test_opcheck_collapse(form):
    for grad in (True, False):
        x, r = randn(2, 3, 5, 2, 6, grad=grad), randn(*((3, 2) if form == "per_head" else (3, 3, 2)), grad=grad)
        arguments = (x, r, False, "bhsd", "auto")
        if grad:
            opcheck(OPS.collapse_forward.default, arguments)
    opcheck(OPS.collapse_backward.default, (OPS.collapse_forward(*arguments), *arguments))


def test_opcheck_merge_states():
    for grad in (True, False):
        outs, lses = [randn(2, 3, 5, 4, grad=grad) for _ in range(2)], [randn(2, 3, 5, grad=grad) for _ in range(2)]
        if grad:
            opcheck(OPS.merge_states_forward.default, (outs, lses, False, "bhsd"))
    out, lse = OPS.merge_states_forward(outs, lses, False, "bhsd")
    for dout, dlse in ((out, lse), (None, lse), (out, None)):
        opcheck(OPS.merge_states_backward.default, (dout, dlse, out, lse, outs, lses, False, "bhsd"))


def test_every_op_is_checked_here():
    tensor_ops = {"attention", "merge_states", "premix", "premix_qkv", "collapse"}
    expected = {f"plait::{name}_{step}" for name in tensor_ops for step in ("forward", "backward")}
    registered = {name.split(".")[0] for name in torch._C._dispatch_get_all_op_names() if name.startswith("plait::")}
    assert registered == expected | {
        "plait::plan_attention", "plait::plan_premix", "plait::plan_collapse", "plait::check_merge",
        "plait::plan_attention_with_kvcache", "plait::plan_iha_attention_with_kvcache", "plait::flop_matched_window",
        "plait::attention_with_kvcache_", "plait::iha_attention_with_kvcache_",  # test_kv_cache_ops.py
    }  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_fake_results_have_the_real_layout(case):
    *tensors, options = attention_inputs(case, grad=False)
    real = OPS.attention_forward(*tensors, *options)
    real += OPS.attention_backward(real[0], *real, None, *tensors, *options)
    with FakeTensorMode() as mode:
        fakes = [None if t is None else mode.from_tensor(t) for t in tensors]
        fake = OPS.attention_forward(*fakes, *options)
        fake += OPS.attention_backward(fake[0], *fake, None, *fakes, *options)
    for a, b in zip(real, fake, strict=True):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


def test_meta_tensors_give_shapes():
    q = torch.empty(2, 4, 8, 16, device="meta")
    out, lse = plait.flash_attention(q, q, q, causal=True, return_lse=True)
    assert out.device.type == "meta" and out.shape == q.shape and lse.shape == (2, 4, 8)


# What runs inside plait: only its own ops, empty* and views.


def calls():
    dense = [randn(2, 4, 9, 8, grad=True), randn(2, 2, 9, 8, grad=True), randn(2, 2, 9, 8, grad=True)]
    packed = [x.detach()[0].transpose(0, 1).requires_grad_() for x in dense]
    bshd = [x.detach().transpose(1, 2).requires_grad_() for x in dense]
    weights = [randn(H, 3, H, grad=True) for H in (4, 2, 2)]
    cu = torch.tensor([0, 4, 9], dtype=torch.int32)
    rope = oracle.rope_tables(27, 4)
    sinks, collapse = randn(4, grad=True), randn(4, 3, grad=True)
    everything = {"causal": True, "window": (5, 0), "softcap": 2.0, "sinks": sinks, "return_lse": True}
    yield "attention", lambda: plait.flash_attention(*dense, **everything)
    yield "out alone", lambda: (plait.flash_attention(*dense, causal=True),)
    yield "lse alone", lambda: (plait.flash_attention(*dense, return_lse=True)[1],)
    yield "bshd", lambda: plait.flash_attention(*bshd, layout="bshd", **everything)
    yield "packed", lambda: plait.flash_attention_varlen(*packed, cu_seqlens_q=cu, cu_seqlens_k=cu, **everything)
    for mode, layout in itertools.product(("joint", "interleaved"), ("bhsd", "bshd", "packed")):
        tensors = {"bhsd": dense, "bshd": bshd, "packed": packed}[layout]
        lengths = {"cu_seqlens_q": cu, "cu_seqlens_k": cu} if layout == "packed" else {}
        options = {"mode": mode, "rope": rope, "collapse": collapse if mode == "interleaved" else None, **everything}
        options["layout"] = "bshd" if layout == "bshd" else "bhsd"
        yield (
            f"{mode} {layout}",
            lambda t=tensors, o=options, n=lengths: plait.iha_attention(*t, *weights, **o, **n),
        )
    yield "premix", lambda: (plait.premix(dense[0], weights[0], rope=rope),)
    parts = [dense[0], dense[0].detach().clone().requires_grad_()]
    lses = [randn(2, 4, 9, grad=True), randn(2, 4, 9, grad=True)]
    yield "merge_states", lambda: plait.merge_states(parts, lses)


CALLS = [name for name, _ in calls()]


@pytest.mark.parametrize("name", CALLS)
def test_only_plait_ops_run(name):
    call = dict(calls())[name]
    with Recorder() as forward:
        results = call()
    assert foreign(forward.names) == set() and any(n.startswith("plait::") for n in forward.names)
    gradients = [torch.randn_like(r) for r in results]
    with Recorder() as backward:
        torch.autograd.backward(results, gradients)
    assert foreign(backward.names) == set() and any(n.startswith("plait::") for n in backward.names)


@pytest.mark.parametrize("name", CALLS)
def test_plait_ops_call_nothing_but_allocation(name):
    """The profiler also sees below the ops: no aten kernel but empty* may appear. Where `out` has no gradient, a GPU
    reads one zero in its stead, which torch writes."""
    call = dict(calls())[name]
    results = call()
    gradients = [torch.randn_like(r) for r in results]
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        torch.autograd.backward(call(), gradients)
    names = {event.name for event in trace.events() if event.name.startswith(("aten::", "plait::"))}
    if name == "lse alone" and results[0].is_cuda:
        names -= {"aten::zero_", "aten::fill_"}
    assert foreign(names) == set() and any(n.startswith("plait::") for n in names)
