"""Bad input: one clear error each, that names the argument and says what is legal; eager, fake and compiled alike."""

import math
import re

import oracle
import plait
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode


def qkv(dtype=torch.float32, **changes):
    shapes = {"q": (2, 4, 5, 8), "k": (2, 2, 7, 8), "v": (2, 2, 7, 8), **changes}
    return [torch.randn(shapes[n]).to(dtype) for n in "qkv"]


def attend(*tensors, **options):
    return lambda: plait.flash_attention(*tensors, **options)


# (what, call, text that the message must contain): the argument's name comes first.
BAD = [
    ("rank", attend(*qkv(q=(4, 5, 8))), r"q: .*\[4, 5, 8\].*\[B, Hq, Sq, D\]"),
    ("rank of v", attend(*qkv(v=(2, 7, 8))), r"v: .*\[B, Hk, Sk, Dv\]"),
    ("rank above any", attend(*qkv(q=(1, 1, 2, 4, 5, 8))), "q: "),
    ("batch", attend(*qkv(k=(3, 2, 7, 8))), "k: .*3.*2"),
    ("length of v", attend(*qkv(v=(2, 2, 6, 8))), "v: .*6.*7"),
    ("heads of v", attend(*qkv(v=(2, 1, 7, 8))), "v: .*heads"),
    ("head dim", attend(*qkv(k=(2, 2, 7, 6))), "k: .*head dim"),
    ("head dim above 1024", attend(*qkv(q=(2, 4, 5, 1025), k=(2, 2, 7, 1025))), "q: .*1025.*1024"),
    ("heads no multiple", attend(*qkv(k=(2, 3, 7, 8), v=(2, 3, 7, 8))), "k: .*3.*4"),
    ("dtype", attend(*qkv(torch.int64)), "q: .*float"),
    ("dtype mix", attend(qkv()[0], *qkv(torch.bfloat16)[1:]), "k: .*bfloat16"),
    ("complex", attend(*qkv(torch.complex64)), "q: "),
    ("sparse", attend(qkv()[0].to_sparse(), *qkv()[1:]), "q: .*strided"),
    ("no tensor", attend(1.0, *qkv()[1:]), "q: got float, expected a torch.Tensor"),
    ("scale", attend(*qkv(), scale=math.nan), "scale: .*finite"),
    ("infinite scale", attend(*qkv(), scale=math.inf), "scale: .*finite"),
    ("text for scale", attend(*qkv(), scale="1"), "scale: got '1', expected a number"),
    ("softcap", attend(*qkv(), softcap=-1.0), "softcap: .*-1"),
    ("infinite softcap", attend(*qkv(), softcap=math.inf), "softcap: .*inf"),
    ("window", attend(*qkv(), window=(-2, 0)), "window: .*-2.*-1"),
    ("right of window", attend(*qkv(), window=(0, -5)), "window: .*-5"),
    ("int for window", attend(*qkv(), window=5), r"window: got 5, expected None or \(left, right\)"),
    ("float in window", attend(*qkv(), window=(1.5, 0)), "window: got 1.5"),
    ("split_size", attend(*qkv(), split_size=-3), "split_size: .*-3"),
    ("split_size with split_q", attend(*qkv(), split_size=8, strategy="split_q"), "split_size: .*split_kv"),
    ("causal", attend(*qkv(), causal=1), "causal: got 1, expected True or False"),
    ("strategy", attend(*qkv(), strategy="fast"), "strategy: .*fast.*split_q.*split_kv.*split_d"),
    ("backend", attend(*qkv(), backend="metal"), "backend: .*metal.*reference.*cpu"),
    ("layout", attend(*qkv(), layout="sbhd"), "layout: got 'sbhd', expected one of 'bhsd', 'bshd'"),
    ("out_dtype", attend(*qkv(), out_dtype=torch.bfloat16), "out_dtype: "),
    ("text for out_dtype", attend(*qkv(), out_dtype="float32"), "out_dtype: got 'float32'"),
    ("sinks", attend(*qkv(), sinks=torch.randn(3)), "sinks: "),
    ("sinks' dtype", attend(*qkv(), sinks=torch.randn(4).half()), "sinks: .*float32"),
    ("dropout", attend(*qkv(), dropout_p=0.1), "dropout_p: plait does not offer dropout"),
    ("no dropout", attend(*qkv(), dropout_p=0.0), "dropout_p: got 0.0; leave it out"),
    ("no mask", attend(*qkv(), attn_mask=None), "attn_mask: got None; leave it out"),
    ("mask", attend(*qkv(), attn_mask=torch.ones(5, 7)), "attn_mask: .*flex_attention"),
    ("alibi", attend(*qkv(), alibi_slopes=torch.ones(4)), "alibi_slopes: plait does not offer ALiBi"),
]  # fmt: skip


def packed(cu_q=(0, 2, 5), cu_k=(0, 3, 7), dtype=torch.int32, **options):
    q, k, v = torch.randn(5, 4, 8), torch.randn(7, 2, 8), torch.randn(7, 2, 8)
    cu_q, cu_k = (torch.tensor(cu, dtype=dtype) for cu in (cu_q, cu_k))
    return lambda: plait.flash_attention_varlen(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **options)


BAD_PACKED = [
    ("cu_seqlens dtype", packed(dtype=torch.int64), "cu_seqlens_q: .*int32"),
    ("start", packed(cu_q=(1, 2, 5)), "cu_seqlens_q: "),
    ("decreasing", packed(cu_k=(0, 8, 7)), "cu_seqlens_k: "),
    ("past the end", packed(cu_q=(0, 2, 6)), "cu_seqlens_q: "),
    ("counts differ", packed(cu_q=(0, 5)), "cu_seqlens_k: "),
    ("negative bound", packed(max_seqlen_q=-1), "max_seqlen_q: got -1"),
    ("tensor bound", packed(max_seqlen_k=torch.ones(3)), "max_seqlen_k: .*0-dim"),
    ("dense tensors", lambda: plait.flash_attention_varlen(*qkv(), cu_seqlens_q=torch.zeros(2, dtype=torch.int32),
                                                           cu_seqlens_k=torch.zeros(2, dtype=torch.int32)), "q: "),
]  # fmt: skip


def iha(tensors=None, w_q=(4, 2, 4), w_k=(2, 2, 2), w_v=(2, 2, 2), dtype=torch.float32, **options):
    weights = [torch.randn(shape).to(dtype) for shape in (w_q, w_k, w_v)]
    return lambda: plait.iha_attention(*(tensors or qkv()), *weights, **options)


def packed_iha(cu_q=(0, 2, 5), cu_k=(0, 3, 7)):
    tensors = torch.randn(5, 4, 8), torch.randn(7, 2, 8), torch.randn(7, 2, 8)
    cu_q, cu_k = (torch.tensor(cu, dtype=torch.int32) for cu in (cu_q, cu_k))
    return iha(tensors, rope=oracle.rope_tables(9, 4), cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)


BAD_IHA = [
    ("W of another H", iha(w_q=(2, 2, 2)), r"w_q: got shape \[2, 2, 2\], expected \[Hq, P, Hq\] = \[4, P, 4\]"),
    ("W with P first", iha(w_q=(2, 4, 4)), r"w_q: got shape \[2, 4, 4\], expected \[Hq, P, Hq\] = \[4, P, 4\]"),
    ("W rank", iha(w_k=(2, 2)), r"w_k: got shape \[2, 2\]"),
    ("P differs", iha(w_v=(2, 3, 2)), r"w_v: got shape \[2, 3, 2\], expected \[Hk, P, Hk\] = \[2, 2, 2\]"),
    ("P zero", iha(w_q=(4, 0, 4), w_k=(2, 0, 2), w_v=(2, 0, 2)), "w_q: .*P >= 1"),
    ("mode", iha(mode="plain"), "mode: got 'plain', expected 'joint' or 'interleaved'"),
    ("mask", iha(mode="interleaved", mask="row", collapse=torch.ones(4, 2)), "mask: got 'row'"),
    ("mask in joint", iha(mask="token"), "mask: .*interleaved"),
    ("collapse missing", iha(mode="interleaved"), "collapse: is missing; interleaved mode needs a tensor"),
    ("collapse in joint", iha(collapse=torch.ones(4, 2)), "collapse: joint mode has none"),
    ("collapse shape", iha(mode="interleaved", collapse=torch.ones(4, 3)), r"collapse: .*\[4, 3\]"),
    ("rank", iha(qkv(q=(4, 5, 8))), r"q: got shape \[4, 5, 8\], expected \[B, H, S, D\]"),
    ("one cu_seqlens", iha([x[0].transpose(0, 1) for x in qkv()], cu_seqlens_q=torch.tensor([0, 5]).int()),
     "cu_seqlens_k: "),
    ("rope type", iha(rope=torch.ones(7, 4)), r"rope: got Tensor, expected None or \(cos, sin\)"),
    ("short rope", iha(rope=oracle.rope_tables(3, 4)), "rope|cos"),
    ("wide rope", iha(rope=oracle.rope_tables(7, 5)), "rope|cos"),
    ("rope style", iha(rope=oracle.rope_tables(7, 4), rope_style="full"), "rope_style: got 'full'.*'half', 'pairs'"),
    ("rope index", iha(rope=oracle.rope_tables(99, 4), mode="interleaved", collapse=torch.ones(4, 2), rope_index="n"),
     "rope_index: got 'n'"),
    ("rope gradients", iha(rope=tuple(t.requires_grad_() for t in oracle.rope_tables(7, 4))), "rope: .*detach"),
    ("dtype of w_q", iha(qkv(torch.bfloat16), dtype=torch.half), "w_q: got float16, expected float32 or bfloat16.* q$"),
    ("dtype of w_v", lambda: plait.iha_attention(*qkv(), torch.randn(4, 2, 4), *(torch.randn(2, 2, 2).to(t)
                                                 for t in (torch.float, torch.half))), "w_v: got float16.* v$"),
    ("head dim in IHA", iha(qkv(v=(2, 2, 7, 1025))), "v: got head dim 1025"),
    ("cu_seqlens of IHA", packed_iha(cu_k=(0, 8, 7)), "cu_seqlens_k: decreases"),
    ("cu_seqlens counts of IHA", packed_iha(cu_q=(0, 5)), "cu_seqlens_k: got 3 offsets, expected 2 as cu_seqlens_q"),
    ("weight dtype", lambda: plait.premix(qkv()[0], torch.randn(4, 2, 4).half()), "w: .*float16"),
    ("premix weight", lambda: plait.premix(qkv()[0], torch.randn(3, 2, 3)), "w: "),
    ("fold P", lambda: plait.fold_premix_into_projection(torch.randn(8, 3), torch.randn(2, 2, 2)), "w: .*P = 1"),
    ("fold rows", lambda: plait.fold_premix_into_projection(torch.randn(7, 3), torch.randn(2, 1, 2)), "weight: "),
    ("window rule P", lambda: plait.flop_matched_window(100, 0), "P: got 0"),
    ("window rule N", lambda: plait.flop_matched_window(0, 4), "N: got 0"),
    ("window rule 2P > N", lambda: plait.flop_matched_window(6, 4), "P: got 4"),
    ("window rule mode", lambda: plait.flop_matched_window(100, 2, mode="plain"), "mode: got 'plain'"),
    ("window rule float", lambda: plait.flop_matched_window(100.0, 2), "N: got 100.0"),
    ("module heads", lambda: plait.nn.InterleavedHeadAttention(8, 4, 3, 2, P=1), "kv_heads: got 3"),
    ("module P", lambda: plait.nn.InterleavedHeadAttention(8, 4, 2, 2, P=0), "P: got 0"),
    ("module mode", lambda: plait.nn.InterleavedHeadAttention(8, 4, 2, 2, P=1, mode="x"), "mode: got 'x'"),
    ("module cu_seqlens", lambda: plait.nn.InterleavedHeadAttention(8, 4, 2, 2, P=1)(
        torch.ones(2, 8), cu_seqlens=torch.tensor([0, 2])), "cu_seqlens: got torch.int64"),
    ("module input", lambda: plait.nn.InterleavedHeadAttention(8, 4, 2, 2, P=1)(torch.ones(2, 8)), "x: got shape"),
]  # fmt: skip


def state(n=2, S=5, D=8, dtype=torch.float32):
    return [torch.randn(2, 3, S, D).to(dtype) for _ in range(n)], [torch.randn(2, 3, S) for _ in range(n)]


BAD_MERGE = [
    ("nothing", lambda: plait.merge_states([], []), "lses: got 0 outs"),
    ("counts", lambda: plait.merge_states(state()[0], state()[1][:1]), "lses: got 2 outs and 1 lses"),
    ("shapes", lambda: plait.merge_states(state(1)[0] + state(1, 6)[0], state()[1]), "outs: "),
    ("lse shapes", lambda: plait.merge_states(state()[0], state(2, 6)[1]), "lse"),
    ("dtypes", lambda: plait.merge_states(state(1)[0] + state(1, dtype=torch.half)[0], state()[1]), "outs: "),
    ("rank", lambda: plait.merge_states([torch.ones(3, 4)], [torch.ones(3)]), "out"),
    ("layout", lambda: plait.merge_states(*state(), layout="x"), "layout: got 'x'"),
]

EVERYTHING = [*BAD, *BAD_PACKED, *BAD_IHA, *BAD_MERGE]


@pytest.mark.parametrize("what, call, message", EVERYTHING, ids=[b[0] for b in EVERYTHING])
def test_bad_input_is_a_value_error(what, call, message):
    with pytest.raises(ValueError) as error:
        call()
    text = str(error.value)
    assert re.match(message, text, re.DOTALL), text
    assert "Exception raised from" not in text and "\n" not in text.strip(), "the message is one line of our own"


def test_backward_arguments():
    q, k, v = qkv()
    out, lse = plait.flash_attention(q, k, v, return_lse=True)
    cases = {
        "dout": (out[:, :, :4], q, k, v, out, lse),
        "out": (out, q, k, v, out.half(), lse),
        "lse": (out, q, k, v, out, lse[:, :1]),
        "k": (out, q, k[:1], v, out, lse),
    }
    for name, arguments in cases.items():
        with pytest.raises(ValueError, match=f"^{name}: "):
            plait.attention_backward(*arguments)
    with pytest.raises(ValueError, match="^dlse: "):
        plait.attention_backward(out, q, k, v, out, lse, dlse=lse[:1])
    with pytest.raises(ValueError, match="^lse: .*float32"):
        plait.attention_backward(out, q, k, v, out, lse.double())


def test_unknown_keywords_and_positional_options():
    for call in (attend(*qkv(), casual=True), lambda: plait.flash_attention(*qkv(), True)):
        with pytest.raises(TypeError):
            call()


@pytest.mark.parametrize(
    ("keyword", "hint"),
    [
        ({"is_causal": True}, "plait calls it causal="),
        ({"window_size": (3, 0)}, "plait calls it window="),
        ({"softmax_scale": 1.0}, "plait calls it scale="),
        ({"return_attn_probs": True}, "plait calls it return_lse="),
        ({"enable_gqa": True}, "leave it out, k and v may have fewer heads"),
        ({"sliding_window": 4}, "window=(W - 1, 0)"),
        ({"causl": True}, "did you mean causal=?"),
        ({"zzz": 1}, "it has q, k, v, causal,"),
    ],
    ids=str,
)
def test_names_of_other_libraries_are_pointed_to_ours(keyword, hint):
    with pytest.raises(TypeError) as error:
        plait.flash_attention(*qkv(), **keyword)
    text = f"flash_attention() got an unexpected keyword argument '{next(iter(keyword))}'; "
    assert str(error.value).startswith(text) and hint in str(error.value), str(error.value)


def test_hints_name_what_the_function_has():
    with pytest.raises(TypeError, match="plait calls it block_table="):
        plait.attention_with_kvcache(*qkv(), cache_seqlens=3, page_table=None)
    with pytest.raises(TypeError, match="argument 'page_table'; it has q, k, v"):
        plait.flash_attention(*qkv(), page_table=None)


UNSUPPORTED = [
    ("float64", attend(*qkv(torch.float64)), "float64"),
    ("split_d", attend(*qkv(), strategy="split_d"), "split_d"),
    ("cuda backend", attend(*qkv(), backend="cuda_sm90"), "cuda_sm90"),
    ("reference has no strategies", attend(*qkv(), backend="reference", strategy="split_q"), "split_q"),
]


@pytest.mark.parametrize("what, call, message", UNSUPPORTED, ids=[u[0] for u in UNSUPPORTED])
def test_what_no_backend_serves_is_a_runtime_error(what, call, message):
    with pytest.raises(RuntimeError, match=message) as error:
        call()
    text = str(error.value)
    assert "required" in text and "supported" in text and ("missing" in text or "not in this build" in text), text


def test_cuda_tensors_are_refused_with_a_way_out():
    with FakeTensorMode():
        q = torch.empty(1, 2, 8, 16, device="cuda")
        for call in (attend(q, q, q), lambda: plait.premix(q, torch.empty(2, 1, 2, device="cuda"))):
            with pytest.raises(RuntimeError, match="device: "):
                call()
        with pytest.raises(ValueError, match="k: .*cuda"):
            plait.flash_attention(torch.empty(1, 2, 8, 16), q, q)


STATIC = [
    b
    for b in EVERYTHING
    if b[0] not in ("sparse", "complex", "start", "decreasing", "past the end", "cu_seqlens of IHA")
]


@pytest.mark.parametrize("what, call, message", STATIC, ids=[b[0] for b in STATIC])
def test_fake_tensors_are_refused_alike(what, call, message):
    """The same words while tracing: the fake kernels ask the planner of the real ones."""
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(ValueError) as error:
        call()
    assert re.match(message, str(error.value), re.DOTALL), str(error.value)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_calls_show_the_message(dynamic):
    compiled = torch.compile(plait.flash_attention, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    with pytest.raises(Exception, match="k: .*3.*4"):
        compiled(*qkv(k=(2, 3, 7, 8), v=(2, 3, 7, 8)))
    with pytest.raises(Exception, match="layout: got 'sbhd'"):
        compiled(*qkv(), layout="sbhd")


def test_strategy_is_honoured_and_explained():
    q, k, v = qkv()
    plans = {s: plait.explain(q, k, v, strategy=s) for s in ("split_q", "split_kv")}
    for strategy, text in plans.items():
        assert re.search(rf"strategy +{strategy}\n", text), text
    assert plans["split_q"] != plans["split_kv"]
    results = [plait.flash_attention(q, k, v, strategy=s) for s in plans]
    torch.testing.assert_close(*results, atol=1e-6, rtol=1e-5)
    assert "reference" in plait.explain(q, k, v, backend="reference")
    assert plait.explain(q, k, v, backward=True) != plait.explain(q, k, v)
    pseudo = [torch.randn(2, H, 5, 3, 8) for H in (4, 2, 2)]
    assert plait.explain(*pseudo, mode="joint") and plait.explain(*pseudo, mode="interleaved", backward=True)


def test_explain_refuses_what_the_call_refuses():
    with pytest.raises(ValueError, match="^k: "):
        plait.explain(*qkv(k=(2, 3, 7, 8), v=(2, 3, 7, 8)))
    with pytest.raises(ValueError, match="^device: "):
        plait.explain(*qkv(), device="abacus")
    with pytest.raises(RuntimeError, match="missing"):
        plait.explain(*qkv(), strategy="split_d")


def _q(*shape):
    return torch.randn(*shape)


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: plait.flash_attention(_q(1, 2, 4, 8), _q(1, 2, 5, 8).to("meta"), _q(1, 2, 5, 8)), "k"),
        (lambda: plait.premix(_q(1, 2, 4, 8), _q(2, 3, 2).to("meta")), "w"),
        (lambda: plait.merge_states([_q(1, 2, 4, 8)], [_q(1, 2, 4).to("meta")]), "lses"),
        (lambda: plait.merge_states(None, None), "outs"),
        (
            lambda: plait.flash_attention_varlen(
                *(_q(4, 2, 8),) * 3, cu_seqlens_q=torch.tensor([0, 4]), cu_seqlens_k=torch.tensor([0, 4])
            ),
            "cu_seqlens_q: got torch.int64",
        ),
        (lambda: plait.flash_attention(*(_q(1, 2, 4, 8),) * 3, softcap=3e38), "softcap"),
        (lambda: plait.flash_attention(*(_q(1, 2, 4, 8),) * 3, scale=1e39), "scale"),
        (lambda: plait.flash_attention(*(_q(1, 2, 4, 8),) * 3, scale=10**400), "scale"),
        (lambda: plait.flash_attention(*(_q(1, 2, 4, 8),) * 3, window=(2**63, 0)), "window"),
        (lambda: plait.fold_premix_into_projection(torch.ones(8, 4, dtype=torch.int32), _q(2, 1, 2)), "weight"),
        (
            lambda: plait.iha_attention(*(_q(1, 2, 4, 8),) * 3, *(_q(2, 2, 2),) * 3, rope_index="zz"),
            "rope_index",
        ),
        (lambda: plait.nn.InterleavedHeadAttention(16, 2, 2, 8, P=2, window=(-3, 0)), "window"),
        (lambda: plait.iha_attention(*(_q(1, 2, 4, 8),) * 3, *(_q(2, 2, 2),) * 3, rope_style="zz"), "rope_style: got"),
        (lambda: plait.premix(_q(1, 2, 4, 8), _q(2, 2, 2), rope_style="zz"), "rope_style: got"),
        (lambda: plait.flop_matched_window(2**63, 1), "N: .*63 bits"),
        (lambda: plait.flop_matched_window(8192, 4, tile=-(2**70)), "tile: .*63 bits"),
        (lambda: plait.merge_states([_q(1, 2, 4, 8)] * 2, [_q(1, 2, 5)] * 2), "^lses: got shape"),
        (lambda: plait.merge_states([_q(2, 4)], [_q(2, 4)]), "^outs: got rank"),
        (lambda: plait.merge_states([_q(1, 2, 4, 2000)], [_q(1, 2, 4)]), "^outs: got head dim"),
        (
            lambda: plait.attention_backward(
                *(_q(1, 2, 4, 8),) * 5, _q(1, 2, 4), cu_seqlens_q=torch.tensor([0, 4], dtype=torch.int32)
            ),
            "^cu_seqlens_k: is missing",
        ),
        (lambda: plait.nn.InterleavedHeadAttention(16, 2, 2, 2048, P=2), "head_dim"),
    ],
)
def test_what_would_be_silent_is_refused(call, argument):
    with pytest.raises(ValueError, match=argument):
        call()


def test_forward_mode_tangents_are_refused():
    q, k = _q(1, 2, 4, 8), _q(1, 2, 5, 8)
    with pytest.raises(RuntimeError, match="q: got a forward-mode tangent"):
        torch.func.jvp(lambda x: plait.flash_attention(x, k, k), (q,), (q,))


def test_a_transposed_weight_folds():
    weight, w = _q(6, 16).T, _q(2, 1, 2)
    expected = torch.einsum("hs,sdi->hdi", w[:, 0], weight.reshape(2, 8, 6)).reshape(16, 6)
    torch.testing.assert_close(plait.fold_premix_into_projection(weight, w), expected)


def test_the_backward_is_explained_without_the_strategy_of_the_forward():
    """As autograd runs it: split_size and strategy are the forward's."""
    q, k, v = (x.requires_grad_() for x in qkv())
    for options in ({"split_size": 64}, {"strategy": "split_q"}, {"strategy": "split_kv"}):
        torch.autograd.grad(plait.flash_attention(q, k, v, **options).sum(), q)
        assert "attention_backward" in plait.explain(q, k, v, backward=True, **options)


def test_a_result_that_does_not_fit_memory_names_its_argument():
    q, k = torch.ones(1, 1, 1, 8).expand(2**10, 2**15, 2**20, 8), torch.ones(1, 1, 1, 8).expand(2**10, 2**15, 1, 8)
    with pytest.raises(RuntimeError, match=r"q: torch cannot allocate .*\[1024, 32768, 1048576, 8\].*smaller"):
        plait.flash_attention(q, k, k)
    q = torch.ones(1, 1, 1, 8).expand(2**10, 2**20, 2**20, 8)
    with pytest.raises(ValueError, match=r"q: got \[1024, 1048576, 1048576, 8\], expected at most 2\^48 elements"):
        plait.flash_attention(q, q, q)
    x = torch.ones(1, 1, 1, 8).expand(2**20, 1, 2**20, 8)
    with pytest.raises(RuntimeError, match="x: torch cannot allocate"):
        plait.premix(x, torch.ones(1, 1, 1))


def test_autocast_is_named_where_weights_keep_their_dtype():
    x, w = _q(1, 2, 4, 8), _q(2, 2, 2).half()
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(ValueError, match="w: got torch.float16, .*autocast is on"):
            plait.premix(x, w)
        with pytest.raises(ValueError, match="w_q: got torch.float16, .*autocast is on"):
            plait.iha_attention(x, x, x, w, w, w)
        assert plait.premix(x, w.float()).dtype == torch.bfloat16
