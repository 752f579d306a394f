"""The kernel suites: which cases each measures by default, in which passes, and in which order.

Called by bench.kernels, bench.tables and bench.plots.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import plait
from plait.bench.cases import AttentionCase, Case, DecodeCase, IhaCase, parse
from plait.bench.config import BenchError

REGIMES = ("burst", "sustained")
BASELINES = (  # head dims, dense and causal, that tables and plots show: B S = 16384, H D = 2048
    "D64 full", "D64 causal", "D128 full", "D128 causal", "D256 full", "D256 causal"
)  # fmt: skip
LENGTHS = (2048, 4096, 8192, 16384)
TOKENS, _WIDTH = 16384, 2048  # B S and H D of the grids
_NAIVE_TOO = ("auto", "cuda_mma", "cuda_naive")


@dataclass(frozen=True)
class Entry:
    """A case of a default set. priority: 0 is measured first. sustained: also in that regime. strategies: plait's own,
    asked for by name, are peers too."""

    case: Case
    priority: int = 0
    sustained: bool = False
    backends: tuple[str, ...] = ("auto",)
    strategies: tuple[str, ...] = ()


@dataclass(frozen=True)
class Task:
    """One row to measure (one per backend of plait)."""

    entry: Entry
    kind: str  # the schema's pass: fwd or bwd
    regime: str

    def __str__(self) -> str:
        return f"{self.entry.case} {self.kind} {self.regime}"


@dataclass(frozen=True)
class Suite:
    """passes: what of each case is measured. kinds: the types of its cases."""

    passes: tuple[str, ...]
    kinds: tuple[type, ...]
    entries: list[Entry]


def suite(name: str) -> Suite:
    """The default set of a suite."""
    makers = {
        "prefill": lambda: Suite(("fwd",), (AttentionCase,), _prefill()),
        "backward": lambda: Suite(("bwd",), (AttentionCase,), _backward()),
        "iha": lambda: Suite(("fwd", "bwd"), (IhaCase,), _iha()),
        "decode": lambda: Suite(("fwd",), (DecodeCase,), _decode()),
        "large_head_dim": lambda: Suite(("fwd", "bwd"), (AttentionCase,), _large_head_dim()),
        "matrix": lambda: Suite(("fwd",), (AttentionCase,), _matrix()),
        "crossover": lambda: Suite(("fwd",), (AttentionCase,), _crossover()),
    }
    return makers[name]()


def select(chosen: Suite, patterns: list[str]) -> list[Entry]:
    """The entries that any pattern names: a whole case, in the set or not, or words that a case must have.

    Without patterns all of them.
    """
    if not patterns:
        return chosen.entries
    found: list[Entry] = []
    for pattern in patterns:
        case = parse(pattern)
        if case is None:
            words = set(pattern.split())
            matches = [entry for entry in chosen.entries if words and words <= set(str(entry.case).split())]
        elif isinstance(case, chosen.kinds):
            matches = [entry for entry in chosen.entries if entry.case == case] or [Entry(case)]
        else:
            raise BenchError(f"--cases: {pattern!r} is no case of this suite")
        if not matches:
            raise BenchError(f"--cases: {pattern!r} matches nothing; --list shows the cases")
        found += [entry for entry in matches if entry not in found]
    return found


def tasks(chosen: Suite, entries: list[Entry], regimes: tuple[str, ...], every_sustained: bool) -> list[Task]:
    """What to measure, the most important first; within a priority all bursts before the sustained runs.

    every_sustained: also of cases whose default is burst only.
    """
    planned = [
        Task(entry, kind, regime)
        for regime in regimes
        for entry in entries
        for kind in chosen.passes
        if regime == "burst" or entry.sustained or every_sustained
    ]
    return sorted(planned, key=lambda task: task.entry.priority)


def _attention(text: str, priority: int, sustained: bool = False, backends: tuple[str, ...] = ("auto",)) -> Entry:
    return Entry(parse(text), priority, sustained, backends)


def _grid(head_dims: tuple[int, ...], lengths: tuple[int, ...], priority: int) -> list[Entry]:
    """Longest first; of each head dim and mask the longest also sustained."""
    entries = []
    for length, dim, mask in itertools.product(sorted(lengths, reverse=True), head_dims, ("causal", "full")):
        text = f"B{TOKENS // length} S{length} H{_WIDTH // dim} D{dim} {mask}"
        entries.append(_attention(text, priority, sustained=length == max(LENGTHS)))
    return entries


def _models() -> list[Entry]:
    """Shapes of models: grouped heads, the IHA paper's 20 heads, its window, packed and deterministic calls."""
    texts = {
        "B1 S16384 H32/8 D128 causal": 1,
        "B1 S8192 H20 D128 causal": 1,
        "B1 S32768 H20 D128 causal": 1,
        "B1 S65536 H20 D128 causal": 2,
        "B1 S32768 H20 D128 causal window 4225": 1,
        "B8 S2048 H16 D128 causal varlen": 2,
        "B64 S4096 H16 D128 causal varlen random": 2,
        "B64 S2114 H16 D128 causal": 2,  # the mean of those lengths
        "B1 S128x32768 H32/8 D128 full": 1,  # few queries beside a long context
    }
    return [_attention(text, priority) for text, priority in texts.items()]


def _short_queries() -> list[Entry]:
    """Pieces of a prompt beside a long context: ranges of keys instead of idle multiprocessors."""
    shapes = ("S32x32768 H32/8 D128", "S256x32768 H32/8 D128", "S512x32768 H32/8 D128", "S768x32768 H32/8 D128",
              "S128x32768 H32/8 D64", "S128x32768 H32/8 D256", "S128x4096 H32/8 D128")  # fmt: skip
    texts = [f"B1 {shape} full" for shape in shapes]
    return [_attention(text, 1) for text in (*texts, "B1 S128x32768 H32/8 D128 causal", "B4 S64x16384 H32/8 D128 full")]


def _prefill() -> list[Entry]:
    floors = ("B1 S4096 H32 D128 full fp16", "B8 S2048 H32 D128 full fp16")
    return [
        *_grid((128, 64), LENGTHS, 0),
        *(_attention(text, 0, backends=_NAIVE_TOO) for text in floors),
        *_models(),
        *_short_queries(),
        *_grid((256,), LENGTHS, 2),
        *_grid((128, 64, 256), (512, 1024), 3),
        _attention("B4 S4096 H16 D128 causal fp16", 3),
    ]


def _backward() -> list[Entry]:
    return [
        *_grid((128, 64), LENGTHS, 0),
        *_models(),
        *(_attention(f"B2 S8192 H{_WIDTH // dim} D{dim} causal deterministic", 2) for dim in (128, 64)),
        *_grid((256,), LENGTHS, 2),
        *_grid((128, 64), (512, 1024), 3),
        _attention("B1 S4096 H32 D128 full fp16", 3, backends=_NAIVE_TOO),
    ]


def _iha() -> list[Entry]:
    """The 2.4B model's heads at the lengths of its benchmark, windows FLOP-matched to causal attention."""
    entries = []
    for length, priority in ((8192, 0), (16384, 1), (32768, 1), (65536, 1)):
        sizes = (length, 20, 4, 128)
        left = plait.flop_matched_window(length, 4)[0]
        rows = plait.flop_matched_window(length, 4, mode="interleaved")[0]
        entries += [
            Entry(IhaCase(*sizes, "joint", "premix"), min(priority, 1) * 2),
            Entry(IhaCase(*sizes, "joint", "attention", left), priority, sustained=length == 32768),
            Entry(IhaCase(*sizes, "joint", "layer", left), priority),
            Entry(IhaCase(*sizes, "interleaved", "attention", rows), 3),
        ]
    return entries


def _decode() -> list[Entry]:
    shapes = itertools.product((8, 1, 64), (32768, 8192), (8, 32))
    dense = [Entry(DecodeCase(batch, length, 32, kv, 128), int(batch == 64)) for batch, length, kv in shapes]
    paged = [Entry(DecodeCase(8, 32768, 32, 8, 128, page), 1) for page in (16, 64, 256)]
    return [*dense, *paged, Entry(DecodeCase(1, 131072, 64, 8, 128), 2)]


def _large_head_dim() -> list[Entry]:
    texts = [("B1 S8192 H8 D512 causal", 0), ("B1 S4096 H4 D1024 causal", 0)]
    texts += [(f"B1 S8192 H8 D{dim} causal", 1) for dim in (320, 384, 640, 768)]
    texts += [("B1 S8192 H8 D512 full", 2), ("B1 S4096 H4 D1024 full", 2)]
    return [_attention(text, priority) for text, priority in texts]


def _matrix() -> list[Entry]:
    shapes = ("B1 S4096 H32 D128", "B8 S2048 H32 D128", "B1 S2048 H16 D256", "B1 S1024 H8 D512", "B1 S512 H4 D1024",
              "B1 S1x8192 H8 D128")  # fmt: skip
    return [
        _attention(f"{shape} {mask} fp16", 0, backends=_NAIVE_TOO) for shape in shapes for mask in ("full", "causal")
    ]


def _crossover() -> list[Entry]:
    """From one query to a prompt beside keys that wait: where split_kv ends and split_q begins."""
    lengths = itertools.product((1, 8), (4096, 32768), (1, 16, 64, 128, 256))
    cases = [parse(f"B{batch} S{q}x{k} H32/8 D128 causal") for batch, k, q in lengths]
    return [Entry(case, int(case.batch > 1), strategies=("split_q", "split_kv")) for case in cases]
