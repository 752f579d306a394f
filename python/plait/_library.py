"""Finds and loads the compiled libraries of the package.

Called once, when plait is imported; afterwards torch.ops.plait has the ops of bindings/torch/library.cpp.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

SHIM = "libplait_torch.so"
MINIMUM_TORCH = (2, 10)


def load(package_dirs: Iterable[str]) -> Path:
    """Loads `lib/libplait_torch.so` from the first of `package_dirs` that has it, and returns its path.

    An editable install has two such folders: the sources and the installed tree.
    Raises ImportError where torch is missing or too old, or where the library is missing or cannot be loaded.
    """
    try:
        import torch
    except ImportError as error:
        raise ImportError("plait needs torch >= 2.10: pip install torch") from error
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if release < MINIMUM_TORCH:
        raise ImportError(f"plait needs torch >= 2.10, found {torch.__version__}: pip install --upgrade torch")
    folders = [Path(folder) / "lib" for folder in package_dirs]
    found = next((folder / SHIM for folder in folders if (folder / SHIM).is_file()), None)
    if found is None:
        raise ImportError(
            f"plait was installed without its compiled library: no {SHIM} in "
            f"{', '.join(str(folder) for folder in folders)}. Run `make setup` in a checkout, or install plait again "
            "with torch importable."
        )
    try:
        torch.ops.load_library(str(found))
    except OSError as error:
        raise ImportError(f"plait cannot load {found}: {error.__cause__ or error}") from error
    return found
