"""The benchmark tables of the README, written from one GPU's result files.

Called by `python -m plait.bench tables`.
"""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Iterable
from pathlib import Path

from plait.bench import report, results
from plait.bench.cases import parse
from plait.bench.config import BenchError
from plait.bench.suites import BASELINES, LENGTHS

BEGIN, END = "<!-- benchmarks: begin (python -m plait.bench tables) -->", "<!-- benchmarks: end -->"
_SDPA = ("cudnn", "fa2", "sdpa")  # what SDPA may be called among the peers of a llama row


def run(folder: Path, readme: Path) -> int:
    """Replaces what stands between the markers of `readme`; returns the exit status."""
    try:
        text = readme.read_text()
    except OSError as error:
        raise BenchError(f"--readme: cannot read {readme}: {error.strerror or error}") from error
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(END) < text.index(BEGIN):
        raise BenchError(f"--readme: {readme} lacks the two lines {BEGIN} and {END}")
    head, rest = text.split(BEGIN)
    made = head + BEGIN + "\n" + render(folder) + END + rest.split(END)[1]
    temporary = readme.with_name(readme.name + ".tmp")
    temporary.write_text(made)
    os.replace(temporary, readme)
    print(f"wrote the tables of {folder} into {readme}")
    return 0


def render(folder: Path) -> str:
    """All tables that the files of a folder allow, as Markdown."""
    files = {path.stem: results.load(path) for path in sorted(folder.glob("*.json"))}
    if not files:
        raise BenchError(f"--results: {folder} holds no result files; measure first: python -m plait.bench prefill")
    parts = [_heading(files)]
    rows = {suite: best(content["rows"]) for suite, content in files.items()}
    parts += [_attention(rows.get("prefill", []), rows.get("backward", []))]
    parts += [_naive(files.get("prefill", {"rows": []})["rows"])]
    parts += [_iha(rows.get("iha", [])), _matrix(files.get("matrix", {"rows": []})["rows"])]
    if "decode" in files:
        read = files["decode"]["env"].get("read_tb_s", 0.0)
        title = f"Decode, bf16, one query: GB/s of keys and values; a plain read of memory got {1000 * read:,.0f} GB/s."
        parts += [_beside(rows["decode"], title, {"cudnn": "cuDNN", "fa2": "FA2"})]
    title = "Head dims above 256, bf16: TFLOP/s. Of torch's kernels on this GPU only these two take them."
    parts += [_beside(rows.get("large_head_dim", []), title, {"efficient": "efficient", "math": "math"})]
    parts += [_crossover(rows.get("crossover", [])), _llama(rows.get("llama", []))]
    return "\n" + "\n".join(part for part in parts if part) + "\n"


def _text(*sentences: str) -> str:
    """A paragraph."""
    return textwrap.fill(" ".join(sentences), 120, break_long_words=False, break_on_hyphens=False) + "\n"


def best(rows: list[dict]) -> list[dict]:
    """Of rows that differ in backend alone, the fastest."""
    chosen: dict[tuple, dict] = {}
    for row in rows:
        key = (row["case"], row["pass"], row["regime"])
        if key not in chosen or _faster(row, chosen[key]):
            chosen[key] = row
    return list(chosen.values())


def markdown(columns: list[str], lines: Iterable[list[str]]) -> str:
    """A Markdown table, numbers to the right."""
    rule = ["---", *["--:"] * (len(columns) - 1)]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in [columns, rule, *lines])


def _heading(files: dict[str, dict]) -> str:
    env = next(files[name]["env"] for name in ("prefill", *files) if name in files)
    dates = sorted({content["env"]["date"][:10] for content in files.values()})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    cudnn = f", cuDNN {_cudnn(env['cudnn'])}" if env["cudnn"] else ""
    commits: dict[str, list[str]] = {}
    for suite, content in files.items():
        for commit in {(content["env"] | row.get("env", {})).get("commit") for row in content["rows"]} - {None}:
            commits.setdefault(commit, []).append(suite)
    at = "; ".join(f"{commit} ({', '.join(suites)})" for commit, suites in sorted(commits.items()))
    return _text(
        f"Measured on {env['gpu'] or env['cpu']}, {when}, torch {env['torch']}{cudnn}; medians of interleaved samples",
        "on random data, peers in the same run. [bench/README.md](bench/README.md) says how, and bench/results holds",
        "every number.",
        *([f"Measured at {at}."] if at else []),
    )


def _cudnn(version: int) -> str:
    return f"{version // 10000}.{version // 100 % 100}"


def _attention(forward: list[dict], backward: list[dict]) -> str:
    """TFLOP/s over the lengths, and the ratio to torch's flash backend."""
    lines = []
    for title, rows in (("forward", forward), ("backward", backward)):
        found = {row["case"]: row for row in rows if row["regime"] == "burst"}
        for words in BASELINES:
            dim, mask = words.split()
            heads = 2048 // int(dim[1:])
            cells = [found.get(f"B{16384 // s} S{s} H{heads} {dim} {mask}") for s in LENGTHS]
            if any(cells):
                lines.append([f"{title}, {dim[0]} {dim[1:]}, {mask}", *(_rate(row, "fa2") for row in cells)])
    if not lines:
        return ""
    title = _text("Attention, bf16, 16384 tokens in all: TFLOP/s (times torch's FlashAttention-2).")
    return title + "\n" + markdown(["", *(f"S {length}" for length in LENGTHS)], lines)


def _naive(rows: list[dict]) -> str:
    """Tensor-core kernels beside the plain ones, where both were measured in one run."""
    lines = []
    for row in rows:
        naive = row["peers"].get("cuda_naive")
        if naive and row["regime"] == "burst" and row["backend"] != "cuda_naive":
            lines.append([row["case"], f"{row['ours']:.0f}", f"{naive:.1f}", f"{row['ours'] / naive:.0f}x"])
    title = _text("Tensor cores beside CUDA cores, forward: TFLOP/s.")
    return title + "\n" + markdown(["", "tensor cores", "cuda_naive", "ratio"], lines) if lines else ""


def _iha(rows: list[dict]) -> str:
    """Premix, attention and the whole layer over the lengths, in the units of their rows."""
    peers = {"premix": "einsum", "attention": "fa2_heads", "layer": "cudnn_causal"}
    lines = []
    for row in rows:
        case = parse(row["case"])
        if row["regime"] != "burst" or case is None or case.mode != "joint":
            continue
        what = [f"{report.number(row['ours'])} {row['unit']}", _times(row, peers[case.part]), _share(row, "copy")]
        lines.append((case.part, case.length, row["pass"], what))
    lines.sort(key=lambda line: (list(peers).index(line[0]), line[1], line[2] != "fwd"))
    title = _text(
        "IHA, joint, 20 heads, P 4, D 128, bf16, FLOP-matched windows. Premix is that of Q, K and V, RoPE on Q and K.",
        "Peers are einsum and an eager rotation (premix), FlashAttention-2 on the pseudo-heads as heads, without",
        "their merge (attention), and causal cuDNN attention (layer).",
    )
    cells = [[f"{part}, N {length}, {kind}", *what] for part, length, kind, what in lines]
    return title + "\n" + markdown(["", "plait", "times the peer", "of a copy's bandwidth"], cells) if lines else ""


def _matrix(rows: list[dict]) -> str:
    """Latency and TFLOP/s of the FlashAttention-2 matrix."""
    lines = []
    for row in best(rows):
        if row["regime"] != "burst":
            continue
        flops = parse(row["case"]).flops(False)
        rates = [row["ours"], row["peers"].get("cuda_naive"), *(row["peers"].get(name) for name in _SDPA[:2])]
        cells = ["-" if rate is None else f"{report.number(flops / rate / 1e6)} us ({rate:.3g})" for rate in rates]
        lines.append([row["case"], row["backend"], *cells])
    title = _text("Forward, fp16: latency (TFLOP/s).")
    return title + "\n" + markdown(["", "backend", "plait", "cuda_naive", "cuDNN", "FA2"], lines) if lines else ""


def _beside(rows: list[dict], title: str, peers: dict[str, str]) -> str:
    """The rate of each row, and of peers with what plait's is of theirs."""
    lines = []
    for row in rows:
        if row["regime"] != "burst":
            continue
        rates = [row["peers"].get(name) for name in peers]
        cells = ["-" if rate is None else f"{report.number(rate)} ({row['ours'] / rate:.2f}x)" for rate in rates]
        lines.append([f"{row['case']}, {row['pass']}", report.number(row["ours"]), *cells])
    heads = ["", "plait", *(f"{name} (plait is)" for name in peers.values())]
    return _text(title) + "\n" + markdown(heads, lines) if lines else ""


def _crossover(rows: list[dict]) -> str:
    """How far strategy auto is from the faster of the strategies."""
    shares = {}
    for row in rows:
        strategies = [row["peers"][name] for name in ("split_q", "split_kv") if name in row["peers"]]
        if row["regime"] == "burst" and len(strategies) == 2:
            shares[row["case"]] = row["ours"] / max(strategies)
    if not shares:
        return ""
    worst = min(shares, key=shares.get)
    return _text(
        f'Few queries beside many keys: in {len(shares)} shapes `strategy="auto"` ran at {min(shares.values()):.0%}',
        f"or more of the faster of split_q and split_kv (least at {worst}).",
    )


def _llama(rows: list[dict]) -> str:
    """A row per length and model: train step, prefill, decode, and the parts of one layer."""
    table: dict[tuple[int, float], dict[str, dict]] = {}
    for row in rows:
        match = re.fullmatch(r"N(\d+) frac([\d.]+) joint \w+", row["case"])
        if match:
            table.setdefault((int(match[1]), float(match[2])), {})[row["pass"]] = row
    lines = []
    for (length, fraction), passes in sorted(table.items()):
        if fraction == 0:
            lines.append([f"{length}", _sdpa_name(passes), *_llama_cells(passes, _sdpa_of)])
        name = f"IHA in {fraction:.0%}" if fraction else "plait"
        lines.append([f"{length}", name, *_llama_cells(passes, lambda row: row["ours"])])
    columns = ["N", "attention", "train step ms", "times SDPA", "prefill ms", "decode ms", "premix ms", "attention ms",
               "rest ms"]  # fmt: skip
    title = _text(
        "The LLaMA of preset 2.4b, bf16, batch 1, gradient checkpointing, fused AdamW. The last three columns are of",
        "one layer, forward and backward.",
    )
    return title + "\n" + markdown(columns, lines) if lines else ""


def _llama_cells(passes: dict[str, dict], value) -> list[str]:
    def ms(name: str) -> str:
        found = value(passes[name]) if name in passes else None
        return "-" if found is None else f"{found:.2f}" if found < 100 else f"{found:.0f}"

    ratio = "-"
    if "step" in passes and value(passes["step"]) and _sdpa_of(passes["step"]):
        ratio = f"{value(passes['step']) / _sdpa_of(passes['step']):.3f}"
    return [
        ms("step"),
        ratio,
        *(ms(name) for name in ("prefill", "decode", "layer_premix", "layer_attention", "layer_rest")),
    ]


def _sdpa_of(row: dict) -> float | None:
    return next((row["peers"][name] for name in _SDPA if name in row["peers"]), None)


def _sdpa_name(passes: dict[str, dict]) -> str:
    names = {"cudnn": "SDPA (cuDNN)", "fa2": "SDPA (FA2)"}
    peers = next(iter(passes.values()))["peers"]
    return next((names[name] for name in names if name in peers), "SDPA")


def _faster(a: dict, b: dict) -> bool:
    return a["ours"] < b["ours"] if a["unit"] == "ms" else a["ours"] > b["ours"]


def _rate(row: dict | None, peer: str) -> str:
    return "-" if row is None else f"{row['ours']:.0f} ({_times(row, peer)})"


def _times(row: dict, peer: str) -> str:
    """Speed relative to a peer."""
    if peer not in row["peers"]:
        return "-"
    ratio = row["ours"] / row["peers"][peer]
    return f"{1 / ratio if row['unit'] == 'ms' else ratio:.2f}x"


def _share(row: dict, peer: str) -> str:
    return f"{row['ours'] / row['peers'][peer]:.0%}" if peer in row["peers"] else "-"
