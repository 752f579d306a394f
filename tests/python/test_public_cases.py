"""Cases that users of other attention libraries reported in public, as small tests; the reference is in each comment.

Cases over a cache are in test_public_cases_cache.py. Not applicable on a CPU, and left to the GPU tests:

| public case | what it needs |
|---|---|
| Dao-AILab/flash-attention#54, #1782, flashinfer-ai/flashinfer#452, deepseek-ai/FlashMLA#158 | two GPUs |
| Dao-AILab/flash-attention#2244, #1596, #1766, under load | a busy GPU (here: 200 repeats on threads) |
| Dao-AILab/flash-attention#2711, under a memory checker | compute-sanitizer (here: the refusal, and ASan in C++) |
| karpathy/nanochat#820 | a GPU that is not sm_90 (here: the plan for one) |
| NVIDIA/TransformerEngine#1930, across ranks | several processes with GPUs (here: the arithmetic of the ranks) |
"""

import math
import subprocess
import sys

import oracle
import plait
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

HALF_TYPES = [torch.float16, torch.bfloat16]


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
    """out, lse and the gradients of `tensors` (those that are None stay so)."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    out, lse = call(*leaves)
    seen = torch.isfinite(lse)
    loss = (out.double() * dout.double()).sum()
    if dlse is not None:
        loss = loss + (lse.masked_fill(~seen, 0).double() * dlse.double()).sum()
    return out.detach(), lse.detach(), *torch.autograd.grad(loss, leaves)


def compare(call, reference, tensors, *, with_lse=True, terms=1.0):
    """Forward and every gradient of `call` against `reference`, which gets float64 copies."""
    out, lse = call(*tensors)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse) if with_lse else None
    got = gradients(call, tensors, dout, dlse)
    expected = gradients(reference, [t.double() for t in tensors], dout, dlse)
    seen = torch.isfinite(expected[1])
    assert torch.equal(got[1][~seen].double(), expected[1][~seen])
    near(got[1][seen], expected[1][seen])
    for mine, theirs in zip((got[0], *got[2:]), (expected[0], *expected[2:]), strict=True):
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


# ---- rows that see nothing, empty sequences, empty problems


def test_queries_of_short_keys_are_masked_not_nan():  # Dao-AILab/flash-attention#443
    cu_q, cu_k = offsets(76, 34, 146), offsets(1, 1, 1)
    q = torch.randn(256, 1, 32).half()
    k, v = torch.randn(3, 1, 32).half(), torch.randn(3, 1, 32).half()
    call = packed(cu_q, cu_k, causal=True)
    out, lse, dq, _, _ = compare(call, packed_expected(cu_q, cu_k, causal=True), (q, k, v))
    sees = torch.zeros(256, dtype=torch.bool)
    sees[(cu_q[1:] - 1).long()] = True  # only the last row of each sequence meets its one key
    assert (out[~sees] == 0).all() and (dq[~sees] == 0).all()
    assert torch.isneginf(lse[:, ~sees]).all() and torch.isfinite(lse[:, sees]).all()


def test_more_queries_than_keys():  # Dao-AILab/flash-attention#1778
    q, k, v = torch.randn(1, 2, 5, 16), torch.randn(1, 2, 2, 16), torch.randn(1, 2, 2, 16)
    out, lse, dq, dk, dv = compare(dense(causal=True), dense_reference(causal=True), (q, k, v))
    assert (out[:, :, :3] == 0).all() and (dq[:, :, :3] == 0).all() and torch.isneginf(lse[:, :, :3]).all()
    assert (dk != 0).any() and (dv != 0).any()


@pytest.mark.parametrize("causal", [False, True])
def test_lse_of_a_sequence_without_keys_is_minus_infinity(causal):  # Dao-AILab/flash-attention#978
    cu_q, cu_k = offsets(3, 4, 2), offsets(5, 0, 6)
    q, k, v = torch.randn(9, 2, 8), torch.randn(11, 2, 8), torch.randn(11, 2, 8)
    _, lse, *_ = compare(packed(cu_q, cu_k, causal=causal), packed_expected(cu_q, cu_k, causal=causal), (q, k, v))
    assert torch.isneginf(lse[:, 3:7]).all()


def test_one_row_and_one_key_have_no_score_gradient():  # Dao-AILab/flash-attention#334
    q, k, v = (torch.randn(1, 1, 1, 16).half() * 3 for _ in range(3))
    *_, dq, dk, _ = compare(dense(), dense_reference(), (q, k, v), with_lse=False, terms=3)
    # P = 1, so dP - delta is 0 up to the rounding of out.
    assert dq.abs().max() < 0.1 and dk.abs().max() < 0.1
    out, lse = plait.flash_attention(q.float(), k.float(), v.float(), return_lse=True)
    dq, dk, _ = plait.attention_backward(torch.ones_like(out), q.float(), k.float(), v.float(), out, lse)
    assert dq.abs().max() < 1e-4 and dk.abs().max() < 1e-4


def test_large_inputs_stay_finite():  # Dao-AILab/flash-attention#1052
    q, k, v = (torch.randn(1, 1, 1024, 128).half() * 3 for _ in range(3))
    compare(dense(causal=True), dense_reference(causal=True), (q, k, v), terms=100)


@pytest.mark.parametrize("causal", [False, True])
def test_an_empty_query_sequence_between_others(causal):  # Dao-AILab/flash-attention#1713
    cu_q = torch.tensor([0, 150, 150, 300], dtype=torch.int32)
    cu_k = torch.tensor([0, 100, 200, 300], dtype=torch.int32)
    q, k, v = (torch.randn(300, 2, 16) for _ in range(3))
    *_, dk, dv = compare(packed(cu_q, cu_k, causal=causal), packed_expected(cu_q, cu_k, causal=causal), (q, k, v))
    assert (dk[100:200] == 0).all() and (dv[100:200] == 0).all()


def test_fewer_rows_than_sequences():  # Dao-AILab/flash-attention#1619
    cu_q, cu_k = offsets(0, 0, 1, 0), offsets(4, 0, 9, 2)
    q, k, v = torch.randn(1, 21, 120), torch.randn(15, 7, 120), torch.randn(15, 7, 120)
    compare(packed(cu_q, cu_k), packed_expected(cu_q, cu_k), (q, k, v))


@pytest.mark.parametrize("compiled", [False, True])
def test_static_buffers_longer_than_their_sequences(compiled):  # Dao-AILab/flash-attention#1228, pytorch/pytorch#176793
    total, used = 131072, 100
    q, k, v = (torch.full((total, 1, 8), math.nan).requires_grad_() for _ in range(3))
    with torch.no_grad():
        for x in (q, k, v):
            x[:used] = torch.randn(used, 1, 8)
    cu = torch.tensor([0, 40, used, used, used], dtype=torch.int32)  # padded by repeating the end
    call = packed(cu, cu, causal=True)
    call = torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call
    out, lse = call(q, k, v)
    assert (out[used:] == 0).all() and torch.isneginf(lse[:, used:]).all()
    out[:used].sum().backward()
    expected = [x.detach()[:used].double().requires_grad_() for x in (q, k, v)]
    expected_out, _ = packed_reference(*expected, offsets(40, 60), offsets(40, 60), causal=True)
    near(out[:used], expected_out)
    expected_out.sum().backward()
    for got, one in zip((q, k, v), expected, strict=True):
        near(got.grad[:used], one.grad)
        assert (got.grad[used:] == 0).all()


@pytest.mark.parametrize("B, Sq", [(0, 4), (2, 0)])
def test_no_batch_and_no_rows(
    B, Sq
):  # Dao-AILab/flash-attention#1159, pytorch/pytorch#165944, facebookresearch/xformers#852
    q, k, v = torch.randn(B, 2, Sq, 8), torch.randn(B, 2, 5, 8), torch.randn(B, 2, 5, 8)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = plait.flash_attention(*leaves)
    assert out.shape == (B, 2, Sq, 8)
    out.sum().backward()
    assert all(x.grad.shape == x.shape and (x.grad == 0).all() for x in leaves)


# ---- sizes that overflow 32 bits or 16-bit grid limits


@pytest.fixture(scope="module")
def far_memory():
    """2^31 bfloat16 numbers and a few more of address space; only touched pages become memory."""
    return torch.empty(2**31 + 2**20, dtype=torch.bfloat16)


@pytest.mark.parametrize("axis", ["batch", "heads", "rows", "dims"])
def test_strides_that_overflow_32_bits(far_memory, axis):  # Dao-AILab/flash-attention#2260, #767, #1311, #1500
    shape = (3, 2, 5, 4)
    stride = [2 * 5 * 4, 5 * 4, 4, 1]
    place = ["batch", "heads", "rows", "dims"].index(axis)
    stride[place] = -(-(2**31) // (shape[place] - 1))  # the last index lies just past 2^31
    views, small = [], []
    for i in range(4):
        view = torch.as_strided(far_memory, shape, stride, i * 1000)
        view.copy_(torch.randn(shape))
        views.append(view)
        small.append(view.contiguous())
    q, k, v, dout = views
    out, lse = plait.flash_attention(q, k, v, causal=True, return_lse=True)
    expected, expected_lse = plait.flash_attention(*small[:3], causal=True, return_lse=True)
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    near(out, oracle.attention(*small[:3], causal=True)[0])
    grads = plait.attention_backward(dout, q, k, v, out, lse, causal=True)
    expected = plait.attention_backward(small[3], *small[:3], out.contiguous(), lse, causal=True)
    assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))


def test_many_heads():  # Dao-AILab/flash-attention#1812
    q, k, v = (torch.randn(1, 3, 71280, 8).half() for _ in range(3))

    def reference(*tensors):
        out, lse = oracle.attention(*(x.transpose(1, 2) for x in tensors))
        return out.transpose(1, 2), lse

    compare(dense(layout="bshd"), reference, (q, k, v), terms=4)


def test_a_batch_above_65535():  # pytorch/pytorch#146704, facebookresearch/xformers#845
    q, k, v = (torch.randn(65536, 1, 4, 8).half() for _ in range(3))
    compare(dense(), dense_reference(), (q, k, v), terms=4)


# ---- masks and head dims


HANG = """
import torch, plait
torch.manual_seed(0)
q, k, v = (torch.randn(128, 2, 512, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
cu = torch.tensor([0, 128], dtype=torch.int32)
out = plait.flash_attention_varlen(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True)
out.sum().backward()
assert all(torch.isfinite(x.grad).all() for x in (q, k, v))
print("returned")
"""


def test_packed_backward_of_head_dim_512_returns():  # xlite-dev/ffpa-attn#298
    done = subprocess.run([sys.executable, "-c", HANG], capture_output=True, text=True, timeout=300)
    assert done.stdout == "returned\n", done.stderr


@pytest.mark.parametrize("D", [320, 512])
@pytest.mark.parametrize("Sq, Sk", [(20, 50), (50, 20)])
def test_backward_keeps_the_alignment_of_the_forward(D, Sq, Sk):  # xlite-dev/ffpa-attn#300
    q, k, v = torch.randn(1, 2, Sq, D), torch.randn(1, 2, Sk, D), torch.randn(1, 2, Sk, D)
    compare(dense(causal=True), dense_reference(causal=True), (q, k, v), terms=4)


def test_windows_that_equal_causal():  # Dao-AILab/flash-attention#1133
    S = 1024
    q, k, v = (torch.randn(1, 2, S, 64).half() for _ in range(3))
    expected = plait.flash_attention(q, k, v, causal=True)
    for left in (-1, S, S - 1):
        assert torch.equal(plait.flash_attention(q, k, v, window=(left, 0)), expected), left


@pytest.mark.parametrize("causal", [False, True])
def test_window_edges(causal):  # huggingface/transformers#39408
    S, tile = 200, 64
    q, k, v = torch.randn(1, 1, S, 8), torch.randn(1, 1, S, 8), torch.randn(1, 1, S, 8)
    edges = (0, 1, tile - 1, tile, tile + 1, S - 1, S)
    for left in edges:
        for right in edges:
            out, lse = plait.flash_attention(q, k, v, causal=causal, window=(left, right), return_lse=True)
            expected, expected_lse = oracle.attention(q, k, v, causal=causal, window=(left, right))
            near(out, expected)
            near(lse, expected_lse)


def test_a_window_of_w_keys_counts_the_row_itself():  # huggingface/transformers#39408
    W, S = 4, 12
    q = torch.zeros(1, 1, S, 8)
    _, lse = plait.flash_attention(q, q, q, causal=True, window=(W - 1, None), return_lse=True)
    counts = torch.arange(1, S + 1).clamp(max=W)
    torch.testing.assert_close(lse[0, 0], counts.float().log())


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


@pytest.mark.parametrize("dtype", [torch.float32, *HALF_TYPES], ids=str)
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
