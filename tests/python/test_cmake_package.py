"""find_package(plait) works from an installed tree: the C and C++ examples build against it and run.

Uses the tree that pip installed, which holds the headers, the library and the CMake package.
"""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TREE = next(
    path
    for folder in importlib.util.find_spec("plait").submodule_search_locations
    if (path := Path(folder) / "lib" / "libplait.so").is_file()
).parents[1]


def run(*command: object, **options: object) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("folder", "program", "expected"),
    [("cpp", "train_step", "|dq|"), ("c", "forward", "refused as it should be: window")],
)
def test_examples_build_against_the_installed_package(tmp_path, folder, program, expected):
    cmake = shutil.which("cmake") or shutil.which("cmake", path=str(Path(sys.executable).parent))
    if cmake is None:
        pytest.skip("no cmake on PATH")
    run(cmake, "-S", ROOT / "examples" / folder, "-B", tmp_path, f"-DCMAKE_PREFIX_PATH={TREE}")
    run(cmake, "--build", tmp_path)
    assert expected in run(tmp_path / program)


def test_a_moved_tree_still_works(tmp_path):
    cmake = shutil.which("cmake") or shutil.which("cmake", path=str(Path(sys.executable).parent))
    if cmake is None:
        pytest.skip("no cmake on PATH")
    moved = tmp_path / "moved"
    shutil.copytree(TREE, moved, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    run(cmake, "-S", ROOT / "examples" / "c", "-B", tmp_path / "b", f"-DCMAKE_PREFIX_PATH={moved}")
    run(cmake, "--build", tmp_path / "b")
    assert str(moved) in run("ldd", tmp_path / "b" / "forward")
