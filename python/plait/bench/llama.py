"""The main job: one LLaMA with SDPA, with plait, and with IHA layers, timed and then trained on real text.

Called by `python -m plait.bench llama`.
"""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.progress import Progress

import plait
from plait.bench import data, report, results
from plait.bench.config import Config
from plait.bench.contenders import reason, resolve
from plait.bench.measure import Measured, measure_model
from plait.bench.models import KINDS, LABELS, build, sdpa_backend, sdpa_preferring
from plait.bench.timing import release
from plait.bench.train import Curve, train

LOSS_BAR = 0.8  # of the held-out unigram entropy
PARTS = ("premix", "attention", "rest", "total")
_COLORS = {"sdpa": "#8a8a8a", "plait": "#1f77b4"}
_IHA_COLORS = ("#d95f02", "#7b3294", "#1b9e77", "#a6761d")

# What several configs measured: each with its SDPA and plait models, which they may share.
Runs = list[tuple[Config, dict[str, Measured]]]


@dataclass(frozen=True)
class Job:
    """What the command line chose beside the models.

    full_steps: fewer train steps than this are not judged by the loss bar. json: a result file of the suite `llama`
    to add the rows to. budget_s: after it nothing more is started.
    """

    device: torch.device
    text: str | None
    folder: Path
    full_steps: int
    json: Path | None = None
    budget_s: float = math.inf
    commit: str | None = None


def run(configs: list[Config], job: Job) -> int:
    """Measures, trains, prints, writes llama.json and llama.png; returns the exit status.

    configs: the same model with different shares of IHA layers; the first one is also trained.
    """
    out = report.console()
    config, device = configs[0], job.device
    old = results.load(job.json) if job.json else None
    corpus = data.load_corpus(job.text, config.N)
    for each in configs:
        out.print(describe(each, device))
    out.print(f"text: {corpus.source}; {len(corpus.train):,} bytes to train on, {len(corpus.held_out):,} held out")
    curves = {}
    with report.progress(out) as bars:
        runs, missing = _measure_all(configs, job, corpus, bars)
        for kind in ("plait", "iha") if config.train_steps else ():
            curves[kind] = _train_kind(config, kind, corpus, device, bars)
    entropy = corpus.unigram_entropy()
    backend, sdpa = backend_name(config, device), sdpa_backend(config, device)
    rows = [row for each, measured in runs for row in rows_of(each, measured, backend, sdpa)]
    rows = list(
        {(row["case"], row["pass"]): row for row in rows + _loss_rows(config, curves, entropy, backend)}.values()
    )
    content = {
        "env": report.environment(device, job.commit),
        "rows": rows,
        "config": {**config.as_dict(), "window": config.window, "chosen_layers": config.chosen_layers},
        "layer_ms": {name: m.layer for name, _, m in _models(runs)},
        "peak_gib": {name: m.peak_gib for name, _, m in _models(runs)},
        "curves": {kind: {"steps": c.steps, "losses": c.losses} for kind, c in curves.items()},
    }
    report.write_json(job.folder / "llama.json", content)
    if job.json:
        results.write(job.json, results.add(old, content["env"], rows, []))
    if runs:
        out.print(times_table(runs))
        out.print(_layer_table(runs))
        _plot(runs, curves, entropy, job.folder / "llama.png")
    for line in missing:
        out.print(f"not measured: {line}")
    out.print(f"wrote {job.folder / 'llama.json'} and {job.folder / 'llama.png'}")
    return _verdict(out, curves, entropy, config.train_steps < job.full_steps)


def describe(config: Config, device: torch.device) -> str:
    """What is about to run, in one paragraph."""
    served = "the best device that this build of plait serves here" if device.type == "cuda" else (
        f"{torch.get_num_threads()} threads; no GPU that this build of plait serves")  # fmt: skip
    window = "no window" if config.window < 0 else f"window {config.window}"
    return (
        f"plait {plait.__version__} on {device} ({served}), {config.dtype}\n"
        f"LLaMA: hidden {config.hidden}, {config.heads} heads, {config.kv_heads} key-value heads, {config.layers} "
        f"layers, vocabulary {config.vocab}; batch {config.B} x {config.N} tokens\n"
        f"IHA: P {config.P}, {config.mode}, {window}, layers {config.chosen_layers}"
    )


def _measure_all(configs: list[Config], job: Job, corpus: data.Corpus, bars: Progress) -> tuple[Runs, list[str]]:
    """Every model that the budget allows, each with an even share of what is left of it, and what was left out.

    SDPA and plait without IHA do not depend on the share of IHA layers and are measured once.
    """
    start = time.monotonic()
    work = [("sdpa", configs[0]), ("plait", configs[0]), *(("iha", config) for config in configs)]
    plain: dict[str, Measured] = {}
    runs: Runs = []
    missing = []
    task = bars.add_task("measuring", total=len(work))
    for index, (kind, config) in enumerate(work):
        name = f"{LABELS[kind]} {config.fraction:.2g}" if kind == "iha" else LABELS[kind]
        bars.update(task, description=f"measuring {name}")
        left = job.budget_s - (time.monotonic() - start)
        if left <= 0:
            missing.append(f"{name}: the budget of {job.budget_s:g} s was spent")
            continue
        try:
            found = measure_kind(config, kind, corpus, job.device, left / (len(work) - index))
        except torch.OutOfMemoryError as error:
            missing.append(f"{name}: {reason(error)}")
            continue
        if kind == "iha":
            runs.append((config, {**plain, kind: found}))
        else:
            plain[kind] = found
        bars.advance(task)
    bars.update(task, description="measured")
    return runs or ([(configs[0], plain)] if plain else []), missing


def measure_kind(
    config: Config, kind: str, corpus: data.Corpus, device: torch.device, seconds: float = math.inf
) -> Measured:
    """Builds one model, measures it and frees it: only one is in memory at a time."""
    loader = data.training_batches(corpus, config.N, config.B, config.n_iter + 2, config.seed, device.type == "cuda")
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    layers = config.chosen_layers
    model = build(config, kind, device)
    try:
        with sdpa_preferring(sdpa_backend(config, device) if kind == "sdpa" else "none"):
            return measure_model(model, config, batches, layers[0] if layers else 0, device, seconds)
    finally:
        del model
        release(device)


def _train_kind(config: Config, kind: str, corpus: data.Corpus, device: torch.device, bars: Progress) -> Curve:
    name = f"training {LABELS[kind]}"
    task = bars.add_task(name, total=config.train_steps)

    def advance(step: int, loss: float) -> None:
        bars.update(task, completed=step, description=f"{name}, held-out loss {loss:.3f}")

    model = build(config, kind, device)
    try:
        return train(model, config, corpus, device, advance)
    finally:
        del model
        release(device)


def backend_name(config: Config, device: torch.device) -> str:
    """The backend that plait plans for these layers."""
    shape = (config.B, config.heads, config.N, config.head_dim)
    q = torch.empty(shape, dtype=getattr(torch, config.dtype), device=device)
    served, _ = resolve(["auto"], lambda backend: plait.explain(q, q, q, causal=True, backend=backend))
    return next(iter(served))


def rows_of(config: Config, measured: dict[str, Measured], backend: str, sdpa: str) -> list[dict]:
    """Result rows of one config: IHA beside plait and SDPA, and plait alone (frac 0) beside SDPA.

    sdpa: the name of SDPA's kernels among the peers. The parts of a layer are rows of the train case.
    """
    rows = []
    for kind, name in (("iha", f"frac{config.fraction:g}"), ("plait", "frac0")):
        if kind not in measured:
            continue
        others = {
            (sdpa if other == "sdpa" else other): measured[other]
            for other in KINDS[: KINDS.index(kind)]
            if other in measured
        }
        case = f"N{config.N} {name} {config.mode}"
        for task, attribute, label in (("train", "step", "step"), ("prefill",) * 3, ("decode",) * 3):
            peers = {other: getattr(m, attribute).median for other, m in others.items()}
            stats = getattr(measured[kind], attribute)
            rows.append(report.row(f"{case} {task}", label, "ms", stats, peers, backend))
        for part in PARTS:
            ms = measured[kind].layer[part]
            peers = {other: m.layer[part] for other, m in others.items() if m.layer[part] > 0}
            if ms > 0:
                rows.append(report.row(f"{case} train", f"layer_{part}", "ms", report.Stats((ms,)), peers, backend))
    return rows


def _loss_rows(config: Config, curves: dict[str, Curve], entropy: float, backend: str) -> list[dict]:
    rows = []
    for kind, name in (("iha", f"frac{config.fraction:g}"), ("plait", "frac0")):
        if kind in curves:
            final = report.Stats((curves[kind].losses[-1],))
            peers = {"unigram_entropy": entropy}
            rows.append(report.row(f"N{config.N} {name} {config.mode} train", "held_out_loss", "nats", final, peers,
                                   backend))  # fmt: skip
    return rows


def _models(runs: Runs) -> list[tuple[str, str, Measured]]:
    """Every model once: a name, its kind, what was measured. One IHA model is `iha`, several carry their share."""
    found, seen = [], set()
    for config, measured in runs:
        for kind, m in measured.items():
            if id(m) not in seen:
                seen.add(id(m))
                found.append((f"iha{config.fraction:g}" if kind == "iha" and len(runs) > 1 else kind, kind, m))
    return found


def _label(name: str, kind: str) -> str:
    return name.replace("iha", f"{LABELS['iha']} ").strip() if kind == "iha" else LABELS[kind]


def times_table(runs: Runs):
    """A row per model: step time, tokens per second, both also relative to SDPA, prefill and decode.

    Models that several configs share appear once.
    """
    columns = ["model", "P", "Frac", "N", "WSL", "step ms", "/SDPA", "tok/s", "/SDPA", "prefill ms", "decode ms"]
    rows, seen = [], set()
    for config, measured in runs:
        base = measured["sdpa"].step.median if "sdpa" in measured else math.nan
        for kind, m in measured.items():
            if id(m) in seen:
                continue
            seen.add(id(m))
            settings = ["-", "0", str(config.N), "-"]
            if kind == "iha":
                wsl = "-" if config.window < 0 else str(config.window)
                settings = [str(config.P), f"{config.fraction:.2g}", str(config.N), wsl]
            step = m.step.median
            numbers = [step, step / base, config.B * config.N / step * 1e3, base / step]
            numbers += [m.prefill.median, m.decode.median]
            rows.append([LABELS[kind], *settings, *map(report.number, numbers)])
    return report.table(
        "LLaMA: train step with gradient checkpointing, prefill, decode of one token",
        columns,
        rows,
    )


def _layer_table(runs: Runs):
    rows = []
    for name, kind, m in _models(runs):
        peak = "-" if m.peak_gib is None else f"{m.peak_gib:.1f}"
        rows.append([_label(name, kind), *(f"{m.layer[part]:.2f}" for part in PARTS), peak])
    return report.table("one layer, forward and backward, ms", ["layer", *PARTS, "peak GiB of a step"], rows)


def _plot(runs: Runs, curves: dict[str, Curve], entropy: float, path: Path) -> None:
    config = runs[0][0]
    figure, axes = report.new_figure(2 if curves else 1)
    passes = ("step", "prefill", "decode")
    models = _models(runs)
    colors = iter(_IHA_COLORS * len(models))
    width = 0.8 / len(models)
    for offset, (name, kind, m) in enumerate(models):
        places = [index + width * (offset - (len(models) - 1) / 2) for index in range(len(passes))]
        color = _COLORS.get(kind) or next(colors)
        axes[0].bar(places, [getattr(m, p).median for p in passes], 0.9 * width, label=_label(name, kind), color=color)
    axes[0].set_xticks(range(len(passes)), ["train step", "prefill", "decode, one token"])
    axes[0].set_yscale("log")
    axes[0].set_ylabel("ms")
    shares = ", ".join(f"{each.fraction:.2g}" for each, _ in runs)
    axes[0].set_title(f"B {config.B} x N {config.N}, IHA in {shares} of the layers, P {config.P}")
    axes[0].legend()
    if curves:
        for kind, curve in curves.items():
            color = _COLORS.get(kind, _IHA_COLORS[0])
            axes[1].plot(curve.steps, curve.losses, marker=".", label=LABELS[kind], color=color)
        axes[1].axhline(entropy, color="black", linewidth=0.8, label="unigram entropy")
        axes[1].axhline(LOSS_BAR * entropy, color="black", linewidth=0.8, linestyle="--", label=f"{LOSS_BAR} of it")
        axes[1].set_xlabel("train steps")
        axes[1].set_ylabel("held-out loss, nats per byte")
        axes[1].legend()
    report.save_figure(figure, path)


def _verdict(out, curves: dict[str, Curve], entropy: float, too_few_steps: bool) -> int:
    """Prints the last lines and returns 0, or 1 when enough training missed the bar."""
    if not curves:
        out.print("not trained (--train-steps 0)")
        return 0
    bar = LOSS_BAR * entropy
    losses = {LABELS[kind]: curve.losses[-1] for kind, curve in curves.items()}
    passed = all(loss <= bar for loss in losses.values())
    out.print("held-out loss: " + ", ".join(f"{name} {loss:.3f}" for name, loss in losses.items()) + " nats per byte")
    out.print(f"held-out unigram entropy: {entropy:.3f} nats per byte")
    if not passed and too_few_steps:
        out.print(f"bar: at most {LOSS_BAR} x entropy = {bar:.3f}: not judged, too few train steps")
        return 0
    out.print(f"bar: at most {LOSS_BAR} x entropy = {bar:.3f}: {'PASS' if passed else 'FAIL'}")
    return 0 if passed else 1
