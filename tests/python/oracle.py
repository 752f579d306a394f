"""Eager float64 attention and IHA straight from the formulas, differentiable by torch's autograd.

Called by the tests; shares no code with plait. Dense tensors are [B, H, S, D], pseudo tensors [B, H, N, P, D].
"""

import math

import torch

# Allowed root-mean-square relative error: (forward, backward); in half types (out and dv, dq and dk).
_BARS = {
    torch.float64: (1e-12, 1e-11),
    torch.float32: (2e-6, 1e-5),
    torch.bfloat16: (1.1 * 2.6e-3, 1.1 * 3.8e-3),
    torch.float16: (1.1 * 2.6e-3 / 8, 1.1 * 3.8e-3 / 8),
}


def rms_error(got, expected):
    """Root-mean-square error relative to the root mean square of `expected` (absolute where that is 0)."""
    got, expected = got.detach().double(), expected.detach().double()
    norm = expected.square().mean().sqrt()
    return float((got - expected).square().mean().sqrt() / (norm if norm > 0 else 1))


def assert_close(got, expected, dtype, *, gradient=False):
    assert got.shape == expected.shape
    finite = torch.isfinite(expected)
    assert torch.equal(torch.isfinite(got), finite)
    assert torch.equal(got[~finite].double(), expected[~finite].double())
    if finite.any():
        error, bar = rms_error(got[finite], expected[finite]), _BARS[dtype][gradient]
        assert error <= bar, f"rms error {error:.2e} above {bar:.2e}"


def visible(rows, keys, causal=False, window=None, token_group=1):
    """bool [rows, keys]: which keys each row sees; `token_group` P widens causal to whole tokens."""
    left, right = (-1 if side is None else side for side in window or (-1, -1))
    diagonal = torch.arange(rows)[:, None] + keys - rows
    key = torch.arange(keys)[None, :]
    sees = torch.ones(rows, keys, dtype=torch.bool)
    if causal:
        sees &= key // token_group <= torch.div(diagonal, token_group, rounding_mode="floor")
    if left >= 0:
        sees &= key >= diagonal - left
    if right >= 0:
        sees &= key <= diagonal + right
    return sees


def softmax_attention(scores, values, sinks=None):
    """out and lse of masked scores [B, H, rows, keys] (-inf is masked) and values [B, H, keys, Dv]."""
    if sinks is not None:
        scores = torch.cat([scores, sinks.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], dim=-1)
        values = torch.cat([values, values.new_zeros(*values.shape[:2], 1, values.shape[3])], dim=2)
    if scores.shape[-1] == 0:
        return scores.new_zeros(*scores.shape[:3], values.shape[-1]), scores.new_full(scores.shape[:3], -math.inf)
    empty = torch.isneginf(scores).all(-1, keepdim=True)
    lse = torch.logsumexp(scores.masked_fill(empty, 0), dim=-1, keepdim=True)
    weights = torch.exp(scores - lse.masked_fill(empty, 0)).masked_fill(empty, 0)
    return weights @ values, lse.masked_fill(empty, -math.inf).squeeze(-1)


def scores_of(q, k, sees, scale, softcap):
    scores = (q @ k.transpose(-1, -2)) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    return scores.masked_fill(~sees, -math.inf)


def attention(q, k, v, *, causal=False, window=None, scale=None, softcap=None, sinks=None, token_group=1):
    """(out, lse) of [B, Hq, Sq, D], [B, Hk, Sk, D], [B, Hk, Sk, Dv], in float64."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1] if k.shape[1] else 1
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    sees = visible(q.shape[2], k.shape[2], causal, window, token_group)
    return softmax_attention(scores_of(q, k, sees, scale, softcap), v, sinks)


def rotate(x, cos, sin, positions, style="half"):
    """x [..., S, D] turned by table rows `positions` [S]; the first 2 * cos.shape[1] dims turn."""
    cos, sin = cos.double()[positions], sin.double()[positions]
    turned, rest = x[..., : 2 * cos.shape[-1]], x[..., 2 * cos.shape[-1] :]
    if style == "half":
        a, b = turned.chunk(2, dim=-1)
        turned = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
    else:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
    return torch.cat([turned, rest], dim=-1)


def premix(x, w):
    """[B, H, N, D] and [H, P, H] to [B, H, N, P, D]."""
    return torch.einsum("hps,bsnd->bhnpd", w.double(), x.double())


def iha(q, k, v, w_q, w_k, w_v, *, mode, mask="flat", collapse=None, rope=None, rope_style="half", rope_index="row",
        causal=False, window=None, scale=None, softcap=None, sinks=None):  # fmt: skip
    """(out, lse) of IHA over dense heads, in float64."""
    queries, keys, P = q.shape[2], k.shape[2], w_q.shape[1]
    q, k, v = premix(q, w_q), premix(k, w_k), premix(v, w_v)
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    flat = [x.flatten(2, 3) for x in (q, k, v)]  # rows n * P + p
    if rope is not None:
        by_row = mode == "interleaved" and rope_index == "row"
        for i, (length, offset) in enumerate(((queries, keys - queries), (keys, 0))):
            row = torch.arange(length * P) + offset * P
            flat[i] = rotate(flat[i], *rope, row if by_row else row // P, rope_style)
    if mode == "interleaved":
        sees = visible(queries * P, keys * P, causal, window, P if mask == "token" else 1)
        out, lse = softmax_attention(scores_of(flat[0], flat[1], sees, scale, softcap), flat[2], sinks)
        out = out.unflatten(2, (queries, P))
        rule = "hp,bhnpd->bhnd" if collapse.dim() == 2 else "hgp,bgnpd->bhnd"
        return torch.einsum(rule, collapse.double(), out), lse
    q, k, v = (x.unflatten(2, (-1, P)) for x in flat)
    sees = visible(queries, keys, causal, window)
    scores = [scores_of(q[..., p, :], k[..., p, :], sees, scale, softcap) for p in range(P)]
    return softmax_attention(torch.cat(scores, -1), torch.cat([v[..., p, :] for p in range(P)], 2), sinks)


def rope_tables(positions, dims, dtype=torch.float32):
    angle = torch.arange(positions, dtype=torch.float64)[:, None] / 100 ** (torch.arange(dims) / dims)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def leaves(*tensors):
    """float64 leaves that require gradients, with the values of `tensors`."""
    return [None if t is None else t.detach().double().requires_grad_() for t in tensors]
