"""Attention forward and backward on the CPU beside torch's SDPA, and a matrix product as the machine's yardstick.

Called by `python -m plait.bench cpu`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention

import plait
from plait.bench import report
from plait.bench.llama import progress
from plait.bench.timing import Stats, sample_interleaved

_BATCH, _HEADS = 1, 8
_GEMM = 2048
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
        return f"B{_BATCH} S{self.seqlen} H{_HEADS} D{self.head_dim} causal {_SHORT[self.dtype]}"

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
    rows = []
    with progress(out) as bars:
        task = bars.add_task("measuring", total=len(cases))
        for shape in cases:
            bars.update(task, description=shape.case)
            rows += _measure(shape, samples)
            bars.advance(task)
    cells = [
        [r["case"], r["pass"], *(f"{value * 1e3:.1f}" for value in (r["ours"], r["peers"]["sdpa"], r["peers"]["gemm"])),
         f"{r['ours'] / r['peers']['sdpa']:.2f}"]
        for r in rows
    ]  # fmt: skip
    title = f"CPU attention, {torch.get_num_threads()} threads, GFLOP/s, medians of {samples} interleaved samples"
    out.print(report.table(title, ["case", "pass", "plait", "SDPA", "gemm", "plait/SDPA"], cells))
    report.write_json(path, {"env": report.environment(_CPU), "rows": rows})
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


def _row(shape: Shape, kind: str, times: dict[str, Stats]) -> dict:
    flops = dict.fromkeys(("ours", "sdpa"), shape.flops(kind == "bwd")) | {"gemm": 2.0 * _GEMM**3}
    rates = {name: stats.map(lambda ms, work=flops[name]: work / ms / 1e9) for name, stats in times.items()}
    peers = {name: rates[name].median for name in ("gemm", "sdpa")}
    return report.row(shape.case, kind, "TFLOP/s", rates["ours"], peers, "cpu")
