"""torch.compile, dynamic shapes, activation checkpointing and autocast."""

from functools import partial

import oracle
import plait
import pytest
import torch
from recorder import Recorder
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts


def leaves(*tensors):
    return [t.detach().clone().requires_grad_() for t in tensors]


def iha_call(mode, layout="bhsd"):
    weights = [torch.randn(H, 2, H) for H in (4, 2, 2)]
    collapse = torch.randn(4, 2) if mode == "interleaved" else None
    rope = oracle.rope_tables(128, 4)

    def call(q, k, v):
        return plait.iha_attention(
            q, k, v, *weights, mode=mode, collapse=collapse, rope=rope, causal=True, window=(20, 0), layout=layout
        )

    return call


def transposed(q, k, v):
    """As models call it: heads inside positions, transposed for the attention, flattened after it."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return plait.flash_attention(q, k, v, causal=True).transpose(1, 2).flatten(2)


def varlen(q, k, v):
    cu = torch.tensor([0, 3, 3, 7], dtype=torch.int32, device=q.device)
    return plait.flash_attention_varlen(
        *(x[0].transpose(0, 1) for x in (q, k, v)), cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True
    )


def with_lse(q, k, v):
    out, lse = plait.flash_attention(q, k, v, causal=True, softcap=4.0, return_lse=True)
    return out * lse[..., None]


CALLS = {
    "attention": partial(plait.flash_attention, causal=True, window=(20, None)),
    "lse": with_lse,
    "varlen": varlen,
    "joint": iha_call("joint"),
    "interleaved": iha_call("interleaved"),
}


def run(call, tensors):
    inputs = leaves(*tensors)
    out = call(*inputs)
    out.square().sum().backward()
    return [out.detach(), *(x.grad for x in inputs)]


def assert_same(got, expected):
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", CALLS)
def test_compiles_without_a_graph_break(name):
    torch.manual_seed(1)
    tensors = torch.randn(2, 4, 7, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 8)
    compiled = torch.compile(CALLS[name], fullgraph=True, backend="aot_eager")
    assert_same(run(compiled, tensors), run(CALLS[name], tensors))


@pytest.mark.parametrize("name", ["attention", "lse", "joint", "interleaved"])
def test_twenty_lengths_compile_at_most_twice(name):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(CALLS[name], fullgraph=True, dynamic=True, backend=counter)
    for length in range(5, 25):
        tensors = torch.randn(2, 4, length, 8), torch.randn(2, 2, length, 8), torch.randn(2, 2, length, 8)
        assert_same(run(compiled, tensors), run(CALLS[name], tensors))
    assert counter.frame_count <= 2


def test_twenty_lengths_of_queries_and_keys_compile_at_most_twice():
    """Default settings: the first new length makes the sizes dynamic."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(CALLS["joint"], fullgraph=True, backend=counter)
    for length in range(5, 25):
        tensors = torch.randn(2, 4, length, 8), torch.randn(2, 2, 2 * length, 8), torch.randn(2, 2, 2 * length, 8)
        assert_same(run(compiled, tensors), run(CALLS["joint"], tensors))
    assert counter.frame_count <= 2


def test_options_may_depend_on_the_length():
    def call(q, k, v):
        return plait.flash_attention(q, k, v, causal=True, window=(q.shape[2] // 2, None), split_size=q.shape[2])

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=counter)
    for length in range(5, 15):
        tensors = torch.randn(2, 4, length, 8), torch.randn(2, 2, length, 8), torch.randn(2, 2, length, 8)
        assert_same(run(compiled, tensors), run(call, tensors))
    assert counter.frame_count <= 2


def test_inductor_agrees_on_every_layout():
    def call(q, k, v, x):
        attended = transposed(q, k, v)
        return attended * x.sin() + iha_call_bshd(q, k, v).flatten(2)

    iha_call_bshd = iha_call("joint", "bshd")
    tensors = [torch.randn(2, 9, 4, 8), torch.randn(2, 9, 2, 8), torch.randn(2, 9, 2, 8), torch.randn(2, 9, 32)]
    assert_same(run(torch.compile(call, fullgraph=True), tensors), run(call, tensors))


def test_compiled_module_trains():
    module = plait.nn.InterleavedHeadAttention(16, 4, 2, 8, P=2, window=(6, 0))
    x = torch.randn(2, 9, 16)
    module(x).square().sum().backward()
    expected = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    torch.compile(module, fullgraph=True, backend="aot_eager")(x).square().sum().backward()
    assert_same([p.grad for p in module.parameters()], expected)


def test_exports():
    class Attend(torch.nn.Module):
        def forward(self, q, k, v):
            return plait.flash_attention(q, k, v, causal=True)

    q, k, v = torch.randn(2, 4, 7, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 8)
    length = torch.export.Dim("length", min=2, max=4096)
    program = torch.export.export(Attend(), (q, k, v), dynamic_shapes=[{2: length}] * 3)
    longer = torch.randn(2, 4, 31, 8), torch.randn(2, 2, 31, 8), torch.randn(2, 2, 31, 8)
    assert torch.equal(program.module()(*longer), Attend()(*longer))


@pytest.mark.parametrize("name", CALLS)
def test_activation_checkpointing(name):
    tensors = torch.randn(2, 4, 7, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 8)
    call = CALLS[name]
    assert_same(run(lambda *t: checkpoint(call, *t, use_reentrant=False), tensors), run(call, tensors))


@pytest.mark.parametrize("saved", [True, False])
def test_selective_checkpointing_can_keep_attention(saved):
    """The ops' names are stable, so that a policy can save what attention computed: backward then runs no forward."""
    attention = torch.ops.plait.attention_forward.default

    def policy(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if saved and op == attention else CheckpointPolicy.PREFER_RECOMPUTE

    tensors = torch.randn(2, 4, 7, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 8)
    inputs, context = leaves(*tensors), partial(create_selective_checkpoint_contexts, policy)
    out = checkpoint(CALLS["joint"], *inputs, use_reentrant=False, context_fn=context)
    with Recorder() as backward:
        out.square().sum().backward()
    assert {"plait::premix_qkv_forward", "plait::attention_backward"} <= backward.names
    assert ("plait::attention_forward" in backward.names) != saved
    assert_same([out.detach(), *(x.grad for x in inputs)], run(CALLS["joint"], tensors))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_casts_q_k_and_v_together(dtype):
    q, k, v = torch.randn(2, 4, 7, 8), torch.randn(2, 2, 7, 8).to(dtype), torch.randn(2, 2, 7, 8)
    leaf = q.clone().requires_grad_()
    with torch.autocast("cpu", dtype=dtype):
        out = plait.flash_attention(leaf, k, v, causal=True)
        joint = CALLS["joint"](q, k, v)
        mixed = plait.premix(q, torch.eye(4)[:, None])
    assert out.dtype == joint.dtype == mixed.dtype == dtype
    expected = plait.flash_attention(q.to(dtype), k, v.to(dtype), causal=True)
    assert torch.equal(out, expected)
    out.sum().backward()
    assert leaf.grad.dtype == torch.float32


def test_autocast_leaves_float64_alone():
    q = torch.randn(1, 2, 3, 4, dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert plait.flash_attention(q, q, q, backend="reference").dtype == torch.float64


def test_autocast_compiles():
    tensors = torch.randn(2, 4, 7, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 8)
    compiled = torch.compile(CALLS["attention"], fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = compiled(*tensors)
    assert out.dtype == torch.bfloat16
    assert compiled(*tensors).dtype == torch.float32


def test_inference_mode_and_no_grad():
    q, k, v = leaves(torch.randn(2, 4, 7, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 8))
    for guard in (torch.inference_mode, torch.no_grad):
        with guard():
            assert not plait.flash_attention(q, k, v).requires_grad
