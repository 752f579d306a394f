"""Holds the include directions of docs/architecture.md: api -> backends -> core -> catalog -> include/plait.

Called by .ci/run and `make lint`; prints every forbidden #include and exits 1 when there is one.
"""

import re
import sys
from pathlib import Path

# What every folder of CUDA kernels may use.
_KERNEL_BASE = {"src/cuda/" + part for part in ("ptx", "tile", "common", "runtime", "aux")}
# Layer (folder) -> the project folders that its files may include from, beside its own.
LAYERS = {
    "include/plait": set(),
    "src/catalog": {"include/plait"},
    "src/core": {"include/plait", "src/catalog"},
    "src/reference": {"include/plait", "src/core"},
    "src/cpu": {"include/plait", "src/catalog", "src/core"},
    "src/cuda/ptx": set(),
    "src/cuda/tile": {"src/cuda/ptx"},
    "src/cuda/runtime": {"include/plait"},
    "src/cuda/common": {"src/core", "src/cuda/ptx", "src/cuda/tile", "src/cuda/runtime"},
    "src/cuda/aux": {"src/core", "src/cuda/common", "src/cuda/ptx", "src/cuda/runtime"},
    "src/cuda/iha": {"include/plait", "src/catalog", "src/core"} | _KERNEL_BASE,
    "src/cuda/naive": {"include/plait", "src/core"} | _KERNEL_BASE,
    "src/cuda/mma": {"include/plait", "src/catalog", "src/core"} | _KERNEL_BASE,
    "src/cuda": {"include/plait", "src/catalog", "src/core", "src/cuda/iha", "src/cuda/mma", "src/cuda/naive"}
    | _KERNEL_BASE,
    "src/api": {"include/plait", "src/catalog", "src/core", "src/reference", "src/cpu", "src/cuda"},
    "bindings/torch": {"include/plait"},
    "tools/cli": {"include/plait"},
    "examples/cpp": {"include/plait"},
}
# Headers of frameworks, and the files and folders that may include them.
FRAMEWORKS = (
    (re.compile(r"^(torch|ATen|c10|caffe2)\w*[/.]"), ("bindings/torch/",)),
    (re.compile(r"^(cuda|cub|thrust|cutlass|cute|nv)\w*[/.]"), ("src/cuda/", "tools/cli/gpu.cu")),
)
# The oracle must not share the code that it checks.
ORACLE, ORACLE_FORBIDDEN = "src/reference", "src/core/mask.hpp"

INCLUDE = re.compile(r'^\s*#\s*include\s+[<"]([^">]+)[">]', re.MULTILINE)
SUFFIXES = {".hpp", ".h", ".cpp", ".cc", ".cu", ".cuh", ".inc"}


def layer_of(path: str) -> str | None:
    return max((layer for layer in LAYERS if path.startswith(layer + "/")), key=len, default=None)


def resolve(root: Path, file: Path, name: str) -> str | None:
    """The project file that `#include name` in `file` means, relative to `root`; None for anything outside."""
    for base in (file.parent, root / "src", root / "include"):
        candidate = (base / name).resolve()
        if candidate.is_file() and candidate.is_relative_to(root):
            return candidate.relative_to(root).as_posix()
    return None


def includes(root: Path, path: str) -> list[tuple[str, str | None]]:
    file = root / path
    return [(name, resolve(root, file, name)) for name in INCLUDE.findall(file.read_text(encoding="utf-8"))]


def reaches(root: Path, start: str, goal: str) -> list[str] | None:
    """A chain of includes from `start` to `goal`, or None."""
    stack, seen = [[start]], {start}
    while stack:
        chain = stack.pop()
        if chain[-1] == goal:
            return chain
        for _, target in includes(root, chain[-1]):
            if target and target not in seen:
                seen.add(target)
                stack.append([*chain, target])
    return None


def check(root: Path) -> tuple[int, list[str]]:
    """The number of files read and one line for each violation."""
    root = root.resolve()
    files = sorted(
        {
            file.relative_to(root).as_posix()
            for layer in LAYERS
            for file in (root / layer).rglob("*")
            if file.suffix in SUFFIXES
        }
    )
    errors = []
    for path in files:
        layer = layer_of(path)
        for name, target in includes(root, path):
            framework = any(is_of.match(name) and not path.startswith(allowed) for is_of, allowed in FRAMEWORKS)
            if framework and target is None:
                errors.append(f"{path}: includes {name}: {layer} knows no framework and no CUDA")
            other = layer_of(target) if target else None
            if target and other != layer and other not in LAYERS[layer]:
                allowed = ", ".join(sorted(LAYERS[layer] | {layer}))
                errors.append(f"{path}: includes {target}: {layer} may include from {allowed} only")
        if layer == ORACLE and (chain := reaches(root, path, ORACLE_FORBIDDEN)):
            errors.append(f"{path}: reaches {ORACLE_FORBIDDEN} ({' -> '.join(chain)}): the oracle has its own masks")
    return len(files), errors


def main() -> int:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent.parent
    count, errors = check(root)
    if count == 0:
        errors.append(f"{root}: no source file found")
    for error in errors:
        print(error, file=sys.stderr)
    print(f"include directions: {count} files, {len(errors)} violations")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
