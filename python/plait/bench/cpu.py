"""Attention forward and backward on the CPU beside torch's SDPA, and a matrix product as the machine's yardstick; and
what packed sequences, a softcap and sinks cost per key tile that they visit.

Called by `python -m plait.bench cpu`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention

import plait
from plait.bench import report, results
from plait.bench.timing import Stats, sample_interleaved

_BATCH, _HEADS = 1, 8
_GEMM = 2048
_TILE_ROWS, _TILE_KEYS = 64, 128  # of the CPU backend
_OPTION_BAR = 1.3  # how much longer than plain attention an option may take per tile
_SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Shape:
    """One causal problem with equal lengths."""

    seqlen: int
    head_dim: int
    dtype: torch.dtype

    @property
    def case(self) -> str:
        """In the grammar of the result files, and the dtype."""
        return self.case_with("")

    def case_with(self, option: str) -> str:
        words = ["causal", *([option] if option else []), _SHORT[self.dtype]]
        return f"B{_BATCH} S{self.seqlen} H{_HEADS} D{self.head_dim} {' '.join(words)}"

    def flops(self, backward: bool) -> float:
        """Forward 2 pairs (D + Dv), backward 2 pairs (3 D + 2 Dv), pairs halved by causality."""
        pairs = _BATCH * _HEADS * self.seqlen * self.seqlen / 2
        return 2 * pairs * self.head_dim * (5 if backward else 2)


def shapes(seqlens: list[int], head_dims: list[int], dtypes: list[str]) -> list[Shape]:
    """All combinations, short lengths first."""
    return [Shape(s, d, getattr(torch, t)) for s in seqlens for t in dtypes for d in head_dims]


def run(cases: list[Shape], samples: int, path: Path) -> int:
    """Measures every case, prints a table and writes the rows of suite `cpu`; returns the exit status."""
    out = report.console()
    rows, options = [], []
    smallest = min(cases, key=lambda shape: (shape.seqlen, shape.head_dim, shape.dtype != torch.float32))
    with report.progress(out) as bars:
        task = bars.add_task("measuring", total=len(cases) + 1)
        for shape in cases:
            bars.update(task, description=shape.case)
            rows += _measure(shape, samples)
            bars.advance(task)
        bars.update(task, description=f"options of {smallest.case}")
        options = _measure_options(smallest, samples)
        bars.advance(task)
    cells = [
        [r["case"], r["pass"], *(f"{value * 1e3:.1f}" for value in (r["ours"], r["peers"]["sdpa"], r["peers"]["gemm"])),
         f"{r['ours'] / r['peers']['sdpa']:.2f}"]
        for r in rows
    ]  # fmt: skip
    title = f"CPU attention, {torch.get_num_threads()} threads, GFLOP/s, medians of {samples} interleaved samples"
    out.print(report.table(title, ["case", "pass", "plait", "SDPA", "gemm", "plait/SDPA"], cells))
    cells = [
        [
            r["case"],
            r["pass"],
            f"{r['ours']:.1f}",
            f"{r['peers']['plain']:.1f}",
            f"{r['ours'] / r['peers']['plain']:.2f}",
        ]
        for r in options
    ]
    title = (
        f"Cost of options, us per visited tile of {_TILE_ROWS} rows and {_TILE_KEYS} keys, bar {_OPTION_BAR} x plain"
    )
    out.print(report.table(title, ["case", "pass", "plait", "plain", "ratio"], cells))
    results.write(path, results.add(results.load(path), report.environment(_CPU), rows + options, []))
    out.print(f"wrote {path}")
    return 0


def _measure(shape: Shape, samples: int) -> list[dict]:
    generator = torch.Generator().manual_seed(0)
    size = (_BATCH, _HEADS, shape.seqlen, shape.head_dim)
    q, k, v, dout = (torch.randn(size, generator=generator, dtype=shape.dtype) for _ in range(4))
    a, b = (torch.randn(_GEMM, _GEMM, generator=generator, dtype=shape.dtype) for _ in range(2))
    forward = {
        "ours": lambda: plait.flash_attention(q, k, v, causal=True),
        "sdpa": lambda: scaled_dot_product_attention(q, k, v, is_causal=True),
        "gemm": lambda: a @ b,
    }
    with torch.no_grad():
        times = sample_interleaved(forward, _CPU, samples)
    rows = [_row(shape, "fwd", times)]
    inputs = tuple(x.requires_grad_() for x in (q, k, v))
    outs = {name: forward[name]() for name in ("ours", "sdpa")}

    def backward_of(name: str):
        return lambda: torch.autograd.grad(outs[name], inputs, dout, retain_graph=True)

    times = sample_interleaved({"ours": backward_of("ours"), "sdpa": backward_of("sdpa"), "gemm": forward["gemm"]},
                               _CPU, samples)  # fmt: skip
    return [*rows, _row(shape, "bwd", times)]


def _visited_tiles(lengths: list[int]) -> int:
    """Tiles of one head under a causal mask, over sequences of these lengths."""
    ends = (min(row + _TILE_ROWS, length) for length in lengths for row in range(0, length, _TILE_ROWS))
    return sum(-(-end // _TILE_KEYS) for end in ends)


def _measure_options(shape: Shape, samples: int) -> list[dict]:
    """Time per visited tile with packed sequences (odd lengths), a softcap and sinks, beside attention without."""
    generator = torch.Generator().manual_seed(0)
    size = (shape.seqlen, _HEADS, shape.head_dim)
    q, k, v, dout = (torch.randn(size, generator=generator, dtype=shape.dtype) for _ in range(4))
    sinks = torch.randn(_HEADS, generator=generator)
    inputs = tuple(x.requires_grad_() for x in (q, k, v))
    first, second = (shape.seqlen + 1) // 2 - 3 * (shape.seqlen > 8), shape.seqlen // 3
    lengths = [first, second, shape.seqlen - first - second]
    cu = torch.tensor([0, *lengths]).cumsum(0).int()

    def dense(**options):
        return lambda: plait.flash_attention(*(x[None] for x in inputs), causal=True, layout="bshd", **options)[0]

    forward = {
        "plain": dense(),
        "varlen": lambda: plait.flash_attention_varlen(*inputs, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True),
        "softcap": dense(softcap=20.0),
        "sinks": dense(sinks=sinks),
    }
    tiles = {name: _HEADS * _visited_tiles([shape.seqlen]) for name in forward}
    tiles["varlen"] = _HEADS * _visited_tiles(lengths)
    with torch.no_grad():
        passes = {"fwd": sample_interleaved(forward, _CPU, samples)}
    outs = {name: function() for name, function in forward.items()}

    def backward_of(name: str):
        return lambda: torch.autograd.grad(outs[name], inputs, dout, retain_graph=True)

    passes["bwd"] = sample_interleaved({name: backward_of(name) for name in forward}, _CPU, samples)
    rows = []
    for kind, times in passes.items():
        cost = {n: stats.map(lambda ms, count=tiles[n]: ms * 1e3 / count) for n, stats in times.items()}
        rows += [
            report.row(shape.case_with(n), kind, "us/tile", cost[n], {"plain": cost["plain"].median}, "cpu")
            for n in ("varlen", "softcap", "sinks")
        ]
    return rows


def _row(shape: Shape, kind: str, times: dict[str, Stats]) -> dict:
    flops = dict.fromkeys(("ours", "sdpa"), shape.flops(kind == "bwd")) | {"gemm": 2.0 * _GEMM**3}
    rates = {name: stats.map(lambda ms, work=flops[name]: work / ms / 1e9) for name, stats in times.items()}
    peers = {name: rates[name].median for name in ("gemm", "sdpa")}
    return report.row(shape.case, kind, "TFLOP/s", rates["ours"], peers, "cpu")
