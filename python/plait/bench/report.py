"""What a benchmark hands out: environment facts, result rows in the project's schema, tables and plots.

Called by bench.llama, bench.sweep, bench.cpu, bench.kernels and bench.plots.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from plait.bench.timing import Stats, release, sample

_MINIMUM_WIDTH = 120
_COPY_BYTES = 256 * 2**20
_GPU_SHARE = 8  # times as much on a GPU, and as many calls back to back: one alone would mostly wait for its launch


def console() -> Console:
    """Standard output, wide enough for the tables also where it is no terminal."""
    plain = Console(highlight=False)
    return plain if plain.is_terminal else Console(highlight=False, width=max(plain.width, _MINIMUM_WIDTH))


def progress(out: Console) -> Progress:
    """Progress bars that stay readable in a log."""
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=out
    )


def environment(device: torch.device, commit: str | None = None) -> dict:
    """Facts about machine and build that a result is meaningless without.

    commit: where the files lie outside a checkout, what they were copied from.
    """
    gpu = device.type == "cuda"
    read_tb_s, copy_tb_s = _bandwidths(device)
    release(device)
    return {
        "gpu": torch.cuda.get_device_name(device) if gpu else None,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if gpu else None,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version() if gpu else None,
        "commit": commit or _commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "read_tb_s": read_tb_s,
        "copy_tb_s": copy_tb_s,
        "cpu": _cpu_name(),
        "threads": torch.get_num_threads(),
    }


def _bandwidths(device: torch.device) -> tuple[float, float]:
    """TB/s of reading (the faster of a sum and a dot product) and of copying (bytes read plus bytes written)."""
    calls = _GPU_SHARE if device.type == "cuda" else 1
    size = _COPY_BYTES * calls
    block = torch.rand(size // 4, device=device)
    target = torch.rand(size // 4, device=device)

    def tb_s(function, moved: int) -> float:
        def back_to_back() -> None:
            for _ in range(calls):
                function()

        return moved * calls / sample(back_to_back, device, 5).median / 1e9

    read = max(tb_s(block.sum, size), tb_s(lambda: block.dot(target), 2 * size))
    return read, tb_s(lambda: target.copy_(block), 2 * size)


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else None


def _commit() -> str | None:
    """The commit of plait's own checkout; an installed copy may lie in another project's repository."""
    here = str(Path(__file__).resolve().parent)
    top = _output("git", "-C", here, "rev-parse", "--show-toplevel")
    if top is None or not (Path(top) / "python" / "plait" / "bench" / "report.py").is_file():
        return None
    return _output("git", "-C", here, "rev-parse", "HEAD")


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def row(
    case: str, kind: str, unit: str, ours: Stats, peers: dict[str, float], backend: str, regime: str = "burst"
) -> dict:
    """One measurement; `kind` is what the schema calls pass: fwd, bwd, step, prefill, decode."""
    return {
        "case": case,
        "pass": kind,
        "unit": unit,
        "regime": regime,
        "ours": ours.median,
        "p10": ours.quantile(0.1),
        "p90": ours.quantile(0.9),
        "peers": peers,
        "backend": backend,
    }


def write_json(path: Path, content: dict) -> None:
    """Writes a whole file or none: a temporary file beside it takes its name at the end."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    os.replace(temporary, path)


def table(title: str, columns: list[str], rows: list[list[str]]) -> Table:
    """A plain table, numbers to the right."""
    made = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        made.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    for cells in rows:
        made.add_row(*cells)
    return made


def number(value: float) -> str:
    """Three significant digits, more only where they are whole numbers."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def new_figure(columns: int):
    """A figure and its axes, without a display."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, columns, figsize=(6 * columns, 4.2), squeeze=False, layout="constrained")
    return figure, list(axes[0])


def save_figure(figure, path: Path) -> None:
    """Writes the PNG under a temporary name first, then closes the figure."""
    import matplotlib.pyplot as plt

    temporary = path.with_name(path.name + ".tmp")
    figure.savefig(temporary, format="png", dpi=120)
    plt.close(figure)
    os.replace(temporary, path)
