"""The main job: one LLaMA with SDPA, with plait, and with IHA layers, timed and then trained on real text.

Called by `python -m plait.bench llama`.
"""

from __future__ import annotations

import gc
import itertools
from pathlib import Path

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import plait
from plait.bench import data, report
from plait.bench.config import Config
from plait.bench.measure import Measured, measure_model
from plait.bench.models import KINDS, LABELS, build
from plait.bench.train import Curve, train

LOSS_BAR = 0.8  # of the held-out unigram entropy
_COLORS = {"sdpa": "#8a8a8a", "plait": "#1f77b4", "iha": "#d95f02"}


def run(config: Config, device: torch.device, text: str | None, folder: Path, full_steps: int) -> int:
    """Measures, trains, prints, writes llama.json and llama.png; returns the exit status.

    full_steps: fewer train steps than this are not judged by the loss bar.
    """
    out = report.console()
    corpus = data.load_corpus(text, config.N)
    out.print(describe(config, device))
    out.print(f"text: {corpus.source}; {len(corpus.train):,} bytes to train on, {len(corpus.held_out):,} held out")
    measured, curves = {}, {}
    with progress(out) as bars:
        task = bars.add_task("measuring", total=len(KINDS))
        for kind in KINDS:
            bars.update(task, description=f"measuring {LABELS[kind]}")
            measured[kind] = measure_kind(config, kind, corpus, device)
            bars.advance(task)
        bars.update(task, description="measured")
        for kind in ("plait", "iha") if config.train_steps else ():
            curves[kind] = _train_kind(config, kind, corpus, device, bars)
    out.print(times_table([(config, measured)]))
    out.print(_layer_table(measured))
    entropy = corpus.unigram_entropy()
    backend = backend_name(config, device)
    content = {
        "env": report.environment(device),
        "rows": [*rows_of(config, measured, backend), *_loss_rows(config, curves, entropy, backend)],
        "config": {**config.as_dict(), "window": config.window, "chosen_layers": config.chosen_layers},
        "layer_ms": {kind: m.layer for kind, m in measured.items()},
        "curves": {kind: {"steps": c.steps, "losses": c.losses} for kind, c in curves.items()},
    }
    report.write_json(folder / "llama.json", content)
    _plot(config, measured, curves, entropy, folder / "llama.png")
    out.print(f"wrote {folder / 'llama.json'} and {folder / 'llama.png'}")
    return _verdict(out, curves, entropy, config.train_steps < full_steps)


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


def progress(out) -> Progress:
    """Progress bars that stay readable in a log."""
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=out
    )


def measure_kind(config: Config, kind: str, corpus: data.Corpus, device: torch.device) -> Measured:
    """Builds one model, measures it and frees it: only one is in memory at a time."""
    loader = data.training_batches(corpus, config.N, config.B, config.n_iter + 2, config.seed, device.type == "cuda")
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    layers = config.chosen_layers
    model = build(config, kind, device)
    try:
        return measure_model(model, config, batches, layers[0] if layers else 0, device)
    finally:
        del model
        release(device)


def release(device: torch.device) -> None:
    """Gives memory of a dropped model back."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


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
    if device.type == "cpu":
        return "cpu"
    shape = (config.B, config.heads, config.N, config.head_dim)
    q = torch.empty(shape, dtype=getattr(torch, config.dtype), device=device)
    plan = plait.explain(q, q, q, causal=True)
    return next((name for name in ("cuda_sm90", "cuda_mma", "cuda_naive") if name in plan), "cuda")


def rows_of(config: Config, measured: dict[str, Measured], backend: str) -> list[dict]:
    """Result rows of one config: IHA beside plait and SDPA, and plait alone (frac 0) beside SDPA."""
    rows = []
    for kind, name in (("iha", f"frac{config.fraction:g}"), ("plait", "frac0")):
        if kind not in measured:
            continue
        for task, attribute, label in (("train", "step", "step"), ("prefill",) * 3, ("decode",) * 3):
            others = [other for other in KINDS[: KINDS.index(kind)] if other in measured]
            peers = {other: getattr(measured[other], attribute).median for other in others}
            case = f"N{config.N} {name} {config.mode} {task}"
            rows.append(report.row(case, label, "ms", getattr(measured[kind], attribute), peers, backend))
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


def times_table(runs: list[tuple[Config, dict[str, Measured]]]):
    """A row per model: step time, tokens per second, both also relative to SDPA, prefill and decode.

    Models that several configs share appear once.
    """
    columns = ["model", "P", "Frac", "N", "WSL", "step ms", "/SDPA", "tok/s", "/SDPA", "prefill ms", "decode ms"]
    rows, seen = [], set()
    for config, measured in runs:
        base = measured["sdpa"].step.median
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


def _layer_table(measured: dict[str, Measured]):
    parts = ("premix", "attention", "rest", "total")
    rows = [[LABELS[kind], *(f"{m.layer[part]:.2f}" for part in parts)] for kind, m in measured.items()]
    return report.table("one layer, forward and backward, ms", ["layer", *parts], rows)


def _plot(config: Config, measured: dict[str, Measured], curves: dict[str, Curve], entropy: float, path: Path) -> None:
    figure, axes = report.new_figure(2 if curves else 1)
    passes = ("step", "prefill", "decode")
    for offset, (kind, m) in enumerate(measured.items()):
        places = [index + 0.27 * (offset - 1) for index in range(len(passes))]
        axes[0].bar(places, [getattr(m, p).median for p in passes], 0.25, label=LABELS[kind], color=_COLORS[kind])
    axes[0].set_xticks(range(len(passes)), ["train step", "prefill", "decode, one token"])
    axes[0].set_yscale("log")
    axes[0].set_ylabel("ms")
    axes[0].set_title(f"B {config.B} x N {config.N}, IHA in {config.fraction:.2g} of the layers, P {config.P}")
    axes[0].legend()
    if curves:
        for kind, curve in curves.items():
            axes[1].plot(curve.steps, curve.losses, marker=".", label=LABELS[kind], color=_COLORS[kind])
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
