"""Result files of the suites: `<folder>/<gpu>/<suite>.json`, to which runs add and whose rows they replace.

Called by bench.kernels, bench.llama, bench.tables and bench.plots.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from plait.bench import report
from plait.bench.config import BenchError

COMMITTED = Path("bench") / "results"
_ELSEWHERE = Path("plait-bench")
_KEY = ("case", "pass", "regime", "backend")


def gpu_name(device: torch.device) -> str:
    """The folder of a device: `h200` for NVIDIA H200, `cpu`."""
    if device.type == "cpu":
        return "cpu"
    words = torch.cuda.get_device_name(device).lower().split()
    return "_".join(word for word in words if word not in ("nvidia", "tesla", "geforce"))


def default_path(device: torch.device, suite: str) -> Path:
    """In a checkout of plait its committed file, elsewhere a file under plait-bench."""
    folder = COMMITTED if COMMITTED.is_dir() else _ELSEWHERE
    return folder / gpu_name(device) / f"{suite}.json"


def load(path: Path) -> dict:
    """A result file's content; an empty one where there is no file."""
    try:
        content = json.loads(path.read_text())
        rows, env = content["rows"], content["env"]
        if not isinstance(rows, list) or not isinstance(env, dict) or not all(map(_key, rows)):
            raise TypeError("rows and env are not what this benchmark writes")
    except FileNotFoundError:
        return {"env": {}, "rows": []}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise BenchError(f"{path}: is no result file of this benchmark; move it away ({error!r})") from error
    return content


def add(old: dict, env: dict, rows: list[dict], missing: list[dict]) -> dict:
    """`old` with `rows` in place of the rows of the same case, pass, regime and backend.

    A row that stays from another run keeps what differed then under "env". `missing`: what this run could not or did
    not measure; kept until it is measured.
    """
    fresh = {_key(row) for row in rows}
    kept = []
    for row in old["rows"]:
        if _key(row) in fresh:
            continue
        facts = old["env"] | row.get("env", {})
        then = {name: value for name, value in facts.items() if env.get(name) != value}
        kept.append(
            {**{name: value for name, value in row.items() if name != "env"}, **({"env": then} if then else {})}
        )
    measured = fresh | {_key(row) for row in kept}
    measured |= {(*key[:3], "auto") for key in measured}
    reasons = {_key(entry): entry for entry in [*old.get("not_measured", []), *missing]}
    open_points = [entry for key, entry in reasons.items() if key not in measured]
    content = {"env": env, "rows": kept + rows}
    return content | ({"not_measured": open_points} if open_points else {})


def write(path: Path, content: dict) -> None:
    """Writes the whole file or none, its folder too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    report.write_json(path, content)


def _key(row: dict) -> tuple:
    return tuple(row[name] for name in _KEY)
