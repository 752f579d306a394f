"""Bad calls over key-value caches: one clear error that names the argument, nothing written; fake tensors alike."""

import oracle
import plait
import pytest
import torch
from cache_calls import iha_setup, int32, make
from torch._subclasses.fake_tensor import FakeTensorMode

pytestmark = pytest.mark.usefixtures("one_thread")


def tables(positions, dims):
    return dict(zip(("rotary_cos", "rotary_sin"), oracle.rope_tables(positions, dims), strict=True))


BAD = {
    "length past the cache": (lambda c: c.run(cache_seqlens=int32(17, 0, 39)), "cache_seqlens: got 39"),
    "negative length": (lambda c: c.run(cache_seqlens=int32(17, -1, 30)), "cache_seqlens: got -1"),
    "negative int": (lambda c: c.run(cache_seqlens=-1), "cache_seqlens: got -1"),
    "lengths of another type": (lambda c: c.run(cache_seqlens=int32(1, 2, 3).long()),
                                "cache_seqlens: got torch.int64, expected torch.int32"),
    "a list": (lambda c: c.run(cache_seqlens=[1, 2, 3]), "cache_seqlens: got list"),
    "lengths of another batch": (lambda c: c.run(cache_seqlens=int32(1, 2)), "cache_seqlens: "),
    "cache row": (lambda c: c.run(cache_batch_idx=int32(0, 1, 3)), "cache_batch_idx: got 3"),
    "negative cache row": (lambda c: c.run(cache_batch_idx=int32(0, -1, 2)), "cache_batch_idx: got -1"),
    "two into one row": (lambda c: c.run(cache_batch_idx=int32(0, 1, 1), cache_seqlens=int32(3, 4, 5)),
                         "cache_batch_idx: .*cache row 1"),
    "rows of another type": (lambda c: c.run(cache_batch_idx=torch.arange(3)), "cache_batch_idx: .*int32"),
    "one of two new": (lambda c: c.run(v_new=None), "v_new: is missing"),
    "new keys' heads": (lambda c: c.run(k_new=torch.randn(3, 4, 2, 16)), "k_new: "),
    "new keys' dtype": (lambda c: c.run(k_new=c.options["k_new"].half()), "k_new: .*float16"),
    "cache dtype": (lambda c: plait.attention_with_kvcache(c.q, c.k_cache.half(), c.v_cache, **c.options), "k_cache: "),
    "rank of the cache": (lambda c: plait.attention_with_kvcache(c.q, c.k_cache[0], c.v_cache, **c.options),
                          r"k_cache: .*\[B, Hk, S_max, D\]"),
    "head dim": (lambda c: plait.attention_with_kvcache(c.q[..., :8], c.k_cache, c.v_cache, **c.options), "k_cache: "),
    "heads": (lambda c: plait.attention_with_kvcache(c.q[:, :3], c.k_cache, c.v_cache, **c.options), "k_cache: .*3"),
    "sinks": (lambda c: c.run(sinks=torch.randn(4).half()), "sinks: .*float32"),
    "one table": (lambda c: c.run(rotary_cos=torch.ones(40, 8)), "rotary_sin: is missing"),
    "tables' dtype": (lambda c: c.run(rotary_cos=torch.ones(40, 8).half(), rotary_sin=torch.ones(40, 8).half()),
                      "rotary_cos: .*float32"),
    "short tables": (lambda c: c.run(**tables(31, 8)), "rotary_cos: "),
    "wide tables": (lambda c: c.run(**tables(40, 9)), "rotary_cos: .*18 dims"),
    "tables of two shapes": (lambda c: c.run(rotary_cos=torch.ones(40, 8), rotary_sin=torch.ones(40, 7)),
                             "rotary_sin: .*the shape of rotary_cos"),
    "rank of tables": (lambda c: c.run(rotary_cos=torch.ones(1, 1, 1, 1, 40, 8), rotary_sin=torch.ones(40, 8)),
                       "rotary_cos: got rank 6"),
    "more new keys than positions": (lambda c: plait.attention_with_kvcache(
        c.q, c.k_cache[:, :, :1], c.v_cache[:, :, :1], **c.options | {"cache_seqlens": 0}),
        "k_new: got 2 new keys, but the cache holds 1"),
    "a row of no cache": (lambda c: plait.attention_with_kvcache(
        c.q, c.k_cache[:0], c.v_cache[:0], **c.options | {"cache_batch_idx": int32(0, 0, 0)}),
        "cache_batch_idx: got 0 .*none: the cache has no rows"),
    "rotation": (lambda c: c.run(rotary_interleaved="pairs"), "rotary_interleaved: got 'pairs'"),
    "query before the start": (lambda c: c.run(**tables(40, 8),
                                               k_new=None, v_new=None), "rotary_cos: .*before position 0"),
    "layout": (lambda c: c.run(layout="x"), "layout: got 'x'"),
    "dropout": (lambda c: c.run(dropout_p=0.1), "dropout_p: plait does not offer dropout"),
    "gradients": (lambda c: plait.attention_with_kvcache(c.q.clone().requires_grad_(), c.k_cache, c.v_cache,
                                                         **c.options), "q: requires gradients.*no_grad"),
}  # fmt: skip

BAD_PAGES = {
    "page past the pool": (lambda c: c.run(block_table=changed(c, 11)), "block_table: got page 11"),
    "negative page": (lambda c: c.run(block_table=changed(c, -1)), "block_table: got page -1"),
    # Dao-AILab/flash-attention#2711: more keys than the table's pages hold.
    "no pages for a new key": (lambda c: c.run(block_table=c.options["block_table"][:, :0], cache_seqlens=0),
                               "k_new: got 2 new keys, but the cache holds 0; give block_table more columns"),
    "length past the table": (lambda c: c.run(cache_seqlens=int32(17, 0, 47)), "cache_seqlens: got 47"),
    "two into one page": (lambda c: c.run(block_table=c.options["block_table"][[0, 0, 2]],
                                          cache_seqlens=int32(17, 17, 30)), "block_table: two sequences append"),
    "table of another type": (lambda c: c.run(block_table=c.options["block_table"].long()), "block_table: .*int32"),
    "table of another batch": (lambda c: c.run(block_table=c.options["block_table"][:2]), "block_table: "),
    "rows and pages": (lambda c: c.run(cache_batch_idx=int32(0, 1, 2)), "cache_batch_idx: .*block table"),
}  # fmt: skip


def changed(call, page):
    table = call.options["block_table"].clone()
    table[0, 1] = page
    return table


@pytest.mark.parametrize("case", [*BAD, *BAD_PAGES])
def test_refusals_write_nothing(case):
    call = make() if case in BAD else make(page=16)
    before = call.k_cache.clone(), call.v_cache.clone()
    action, message = BAD.get(case) or BAD_PAGES[case]
    with pytest.raises(ValueError, match=f"(?s)^{message}"):
        action(call)
    for cache, old in zip((call.k_cache, call.v_cache), before, strict=True):
        assert torch.equal(cache.nan_to_num(), old.nan_to_num())


CONTENTS = {"length past the cache", "negative length", "cache row", "negative cache row", "two into one row",
            "short tables", "query before the start",
            "more new keys than positions", "a row of no cache"}  # fmt: skip


@pytest.mark.parametrize("case", sorted(BAD.keys() - CONTENTS))
def test_fake_tensors_are_refused_alike(case):
    call = make()
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(ValueError, match=f"(?s)^{BAD[case][1]}"):
        BAD[case][0](call)


def test_what_no_backend_serves():
    with pytest.raises(RuntimeError, match="(?s)required.*supported"):
        make().run(strategy="split_d")
    with pytest.raises(TypeError, match="casual"):
        make().run(casual=True)


IHA_BAD = {
    "kind": ({"cache_kind": "both"}, "cache_kind: got 'both', expected one of 'mixed', 'raw'"),
    "mixed cache called raw": ({"cache_kind": "raw"}, "k_cache: "),
    "no pair": ({"cache": torch.ones(2)}, "cache: got Tensor"),
    "weight": ({"w_k": torch.ones(2, 2, 2)}, "w_k: "),
    "weight of q": ({"w_q": torch.ones(4, 0, 4)}, "w_q: .*P = 0"),
    "length": ({"cache_seqlens": int32(32, 0)}, "cache_seqlens: got 32"),
    "rope": ({"rope": torch.ones(40, 8)}, "rope: got Tensor"),
    "rope style": ({"rope": (torch.ones(40, 8), torch.ones(40, 8)), "rope_style": "x"}, "rope_style: got 'x'"),
    "pages": ({"block_table": int32(0)}, "block_table"),
    "gradients of cos": ({"rope": (torch.ones(40, 8, requires_grad=True), torch.ones(40, 8))}, "rope: .*gradients"),
    "gradients of sin": ({"rope": (torch.ones(40, 8), torch.ones(40, 8, requires_grad=True))}, "rope: .*gradients"),
    "rope style without rope": ({"rope_style": "x"}, "rope_style: got 'x'"),
    "table": ({"rope": (torch.ones(40, 8), 1)}, "rope sin: got int"),
    "gradients": ({"w_v": torch.ones(2, 3, 2, requires_grad=True)}, "w_v: requires gradients"),
}


@pytest.mark.parametrize("case", IHA_BAD)
def test_iha_refusals_write_nothing(case):
    q, k, v, (w_q, w_k, w_v), caches = iha_setup("mixed")
    change, message = IHA_BAD[case]
    arguments = {"q": q, "k_new": k, "v_new": v, "cache": caches, "w_q": w_q, "w_k": w_k, "w_v": w_v,
                 "cache_kind": "mixed", "cache_seqlens": int32(0, 0), **change}  # fmt: skip
    with pytest.raises(TypeError if case == "pages" else ValueError, match=message):
        plait.iha_attention_with_kvcache(**arguments)
    assert all(cache.isnan().all() for cache in caches)


def test_a_refused_append_leaves_the_caches_unmarked():
    """Autograd keeps what it saved of the caches: they have not changed, as with no new keys at all."""
    call = make()
    versions = [cache._version for cache in (call.k_cache, call.v_cache)]
    with pytest.raises(ValueError, match="cache_seqlens"):
        call.run(cache_seqlens=int32(17, -1, 30))
    none = {name: call.options[name][:, :, :0] for name in ("k_new", "v_new")}
    call.run(**none)
    assert [cache._version for cache in (call.k_cache, call.v_cache)] == versions
    call.run()
    assert [cache._version for cache in (call.k_cache, call.v_cache)] == [version + 1 for version in versions]

    q, k, v, weights, caches = iha_setup("mixed")
    versions = [cache._version for cache in caches]
    for length in (int32(32, 0), int32(0, 0)):
        arguments = {"cache_kind": "mixed", "cache_seqlens": length}
        if length[0] > 0:
            with pytest.raises(ValueError, match="cache_seqlens"):
                plait.iha_attention_with_kvcache(q, k, v, caches, *weights, **arguments)
            assert [cache._version for cache in caches] == versions
        else:
            plait.iha_attention_with_kvcache(q, k, v, caches, *weights, **arguments)
            assert [cache._version for cache in caches] == [version + 1 for version in versions]


def test_autocast_is_named_where_the_caches_keep_their_dtype():
    call = make()
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="k_cache: .*autocast is on"):
        call.run()
    q, k, v, weights, caches = iha_setup("mixed")
    caches, weights = [cache.bfloat16() for cache in caches], [w.half() for w in weights]
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="w_q: .*float16.*autocast is on"):
        plait.iha_attention_with_kvcache(q, k, v, caches, *weights, cache_kind="mixed", cache_seqlens=int32(0, 0))
