"""CUDA graphs, streams, a second GPU, and no wait for the GPU anywhere. Called by pytest."""

import math

import oracle
import plait
import pytest
import torch
from gpu_calls import EACH_BACKEND, captured, decoded_in_a_graph, leaves, make, train


@EACH_BACKEND
def test_a_training_step_in_a_graph(backend, dtype):
    tensors = make(dtype=dtype)
    inputs, dout = leaves(tensors), torch.randn(2, 4, 130, 64).to(dtype)
    options = {"causal": True, "deterministic": True, "backend": backend}

    def step():
        out = plait.flash_attention(*inputs, **options)
        return [out, *torch.autograd.grad(out, inputs, dout)]

    graph, results = captured(step)
    for _ in range(2):
        with torch.no_grad():
            for leaf in inputs:
                leaf.copy_(torch.randn_like(leaf))
        graph.replay()
        for got, expected in zip(results, step(), strict=True):
            assert torch.equal(got, expected)


@EACH_BACKEND
@pytest.mark.parametrize("mode", ["joint", "interleaved"])
def test_an_iha_step_in_a_graph(backend, dtype, mode):
    tensors = make(Sq=60, Sk=60, dtype=dtype)
    weights = [torch.randn(H, 2, H) / 2 for H in (4, 2, 2)]
    inputs = leaves([*tensors, *weights])
    options = {"mode": mode, "rope": oracle.rope_tables(120, 16), "causal": True, "deterministic": True,
               "collapse": torch.randn(4, 2) if mode == "interleaved" else None, "backend": backend}  # fmt: skip

    def step():
        out = plait.iha_attention(*inputs, **options)
        return [out, *torch.autograd.grad(out.float().square().sum(), inputs)]

    graph, results = captured(step)
    with torch.no_grad():
        for leaf in inputs:
            leaf.copy_(torch.randn_like(leaf))
    graph.replay()
    for got, expected in zip(results, step(), strict=True):
        assert torch.equal(got, expected)


@EACH_BACKEND
def test_packed_lengths_change_in_a_graph(backend, dtype):
    q, k, v = (torch.randn(200, H, 64).to(dtype) for H in (4, 2, 2))
    cu = torch.tensor([0, 50, 50, 120, 190], dtype=torch.int32)

    def step():
        return plait.flash_attention_varlen(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True, return_lse=True,
                                            max_seqlen_q=70, max_seqlen_k=70, backend=backend)  # fmt: skip

    graph, results = captured(step)
    for lengths in ([0, 50, 50, 120, 190], [0, 0, 150, 199, 200], [0, 1, 2, 3, 3]):
        cu.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        for got, expected in zip(results, step(), strict=True):
            assert torch.equal(got, expected)


@pytest.mark.parametrize("page", [0, 16])
def test_decoding_in_a_graph(page):
    """Token by token with one captured step: the lengths count up on the device."""
    S, count = 64, 12
    q, k, v = (torch.randn(2, H, count, 32) for H in (4, 2, 2))
    shape = (2 * S // page, page, 2, 32) if page else (2, 2, S, 32)
    table = torch.randperm(2 * S // page).view(2, -1).int() if page else None
    caches = [torch.zeros(shape) for _ in range(2)]
    lengths, now = torch.zeros(2, dtype=torch.int32), [x[:, :, :1].clone() for x in (q, k, v)]

    def step():
        out = plait.attention_with_kvcache(now[0], *caches, k_new=now[1], v_new=now[2], cache_seqlens=lengths,
                                           block_table=table, causal=True)  # fmt: skip
        lengths.add_(1)
        return out

    outs = decoded_in_a_graph(step, now, (q, k, v), lengths)
    expected = plait.flash_attention(q, k, v, causal=True)
    torch.testing.assert_close(outs, expected, rtol=1e-5, atol=1e-5)


@EACH_BACKEND
def test_a_side_stream_is_used_and_kept_in_order(backend, dtype):
    tensors = make(dtype=dtype)
    options = {"causal": True, "deterministic": True, "backend": backend}
    dout = torch.randn(2, 4, 130, 64).to(dtype)
    expected = train(lambda *t: plait.flash_attention(*t, **options), tensors, dout)
    late = [torch.full_like(x, math.nan) for x in tensors]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        for to, x in zip(late, tensors, strict=True):
            to.copy_(x)
        got = train(lambda *t: plait.flash_attention(*t, **options), late, dout)
    torch.cuda.current_stream().wait_stream(side)
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


def test_nothing_waits_for_the_gpu():
    q, k, v = make(Sq=60, Sk=60)
    packed = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
    cu = torch.tensor([0, 60, 120], dtype=torch.int32)
    weights = [torch.eye(H)[:, None].repeat(1, 2, 1) for H in (4, 2, 2)]
    caches = [torch.zeros(2, 2, 80, 64, dtype=torch.bfloat16) for _ in range(2)]
    lengths = torch.tensor([3, 9], dtype=torch.int32)
    rope = oracle.rope_tables(80, 16)

    def everything():
        inputs = leaves((q, k, v))
        plait.flash_attention(*inputs, causal=True).sum().backward()
        plait.flash_attention_varlen(*leaves(packed), cu_seqlens_q=cu, cu_seqlens_k=cu).sum().backward()
        plait.iha_attention(*leaves((q, k, v)), *leaves(weights), rope=rope, causal=True).sum().backward()
        plait.attention_with_kvcache(q, *caches, k_new=k[:, :, :1], v_new=v[:, :, :1], cache_seqlens=lengths)
        plait.merge_states([q, q], [torch.zeros(2, 4, 60)] * 2)

    everything()
    torch.cuda.set_sync_debug_mode("error")
    try:
        everything()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.two_gpus
@EACH_BACKEND
def test_the_second_gpu(backend, dtype):
    """Tensors on cuda:1 while cuda:0 is current, which it stays."""
    tensors, dout = make(dtype=dtype), torch.randn(2, 4, 130, 64).to(dtype)
    options = {"causal": True, "deterministic": True, "backend": backend}
    expected = train(lambda *t: plait.flash_attention(*t, **options), tensors, dout)
    there = [x.to("cuda:1") for x in tensors]
    got = train(lambda *t: plait.flash_attention(*t, **options), there, dout.to("cuda:1"))
    assert torch.cuda.current_device() == 0
    for a, b in zip(got, expected, strict=True):
        assert a.device.index == 1 and torch.equal(a.cpu(), b.cpu())
    mixed = plait.premix(there[0], torch.eye(4, device="cuda:1")[:, None])
    assert mixed.device.index == 1 and torch.equal(mixed[:, :, :, 0], there[0])
    side = torch.cuda.Stream("cuda:1")
    with torch.cuda.stream(side):
        again = plait.flash_attention(*there, **options)
    side.synchronize()
    assert torch.equal(again, got[0])
