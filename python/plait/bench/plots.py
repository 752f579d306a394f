"""Plots of the result files: rates over lengths, bars elsewhere.

Called by `python -m plait.bench plots`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from plait.bench import report, results
from plait.bench.cases import AttentionCase, IhaCase, parse
from plait.bench.config import BenchError
from plait.bench.suites import TOKENS
from plait.bench.tables import best

_OURS = "#d95f02"
_PEERS = {"cudnn": "#1f77b4", "fa2": "#7b3294", "gemm": "#8a8a8a", "copy": "#8a8a8a", "efficient": "#1b9e77",
          "math": "#c7c7c7"}  # fmt: skip
_COLUMNS = 4


def run(folder: Path, target: Path) -> int:
    """`<target>/<gpu>/<suite>.svg` for every `<folder>/<gpu>/<suite>.json`; returns the exit status."""
    paths = sorted(folder.glob("*/*.json"))
    if not paths:
        raise BenchError(f"--results: {folder} holds no <gpu>/<suite>.json")
    for path in paths:
        rows = best(results.load(path)["rows"])
        panels = panels_of(rows)
        if not panels:
            continue
        made = target / path.parent.name / f"{path.stem}.svg"
        made.parent.mkdir(parents=True, exist_ok=True)
        draw(panels, f"{path.stem}, {path.parent.name}", made)
        print(f"wrote {made}")
    return 0


def panels_of(rows: list[dict]) -> dict[str, dict[str, list[tuple[str, float]]]]:
    """Panel title -> line -> (place on the x axis, value); a panel per kind of case, lengths along x."""
    panels: dict[str, dict[str, list[tuple[str, float]]]] = {}
    for row in sorted(rows, key=lambda row: _place(row["case"])):
        if row["pass"].startswith("layer_") or row["unit"] == "nats":
            continue
        title, line = _panel(row)
        lines = panels.setdefault(title, {})
        place = str(_place(row["case"])[0])
        lines.setdefault(line, []).append((place, row["ours"]))
        for peer, value in row["peers"].items():
            lines.setdefault(peer, []).append((place, value))
    return {title: {line: list(dict(points).items()) for line, points in panels[title].items()} for title in panels}


def draw(panels: dict[str, dict[str, list[tuple[str, float]]]], title: str, path: Path) -> None:
    """One figure; the same numbers always give the same file."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = min(len(panels), _COLUMNS)
    rows = -(-len(panels) // columns)
    with plt.rc_context({"svg.hashsalt": "plait", "svg.fonttype": "none"}):
        size = (4.2 * columns, 3.2 * rows + 0.4)
        figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
        figure.suptitle(title)
        cells = list(axes.flat)
        for axis, (name, lines) in zip(cells, panels.items(), strict=False):
            _lines(axis, name, lines)
        for axis in cells[len(panels) :]:
            axis.remove()
        temporary = path.with_name(path.name + ".tmp")
        figure.savefig(temporary, format="svg", metadata={"Date": None})
        plt.close(figure)
    os.replace(temporary, path)


def _lines(axis, name: str, lines: dict[str, list[tuple[str, float]]]) -> None:
    """Lines over the lengths, or bars where there is one length only."""
    places = sorted({place for points in lines.values() for place, _ in points}, key=int)
    colors = {line: _color(line) for line in lines}
    if len(places) == 1:
        names = list(lines)[::-1]
        bars = axis.barh(
            names, [lines[line][0][1] for line in names], color=[colors[line] or "#666666" for line in names]
        )
        axis.bar_label(bars, [report.number(lines[line][0][1]) for line in names], fontsize=6, padding=2)
        axis.margins(x=0.15)
        axis.tick_params(axis="y", labelsize=7)
    else:
        for line, points in lines.items():
            x, y = [places.index(place) for place, _ in points], [value for _, value in points]
            width = 2.2 if colors[line] == _OURS else 1.2
            axis.plot(x, y, marker=".", linewidth=width, label=line, color=colors[line])
        axis.set_xticks(range(len(places)), places)
        axis.set_ylim(bottom=0)
        axis.legend(fontsize=6)
    axis.set_title(name, fontsize=9)


def _color(line: str) -> str | None:
    """plait stands out; peers look alike in every panel; None leaves the choice to matplotlib."""
    if line.startswith("plait ") and line != "plait cuda_naive" and "IHA" not in line:
        return _OURS
    return _PEERS.get(line.removesuffix("_causal"))


def _panel(row: dict) -> tuple[str, str]:
    """The panel of a row, and the name of its line in it."""
    case = parse(row["case"])
    end = f"{row['pass']}, {row['unit']}" + ("" if row["regime"] == "burst" else f", {row['regime']}")
    same_tokens = isinstance(case, AttentionCase) and (case.batch == 1 or case.batch * case.seqlen_q == TOKENS)
    if same_tokens and row["case"].count(" ") == 4:
        kind = f"H D {case.heads_q * case.head_dim}, D {case.head_dim}, {'causal' if case.causal else 'full'}"
        return f"{kind}\n{end}", f"plait {row['backend']}"
    if isinstance(case, IhaCase):
        return f"IHA {case.mode} {case.part}\n{end}", f"plait {row['backend']}"
    llama = re.fullmatch(r"N\d+ frac([\d.]+) (\w+) (\w+)", row["case"])
    if llama:
        name = f"plait IHA {float(llama[1]):.0%}" if float(llama[1]) else "plait"
        return f"LLaMA {llama[3]}, {llama[2]}\n{end}", name
    kind = re.sub(r"\b(S|Sk|N)\d+(x\d+)? ", "", row["case"])
    return f"{kind}\n{end}", f"plait {row['backend']}"


def _place(case: str) -> tuple[int, str]:
    """The length of a case, its place on the x axis, and itself."""
    match = re.search(r"\b(?:S|Sk|N)(?:\d+x)?(\d+)\b", case)
    return (int(match[1]) if match else 0), case
