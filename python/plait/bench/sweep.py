"""The sweep: train step, prefill and decode over P, the share of IHA layers and the length.

Called by `python -m plait.bench sweep`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from plait.bench import data, report
from plait.bench.config import Config
from plait.bench.llama import backend_name, describe, measure_kind, rows_of, times_table
from plait.bench.measure import Measured
from plait.bench.models import LABELS, sdpa_backend


def run(configs: list[Config], device: torch.device, text: str | None, folder: Path) -> int:
    """Measures every config, prints one table, writes sweep.json and sweep.png; returns the exit status.

    SDPA and plait without IHA are measured once per length and batch.
    """
    out = report.console()
    corpus = data.load_corpus(text, max(config.N for config in configs))
    out.print(describe(configs[0], device))
    out.print(f"sweep of {len(configs)} settings: the lines above describe the first")
    plain: dict[int, dict[str, Measured]] = {}
    runs: list[tuple[Config, dict[str, Measured]]] = []
    with report.progress(out) as bars:
        task = bars.add_task("sweep", total=len(configs) + 2 * len({config.N for config in configs}))
        for config in configs:
            if config.N not in plain:
                plain[config.N] = {}
                for kind in ("sdpa", "plait"):
                    bars.update(task, description=f"N {config.N}, {LABELS[kind]}")
                    plain[config.N][kind] = measure_kind(config, kind, corpus, device)
                    bars.advance(task)
            bars.update(task, description=f"N {config.N}, P {config.P}, frac {config.fraction:.2g}")
            runs.append((config, {**plain[config.N], "iha": measure_kind(config, "iha", corpus, device)}))
            bars.advance(task)
    out.print(times_table(runs))
    backend, sdpa = backend_name(configs[0], device), sdpa_backend(configs[0], device)
    rows = []
    for config, measured in runs:
        for result in rows_of(config, measured, backend, sdpa):
            if " frac0 " not in result["case"] or config.fraction == 0:
                rows.append({**result, "P": config.P, "window": config.window})
    base = replace(configs[0], train_steps=0).as_dict()
    report.write_json(folder / "sweep.json", {"env": report.environment(device), "rows": rows, "config": base})
    _plot(runs, folder / "sweep.png")
    out.print(f"wrote {folder / 'sweep.json'} and {folder / 'sweep.png'}")
    return 0


def _plot(runs: list[tuple[Config, dict[str, Measured]]], path: Path) -> None:
    """Step time relative to SDPA over the share of IHA layers, a line per P, a panel per length."""
    lengths = sorted({config.N for config, _ in runs})
    figure, axes = report.new_figure(len(lengths))
    for axis, length in zip(axes, lengths, strict=True):
        for P in sorted({config.P for config, _ in runs}):
            points = sorted(
                (config.fraction, m["iha"].step.median / m["sdpa"].step.median)
                for config, m in runs
                if config.P == P and config.N == length
            )
            axis.plot(*zip(*points, strict=True), marker="o", label=f"P {P}")
        axis.axhline(1.0, color="black", linewidth=0.8)
        axis.set_title(f"N {length}")
        axis.set_xlabel("share of IHA layers")
        axis.set_ylabel("train step, IHA over SDPA")
        axis.legend()
    report.save_figure(figure, path)
