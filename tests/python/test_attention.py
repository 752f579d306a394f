"""flash_attention, its packed form, attention_backward and merge_states against an eager float64 reference and SDPA."""

import math

import oracle
import plait
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention


def make(B=2, Hq=4, Hk=2, Sq=37, Sk=53, D=16, Dv=16, dtype=torch.float32):
    return (
        torch.randn(B, Hq, Sq, D).to(dtype),
        torch.randn(B, Hk, Sk, D).to(dtype),
        torch.randn(B, Hk, Sk, Dv).to(dtype),
    )


def check(q, k, v, dtype, *, gradients=True, sinks=None, **options):
    """out, lse and every gradient of plait against the oracle, with gradients through both results."""
    expected_leaves = oracle.leaves(q, k, v, sinks)
    expected_out, expected_lse = oracle.attention(*expected_leaves[:3], sinks=expected_leaves[3], **options)
    got_leaves = [None if t is None else t.detach().clone().requires_grad_(gradients) for t in (q, k, v, sinks)]
    out, lse = plait.flash_attention(*got_leaves[:3], sinks=got_leaves[3], return_lse=True, **options)
    assert out.dtype == dtype and lse.dtype == torch.float32
    oracle.assert_close(out, expected_out, dtype)
    oracle.assert_close(lse, expected_lse, torch.float32)
    if not gradients:
        return
    dout = torch.randn_like(expected_out).to(dtype)
    dlse = torch.randn_like(lse)
    finite = torch.isfinite(expected_lse)
    torch.autograd.backward([out, lse], [dout, dlse])
    torch.autograd.backward([expected_out, expected_lse.masked_fill(~finite, 0)], [dout.double(), dlse.double()])
    for name, got, expected in zip("q k v sinks".split(), got_leaves, expected_leaves, strict=True):
        if got is not None:
            gradient = name in "qk"
            oracle.assert_close(got.grad, expected.grad, dtype, gradient=gradient or dtype == torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"window": (7, 3)},
        {"window": (9, None), "causal": True},
        {"window": (-1, 0)},
        {"scale": 0.7, "softcap": 3.0, "causal": True},
    ],
    ids=str,
)
def test_masks_and_dtypes(options, dtype):
    check(*make(dtype=dtype), dtype, **options)


# Kernels that go through the keys from the last to the first keep a reference of each row's exponents: here it has to
# rise by `log2` within the row, for every fifth row, at several places and in both directions.
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "window": (230, None)}], ids=str)
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("log2", [9, 70, 400])
def test_scores_that_jump(log2, D, options, dtype):
    q, k, v = make(B=1, Hq=2, Hk=1, Sq=460, Sk=460, D=D, Dv=D)
    steps = torch.tensor([0, 3, 1, 2, 1, 0, 0, -1]).repeat_interleave(58)[:460]
    k[..., 0] = steps * log2 * math.log(2)
    q[..., 0] = 0
    q[..., ::5, 0] = math.sqrt(D)  # the scale takes it back
    check(q.to(dtype), k.to(dtype), v.to(dtype), dtype, gradients=False, **options)


@pytest.mark.parametrize("shape", [
    {"Hq": 3, "Hk": 1, "Dv": 5},
    {"Hq": 1, "Hk": 1, "B": 1, "Sq": 1, "Sk": 1, "D": 1, "Dv": 1},
    {"Sq": 130, "Sk": 129, "D": 24, "Dv": 40},
    {"Sq": 5, "Sk": 300},
    {"Sq": 60, "Sk": 20},
    {"D": 257, "Dv": 3, "Sq": 9, "Sk": 11},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("causal", [False, True])
def test_shapes(shape, causal):
    check(*make(**shape), torch.float32, causal=causal)


@given(
    B=st.integers(1, 2), group=st.integers(1, 3), Hk=st.integers(1, 2), Sq=st.integers(1, 70), Sk=st.integers(1, 140),
    D=st.integers(1, 20), Dv=st.integers(1, 20), causal=st.booleans(), left=st.integers(-1, 80),
    right=st.integers(-1, 80), with_sinks=st.booleans(),
)  # fmt: skip
def test_any_shape(B, group, Hk, Sq, Sk, D, Dv, causal, left, right, with_sinks):
    q, k, v = make(B, group * Hk, Hk, Sq, Sk, D, Dv)
    sinks = torch.randn(group * Hk) if with_sinks else None
    check(q, k, v, torch.float32, causal=causal, window=(left, right), sinks=sinks)


def test_sinks_count_for_rows_that_see_no_key():
    q, k, v = make(Sq=9, Sk=4)
    check(q, k, v, torch.float32, causal=True, sinks=torch.randn(4))
    out, lse = plait.flash_attention(q, k, v, causal=True, sinks=torch.arange(4.0), return_lse=True)
    assert (out[:, :, :5] == 0).all()
    assert torch.equal(lse[:, :, 0], torch.arange(4.0).expand(2, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_agrees_with_sdpa(dtype, causal):
    q, k, v = make(Hk=4, Sq=64, Sk=64, D=32, Dv=32, dtype=dtype)
    expected = scaled_dot_product_attention(q, k, v, is_causal=causal)
    tolerance = {"atol": 2e-6, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 2e-2, "rtol": 2e-2}
    torch.testing.assert_close(plait.flash_attention(q, k, v, causal=causal), expected, **tolerance)


def test_layouts_and_strides_give_the_same_bits():
    q, k, v = make(D=16)
    expected = plait.flash_attention(q, k, v, causal=True)
    transposed = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    bshd = plait.flash_attention(*transposed, causal=True, layout="bshd")
    assert bshd.is_contiguous() and torch.equal(bshd.transpose(1, 2), expected)
    views = plait.flash_attention(*(x.transpose(1, 2) for x in transposed), causal=True)
    assert torch.equal(views, expected)
    assert views.transpose(1, 2).is_contiguous(), "transposed inputs must give a transposed output"
    wide = [torch.nn.functional.pad(x, (1, 2))[..., 1:-2] for x in (q, k, v)]
    assert torch.equal(plait.flash_attention(*wide, causal=True), expected)
    spread = [torch.stack([x, x], -1)[..., 0] for x in (q, k, v)]
    assert torch.equal(plait.flash_attention(*spread, causal=True), expected)


def test_expanded_inputs_and_gradients():
    q, k, v = make(B=1, Hq=2, Hk=2)
    shared = [x.clone().requires_grad_() for x in (q, k, v)]
    plait.flash_attention(*(x.expand(3, -1, -1, -1) for x in shared)).sum().backward()
    alone = [x.clone().requires_grad_() for x in (q, k, v)]
    (3 * plait.flash_attention(*alone)).sum().backward()
    for got, expected in zip(shared, alone, strict=True):
        torch.testing.assert_close(got.grad, expected.grad, atol=1e-5, rtol=1e-5)


def test_gradients_keep_the_strides_of_their_inputs():
    x = torch.randn(2, 9, 3, 8)
    q, k, v = (x.clone().transpose(1, 2).requires_grad_() for _ in range(3))
    out = plait.flash_attention(q, k, v)
    for gradient, leaf in zip(torch.autograd.grad(out.sum(), (q, k, v)), (q, k, v), strict=True):
        assert gradient.stride() == leaf.stride()


@pytest.mark.parametrize("shape", [
    {"B": 0}, {"Sq": 0}, {"Sk": 0}, {"Hq": 0, "Hk": 0}
], ids=str)  # fmt: skip
@pytest.mark.parametrize("with_sinks", [False, True])
def test_empty_problems(shape, with_sinks):
    q, k, v = (x.requires_grad_() for x in make(**shape))
    sinks = torch.randn(q.shape[1], requires_grad=True) if with_sinks else None
    out, lse = plait.flash_attention(q, k, v, sinks=sinks, return_lse=True)
    assert out.shape == q.shape and (out == 0).all()
    expected = sinks[None, :, None].expand_as(lse) if with_sinks else torch.full_like(lse, -math.inf)
    assert torch.equal(lse, expected)
    (out.sum() + (lse.sum() if with_sinks else 0)).backward()
    for leaf in (q, k, v):
        assert (leaf.grad == 0).all()
    if with_sinks:
        assert torch.equal(sinks.grad, torch.full_like(sinks, lse.numel() / max(q.shape[1], 1)))


def test_float32_output_of_half_inputs():
    q, k, v = make(dtype=torch.bfloat16)
    out = plait.flash_attention(q, k, v, out_dtype=torch.float32)
    assert out.dtype == torch.float32
    expected, _ = oracle.attention(q, k, v)
    assert oracle.rms_error(out, expected) < oracle.rms_error(plait.flash_attention(q, k, v), expected)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    plait.flash_attention(*leaves, out_dtype=torch.float32).sum().backward()
    assert all(x.grad.dtype == torch.bfloat16 for x in leaves)


def packed_case(lengths_q, lengths_k, spare=2, H=2, Hk=1, D=8):
    cu_q, cu_k = (torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (lengths_q, lengths_k))
    q = torch.randn(int(cu_q[-1]) + spare, H, D)
    k, v = (torch.randn(int(cu_k[-1]) + spare, Hk, D) for _ in range(2))
    return q, k, v, cu_q, cu_k


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "window": (3, 0)}], ids=str)
@pytest.mark.parametrize("with_sinks", [False, True])
def test_packed_sequences(options, with_sinks):
    lengths_q, lengths_k = [3, 0, 70, 5, 1], [9, 4, 70, 0, 2]
    q, k, v, cu_q, cu_k = packed_case(lengths_q, lengths_k)
    sinks = torch.randn(2) if with_sinks else None
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse = plait.flash_attention_varlen(
        *leaves, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, sinks=sinks, return_lse=True, **options
    )
    dout = torch.randn_like(out)
    out.backward(dout)
    expected_leaves = oracle.leaves(q, k, v)
    for i in range(len(lengths_q)):
        rows, keys = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
        one = [x[part].transpose(0, 1)[None] for x, part in zip(expected_leaves, (rows, keys, keys), strict=True)]
        expected, expected_lse = oracle.attention(*one, sinks=sinks, **options)
        oracle.assert_close(out[rows].transpose(0, 1)[None], expected, torch.float32)
        oracle.assert_close(lse[:, rows][None], expected_lse, torch.float32)
        if expected.requires_grad:
            expected.backward(dout[rows].transpose(0, 1)[None].double())
    for got, expected in zip(leaves, expected_leaves, strict=True):
        oracle.assert_close(got.grad, expected.grad, torch.float32, gradient=True)
    assert (out[cu_q[-1] :] == 0).all() and torch.isneginf(lse[:, cu_q[-1] :]).all()


@pytest.mark.parametrize("bound", [None, 1, 10**6, torch.tensor(70)], ids=str)
def test_max_seqlen_never_changes_a_result(bound):
    q, k, v, cu_q, cu_k = packed_case([3, 70], [9, 70])
    call = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "causal": True}
    expected = plait.flash_attention_varlen(q, k, v, **call)
    got = plait.flash_attention_varlen(q, k, v, max_seqlen_q=bound, max_seqlen_k=bound, **call)
    assert torch.equal(got, expected)


def test_attention_backward_is_the_gradient():
    q, k, v = make()
    sinks = torch.randn(4)
    leaves = [x.clone().requires_grad_() for x in (q, k, v, sinks)]
    out, lse = plait.flash_attention(*leaves[:3], sinks=leaves[3], causal=True, softcap=5.0, return_lse=True)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    expected = torch.autograd.grad([out, lse], leaves, [dout, dlse])
    got = plait.attention_backward(
        dout, q, k, v, out.detach(), lse.detach(), dlse=dlse, sinks=sinks, causal=True, softcap=5.0
    )
    assert len(got) == 4 and all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert len(plait.attention_backward(dout, q, k, v, out.detach(), lse.detach())) == 3


def test_gradients_over_split_keys_add_up():
    """Context parallelism: partial forwards are merged, each part's backward takes the merged out and lse."""
    q, k, v = make(Sk=52)
    parts = [slice(0, 20), slice(20, 52)]
    results = [plait.flash_attention(q, k[:, :, p], v[:, :, p], return_lse=True) for p in parts]
    out, lse = plait.merge_states([r[0] for r in results], [r[1] for r in results])
    leaves = oracle.leaves(q, k, v)
    expected, expected_lse = oracle.attention(*leaves)
    oracle.assert_close(out, expected, torch.float32)
    oracle.assert_close(lse, expected_lse, torch.float32)
    dout = torch.randn_like(out)
    expected.backward(dout.double())
    grads = [plait.attention_backward(dout, q, k[:, :, p], v[:, :, p], out, lse) for p in parts]
    oracle.assert_close(grads[0][0] + grads[1][0], leaves[0].grad, torch.float32, gradient=True)
    for i in (1, 2):
        got = torch.cat([g[i] for g in grads], dim=2)
        oracle.assert_close(got, leaves[i].grad, torch.float32, gradient=True)


def test_an_external_lse_of_minus_infinity_gives_no_gradient():
    q, k, v = make(Sq=3)
    out, lse = plait.flash_attention(q, k, v, return_lse=True)
    lse = lse.clone()
    lse[:, :, 1] = -math.inf
    dq, dk, dv = plait.attention_backward(torch.ones_like(out), q, k, v, out, lse)
    assert (dq[:, :, 1] == 0).all() and all(torch.isfinite(g).all() for g in (dq, dk, dv))


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "packed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_merge_states_against_the_formula(layout, dtype):
    shape = {"bhsd": (2, 3, 7, 5), "bshd": (2, 7, 3, 5), "packed": (7, 3, 5)}[layout]
    lse_shape = (3, 7) if layout == "packed" else (2, 3, 7)
    outs = [torch.randn(shape).to(dtype) for _ in range(3)]
    lses = [torch.randn(lse_shape) * 3 for _ in range(3)]
    lses[0][..., 2] = -math.inf
    for part in lses:
        part[..., 4] = -math.inf
    empty_row = (..., 2, slice(None)) if layout == "bhsd" else (..., 2, slice(None), slice(None))
    outs[0][empty_row] = math.nan  # weighs nothing, so is never looked at
    out, lse = plait.merge_states(outs, lses, layout="bhsd" if layout == "packed" else layout)
    expected_lse = torch.logsumexp(torch.stack(lses).double(), 0)
    oracle.assert_close(lse, expected_lse, torch.float32)
    weights = [torch.exp(part.double() - expected_lse).nan_to_num(0) for part in lses]
    if layout != "bhsd":
        weights = [w.transpose(-1, -2) for w in weights]
    expected = sum(w[..., None] * part.double().nan_to_num(0) for w, part in zip(weights, outs, strict=True))
    oracle.assert_close(out, expected, dtype)


def test_merging_nothing_but_empty_states_is_empty():
    out, lse = plait.merge_states([torch.zeros(1, 1, 2, 4)] * 2, [torch.full((1, 1, 2), -math.inf)] * 2)
    assert (out == 0).all() and torch.isneginf(lse).all()


def test_results_do_not_depend_on_threads_and_repeat_bit_for_bit():
    q, k, v = make(Sq=150, Sk=300)
    results = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 2):
            torch.set_num_threads(count)
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            out = plait.flash_attention(*leaves, causal=True, deterministic=True)
            out.square().sum().backward()
            results.append([out.detach(), *(x.grad for x in leaves)])
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_a_fixed_split_makes_results_independent_of_the_batch():
    q, k, v = make(B=3, Sq=2, Sk=500)
    together = plait.flash_attention(q, k, v, split_size=64)
    alone = [plait.flash_attention(q[i : i + 1], k[i : i + 1], v[i : i + 1], split_size=64) for i in range(3)]
    assert torch.equal(together, torch.cat(alone))
    oracle.assert_close(together, oracle.attention(q, k, v)[0], torch.float32)


ON_CPU = torch.get_default_device().type == "cpu"


@pytest.mark.parametrize("backend", ["cpu", "reference"] if ON_CPU else ["cuda_naive", "cuda_mma"])
@pytest.mark.parametrize("sink", [0.1, 1e4, 1e30, 3e38, math.inf, -1e30])
@pytest.mark.parametrize("keys", [0, 2])
def test_rows_without_keys_add_exactly_their_lse_gradient_to_extreme_sinks(sink, keys, backend):
    """Causal, 5 more rows than keys: those see nothing, LSE is the sink, and d LSE / d sink is exactly 1."""
    dtype = torch.float16 if backend == "cuda_mma" else torch.float32
    q, k = torch.randn(1, 1, keys + 5, 8, dtype=dtype), torch.randn(1, 1, keys, 8, dtype=dtype)
    sinks = torch.full((1,), sink, requires_grad=True)
    out, lse = plait.flash_attention(q, k, k, causal=True, sinks=sinks, return_lse=True, backend=backend)
    assert not out[:, :, :5].any() and bool((lse[:, :, :5] == sinks.detach()).all())
    (dsink,) = torch.autograd.grad(lse[:, :, :5].sum(), sinks)
    assert dsink.item() == 5
    if sink >= 1e4:  # the sink takes all
        assert not out.any() and bool((lse == sinks.detach()).all())
