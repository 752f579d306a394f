"""The cases of the kernel suites: their grammar (as result files spell them), and the work that one call must do.

Called by bench.suites, bench.contenders, bench.kernels and bench.tables.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from random import Random

from plait.bench.config import BenchError

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_FLAGS = ("varlen", "random", "deterministic")
_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


def visible_pairs(seqlen_q: int, seqlen_k: int, causal: bool, window: int) -> float:
    """Query-key pairs of one head: all, half of them when causal, as is the custom; counted exactly inside a window
    and where a causal mask meets different lengths.

    window: keys to the left of a row's own, -1 for none; windows are causal here.
    """
    if not causal:
        return seqlen_q * seqlen_k
    if window < 0 and seqlen_q == seqlen_k:
        return seqlen_q * seqlen_k / 2
    offset = seqlen_k - seqlen_q
    window = seqlen_k if window < 0 else window
    return sum(max(min(row + offset + 1, seqlen_k) - max(row + offset - window, 0), 0) for row in range(seqlen_q))


@dataclass(frozen=True)
class AttentionCase:
    """Plain attention: `B{B} S{Sq}[x{Sk}] H{Hq}[/{Hk}] D{D}[/{Dv}] full|causal [window {left}] [varlen [random]] ...`.

    varlen: the B sequences are packed; random: their lengths are drawn from 1 to S, always the same ones. A dtype other
    than bf16 stands at the end of the case.
    """

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    causal: bool
    window: int = -1
    varlen: bool = False
    deterministic: bool = False
    dtype: str = "bf16"
    random: bool = False

    def __str__(self) -> str:
        def pair(letter: str, a: int, b: int, joint: str) -> str:
            return f"{letter}{a}" if a == b else f"{letter}{a}{joint}{b}"

        words = [
            f"B{self.batch}",
            pair("S", self.seqlen_q, self.seqlen_k, "x"),
            pair("H", self.heads_q, self.heads_kv, "/"),
            pair("D", self.head_dim, self.head_dim_v, "/"),
            "causal" if self.causal else "full",
        ]
        words += [f"window {self.window}"] if self.window >= 0 else []
        words += [flag for flag in _FLAGS if getattr(self, flag)]
        return " ".join(words + _dtype_words(self.dtype))

    def flops(self, backward: bool) -> float:
        """Forward 2 pairs (D + Dv), backward 2 pairs (3 D + 2 Dv); what is recomputed does not count."""
        pairs = sum(visible_pairs(q, k, self.causal, self.window) * n for (q, k), n in Counter(self.lengths).items())
        return 2 * pairs * self.heads_q * _dims(self.head_dim, self.head_dim_v, backward)

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """Query and key positions of each sequence."""
        if not self.random:
            return [(self.seqlen_q, self.seqlen_k)] * self.batch
        draw = Random(0)
        return [(n, n) for n in (draw.randint(1, self.seqlen_q) for _ in range(self.batch))]

    @property
    def scores(self) -> int:
        """Elements of the score matrix that an unfused implementation keeps."""
        return self.heads_q * sum(q * k for q, k in self.lengths)


@dataclass(frozen=True)
class IhaCase:
    """A part of IHA, batch 1: `N{N} H{H} P{P} D{D} joint|interleaved [window {w}] premix|attention|layer`.

    window: keys to the left, in positions (joint) or virtual rows (interleaved); premix has none.
    """

    length: int
    heads: int
    pseudo: int
    head_dim: int
    mode: str
    part: str
    window: int = -1
    dtype: str = "bf16"

    def __str__(self) -> str:
        words = [f"N{self.length}", f"H{self.heads}", f"P{self.pseudo}", f"D{self.head_dim}", self.mode]
        words += [f"window {self.window}"] if self.window >= 0 else []
        return " ".join([*words, self.part, *_dtype_words(self.dtype)])

    def flops(self, backward: bool) -> float:
        """Of the attention among pseudo-heads: P times one windowed sequence (joint), or one of N P rows."""
        if self.mode == "joint":
            pairs = self.pseudo * visible_pairs(self.length, self.length, True, self.window)
        else:
            rows = self.length * self.pseudo
            pairs = visible_pairs(rows, rows, True, self.window)
        return 2 * pairs * self.heads * _dims(self.head_dim, self.head_dim, backward)

    def premix_bytes(self, backward: bool) -> float:
        """What premix of Q, K and V must move: X in and X~ out; backward dX~ and X in, dX out. Weights are nothing."""
        source = self.length * self.heads * self.head_dim * _BYTES[self.dtype]
        return 3 * source * ((self.pseudo + 2) if backward else (self.pseudo + 1))

    @property
    def plain(self) -> AttentionCase:
        """Causal attention on the same tokens: what the window is FLOP-matched to."""
        sizes = (1, self.length, self.length, self.heads, self.heads, self.head_dim, self.head_dim)
        return AttentionCase(*sizes, causal=True, dtype=self.dtype)


@dataclass(frozen=True)
class DecodeCase:
    """One query token per sequence over a full cache: `B{B} Sk{Sk} H{Hq}/{Hk} D{D} decode [page {n}]`."""

    batch: int
    seqlen_k: int
    heads_q: int
    heads_kv: int
    head_dim: int
    page: int = 0
    dtype: str = "bf16"

    def __str__(self) -> str:
        words = [f"B{self.batch}", f"Sk{self.seqlen_k}", f"H{self.heads_q}/{self.heads_kv}", f"D{self.head_dim}"]
        words += ["decode", *([f"page {self.page}"] if self.page else [])]
        return " ".join(words + _dtype_words(self.dtype))

    @property
    def cache_bytes(self) -> float:
        """Bytes of K and V, each read once."""
        return 2.0 * self.batch * self.seqlen_k * self.heads_kv * self.head_dim * _BYTES[self.dtype]


Case = AttentionCase | IhaCase | DecodeCase

_ATTENTION = re.compile(
    r"B(?P<batch>\d+) S(?P<seqlen_q>\d+)(x(?P<seqlen_k>\d+))? H(?P<heads_q>\d+)(/(?P<heads_kv>\d+))? "
    r"D(?P<head_dim>\d+)(/(?P<head_dim_v>\d+))? (?P<mask>full|causal)( window (?P<window>\d+))?"
    r"(?P<varlen> varlen(?P<random> random)?)?(?P<deterministic> deterministic)?( (?P<dtype>bf16|fp16|fp32))?"
)
_IHA = re.compile(
    r"N(?P<length>\d+) H(?P<heads>\d+) P(?P<pseudo>\d+) D(?P<head_dim>\d+) (?P<mode>joint|interleaved)"
    r"( window (?P<window>\d+))? (?P<part>premix|attention|layer)( (?P<dtype>bf16|fp16|fp32))?"
)
_DECODE = re.compile(
    r"B(?P<batch>\d+) Sk(?P<seqlen_k>\d+) H(?P<heads_q>\d+)/(?P<heads_kv>\d+) D(?P<head_dim>\d+) decode"
    r"( page (?P<page>\d+))?( (?P<dtype>bf16|fp16|fp32))?"
)


def parse(text: str) -> Case | None:
    """The case that `text` spells, None where it spells none. Raises BenchError for a case that cannot exist."""
    text = " ".join(text.split())
    for pattern, make in ((_ATTENTION, _attention), (_IHA, _iha), (_DECODE, _decode)):
        match = pattern.fullmatch(text)
        if match:
            found = {name: int(part) if part.isdigit() else part for name, part in match.groupdict().items() if part}
            return make(text, found)
    return None


def _attention(text: str, found: dict) -> AttentionCase:
    found.setdefault("seqlen_k", found["seqlen_q"])
    found.setdefault("heads_kv", found["heads_q"])
    found.setdefault("head_dim_v", found["head_dim"])
    found["causal"] = found.pop("mask") == "causal"
    found |= {flag: True for flag in _FLAGS if flag in found}
    if "random" in found and found["seqlen_q"] != found["seqlen_k"]:
        raise BenchError(f"--cases: {text!r}: random lengths are those of queries and keys alike; write S{{length}}")
    if "window" in found and not found["causal"]:
        raise BenchError(f"--cases: {text!r}: windows are causal in this benchmark; write 'causal window ...'")
    return _checked(text, AttentionCase(**found))


def _iha(text: str, found: dict) -> IhaCase:
    if found["part"] == "premix" and "window" in found:
        raise BenchError(f"--cases: {text!r}: premix has no window")
    return _checked(text, IhaCase(**found))


def _decode(text: str, found: dict) -> DecodeCase:
    return _checked(text, DecodeCase(**found))


def _checked(text: str, case: Case) -> Case:
    sizes = {name: value for name, value in vars(case).items() if name not in ("window", "page")}
    zero = [name for name, value in sizes.items() if value == 0 and not isinstance(value, bool)]
    if zero:
        raise BenchError(f"--cases: {text!r}: {zero[0]} is 0, expected at least 1")
    heads_q, heads_kv = getattr(case, "heads_q", 1), getattr(case, "heads_kv", 1)
    if heads_q % heads_kv:
        raise BenchError(f"--cases: {text!r}: {heads_q} query heads are no multiple of {heads_kv} key-value heads")
    return case


def _dims(head_dim: int, head_dim_v: int, backward: bool) -> int:
    return 3 * head_dim + 2 * head_dim_v if backward else head_dim + head_dim_v


def _dtype_words(dtype: str) -> list[str]:
    return [] if dtype == "bf16" else [dtype]
