"""Runs a kernel suite within a time budget: plait beside its peers, rows into the suite's result file.

Called by `python -m plait.bench prefill | backward | iha | decode | large_head_dim | matrix | crossover`.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

from plait.bench import contenders, iha_contenders, report, results
from plait.bench.cases import Case, DecodeCase, IhaCase
from plait.bench.config import BenchError
from plait.bench.contenders import OURS
from plait.bench.protocol import Contender, Protocol, burst, sustained
from plait.bench.suites import Task, select, suite, tasks
from plait.bench.timing import Stats, release, synchronize

_FIRST_GUESS_S = {"burst": 2.0, "sustained": 7.0}  # of a task, before any was measured
_SLACK = 1.2


@dataclass(frozen=True)
class Settings:
    """What the command line chose. budget_s counts from `run`; backends None: what each case names; peers None: all."""

    suite: str
    device: torch.device
    path: Path
    budget_s: float
    patterns: list[str]
    backends: list[str] | None
    regimes: tuple[str, ...]
    commit: str | None = None
    protocol: Protocol = Protocol()
    peers: list[str] | None = None


def list_cases(settings: Settings) -> int:
    """Prints what would be measured, in order; returns the exit status."""
    for task in _tasks(settings):
        print(task, *(settings.backends or task.entry.backends))
    return 0


def run(settings: Settings) -> int:
    """Measures, prints a line per row, and keeps the result file current; returns the exit status."""
    unknown = [name for name in settings.peers or [] if name not in contenders.PEERS]
    if unknown:
        raise BenchError(f"--peers: got {unknown[0]!r}, expected some of {', '.join(contenders.PEERS)}")
    start = time.monotonic()
    deadline = start + settings.budget_s
    out = report.console()
    old = results.load(settings.path)
    planned = _tasks(settings)
    env = report.environment(settings.device, settings.commit)
    out.print(
        f"{settings.suite}: {len(planned)} comparisons on {env['gpu'] or env['cpu']}, budget {settings.budget_s:g} s, "
        f"read {env['read_tb_s']:.2f} TB/s, copy {env['copy_tb_s']:.2f} TB/s"
    )
    rows, missing = [], []
    seconds = dict(_FIRST_GUESS_S)
    with _stream(settings.device):
        for task in planned:
            begin = time.monotonic()
            if begin + _SLACK * seconds[task.regime] > deadline:
                missing.append(_missing(task, "auto", f"the budget of {settings.budget_s:g} s was spent"))
                continue
            new, gone = measure(task, settings, deadline)
            rows, missing = rows + new, missing + gone
            for row in new:
                out.print(describe(row), soft_wrap=True)
            seconds[task.regime] = time.monotonic() - begin
            results.write(settings.path, results.add(old, env, rows, missing))
            release(settings.device)
    results.write(settings.path, results.add(old, env, rows, missing))
    for entry in missing:
        out.print("not measured: {case} {pass} {regime}, {backend}: {reason}".format(**entry), soft_wrap=True)
    out.print(f"wrote {len(rows)} rows to {settings.path} in {time.monotonic() - start:.0f} s")
    return 0 if rows else 1


def measure(task: Task, settings: Settings, deadline: float) -> tuple[list[dict], list[dict]]:
    """The rows of one task, one per backend of plait, and an entry for each backend that gave none."""
    wanted = list(settings.backends or task.entry.backends)
    case, kind, device = task.entry.case, task.kind, settings.device
    module = iha_contenders if isinstance(case, IhaCase) else contenders
    try:
        makers, refused = module.contenders_of(case, kind, device, wanted)
        if task.entry.strategies:
            makers |= contenders.strategy_makers(case, device, task.entry.strategies)
    except RuntimeError as error:
        _check_alive(device, error)
        return [], [_missing(task, backend, contenders.reason(error)) for backend in wanted]
    ready, absent = _prepared(makers, task.regime, settings)
    timer = burst if task.regime == "burst" else sustained
    ours = [name for name in ready if name.startswith(OURS)]
    times = timer(ready, device, settings.protocol, deadline) if ours else {}
    rates = {name: _rated(stats, unit_of(case), ready[name].work) for name, stats in times.items()}
    rows = []
    for name in (name for name in ours if name in rates):
        peers = {_plain(other): stats.median for other, stats in rates.items() if other != name}
        row = report.row(str(case), kind, unit_of(case), rates[name], peers, _plain(name), task.regime)
        reasons = {other: text for other, text in absent.items() if not other.startswith(OURS)}
        rows.append(row | ({"absent": reasons} if reasons else {}))
    failed = {_plain(name): text for name, text in absent.items() if name.startswith(OURS)} | refused
    failed |= {_plain(name): "no time was left" for name in ours if name not in rates}
    return rows, [_missing(task, backend, text) for backend, text in failed.items()]


def unit_of(case: Case) -> str:
    """The unit of a case's rows."""
    if isinstance(case, DecodeCase):
        return "GB/s"
    if isinstance(case, IhaCase):
        return {"premix": "GB/s", "attention": "TFLOP/s", "layer": "ms"}[case.part]
    return "TFLOP/s"


def describe(row: dict) -> str:
    """One row as a line of text."""
    peers = "  ".join(f"{name} {report.number(value)}" for name, value in row["peers"].items())
    spread = f"{report.number(row['p10'])} to {report.number(row['p90'])}"
    return (
        f"{row['case']:<46} {row['pass']} {row['regime']:<9} {row['backend']} {report.number(row['ours'])} "
        f"{row['unit']} ({spread})  {peers}"
    )


def _tasks(settings: Settings) -> list[Task]:
    chosen = suite(settings.suite)
    return tasks(chosen, select(chosen, settings.patterns), settings.regimes, bool(settings.patterns))


def _stream(device: torch.device):
    """A stream of its own: graphs cannot be recorded on the default one."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device))


def _prepared(
    makers: contenders.Makers, regime: str, settings: Settings
) -> tuple[dict[str, Contender], dict[str, str]]:
    """The contenders that run, and why the others do not."""
    ready, absent = {}, {}
    for name, make in makers.items():
        if settings.peers is not None and not name.startswith(OURS) and name not in settings.peers:
            absent[name] = "was not asked for"
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # SDPA warns about each kernel that it does not take
                contender = make()
                if regime == "burst" or contender.sustained:
                    contender.prepare(settings.device, settings.protocol)
                    ready[name] = contender
        except (RuntimeError, ValueError, NotImplementedError) as error:
            _check_alive(settings.device, error)
            absent[name] = contenders.reason(error)
    return ready, absent


def _check_alive(device: torch.device, error: Exception) -> None:
    """After some errors (an illegal access) the device answers nothing any more; then the run ends here."""
    try:
        synchronize(device)
    except RuntimeError as failure:
        raise BenchError(
            f"the device failed, start again without what broke it: {contenders.reason(error)}"
        ) from failure


def _rated(stats: Stats, unit: str, work: float) -> Stats:
    if unit == "ms":
        return stats
    scale = {"TFLOP/s": 1e9, "GB/s": 1e6}[unit]
    return stats.map(lambda ms: work / ms / scale)


def _plain(name: str) -> str:
    return name.removeprefix(OURS)


def _missing(task: Task, backend: str, why: str) -> dict:
    return {
        "case": str(task.entry.case),
        "pass": task.kind,
        "regime": task.regime,
        "backend": backend,
        "reason": why,
    }
