"""Cases that users of other attention libraries reported in public, as small tests; the reference is in each comment.

Those about results (determinism, LSE, messages, partial results) are in test_public_cases_results.py, those over a
cache in test_public_cases_cache.py. Not applicable on a CPU, and left to the GPU tests:

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
from cases import compare, dense, dense_reference, near, offsets, packed, packed_expected, packed_reference

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
    S, tile = 130, 64
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
