"""1,000 random problems in half precision on the backends that the planner takes, forward and gradients.

Called by pytest.
"""

import plait
import pytest
import torch
from cases import compare, dense, dense_reference, packed, packed_expected
from hypothesis import given, settings
from hypothesis import strategies as st

HALF = st.sampled_from([torch.float16, torch.bfloat16])
DIMS = st.one_of(st.sampled_from([64, 128, 256]), st.integers(1, 32).map(lambda n: 8 * n))
LENGTHS = st.one_of(st.sampled_from([0, 1, 15, 64, 127, 128, 129, 191, 192, 193, 256, 257, 400]), st.integers(0, 500))
WINDOWS = st.one_of(st.none(), st.tuples(*[st.one_of(st.none(), st.integers(-1, 300))] * 2))


@st.composite
def problems(draw):
    """Heads, head dims, and what both attention and its reference take."""
    Hk, D = draw(st.integers(1, 2)), draw(DIMS)
    sizes = Hk * draw(st.integers(1, 4)), Hk, D, draw(st.one_of(st.just(D), DIMS))
    scale = draw(st.one_of(st.none(), st.floats(-0.2, 0.2)))
    softcap = draw(st.sampled_from([None, None, 2.0, 20.0]))
    return sizes, {"causal": draw(st.booleans()), "window": draw(WINDOWS), "scale": scale, "softcap": softcap}


STRATEGIES = st.sampled_from(["auto", "split_q"])


def terms(rows):
    """Roundings of O, which reach every row's delta, add up over the rows of a key head in dk."""
    return max(8.0, rows**0.5)


@settings(max_examples=500)
@given(HALF, problems(), STRATEGIES, st.integers(1, 3), LENGTHS, LENGTHS, st.sampled_from(["bhsd", "bshd"]))
def test_dense_problems(dtype, problem, strategy, B, Sq, Sk, layout):
    torch.manual_seed(0)
    (Hq, Hk, D, Dv), options = problem
    tensors = [torch.randn(B, H, S, d).to(dtype) for H, S, d in ((Hq, Sq, D), (Hk, Sk, D), (Hk, Sk, Dv))]

    def call(*tensors):
        if layout == "bhsd":
            return dense(**options, strategy=strategy)(*tensors)
        turned = (x.transpose(1, 2).contiguous() for x in tensors)
        out, lse = dense(**options, strategy=strategy, layout=layout)(*turned)
        return out.transpose(1, 2), lse

    compare(call, dense_reference(**options), tensors, terms=terms(Sq * Hq // Hk), out_terms=1.0)


@settings(max_examples=500)
@given(HALF, problems(), st.lists(st.tuples(LENGTHS, LENGTHS), min_size=1, max_size=5))
def test_packed_problems(dtype, problem, lengths):
    torch.manual_seed(0)
    (Hq, Hk, D, Dv), options = problem
    cu_q, cu_k = (torch.tensor([0, *part]).cumsum(0).int() for part in zip(*lengths, strict=True))
    shapes = ((int(cu_q[-1]), Hq, D), (int(cu_k[-1]), Hk, D), (int(cu_k[-1]), Hk, Dv))
    tensors = [torch.randn(shape).to(dtype) for shape in shapes]
    rows = max(q for q, _ in lengths) * Hq // Hk
    compare(
        packed(cu_q, cu_k, **options), packed_expected(cu_q, cu_k, **options), tensors, terms=terms(rows), out_terms=1.0
    )


@pytest.mark.skipif(torch.cuda.get_device_capability() != (9, 0), reason="cuda_sm90 is for Hopper")
def test_these_are_problems_of_hoppers_kernel():
    q = torch.randn(1, 4, 400, 128, dtype=torch.bfloat16)
    assert "backend    cuda_sm90" in plait.explain(q, q, q, causal=True, strategy="split_q")
