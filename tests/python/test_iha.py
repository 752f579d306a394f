"""premix, iha_attention, folding, the window rule and plait.nn against an eager float64 reference; the identities."""

import math

import oracle
import plait
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st


def make(B=2, Hq=4, Hk=2, Sq=11, Sk=17, D=8, Dv=8, P=3, dtype=torch.float32):
    tensors = [torch.randn(B, Hq, Sq, D), torch.randn(B, Hk, Sk, D), torch.randn(B, Hk, Sk, Dv)]
    weights = [torch.randn(H, P, H) / math.sqrt(H) for H in (Hq, Hk, Hk)]
    return [t.to(dtype) for t in tensors], weights


def delta(H, P):
    return torch.eye(H)[:, None].repeat(1, P, 1)


def check(tensors, weights, dtype, *, collapse=None, sinks=None, **options):
    """out, lse and every gradient against the oracle."""
    inputs = [*tensors, *weights, collapse, sinks]
    expected_leaves = oracle.leaves(*inputs)
    out_expected, lse_expected = oracle.iha(
        *expected_leaves[:6], collapse=expected_leaves[6], sinks=expected_leaves[7], **options
    )
    leaves = [None if t is None else t.clone().requires_grad_() for t in inputs]
    out, lse = plait.iha_attention(*leaves[:6], collapse=leaves[6], sinks=leaves[7], return_lse=True, **options)
    # Pseudo tensors are rounded to dtype between premix and attention: three roundings instead of one.
    loose = 3 if dtype != torch.float32 else 2
    assert out.dtype == dtype and out.shape == out_expected.shape and lse.shape == lse_expected.shape
    forward_bar, backward_bar = (2e-6, 1e-5) if dtype == torch.float32 else (2.9e-3, 4.2e-3)
    assert oracle.rms_error(out, out_expected) <= loose * forward_bar
    assert torch.equal(torch.isneginf(lse), torch.isneginf(lse_expected))
    finite = torch.isfinite(lse)
    assert oracle.rms_error(lse[finite], lse_expected[finite]) <= loose * forward_bar
    dout, dlse = torch.randn_like(out), torch.randn_like(lse) * finite
    torch.autograd.backward([out, lse], [dout, dlse])
    torch.autograd.backward([out_expected, lse_expected.masked_fill(~finite, 0)], [dout.double(), dlse.double()])
    names = "q k v w_q w_k w_v collapse sinks".split()
    for name, leaf, expected in zip(names, leaves, expected_leaves, strict=True):
        if leaf is not None:
            assert leaf.grad.dtype == leaf.dtype
            error = oracle.rms_error(leaf.grad, expected.grad)
            assert error <= loose * backward_bar, f"d{name}: rms error {error:.2e}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [
    {}, {"causal": True}, {"causal": True, "window": (4, 0)}, {"softcap": 2.0, "scale": 0.3}
], ids=str)  # fmt: skip
def test_joint(options, dtype):
    check(*make(dtype=dtype), dtype, mode="joint", **options)


@pytest.mark.parametrize("mask", ["flat", "token"])
@pytest.mark.parametrize("form", ["per_head", "global"])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "window": (7, 1)}], ids=str)
def test_interleaved(options, form, mask):
    collapse = torch.randn(4, 3) if form == "per_head" else torch.randn(4, 4, 3)
    check(*make(), torch.float32, mode="interleaved", mask=mask, collapse=collapse, **options)


@pytest.mark.parametrize("style", ["half", "pairs"])
@pytest.mark.parametrize("mode, index", [("joint", "row"), ("interleaved", "row"), ("interleaved", "token")])
def test_rope(mode, index, style):
    tensors, weights = make()
    rope = oracle.rope_tables(17 * 3, 3)  # D_rot = 6 of D = 8
    collapse = torch.randn(4, 3) if mode == "interleaved" else None
    check(tensors, weights, torch.float32, mode=mode, collapse=collapse, rope=rope, rope_style=style, rope_index=index,
          causal=True)  # fmt: skip


@pytest.mark.parametrize("mode", ["joint", "interleaved"])
def test_sinks(mode):
    collapse = torch.randn(4, 3) if mode == "interleaved" else None
    check(*make(Sq=9, Sk=5), torch.float32, mode=mode, collapse=collapse, sinks=torch.randn(4), causal=True)


@given(
    P=st.integers(1, 4), group=st.integers(1, 2), Hk=st.integers(1, 3), Sq=st.integers(1, 20), Sk=st.integers(1, 40),
    D=st.integers(1, 9), Dv=st.integers(1, 9), causal=st.booleans(), left=st.integers(-1, 30),
    mode=st.sampled_from(["joint", "interleaved"]),
)  # fmt: skip
def test_any_shape(P, group, Hk, Sq, Sk, D, Dv, causal, left, mode):
    tensors, weights = make(1, group * Hk, Hk, Sq, Sk, D, Dv, P)
    collapse = torch.randn(group * Hk, P) if mode == "interleaved" else None
    check(tensors, weights, torch.float32, mode=mode, collapse=collapse, causal=causal, window=(left, -1))


@pytest.mark.parametrize("mode", ["joint", "interleaved"])
def test_layouts_agree(mode):
    tensors, weights = make()
    options = {"mode": mode, "collapse": torch.randn(4, 3) if mode == "interleaved" else None, "causal": True,
               "rope": oracle.rope_tables(17 * 3, 4)}  # fmt: skip
    expected, expected_lse = plait.iha_attention(*tensors, *weights, return_lse=True, **options)
    turned = [x.transpose(1, 2).contiguous() for x in tensors]
    out, lse = plait.iha_attention(*turned, *weights, layout="bshd", return_lse=True, **options)
    torch.testing.assert_close(out.transpose(1, 2), expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(lse, expected_lse, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("mode", ["joint", "interleaved"])
def test_packed_sequences(mode):
    """Positions restart in every sequence, and queries are the last ones of their sequence."""
    lengths_q, lengths_k = [3, 0, 6], [5, 2, 6]
    cu_q, cu_k = (torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (lengths_q, lengths_k))
    (q, k, v), weights = make(B=1, Sq=11, Sk=15)
    packed = [x[0].transpose(0, 1).contiguous() for x in (q, k, v)]
    collapse = torch.randn(4, 3) if mode == "interleaved" else None
    options = {"mode": mode, "collapse": collapse, "causal": True, "rope": oracle.rope_tables(6 * 3, 4)}
    leaves = [x.clone().requires_grad_() for x in (*packed, *weights)]
    out, lse = plait.iha_attention(*leaves, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, return_lse=True, **options)
    assert lse.shape == (4, 11 * (3 if mode == "interleaved" else 1))
    dout = torch.randn_like(out)
    out.backward(dout)
    expected_leaves = oracle.leaves(*packed, *weights)
    for i in (0, 2):
        rows, keys = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
        one = [x[part].transpose(0, 1)[None] for x, part in zip(expected_leaves[:3], (rows, keys, keys), strict=True)]
        expected, _ = oracle.iha(*one, *expected_leaves[3:], **options)
        assert oracle.rms_error(out[rows].transpose(0, 1)[None], expected) < 4e-6
        expected.backward(dout[rows].transpose(0, 1)[None].double())
    for leaf, expected in zip(leaves, expected_leaves, strict=True):
        assert oracle.rms_error(leaf.grad, expected.grad) < 2e-5
    assert (out[9:] == 0).all()


@pytest.mark.parametrize("rope_style", [None, "half", "pairs"])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_premix(layout, rope_style):
    x, w = torch.randn(2, 3, 7, 8), torch.randn(3, 2, 3)
    rope = None if rope_style is None else oracle.rope_tables(9, 4)
    expected = oracle.premix(x, w)
    if rope is not None:
        expected = oracle.rotate(expected.transpose(2, 3), *rope, torch.arange(7), rope_style).transpose(2, 3)
    options = {} if rope is None else {"rope": rope, "rope_style": rope_style}
    got = plait.premix(x if layout == "bhsd" else x.transpose(1, 2), w, layout=layout, **options)
    got = got if layout == "bhsd" else got.transpose(1, 2)
    oracle.assert_close(got, expected, torch.float32)


# The contract's identities.


@pytest.mark.parametrize("P", [1, 2, 4])
@pytest.mark.parametrize("options", [{}, {"causal": True, "window": (4, 0)}], ids=str)
def test_joint_with_identity_weights_is_plain_attention(P, options):
    (q, k, v), _ = make()
    out, lse = plait.iha_attention(q, k, v, delta(4, P), delta(2, P), delta(2, P), return_lse=True, **options)
    expected, expected_lse = plait.flash_attention(q, k, v, return_lse=True, **options)
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(lse, expected_lse + math.log(P), atol=2e-6, rtol=1e-5)


def test_interleaved_with_one_pseudo_head_is_joint():
    tensors, weights = make(P=1)
    joint, joint_lse = plait.iha_attention(*tensors, *weights, causal=True, return_lse=True)
    out, lse = plait.iha_attention(
        *tensors, *weights, mode="interleaved", collapse=torch.ones(4, 1), causal=True, return_lse=True
    )
    torch.testing.assert_close(out, joint, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(lse, joint_lse, atol=1e-6, rtol=1e-5)


def test_joint_is_the_merge_of_one_attention_per_pseudo_head():
    tensors, weights = make()
    out, lse = plait.iha_attention(*tensors, *weights, causal=True, return_lse=True)
    mixed = [plait.premix(x, w) for x, w in zip(tensors, weights, strict=True)]
    parts = [plait.flash_attention(*(x[..., p, :] for x in mixed), causal=True, return_lse=True) for p in range(3)]
    merged, merged_lse = plait.merge_states(*zip(*parts, strict=True))
    torch.testing.assert_close(out, merged, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(lse, merged_lse, atol=2e-6, rtol=1e-5)


def test_rotation_commutes_with_mixing():
    x, w = torch.randn(2, 3, 7, 8), torch.randn(3, 2, 3)
    rope = oracle.rope_tables(7, 4)
    rotated_first = oracle.premix(oracle.rotate(x.double(), *rope, torch.arange(7)), w)
    oracle.assert_close(plait.premix(x, w, rope=rope), rotated_first, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_pseudo_head_folds_into_the_projection(dtype):
    hidden, H, D = 12, 3, 8
    weight, w, x = torch.randn(H * D, hidden).to(dtype), torch.randn(H, 1, H), torch.randn(2, 5, hidden).to(dtype)
    heads = (x @ weight.T).unflatten(-1, (H, D))
    mixed = plait.premix(heads, w, layout="bshd")[:, :, :, 0]
    folded = plait.fold_premix_into_projection(weight, w)
    assert folded.dtype == dtype and folded.shape == weight.shape
    tolerance = 1e-5 if dtype == torch.float32 else 0.1
    torch.testing.assert_close((x @ folded.T).unflatten(-1, (H, D)), mixed, atol=tolerance, rtol=tolerance)


# The window rule.


@pytest.mark.parametrize("mode, windows", [
    ("joint", (1023, 2049, 4225, 8577)), ("interleaved", (1023, 2047, 4095, 8193))
])  # fmt: skip
def test_flop_matched_windows_of_the_contract(mode, windows):
    for N, expected in zip((8192, 16384, 32768, 65536), windows, strict=True):
        left, ratio = plait.flop_matched_window(N, 4, mode=mode)
        assert left == expected
        assert 1 <= ratio < 1.1


def test_flop_matched_window_reaches_the_causal_count_and_no_more():
    def visits(N, w, tile=64):
        return sum(row // tile - max(row - w, 0) // tile + 1 for row in range(0, N, tile))

    for N, P in ((64 * 20, 2), (64 * 33, 4), (64 * 8, 8)):
        left, ratio = plait.flop_matched_window(N, P, tile=64)
        causal = visits(N, N)
        assert ratio == pytest.approx(P * visits(N, left) / causal)
        assert P * visits(N, left) >= causal
    assert plait.flop_matched_window(1000, 1) == (-1, 1.0)


# plait.nn.


@pytest.mark.parametrize("mode", ["joint", "interleaved"])
@pytest.mark.parametrize("P", [1, 3])
def test_module_starts_as_plain_attention(mode, P):
    module = plait.nn.InterleavedHeadAttention(24, 4, 2, 8, P=P, mode=mode)
    x = torch.randn(2, 9, 24)
    q, k, v = (p(x).unflatten(-1, (-1, 8)) for p in (module.q_proj, module.k_proj, module.v_proj))
    expected = module.o_proj(plait.flash_attention(q, k, v, causal=True, layout="bshd").flatten(-2))
    torch.testing.assert_close(module(x), expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(module.w_v.mean(1), torch.eye(2), atol=1e-6, rtol=0)


def test_module_trains_its_pseudo_heads_apart():
    module = plait.nn.InterleavedHeadAttention(24, 4, 2, 8, P=2, window=(5, 0))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    x = torch.randn(2, 9, 24)
    before = module(x).square().mean().item()
    for _ in range(10):
        optimizer.zero_grad()
        loss = module(x, rope=oracle.rope_tables(9, 4)).square().mean()
        loss.backward()
        optimizer.step()
    assert loss.item() < before
    for w in (module.w_q, module.w_k, module.w_v):
        assert (w[:, 0] - w[:, 1]).abs().max() > 1e-5


def test_module_takes_packed_input_and_names_itself():
    module = plait.nn.InterleavedHeadAttention(24, 4, 2, 8, P=2, dtype=torch.float32, device="cpu")
    x = torch.randn(9, 24)
    out = module(x, cu_seqlens=torch.tensor([0, 4, 9], dtype=torch.int32))
    torch.testing.assert_close(out[:4], module(x[None, :4])[0], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(out[4:], module(x[None, 4:])[0], atol=1e-6, rtol=1e-5)
    assert "P=2" in repr(module) and "mode=joint" in repr(module)
    weight = module.w_v.clone()
    module.reset_parameters()
    assert not torch.equal(module.w_v, weight)
    state = plait.nn.InterleavedHeadAttention(24, 4, 2, 8, P=2, device="meta").state_dict()
    assert state.keys() == module.state_dict().keys()


@pytest.mark.parametrize("mode", ["joint", "interleaved"])
@pytest.mark.parametrize("empty", ["keys", "batch", "heads"])
def test_empty_problems_with_rope(mode, empty):
    """No keys, no sequences or no heads: zeros, LSE -inf, and gradients of zero; dense as packed."""
    B, H, Sq, Sk, D, P = 2, 2, 3, 5, 8, 2
    Sk, B, H = (0 if empty == "keys" else Sk), (0 if empty == "batch" else B), (0 if empty == "heads" else H)
    q, k, v = (torch.randn(B, H, S, D, requires_grad=True) for S in (Sq, Sk, Sk))
    weights = [torch.randn(H, P, H, requires_grad=True) for _ in "qkv"]
    options = {"mode": mode, "causal": True, "rope": (torch.ones(5 * P, D // 2), torch.zeros(5 * P, D // 2))}
    inputs = [q, k, v, *weights]
    if mode == "interleaved":
        inputs.append(torch.randn(H, P, requires_grad=True))
        options["collapse"] = inputs[-1]
    out, lse = plait.iha_attention(q, k, v, *weights, return_lse=True, **options)
    assert out.shape == q.shape and not out.any() and bool((lse == -torch.inf).all())
    for x, grad in zip(inputs, torch.autograd.grad(out.sum(), inputs), strict=True):
        assert grad.shape == x.shape and not grad.any()
    if empty == "keys":
        cu_q, cu_k = (torch.tensor([0, S, 2 * S], dtype=torch.int32) for S in (Sq, Sk))
        packed = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
        out = plait.iha_attention(*packed, *weights, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **options)
        assert out.shape == (B * Sq, H, D) and not out.any()
