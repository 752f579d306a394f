"""Public cases about determinism, batch invariance, LSE, messages and partial results; see test_public_cases.py."""

import oracle
import plait
import pytest
import torch
from cases import dense, dense_reference, near, offsets, packed, packed_expected
from torch._dynamo.testing import CompileCounterWithBackend

# ---- determinism and batch invariance


@pytest.mark.parametrize("D", [64, 256, 512])
@pytest.mark.parametrize("kind", ["causal", "local", "varlen", "gqa"])
@pytest.mark.parametrize("compiled", [False, True])
def test_deterministic_gradients(D, kind, compiled):  # Dao-AILab/flash-attention#2244, #1596, #1766
    options = {"deterministic": True, "causal": True}
    if kind == "local":
        options = {"deterministic": True, "window": (9, 3)}
    Hk = 1 if kind == "gqa" else 2
    if kind == "varlen":
        cu = offsets(30, 3, 12)
        call = packed(cu, cu, **options)
        tensors = [torch.randn(45, H, D) for H in (2, Hk, Hk)]
    else:
        call = dense(**options)
        tensors = [torch.randn(1, H, 45, D) for H in (2, Hk, Hk)]
    call = torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call
    leaves = [x.requires_grad_() for x in tensors]
    first = None
    for _ in range(200 if D == 64 and not compiled else 20):
        out, _ = call(*leaves)
        results = [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]
        first = first or results
        assert all(torch.equal(a, b) for a, b in zip(first, results, strict=True))


@pytest.mark.parametrize("split_size", [64, 100])
def test_a_decode_row_beside_a_prefill(
    split_size,
):  # Dao-AILab/flash-attention#1922, #1897, vllm-project/flash-attention#169
    lengths_q, lengths_k = (1, 129, 1), (700, 129, 64)
    cu_q, cu_k = offsets(*lengths_q), offsets(*lengths_k)
    q, k, v = torch.randn(131, 4, 32).bfloat16(), torch.randn(893, 2, 32).bfloat16(), torch.randn(893, 2, 32).bfloat16()
    together, lse = packed(cu_q, cu_k, causal=True, split_size=split_size)(q, k, v)
    for i in range(3):
        rows, keys = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
        alone, alone_lse = packed(offsets(lengths_q[i]), offsets(lengths_k[i]), causal=True, split_size=split_size)(
            q[rows], k[keys], v[keys]
        )
        assert torch.equal(alone, together[rows]) and torch.equal(alone_lse, lse[:, rows])


@pytest.mark.parametrize("rows", [1, 4])
def test_packed_splits_of_unequal_lengths(rows):  # Dao-AILab/flash-attention#1217, vllm-project/flash-attention#176
    lengths_k = (rows, 700, 65)  # most splits of the short ones are empty
    cu_q, cu_k = offsets(rows, rows, rows), offsets(*lengths_k)
    q, k, v = torch.randn(3 * rows, 4, 16), torch.randn(sum(lengths_k), 2, 16), torch.randn(sum(lengths_k), 2, 16)
    expected, expected_lse = packed_expected(cu_q, cu_k, causal=True)(q, k, v)
    for split_size in (None, 700, 350, 100):
        out, lse = packed(cu_q, cu_k, causal=True, split_size=split_size)(q, k, v)
        near(out, expected)
        near(lse, expected_lse)


# ---- LSE


@pytest.mark.parametrize("path", ["dense", "split", "packed"])
def test_lse_is_the_natural_log_of_the_scaled_scores(path):  # pytorch/pytorch#181645, flashinfer-ai/flashinfer#4485
    q, k, v = torch.randn(1, 2, 3, 16), torch.randn(1, 2, 400, 16), torch.randn(1, 2, 400, 16)
    expected = torch.logsumexp(q.double() @ k.double().transpose(-1, -2) / 4, -1)
    if path == "packed":
        cu_q, cu_k = offsets(3), offsets(400)
        _, lse = packed(cu_q, cu_k)(*(x[0].transpose(0, 1) for x in (q, k, v)))
        lse = lse[None]
    else:
        _, lse = dense(**({"split_size": 64} if path == "split" else {}))(q, k, v)
    near(lse, expected)


def test_a_loss_may_use_the_lse():  # Dao-AILab/flash-attention#1137, #889, pytorch/pytorch#136232
    tensors = [torch.randn(2, 2, 9, 8) for _ in range(3)]
    results = []
    for call, dtype in ((dense(causal=True), torch.float32), (dense_reference(causal=True), torch.float64)):
        leaves = [x.detach().clone().to(dtype).requires_grad_() for x in tensors]
        out, lse = call(*leaves)
        (out * lse.exp()[..., None]).sum().backward()
        results.append([x.grad for x in leaves])
    for got, expected in zip(*results, strict=True):
        near(got, expected, terms=100)


def test_an_lse_alone_has_gradients():  # Dao-AILab/flash-attention#404, #141
    q, k, v = (torch.randn(1, 2, 7, 8).requires_grad_() for _ in range(3))
    plait.flash_attention(q, k, v, return_lse=True)[1].sum().backward()
    expected = oracle.leaves(q, k, v)
    oracle.attention(*expected)[1].sum().backward()
    near(q.grad, expected[0].grad)
    near(k.grad, expected[1].grad, terms=4)
    assert (v.grad == 0).all()


# ---- grouped heads, dtypes, messages, compile


def test_half_grouped_heads_through_sum_backward():  # huggingface/kernels-community#1085
    q, k, v = (torch.randn(1, H, 8, 64).bfloat16().requires_grad_() for H in (8, 2, 2))
    plait.flash_attention(q, k, v, causal=True).sum().backward()
    expected = oracle.leaves(q, k, v)
    oracle.attention(*expected, causal=True)[0].sum().backward()
    for got, one in zip((q, k, v), expected, strict=True):
        near(got.grad, one.grad, terms=4)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_tensor_for_max_seqlen_never_recompiles(dynamic):  # modelscope/ms-swift#9798, huggingface/transformers#41803
    counter = CompileCounterWithBackend("eager")
    cu = offsets(3, 5)

    def step(q, k, v, bound):
        return plait.flash_attention_varlen(
            q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=bound, max_seqlen_k=bound
        )

    compiled = torch.compile(step, fullgraph=True, backend=counter, dynamic=dynamic)
    tensors = [torch.randn(8, 2, 8) for _ in range(3)]
    results = [compiled(*tensors, torch.tensor(bound)) for bound in (5, 6, 700)]
    assert counter.frame_count == 1
    assert all(torch.equal(results[0], other) for other in results)


def test_a_mix_of_dtypes_names_the_tensor_and_the_dtypes():  # kohya-ss/musubi-tuner#1037
    q, k = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 4, 8)
    with pytest.raises(ValueError, match="^v: got bfloat16, expected float32 as q has; convert"):
        plait.flash_attention(q, k, k.bfloat16())


@pytest.mark.parametrize("device", ["a100", "rtx4090", "t4"])
def test_a_kernel_for_another_gpu_is_refused_while_planning(device):  # karpathy/nanochat#820
    q = torch.empty(1, 2, 8, 64, dtype=torch.float16, device="meta")
    with pytest.raises((RuntimeError, ValueError), match="cuda|device"):
        plait.explain(q, q, q, backend="cuda_sm90", device=device)


def test_an_op_that_writes_into_its_arguments_says_so():  # Dao-AILab/flash-attention#2351
    schema = torch.ops.plait.attention_forward.default._schema
    assert not any(argument.is_write for argument in schema.arguments)
    written = {a.name for a in torch.ops.plait.attention_with_kvcache_.default._schema.arguments if a.is_write}
    assert written == {"k_cache", "v_cache"}


# ---- partial results


@pytest.mark.parametrize("ranks", [3, 4])
def test_context_parallel_shards_of_unequal_length(ranks):  # NVIDIA/TransformerEngine#1930
    S = 53  # not a multiple of the ranks
    q, k, v, dout = (torch.randn(1, 2, S, 16) for _ in range(4))
    edges = torch.linspace(0, S, ranks + 1).long().tolist()
    shards = [slice(a, b) for a, b in zip(edges, edges[1:], strict=False)]
    leaves = oracle.leaves(q, k, v)
    expected, _ = oracle.attention(*leaves, causal=True)
    expected.backward(dout.double())
    grads = [torch.zeros_like(x) for x in (q, k, v)]
    for mine in range(ranks):
        rows = shards[mine]
        parts = []
        for other in range(mine + 1):  # later shards are masked as a whole
            keys = shards[other]
            call = dense(causal=other == mine)
            parts.append(call(q[:, :, rows], k[:, :, keys], v[:, :, keys]))
        out, lse = plait.merge_states([p[0] for p in parts], [p[1] for p in parts])
        near(out, expected.detach()[:, :, rows])
        for other in range(mine + 1):
            keys = shards[other]
            dq, dk, dv = plait.attention_backward(
                dout[:, :, rows], q[:, :, rows], k[:, :, keys], v[:, :, keys], out, lse, causal=other == mine
            )
            grads[0][:, :, rows] += dq
            grads[1][:, :, keys] += dk
            grads[2][:, :, keys] += dv
    for got, leaf in zip(grads, leaves, strict=True):
        near(got, leaf.grad, terms=4)


def test_merging_states_far_apart_does_not_overflow():  # jzhang38/EasyContext#14
    outs = [torch.randn(1, 1, 4, 8, requires_grad=True) for _ in range(2)]
    lses = [torch.tensor([[[0.0, 1e4, -1e4, 300.0]]], requires_grad=True),
            torch.tensor([[[200.0, -1e4, -9e3, 301.0]]], requires_grad=True)]  # fmt: skip
    out, lse = plait.merge_states(outs, lses)
    weights = torch.softmax(torch.stack([x.double() for x in lses]), 0)
    near(out, sum(w[..., None] * x.double() for w, x in zip(weights, outs, strict=True)))
    near(lse, torch.logsumexp(torch.stack([x.double() for x in lses]), 0))
    (out.sum() + lse.sum()).backward()
    assert all(torch.isfinite(x.grad).all() for x in (*outs, *lses))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("D", [64, 256])
def test_backward_on_numbers_like_those_of_a_model(D, dtype):  # NVIDIA/TransformerEngine#3216
    """Smooth positions, a few channels of large size, one key that draws most rows, gradients over four decades."""
    B, H, S = 2, 2, 96
    t = torch.linspace(0, 6, S)[None, None, :, None]
    smooth = lambda: torch.sin(t * torch.rand(B, H, 1, D) * 3 + torch.rand(B, H, 1, D) * 6)  # noqa: E731
    q, k, v = smooth() + 0.1 * torch.randn(B, H, S, D), smooth() + 0.1 * torch.randn(B, H, S, D), smooth()
    q[..., :3] += 5
    k[..., :3] *= 4
    k[:, :, 0] += 1.5
    v[:, :, 0] *= 0.01
    dout = torch.randn(B, H, S, D) * 10 ** (-4 * torch.rand(B, H, S, 1))
    q, k, v, dout = (x.to(dtype) for x in (q, k, v, dout))
    out, lse = plait.flash_attention(q, k, v, causal=True, return_lse=True)
    got = plait.attention_backward(dout, q, k, v, out, lse, causal=True)
    leaves = oracle.leaves(q, k, v)
    expected, _ = oracle.attention(*leaves, causal=True)
    expected.backward(dout.double())
    for mine, leaf in zip(got, leaves, strict=True):
        cosine = torch.nn.functional.cosine_similarity(mine.double().flatten(), leaf.grad.flatten(), 0)
        assert cosine > {torch.float32: 1 - 1e-9, torch.float16: 1 - 1e-4, torch.bfloat16: 1 - 3e-3}[dtype]
