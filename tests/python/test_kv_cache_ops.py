"""The ops over caches: opcheck, fake layouts, compiled steps, and nothing else inside."""

import oracle
import plait
import pytest
import torch
from cache_calls import iha_setup, int32, make
from recorder import Recorder, foreign
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

OPS = torch.ops.plait
pytestmark = pytest.mark.usefixtures("one_thread")


def op_arguments(case):
    if case in ("mixed", "raw"):
        q, k, v, weights, caches = iha_setup(case)
        caches = [cache.nan_to_num() for cache in caches]
        rope = oracle.rope_tables(24, 8)
        tensors = (q[:, :, :3], k[:, :, :2], v[:, :, :2], *caches, *weights, int32(3, 9), int32(1, 0), *rope, None)
        names, op = (case, "half"), OPS.iha_attention_with_kvcache_
    else:
        call = make(layout="bshd" if case == "bshd" else "bhsd", page=4 if case == "paged" else 0)
        o = call.options
        rope = oracle.rope_tables(40, 8) if case == "rope" else (None, None)
        new = (None, None) if case == "nothing new" else (o["k_new"], o["v_new"])
        caches = (call.k_cache.nan_to_num(), call.v_cache.nan_to_num())
        tensors = (call.q, *caches, *new, o["cache_seqlens"], o.get("block_table"), None, *rope, torch.randn(4))
        names, op = ("pairs",), OPS.attention_with_kvcache_
    layout = "bshd" if case == "bshd" else "bhsd"
    return op, (*tensors, *names, True, -1, -1, None, 0.0, False, 0, "auto", "auto", None, layout)


OP_CASES = ["dense", "bshd", "paged", "rope", "nothing new", "mixed", "raw"]


@pytest.mark.parametrize("case", OP_CASES)
def test_opcheck(case):
    op, arguments = op_arguments(case)
    opcheck(op.default, arguments)


@pytest.mark.parametrize("case", OP_CASES)
def test_fake_results_have_the_real_layout(case):
    op, arguments = op_arguments(case)
    real = op(*arguments)
    with FakeTensorMode() as mode:
        fake = op(*(mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in arguments))
    for a, b in zip(real, fake, strict=True):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


def test_schema_tells_what_changes():
    for op in (OPS.attention_with_kvcache_.default, OPS.iha_attention_with_kvcache_.default):
        changed = {a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
        assert changed == {"k_cache", "v_cache"}


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_steps_change_the_caches(backend):
    def step(q, k, v, caches, lengths, weights, pseudo):
        out = plait.attention_with_kvcache(q, *caches, k_new=k, v_new=v, cache_seqlens=lengths, causal=True)
        mixed = plait.iha_attention_with_kvcache(q, k, v, pseudo, *weights, cache_kind="raw", cache_seqlens=lengths,
                                                 causal=True)  # fmt: skip
        return out + mixed, lengths + q.shape[2]

    q, k, v, weights, raw = iha_setup("raw", D=16, Dv=16)
    results = []
    with torch.no_grad():
        for run in (step, torch.compile(step, fullgraph=True, backend=backend, dynamic=True)):
            caches, pseudo = ([torch.zeros_like(cache) for cache in raw] for _ in range(2))
            lengths, outs = int32(0, 0), []
            for begin, end in ((0, 9), (9, 10), (10, 11)):
                out, lengths = run(*(x[:, :, begin:end] for x in (q, k, v)), caches, lengths, weights, pseudo)
                outs.append(out)
            results.append([torch.cat(outs, 2), *caches, *pseudo, lengths])
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-6, atol=1e-6)


def test_nothing_else_runs_inside():
    call = make(rope_dims=8, causal=True, page=4)
    q, k, v, weights, caches = iha_setup("mixed")
    lengths = int32(0, 0)
    with Recorder() as recorder:
        call.run(return_lse=True)
        plait.iha_attention_with_kvcache(q, k, v, caches, *weights, cache_kind="mixed", cache_seqlens=lengths)
    assert foreign(recorder.names) == set()
    assert {"plait::attention_with_kvcache_", "plait::iha_attention_with_kvcache_"} <= recorder.names


def test_the_functional_names():
    for name in ("attention_with_kvcache", "iha_attention_with_kvcache"):
        assert getattr(plait, name) is getattr(plait.functional, name)
        assert name in plait.__all__ and name in plait.functional.__all__
