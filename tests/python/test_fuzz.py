"""Random calls of the Python package and the command, all options mixed; malformed input of every kind.

A call gives the result of the float64 reference, or one clear error.
"""

import importlib.util
import math
import subprocess
from pathlib import Path

import oracle
import plait
import pytest
import torch
from cases import compare, dense, dense_reference, near, packed, packed_expected
from hypothesis import given
from hypothesis import strategies as st

DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
LENGTHS = st.one_of(st.sampled_from([0, 1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129]), st.integers(0, 90))
WINDOWS = st.one_of(st.none(), st.tuples(*[st.one_of(st.none(), st.integers(-1, 140))] * 2))


@st.composite
def options(draw):
    """What every attention call takes, and what the reference takes of it."""
    math_options = {
        "causal": draw(st.booleans()),
        "window": draw(WINDOWS),
        "scale": draw(st.one_of(st.none(), st.floats(-0.5, 0.5))),
        "softcap": draw(st.sampled_from([None, 0.0, 2.0, 20.0])),
    }
    how = {"deterministic": draw(st.booleans()), "strategy": draw(st.sampled_from(["auto", "split_q", "split_kv"]))}
    if how["strategy"] != "split_q":
        how["split_size"] = draw(st.sampled_from([None, 1, 50, 64, 2**62]))
    return math_options, how


def strided(draw, dtype, *shape):
    """Random numbers of this shape in memory of another order, with gaps."""
    order = draw(st.permutations(range(len(shape))))
    gap = draw(st.integers(0, 1))
    memory = torch.randn([shape[i] + gap for i in order]).to(dtype)
    view = memory[tuple(slice(gap, None) for _ in order)]
    return view.permute([order.index(i) for i in range(len(shape))])


@st.composite
def heads_and_dims(draw):
    Hk = draw(st.integers(1, 2))
    D = draw(st.sampled_from([1, 3, 8, 16, 20, 64]))
    return Hk * draw(st.integers(1, 3)), Hk, D, draw(st.sampled_from([D, 1, 24]))


@given(st.data(), DTYPES, options(), heads_and_dims(), LENGTHS, LENGTHS)
def test_dense_attention(data, dtype, chosen, sizes, Sq, Sk):
    torch.manual_seed(0)
    (math_options, how), (Hq, Hk, D, Dv) = chosen, sizes
    B, layout = data.draw(st.integers(0, 3)), data.draw(st.sampled_from(["bhsd", "bshd"]))
    tensors = [strided(data.draw, dtype, B, H, S, d) for H, S, d in ((Hq, Sq, D), (Hk, Sk, D), (Hk, Sk, Dv))]

    def call(*tensors):
        if layout == "bhsd":
            return dense(**math_options, **how)(*tensors)
        out, lse = dense(**math_options, **how, layout=layout)(*(x.transpose(1, 2) for x in tensors))
        return out.transpose(1, 2), lse

    compare(call, dense_reference(**math_options), tensors, terms=8)


@given(st.data(), DTYPES, options(), heads_and_dims(), st.lists(st.tuples(LENGTHS, LENGTHS), min_size=1, max_size=4))
def test_packed_attention(data, dtype, chosen, sizes, lengths):
    torch.manual_seed(0)
    (math_options, how), (Hq, Hk, D, Dv) = chosen, sizes
    cu_q, cu_k = (torch.tensor([0, *part]).cumsum(0).int() for part in zip(*lengths, strict=True))
    shapes = ((int(cu_q[-1]), Hq, D), (int(cu_k[-1]), Hk, D), (int(cu_k[-1]), Hk, Dv))
    tensors = [strided(data.draw, dtype, *shape) for shape in shapes]
    call, reference = packed(cu_q, cu_k, **math_options, **how), packed_expected(cu_q, cu_k, **math_options)
    compare(call, reference, tensors, terms=8)


@st.composite
def cache_steps(draw):
    """A step over a dense or paged cache with its index tensors, sound or not."""
    B, Hk, Sn = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(0, 3))
    wild = st.one_of(st.integers(-3, 30), st.sampled_from([-(2**31), 2**31 - 1]))
    sound = draw(st.booleans())
    page = draw(st.sampled_from([0, 1, 4, 7]))
    capacity = page * 4 if page else 20

    def numbers(count, legal):
        return draw(st.lists(legal if sound else st.one_of(legal, wild), min_size=count, max_size=count))

    lengths = numbers(B, st.integers(0, capacity - Sn))
    if page:
        table = draw(st.permutations(range(4 * B + 1)))[: 4 * B] if sound else numbers(4 * B, st.integers(0, 4 * B))
        return page, Hk, Sn, lengths, {"block_table": torch.tensor(table, dtype=torch.int32).view(B, 4)}, 4 * B + 1
    rows = draw(st.permutations(range(B + 1)))[:B] if sound else numbers(B, st.integers(0, B))
    return 0, Hk, Sn, lengths, {"cache_batch_idx": torch.tensor(rows, dtype=torch.int32)}, B + 1


def place(page, index, b, position):
    if page:
        return int(index["block_table"][b, position // page]), position % page
    return int(index["cache_batch_idx"][b]), position


def legal_step(page, index, lengths, Sn, count, capacity):
    """Whether the contract allows the step, from the numbers alone."""
    written = []
    for b, length in enumerate(lengths):
        if length < 0 or length + Sn > capacity:
            return False
        rows = {place(page, index, b, i)[0] for i in range(length + Sn)} or set()
        if not page:
            rows = {int(index["cache_batch_idx"][b])}
        if any(row < 0 or row >= count for row in rows):
            return False
        written += [place(page, index, b, i) for i in range(length, length + Sn)]
    return len(set(written)) == len(written)


@given(cache_steps(), st.booleans(), st.integers(1, 4), st.booleans())
def test_cache_steps_sound_or_refused(step, causal, Sq, bshd):
    torch.manual_seed(0)
    page, Hk, Sn, lengths, index, count = step
    B, Hq, D, slots = len(lengths), 2 * Hk, 8, page or 20
    order = (lambda x: x.transpose(1, 2)) if bshd else (lambda x: x)
    pool_order = (lambda x: x.transpose(1, 2)) if page or bshd else (lambda x: x)
    caches = [torch.randn(count, Hk, slots, D) for _ in range(2)]  # [row or page, Hk, slot, D]
    before = [c.clone() for c in caches]
    q, k_new, v_new = torch.randn(B, Hq, Sq, D), torch.randn(B, Hk, Sn, D), torch.randn(B, Hk, Sn, D)
    fresh = {"k_new": order(k_new), "v_new": order(v_new)} if Sn else {}

    def call():
        out, lse = plait.attention_with_kvcache(
            order(q), *(pool_order(c) for c in caches), cache_seqlens=torch.tensor(lengths, dtype=torch.int32),
            causal=causal, return_lse=True, layout="bshd" if bshd else "bhsd", **index, **fresh,
        )  # fmt: skip
        return order(out), lse

    if not legal_step(page, index, lengths, Sn, count, page * 4 if page else 20):
        with pytest.raises(ValueError, match="^(cache_seqlens|block_table|cache_batch_idx): ") as error:
            call()
        assert "\n" not in str(error.value)
        assert all(torch.equal(c, old) for c, old in zip(caches, before, strict=True))
        return
    out, lse = call()
    for b, length in enumerate(lengths):
        for i in range(Sn):
            for old, new in zip(before, (k_new, v_new), strict=True):
                row, slot = place(page, index, b, length + i)
                old[row, :, slot] = new[b, :, i]
    assert all(torch.equal(c, expected) for c, expected in zip(caches, before, strict=True))
    for b, length in enumerate(lengths):
        at = [place(page, index, b, i) for i in range(length + Sn)]
        keys = [torch.stack([c[row, :, slot] for row, slot in at], 1)[None] if at else c[:1, :, :0] for c in caches]
        expected, expected_lse = oracle.attention(q[b : b + 1], *keys, causal=causal)
        torch.testing.assert_close(out[b : b + 1].double(), expected, atol=4e-6, rtol=4e-6)
        torch.testing.assert_close(lse[b : b + 1].double(), expected_lse, atol=4e-6, rtol=4e-6)


@given(
    st.lists(st.one_of(st.integers(-2, 14), st.sampled_from([-(2**31), 2**31 - 1])), max_size=5),
    st.lists(st.integers(0, 6), min_size=1, max_size=4),
)
def test_malformed_cu_seqlens(wild, lengths):
    good = torch.tensor([0, *lengths]).cumsum(0).int()
    total = int(good[-1])
    bad = torch.tensor(wild, dtype=torch.int32)
    q, k = torch.randn(total, 2, 4), torch.randn(total, 2, 4)
    steps = [b - a for a, b in zip(wild, wild[1:], strict=False)]
    legal = len(wild) == len(good) and wild[0] == 0 and min(steps) >= 0 and wild[-1] <= total
    for name, cu_q, cu_k in (("q", bad, good), ("k", good, bad)):
        call = lambda: plait.flash_attention_varlen(q, k, k, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, return_lse=True)  # noqa: B023, E731
        if not legal:
            with pytest.raises(ValueError, match=f"^cu_seqlens_[{name}k]: "):
                call()
            continue
        out, lse = call()
        end = int(cu_q[-1])
        expected, expected_lse = packed_expected(cu_q, cu_k)(q, k, k)
        near(out[:end], expected)
        torch.testing.assert_close(lse[:, :end].double(), expected_lse, atol=4e-6, rtol=4e-6)
        assert (out[end:] == 0).all() and torch.isneginf(lse[:, end:]).all()


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from([2**63, -(2**63), math.nan, math.inf, 1.5, "", "auto", b"x"]),
    st.tuples(st.integers(-3, 3), st.one_of(st.none(), st.floats())),
    st.builds(lambda: torch.ones(3)),
    st.builds(list),
)
NAMES = (
    "causal window scale softcap sinks strategy backend deterministic return_lse out_dtype split_size layout".split()
)


@given(st.dictionaries(st.sampled_from(NAMES), JUNK, min_size=1, max_size=3))
def test_junk_for_options(junk):
    q = torch.randn(1, 2, 3, 4)
    try:
        plait.flash_attention(q, q, q, **junk)
    except (ValueError, RuntimeError) as error:
        text = str(error)
        assert text.split(":")[0] in (*junk, "backend"), text
        assert "\n" not in text.strip() and len(text) < 1000, text


PROGRAM = next(
    path
    for folder in importlib.util.find_spec("plait").submodule_search_locations
    if (path := Path(folder) / "bin" / "plait").is_file()
)
NUMBERS = st.one_of(
    st.integers(0, 12).map(str),
    st.sampled_from(["-1", "64", "1025", "9223372036854775807", "1e9", "nan", "-inf", "x", "", "4294967296"]),
)
FLAGS = ["--batch", "--heads", "--kv-heads", "--seqlen-q", "--seqlen-kv", "--head-dim", "--head-dim-v", "--P"]
FLAGS += ["--scale", "--softcap", "--split-size", "--threads", "--seed"]
SWITCHES = ["--causal", "--sinks", "--deterministic", "--packed", "--json", "--forward-only", "--peaky", "--backward"]
WORDS = [("--mode", "joint"), ("--mode", "interleaved"), ("--mask", "token"), ("--dtype", "bfloat16"),
         ("--dtype", "int8"), ("--layout", "bshd"), ("--strategy", "split_kv"), ("--strategy", "split_d"),
         ("--backend", "reference"), ("--backend", "cuda_sm90"), ("--out-dtype", "float32"), ("--device", "h200"),
         ("--window", "3", "0"), ("--window", "-1", "9223372036854775807"), ("--window", "-2", "0"), ("--window", "3"),
         ("--what",), ("more",)]  # fmt: skip


@given(
    st.sampled_from(["check", "explain"]),
    st.dictionaries(st.sampled_from(FLAGS), NUMBERS, max_size=5),
    st.lists(st.sampled_from(SWITCHES), unique=True, max_size=3),
    st.lists(st.sampled_from(WORDS), max_size=3),
)
def test_command_lines(command, numbers, switches, words):
    small = {"--seqlen-q": "5", "--heads": "2", "--head-dim": "8", "--bar-factor": "20"} if command == "check" else {}
    pairs = [part for pair in {**small, **numbers}.items() for part in pair]
    arguments = [command, *pairs, *switches, *(part for word in words for part in word)]
    done = subprocess.run([PROGRAM, *arguments], capture_output=True, text=True, timeout=120)
    # A large scale leaves an fp32 LSE few accurate digits: then a check may fail, and says so.
    says_so = "check FAILED" in done.stdout or '"passed": false' in done.stdout
    failed_check = command == "check" and "--scale" in numbers and says_so
    assert done.returncode in ((1,) if failed_check else (0, 2)), (arguments, done)
    if done.returncode == 2:
        assert done.stdout == "" and done.stderr.startswith("plait: error: "), (arguments, done)
        assert done.stderr.count("\n") == 1 and len(done.stderr) < 1000, (arguments, done)
