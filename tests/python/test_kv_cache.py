"""Attention over key-value caches against eager float64: dense, ragged, paged, append, rotation."""

import dataclasses
import math

import oracle
import plait
import pytest
import torch
from cache_calls import int32, make, read, write

pytestmark = pytest.mark.usefixtures("one_thread")


def check(call):
    """Runs the call and compares out, lse and every element of both caches with the formulas in float64."""
    o = dict(call.options)
    layout, dtype, new = o["layout"], call.q.dtype, o.get("k_new")
    heads_first = (lambda x: x) if layout == "bhsd" else (lambda x: x.transpose(1, 2))
    q = heads_first(call.q)
    Sq, Sn = q.shape[2], 0 if new is None else heads_first(new).shape[2]
    o["heads"] = call.k_cache.shape[2 if "block_table" in o or layout == "bshd" else 1]
    before = call.k_cache.clone(), call.v_cache.clone()
    seqlens = o["cache_seqlens"].clone()
    out, lse = call.run(return_lse=True)
    assert out.shape == (*call.q.shape[:-1], call.v_cache.shape[-1]) and torch.equal(o["cache_seqlens"], seqlens)
    assert out.dtype == (o.get("out_dtype") or dtype) and lse.dtype == torch.float32

    style = "pairs" if o.get("rotary_interleaved") else "half"
    turn = lambda x, at: x  # noqa: E731
    if "rotary_cos" in o:
        turn = lambda x, at: oracle.rotate(x.double(), o["rotary_cos"], o["rotary_sin"], at, style)  # noqa: E731
    for b, length in enumerate(call.lengths):
        for name, cache, old in (("k_new", call.k_cache, before[0]), ("v_new", call.v_cache, before[1])):
            if Sn:
                x = heads_first(o[name])[b]
                x = turn(x, torch.arange(Sn) + length) if name == "k_new" else x
                got = read(cache, b, length + Sn, layout, o)[0, :, length:]
                exact = name == "v_new" or "rotary_cos" not in o
                torch.testing.assert_close(got, x.to(dtype), rtol=0 if exact else 2 * torch.finfo(dtype).eps,
                                           atol=0 if exact else torch.finfo(dtype).eps)  # fmt: skip
                write(old, b, length, got, layout, o)  # the only elements that may change
    for cache, old in ((call.k_cache, before[0]), (call.v_cache, before[1])):
        assert torch.equal(cache.isnan(), old.isnan()) and torch.equal(cache.nan_to_num(), old.nan_to_num())

    expected_out, expected_lse = [], []
    for b, length in enumerate(call.lengths):
        keys, values = (read(cache, b, length + Sn, layout, o) for cache in (call.k_cache, call.v_cache))
        rows = turn(q[b : b + 1], torch.arange(Sq) + length + Sn - Sq)
        result = oracle.attention(rows, keys, values, **{n: o.get(n) for n in ("window", "scale", "softcap", "sinks")},
                                  causal=o.get("causal", False))  # fmt: skip
        expected_out.append(result[0])
        expected_lse.append(result[1])
    oracle.assert_close(heads_first(out), torch.cat(expected_out), dtype)
    oracle.assert_close(lse, torch.cat(expected_lse), torch.float32 if dtype == torch.float32 else dtype)


PLAIN = {
    "dense": {},
    "bshd": {"layout": "bshd"},
    "causal": {"causal": True},
    "more queries than new keys": {"causal": True, "Sq": 5, "lengths": (17, 4, 30)},
    "more new keys than queries": {"causal": True, "Sq": 1, "Sn": 7},
    "chunked prefill": {"causal": True, "Sq": 9, "Sn": 9},
    "nothing new": {"Sn": 0, "causal": True},
    "one query": {"Sq": 1, "Sn": 1, "causal": True},
    "window": {"causal": True, "window": (5, 0), "Sq": 3},
    "two-sided window": {"window": (3, 1), "Sq": 4},
    "rows of a bigger cache": {"rows": (5, 0, 2), "causal": True},
    "strided": {"strided": True, "causal": True},
    "strided bshd": {"strided": True, "layout": "bshd", "causal": True},
    "one key head": {"Hk": 1, "Hq": 6},
    "no groups": {"Hk": 4, "Hq": 4},
    "wide values": {"D": 8, "Dv": 80},
    "head dim 72": {"D": 72, "Dv": 72},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": True, "causal": True},
    "scale": {"scale": 0.3},
    "all empty": {"lengths": (0, 0), "Sn": 0, "causal": True},
    "all empty, sinks": {"lengths": (0, 0), "Sn": 0, "sinks": True},
    "prefill into an empty cache": {"lengths": (0, 0), "Sn": 6, "Sq": 6, "causal": True},
    "full": {"lengths": (38, 38, 38)},
    "long": {"lengths": (517, 3, 260), "capacity": 600, "causal": True},
    "rope": {"rope_dims": 16, "causal": True},
    "rope pairs": {"rope_dims": 16, "rotary_interleaved": True, "causal": True},
    "partial rope": {"rope_dims": 6, "causal": True, "Sq": 3, "lengths": (17, 1, 30)},
    "partial rope pairs": {"rope_dims": 6, "rotary_interleaved": True, "layout": "bshd"},
    "rope, nothing new": {"rope_dims": 8, "Sn": 0, "lengths": (17, 9, 30)},
    "everything": {"rope_dims": 8, "rotary_interleaved": True, "causal": True, "window": (9, 0), "softcap": 4.0,
                   "sinks": True, "scale": 0.2, "Sq": 5, "Sn": 6, "strided": True, "rows": (1, 3, 0)},
}  # fmt: skip


@pytest.mark.parametrize("case", PLAIN)
def test_matches_float64(case):
    check(make(**PLAIN[case]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ["dense", "long", "rope", "everything"])
def test_half_types_match_float64(case, dtype):
    check(make(**PLAIN[case], dtype=dtype))


@pytest.mark.parametrize("case", ["long", "everything"])
def test_several_threads(case):
    torch.set_num_threads(3)
    check(make(**PLAIN[case]))


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("page", [1, 3, 16, 256])
def test_pages_of_any_size(page, layout):
    common = {"page": page, "layout": layout, "causal": True, "capacity": 300, "lengths": (255, 0, 30)}
    check(make(**common))
    check(make(**common, Sn=0, Sq=1, strided=True))
    check(make(**common, rope_dims=10, Sn=5, Sq=3, window=(20, 0), sinks=True, dtype=torch.bfloat16))


def test_float32_output():
    call = make(dtype=torch.bfloat16, out_dtype=torch.float32, causal=True)
    out = call.run()
    rounded = call.run(k_new=None, v_new=None, cache_seqlens=int32(*(n + 2 for n in call.lengths)), out_dtype=None)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.bfloat16(), rounded, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("strategy", ["split_q", "split_kv"])
def test_strategies_and_the_oracle_agree(strategy):
    call = make(lengths=(300, 5, 170), capacity=310, Sq=1, Sn=0, causal=True)
    expected = call.run(backend="reference", return_lse=True)
    for got, want in zip(call.run(strategy=strategy, return_lse=True), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_a_sequence_does_not_depend_on_its_batch():
    check_alone_and_together(make(lengths=(300, 5, 170), capacity=310, Sq=1, Sn=0, causal=True))


def check_alone_and_together(call):
    """Dao-AILab/flash-attention#1922, #1897: one sequence alone, then beside others, with a fixed split size."""
    together = call.run(split_size=64, return_lse=True)
    for b, length in enumerate(call.lengths):
        alone = plait.attention_with_kvcache(
            call.q[b : b + 1], call.k_cache[b : b + 1], call.v_cache[b : b + 1], cache_seqlens=length, causal=True,
            split_size=64, return_lse=True,
        )  # fmt: skip
        assert all(torch.equal(x[b : b + 1], y) for x, y in zip(together, alone, strict=True))


def test_one_length_for_all():
    one, many = make(lengths=(9, 9), causal=True), None
    many = dataclasses.replace(one, k_cache=one.k_cache.clone(), v_cache=one.v_cache.clone())
    assert torch.equal(one.run(cache_seqlens=9), many.run())
    assert torch.equal(one.k_cache.nan_to_num(), many.k_cache.nan_to_num())


def test_token_by_token_equals_attention_at_once():
    q, k, v = (torch.randn(2, H, 21, 16) for H in (4, 2, 2))
    caches = [torch.full((2, 2, 32, 16), math.nan) for _ in range(2)]
    outs, begin = [], 0
    for count in (9, 1, 1, 4, 1, 5):
        step = slice(begin, begin + count)
        outs.append(plait.attention_with_kvcache(q[:, :, step], *caches, k_new=k[:, :, step], v_new=v[:, :, step],
                                                 cache_seqlens=begin, causal=True))  # fmt: skip
        begin += count
    torch.testing.assert_close(torch.cat(outs, 2), plait.flash_attention(q, k, v, causal=True), rtol=1e-5, atol=1e-5)
    assert torch.equal(caches[0][:, :, :21], k) and torch.equal(caches[1][:, :, :21], v)


def test_rows_that_see_no_key():
    # flashinfer-ai/flashinfer#4452: paged, causal, more queries than keys; LSE is -inf there, not a large number.
    call = make(lengths=(1, 2), Sq=5, Sn=1, page=4, causal=True)
    out, lse = call.run(return_lse=True)
    assert torch.isneginf(lse[0, :, :3]).all() and torch.isfinite(lse[0, :, 3:]).all() and (out[0, :, :3] == 0).all()
    assert torch.isneginf(lse[1, :, :2]).all() and torch.isfinite(lse[1, :, 2:]).all()


@pytest.mark.parametrize("batch, queries", [(0, 2), (2, 0)])
def test_empty_problems(batch, queries):
    call = make(lengths=(3,) * batch, Sq=queries, Sn=2) if batch else make(lengths=(3, 3), Sq=queries, Sn=2)
    if not batch:
        call.q, call.options = call.q[:0], {"cache_seqlens": int32(), "layout": "bhsd"}
    out, lse = call.run(return_lse=True)
    assert out.numel() == 0 and lse.numel() == 0
    if batch:  # no queries: the new keys are written all the same
        assert torch.equal(call.k_cache[:, :, 3:5], call.options["k_new"])


def test_saved_tensors_notice_the_change():
    call = make(lengths=(3, 3))
    x = torch.ones((), requires_grad=True)
    y = (call.k_cache * x).sum()  # saves the cache for its backward
    call.run(k_new=None, v_new=None)  # writes nothing
    y.backward(retain_graph=True)
    call.run()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_inference_mode_and_autocast():
    with torch.inference_mode():
        call = make(causal=True)
        assert call.run().shape == call.q.shape[:-1] + (12,)
    call = make(causal=True, dtype=torch.bfloat16)
    q, k_new, v_new = (x.float() for x in (call.q, call.options["k_new"], call.options["v_new"]))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = plait.attention_with_kvcache(q, call.k_cache, call.v_cache, **{**call.options, "k_new": k_new,
                                                                             "v_new": v_new})  # fmt: skip
    assert torch.equal(out, call.run())
