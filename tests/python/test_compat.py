"""The flash-attn stand-ins: signatures, layouts, results against eager float64, refusals by name, ignored hints."""

import inspect

import oracle
import plait
import pytest
import torch
from plait.compat import flash_attn_2, flash_attn_3

FA2_TAIL = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
    "deterministic=False, return_attn_probs=False"
)
FA3_SCALES = "q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0"
FA3_TAIL = (
    f"softmax_scale=None, causal=False, qv=None, {FA3_SCALES}, num_splits=1, pack_gqa=None, deterministic=False, "
    "sm_margin=0, return_attn_probs=False"
)
LENGTHS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
# As of flash-attn 2.8 and the hopper folder of the same tree.
SIGNATURES = {
    flash_attn_2: {
        "flash_attn_func": f"q, k, v, {FA2_TAIL}",
        "flash_attn_kvpacked_func": f"q, kv, {FA2_TAIL}",
        "flash_attn_qkvpacked_func": f"qkv, {FA2_TAIL}",
        "flash_attn_varlen_func": f"q, k, v, {LENGTHS}, {FA2_TAIL}, block_table=None",
        "flash_attn_varlen_kvpacked_func": f"q, kv, {LENGTHS}, {FA2_TAIL}",
        "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {FA2_TAIL}",
        "flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, "
        "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, "
        "causal=False, window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0, "
        "return_softmax_lse=False",
    },
    flash_attn_3: {
        "flash_attn_func": f"q, k, v, {FA3_TAIL}",
        "flash_attn_qkvpacked_func": f"qkv, softmax_scale=None, causal=False, {FA3_SCALES}, deterministic=False, "
        "num_heads_q=None, sm_margin=0, return_attn_probs=False",
        "flash_attn_varlen_func": f"q, k, v, {LENGTHS}, seqused_q=None, seqused_k=None, {FA3_TAIL}",
        "flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, "
        "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, "
        "cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, "
        "v_descale=None, softmax_scale=None, causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, "
        "rotary_interleaved=True, scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, "
        "return_softmax_lse=False",
    },
}
BOTH = pytest.mark.parametrize("fa", [flash_attn_2, flash_attn_3], ids=["2", "3"])


@BOTH
def test_signatures(fa):
    assert sorted(fa.__all__) == sorted(SIGNATURES[fa])
    for name, expected in SIGNATURES[fa].items():
        parameters = inspect.signature(getattr(fa, name)).parameters.values()
        assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)
        plain = [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters]
        assert ", ".join(plain) == expected, name


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def qkv(Sq=9, Sk=13, Hq=4, Hk=2, D=16, Dv=16, B=2, grad=False):
    """[B, S, H, D]"""
    shapes = ((B, Sq, Hq, D), (B, Sk, Hk, D), (B, Sk, Hk, Dv))
    return [torch.randn(shape).requires_grad_(grad) for shape in shapes]


def expected(q, k, v, **options):
    """out [B, S, H, D] and lse [B, H, S] in float64."""
    out, lse = oracle.attention(*(x.transpose(1, 2) for x in (q, k, v)), **options)
    return out.transpose(1, 2), lse


@BOTH
@pytest.mark.parametrize("case", ["plain", "everything"])
def test_dense(fa, case):
    tensors = qkv(grad=True, Dv=12)
    options, same = {}, {}
    if case == "everything":
        options = {"softmax_scale": 0.3, "causal": True, "window_size": (4, 0), "softcap": 2.0, "deterministic": True}
        same = {"scale": 0.3, "causal": True, "window": (4, 0), "softcap": 2.0}
    result = fa.flash_attn_func(*tensors, **options, return_attn_probs=True)
    assert result[2:] == ((None,) if fa is flash_attn_2 else ())
    wide = oracle.leaves(*tensors)
    out, lse = expected(*wide, **same)
    oracle.assert_close(result[0], out, torch.float32)
    oracle.assert_close(result[1], lse, torch.float32)
    dout, dlse = torch.randn_like(result[0]), torch.randn_like(result[1])
    grads = torch.autograd.grad(result[:2], tensors, (dout, dlse))
    for got, want in zip(grads, torch.autograd.grad((out, lse), wide, (dout.double(), dlse.double())), strict=True):
        oracle.assert_close(got, want, torch.float32, gradient=True)
    assert torch.equal(fa.flash_attn_func(*tensors, **options), result[0])


def test_positional_arguments_stand_where_theirs_do():
    tensors = qkv()
    causal = plait.flash_attention(*tensors, scale=0.3, causal=True, window=(4, 0), layout="bshd")
    assert torch.equal(flash_attn_2.flash_attn_func(*tensors, 0.0, 0.3, True, (4, 0)), causal)
    assert torch.equal(flash_attn_3.flash_attn_func(*tensors, 0.3, True, None, None, None, None, (4, 0)), causal)


@BOTH
def test_stacked(fa):
    qkv_ = torch.randn(2, 9, 3, 4, 16, requires_grad=True)
    result = fa.flash_attn_qkvpacked_func(qkv_, causal=True, return_attn_probs=True)
    plain = fa.flash_attn_func(*qkv_.unbind(2), causal=True, return_attn_probs=True)
    assert torch.equal(result[0], plain[0]) and torch.equal(result[1], plain[1])
    (grad,) = torch.autograd.grad(result[0].square().sum(), qkv_)
    (same,) = torch.autograd.grad(plain[0].square().sum(), qkv_)
    assert torch.equal(grad, same)
    with pytest.raises(ValueError, match=r"^qkv: got \[2, 9, 2, 4, 16\]"):
        fa.flash_attn_qkvpacked_func(qkv_[:, :, :2])


def test_stacked_keys_and_values():
    q, kv = torch.randn(2, 9, 4, 16), torch.randn(2, 13, 2, 2, 16)
    out = flash_attn_2.flash_attn_kvpacked_func(q, kv, causal=True)
    assert torch.equal(out, flash_attn_2.flash_attn_func(q, *kv.unbind(2), causal=True))
    with pytest.raises(ValueError, match=r"^kv: got \[2, 13, 3, 2, 16\]"):
        flash_attn_2.flash_attn_kvpacked_func(q, torch.randn(2, 13, 3, 2, 16))


def test_heads_in_a_row():
    tensors = qkv(Sk=9)
    out = flash_attn_3.flash_attn_qkvpacked_func(torch.cat(tensors, 2), causal=True, num_heads_q=4)
    assert torch.equal(out, flash_attn_3.flash_attn_func(*tensors, causal=True))
    for heads in (None, 3, 8, 0):
        with pytest.raises(ValueError, match=f"^num_heads_q: got {heads} for 8 heads"):
            flash_attn_3.flash_attn_qkvpacked_func(torch.cat(tensors, 2), num_heads_q=heads)


def packed(grad=False):
    tensors = [torch.randn(total, H, 16).requires_grad_(grad) for total, H in ((9, 4), (12, 2), (12, 2))]
    return tensors, int32(0, 4, 4, 9), int32(0, 7, 9, 12)


@BOTH
def test_packed(fa):
    tensors, cu_q, cu_k = packed(grad=True)
    result = fa.flash_attn_varlen_func(*tensors, cu_q, cu_k, 5, 7, causal=True, return_attn_probs=True)
    assert result[2:] == ((None,) if fa is flash_attn_2 else ()) and result[1].shape == (4, 9)
    for b in range(3):
        rows, keys = slice(*cu_q[b : b + 2].tolist()), slice(*cu_k[b : b + 2].tolist())
        q, k, v = (x[part][None] for x, part in zip(tensors, (rows, keys, keys), strict=True))
        out, lse = expected(q, k, v, causal=True)
        oracle.assert_close(result[0][rows], out[0], torch.float32)
        oracle.assert_close(result[1][:, rows], lse[0], torch.float32)
    result[0].sum().backward()
    assert all(x.grad.isfinite().all() for x in tensors)
    assert torch.equal(fa.flash_attn_varlen_func(*tensors, cu_q, cu_k, 5, 7, causal=True), result[0])


def test_packed_and_stacked():
    (q, k, v), cu_q, cu_k = packed()
    out = flash_attn_2.flash_attn_varlen_kvpacked_func(q, torch.stack([k, v], 1), cu_q, cu_k, 5, 7, 0.0, None, True)
    assert torch.equal(out, flash_attn_2.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 5, 7, causal=True))
    out = flash_attn_2.flash_attn_varlen_qkvpacked_func(torch.stack([k, k, v], 1), cu_k, 7, causal=True)
    assert torch.equal(out, flash_attn_2.flash_attn_varlen_func(k, k, v, cu_k, cu_k, 7, 7, causal=True))


@pytest.mark.parametrize("used", ["keys", "queries", "both"])
def test_rows_in_use(used):
    tensors, cu_q, cu_k = packed(grad=True)
    used_q = int32(3, 0, 4) if used != "keys" else None
    used_k = int32(5, 2, 0) if used != "queries" else None
    out, lse = flash_attn_3.flash_attn_varlen_func(
        *tensors, cu_q, cu_k, 5, 7, seqused_q=used_q, seqused_k=used_k, causal=True, return_attn_probs=True
    )
    for b in range(3):
        (q0, q1), (k0, k1) = cu_q[b : b + 2].tolist(), cu_k[b : b + 2].tolist()
        q_end = q1 if used_q is None else q0 + int(used_q[b])
        k_end = k1 if used_k is None else k0 + int(used_k[b])
        q, k, v = (x[begin:end][None] for x, begin, end in zip(tensors, (q0, k0, k0), (q_end, k_end, k_end),
                                                               strict=True))  # fmt: skip
        want, want_lse = expected(q, k, v, causal=True)
        oracle.assert_close(out[q0:q_end], want[0], torch.float32)
        oracle.assert_close(lse[:, q0:q_end], want_lse[0], torch.float32)
        assert (out[q_end:q1] == 0).all() and torch.isneginf(lse[:, q_end:q1]).all()
        out[q0:q_end].sum().backward(retain_graph=True)
    if used_k is not None:
        assert (tensors[1].grad[9:] == 0).all() and (tensors[1].grad[5:7] == 0).all()
    wrong = [(int32(1, 1), "seqused_k: "), (int32(1, 1, 1).long(), "seqused_k: .*int64")]
    if not cu_k.is_cuda:  # the host sees what the lengths are
        wrong.append((int32(8, 2, 0), "seqused_k: got 8 in sequence 0 of length 7"))
    for bad, message in wrong:
        with pytest.raises(ValueError, match=message):
            flash_attn_3.flash_attn_varlen_func(*tensors, cu_q, cu_k, 5, 7, seqused_k=bad)


# Caches.


def with_cache(fa, *args, table=None, **options):
    name = "block_table" if fa is flash_attn_2 else "page_table"
    return fa.flash_attn_with_kvcache(*args, **options, **({} if table is None else {name: table}))


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("page", [0, 3, 256])
def test_cache(fa, page, interleaved, dtype):
    lengths, S = [11, 0, 25], 30
    q, k, v = (torch.randn(3, 2, H, 16).to(dtype) for H in (4, 2, 2))
    dense = [torch.randn(3, S, 2, 16).to(dtype) for _ in range(2)]
    cos, sin = (table.to(dtype) for table in oracle.rope_tables(S, 8))
    table, caches, rows = None, dense, int32(2, 0, 1)
    if page:
        rows, blocks = None, -(-S // page)
        table = torch.randperm(3 * blocks).view(3, blocks).int()
        caches = [torch.zeros(3 * blocks, page, 2, 16, dtype=dtype) for _ in range(2)]
        for b in range(3):
            for position in range(S):
                for cache, whole in zip(caches, dense, strict=True):
                    cache[table[b, position // page], position % page] = whole[b, position]
    before = [x.clone() for x in dense]
    out, lse = with_cache(
        fa, q, *caches, k, v, rotary_cos=cos, rotary_sin=sin, cache_seqlens=int32(*lengths), cache_batch_idx=rows,
        table=table, causal=True, rotary_interleaved=interleaved, return_softmax_lse=True,
    )  # fmt: skip
    assert lse.shape == (3, 4, 2) and out.shape == q.shape and out.dtype == dtype
    style = "pairs" if interleaved else "half"
    for b, length in enumerate(lengths):
        at = torch.arange(2) + length
        row = b if rows is None else int(rows[b])
        turned = [oracle.rotate(x[b].transpose(0, 1).double(), cos, sin, at, style).transpose(0, 1) for x in (q, k)]
        keys = torch.cat([before[0][row, :length], turned[1].to(dtype)])[None]
        values = torch.cat([before[1][row, :length], v[b]])[None]
        want, want_lse = expected(turned[0][None], keys, values, causal=True)
        oracle.assert_close(out[b : b + 1], want, dtype)
        oracle.assert_close(lse[b : b + 1], want_lse, dtype)


@BOTH
def test_cache_lengths(fa):
    q, *caches = (torch.randn(2, S, H, 16) for S, H in ((1, 4), (12, 2), (12, 2)))
    assert torch.equal(with_cache(fa, q, *caches), with_cache(fa, q, *caches, cache_seqlens=12))
    table = int32(1, 0, 3, 2, 5, 4).view(2, 3)
    pages = [cache.reshape(6, 4, 2, 16) for cache in caches]
    whole = with_cache(fa, q, *pages, table=table)
    assert torch.equal(whole, with_cache(fa, q, *pages, table=table, cache_seqlens=int32(12, 12)))
    with pytest.raises(ValueError, match="^cache_seqlens: is missing"):
        with_cache(fa, q, *caches, q[:, :, :2], q[:, :, :2])
    cut = with_cache(fa, q, *caches, cache_seqlens=7, softmax_scale=0.2, window_size=(3, 0), softcap=3.0)
    want, _ = expected(q, *(c[:, :7] for c in caches), scale=0.2, window=(3, 0), softcap=3.0)
    oracle.assert_close(cut, want, torch.float32)


@BOTH
def test_rotations_that_plait_places_elsewhere(fa):
    q, k, v = qkv(Sq=2, Sk=2)
    caches, tables = [torch.randn(2, 12, 2, 16) for _ in range(2)], oracle.rope_tables(12, 8)
    rope = {"rotary_cos": tables[0], "rotary_sin": tables[1], "cache_seqlens": 4}
    for arguments, options, message in (
        ((q, *caches), {"causal": True}, "without k and v"),
        ((q[:, :1], *caches, k, v), {"causal": True}, "1 queries for 2 new keys"),
        ((q, *caches, k, v), {}, "causal=False"),
    ):
        before = [cache.clone() for cache in caches]
        with pytest.raises(ValueError, match=f"^rotary_cos: .*{message}"):
            with_cache(fa, *arguments, **rope, **options)
        assert all(torch.equal(x, y) for x, y in zip(caches, before, strict=True))
    with_cache(fa, q, *caches, k, v, **rope, window_size=(5, 0))
    with_cache(fa, q[:, :1], *caches, k[:, :1], v[:, :1], **rope)


# What plait does not have, and what it need not have.

ONES = torch.ones(4)
OFF_DEFAULT = {
    flash_attn_2: {
        "flash_attn_func": {"dropout_p": 0.1, "alibi_slopes": ONES},
        "flash_attn_kvpacked_func": {"dropout_p": 0.1, "alibi_slopes": ONES},
        "flash_attn_qkvpacked_func": {"dropout_p": 0.1, "alibi_slopes": ONES},
        "flash_attn_varlen_func": {"dropout_p": 0.1, "alibi_slopes": ONES, "block_table": int32(0)},
        "flash_attn_varlen_kvpacked_func": {"dropout_p": 0.1, "alibi_slopes": ONES},
        "flash_attn_varlen_qkvpacked_func": {"dropout_p": 0.1, "alibi_slopes": ONES},
        "flash_attn_with_kvcache": {"cache_leftpad": int32(0, 0), "alibi_slopes": ONES},
    },
    flash_attn_3: {
        "flash_attn_func": {"qv": ONES, "q_descale": ONES, "k_descale": ONES, "v_descale": ONES, "attention_chunk": 4},
        "flash_attn_qkvpacked_func": {"q_descale": ONES, "k_descale": ONES, "v_descale": ONES, "attention_chunk": 4},
        "flash_attn_varlen_func": {"qv": ONES, "q_descale": ONES, "k_descale": ONES, "v_descale": ONES,
                                   "attention_chunk": 4},
        "flash_attn_with_kvcache": {"qv": ONES, "cache_leftpad": int32(0, 0), "cu_seqlens_q": int32(0, 1),
                                    "cu_seqlens_k_new": int32(0, 1), "rotary_seqlens": int32(0, 1), "q_descale": ONES,
                                    "k_descale": ONES, "v_descale": ONES, "attention_chunk": 4},
    },
}  # fmt: skip
HINTS = {
    flash_attn_2: {"flash_attn_with_kvcache": {"num_splits": 3}},
    flash_attn_3: {
        "flash_attn_func": {"num_splits": 3, "pack_gqa": True, "sm_margin": 8},
        "flash_attn_qkvpacked_func": {"sm_margin": 8},
        "flash_attn_varlen_func": {"num_splits": 3, "pack_gqa": True, "sm_margin": 8},
        "flash_attn_with_kvcache": {
            "num_splits": 3, "pack_gqa": True, "sm_margin": 8, "scheduler_metadata": int32(1), "max_seqlen_q": 9,
        },
    },
}  # fmt: skip


def arguments_of(name):
    (q, k, v), cu_q, cu_k = packed()
    bounds = (cu_q, cu_k, 5, 7)
    dense = qkv(Sk=9, Hk=4)
    return {
        "flash_attn_func": dense,
        "flash_attn_kvpacked_func": (dense[0], torch.stack(dense[1:], 2)),
        "flash_attn_qkvpacked_func": (torch.stack(dense, 2),),
        "flash_attn_varlen_func": (q, k, v, *bounds),
        "flash_attn_varlen_kvpacked_func": (q, torch.stack([k, v], 1), *bounds),
        "flash_attn_varlen_qkvpacked_func": (torch.stack([k, k, v], 1), cu_k, 7),
        "flash_attn_with_kvcache": dense,
    }[name]


@BOTH
def test_refused_by_name(fa):
    assert OFF_DEFAULT[fa].keys() == SIGNATURES[fa].keys()
    for name, off in OFF_DEFAULT[fa].items():
        arguments = arguments_of(name)
        for argument, value in off.items():
            with pytest.raises(ValueError, match=f"^{argument}: got .*; .{{20}}"):
                getattr(fa, name)(*arguments, **{argument: value})


# An argument, a value that plait refuses, and the refusal: in flash-attn's names.
REFUSED = [
    ({"window_size": 5}, r"window_size: got 5, expected None or \(left, right\)"),
    ({"window_size": (-3, 0)}, r"window_size: got \(-3, 0\)"),
    ({"softmax_scale": "1"}, "softmax_scale: got '1', expected a number"),
    ({"softcap": -1.0}, "softcap: got -1"),
]


@BOTH
@pytest.mark.parametrize(("off", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_refusals_have_the_names_of_the_caller(fa, off, message):
    for name in ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"):
        with pytest.raises(ValueError, match=f"^{message}"):
            getattr(fa, name)(*arguments_of(name), **off)


@BOTH
def test_refusals_of_a_cache_call_have_the_names_of_the_caller(fa):
    q, k_cache, v_cache = arguments_of("flash_attn_with_kvcache")
    new = torch.randn(*q.shape[:2], *k_cache.shape[2:])
    for k, v, message in ((new, None, "v: is missing; expected both of k and v"), (new[..., 1:], new, "k: ")):
        with pytest.raises(ValueError, match=f"^{message}"):
            fa.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=1)
    with pytest.raises(ValueError, match="^return_softmax_lse: got 1"):
        fa.flash_attn_with_kvcache(q, k_cache, v_cache, return_softmax_lse=1)
    with pytest.raises(ValueError, match="^return_attn_probs: got 1"):
        fa.flash_attn_func(q, k_cache, v_cache, return_attn_probs=1)


@BOTH
def test_hints_change_nothing(fa):
    for name, hints in HINTS[fa].items():
        arguments = arguments_of(name)
        plain = getattr(fa, name)(*arguments)
        for hint, value in hints.items():
            assert torch.equal(getattr(fa, name)(*arguments, **{hint: value}), plain), (name, hint)


@BOTH
def test_every_argument_is_a_feature_a_refusal_or_a_hint(fa):
    """So that no argument of theirs is taken and silently dropped."""
    features = {
        "softmax_scale", "causal", "window_size", "softcap", "deterministic", "return_attn_probs", "num_heads_q",
        "seqused_q", "seqused_k", "k", "v", "rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx",
        "rotary_interleaved", "return_softmax_lse",
    }  # fmt: skip
    for name in SIGNATURES[fa]:
        optional = {p.name for p in inspect.signature(getattr(fa, name)).parameters.values() if p.default != p.empty}
        optional -= {"page_table"} | ({"block_table"} if "kvcache" in name else set())
        off, hints = OFF_DEFAULT[fa][name].keys(), HINTS[fa].get(name, {}).keys()
        assert optional == (features & optional) | off | hints, name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seqused_k": [1, 1]}, "seqused_k: got list, expected a torch.Tensor"),
        ({"seqused_q": torch.tensor([1, 1])}, "seqused_q: got torch.int64, expected torch.int32"),
        ({"seqused_k": torch.ones(3, dtype=torch.int32)}, r"seqused_k: got shape \[3\]"),
        ({"cu_seqlens_k": [0, 3, 7], "seqused_k": torch.ones(2, dtype=torch.int32)}, "cu_seqlens_k: got list"),
        ({"cu_seqlens_q": torch.tensor(0, dtype=torch.int32), "seqused_k": torch.ones(2, dtype=torch.int32)},
         r"cu_seqlens_q: got shape \[\]"),
        ({"cu_seqlens_q": torch.zeros(2, dtype=torch.int32), "seqused_k": torch.ones(2, dtype=torch.int32)},
         r"cu_seqlens_k: got shape \[3\]"),
    ],
)  # fmt: skip
def test_sequences_in_use_are_checked(changes, message):
    q, k = torch.randn(5, 2, 8), torch.randn(7, 2, 8)
    cu = {name: torch.tensor(ends, dtype=torch.int32) for name, ends in (("cu_seqlens_q", [0, 2, 5]),
                                                                       ("cu_seqlens_k", [0, 3, 7]))}  # fmt: skip
    with pytest.raises(ValueError, match=message):
        flash_attn_3.flash_attn_varlen_func(q, k, k, max_seqlen_q=3, max_seqlen_k=4, **cu | changes)
