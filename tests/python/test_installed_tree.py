"""The installed package is complete and self-contained: libraries, program, headers, what they link, where they look.

bindings/torch's own part is in test_package.py.
"""

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest

TREE = next(
    path
    for folder in importlib.util.find_spec("plait").submodule_search_locations
    if (path := Path(folder) / "lib" / "libplait.so").is_file()
).parents[1]
HEADERS = Path(__file__).parents[2] / "include" / "plait"


def dynamic(path: Path) -> tuple[set[str], str]:
    """Names that a binary needs, and its run path."""
    text = subprocess.run(["readelf", "-d", path], capture_output=True, text=True, check=True).stdout
    runpath = re.search(r"R(?:UN)?PATH.*\[(.*)\]", text)
    return set(re.findall(r"NEEDED.*\[(.+)\]", text)), runpath.group(1) if runpath else ""


@pytest.mark.parametrize("name", ["lib/libplait.so", "lib/libplait_torch.so", "bin/plait"])
def test_nothing_needs_a_gpu_library_to_load(name):
    needed, _ = dynamic(TREE / name)
    assert needed
    assert not [lib for lib in needed if re.match(r"lib(cuda|cudart|cublas|nvrtc|torch_cuda|c10_cuda)", lib)]


def test_libplait_knows_no_framework():
    needed, _ = dynamic(TREE / "lib" / "libplait.so")
    assert not [lib for lib in needed if re.match(r"lib(torch|c10|python)", lib)]


@pytest.mark.parametrize(
    ("name", "runpath"),
    [("lib/libplait.so", "$ORIGIN"), ("lib/libplait_torch.so", "$ORIGIN"), ("bin/plait", "$ORIGIN/../lib")],
)
def test_run_paths_are_relative(name, runpath):
    assert dynamic(TREE / name)[1] == runpath


def test_highway_travels_with_the_package():
    needed, _ = dynamic(TREE / "lib" / "libplait.so")
    (hwy,) = [lib for lib in needed if lib.startswith("libhwy")]
    assert {path.name for path in (TREE / "lib").iterdir()} == {"libplait.so", "libplait_torch.so", hwy}
    loaded = subprocess.run(["ldd", TREE / "bin" / "plait"], capture_output=True, text=True, check=True).stdout
    assert Path(re.search(rf"{hwy} => (\S+)", loaded).group(1)).resolve() == (TREE / "lib" / hwy).resolve()


def test_headers_are_the_public_ones():
    installed = {path.name: path.read_bytes() for path in (TREE / "include" / "plait").iterdir()}
    assert installed == {path.name: path.read_bytes() for path in HEADERS.iterdir()}
