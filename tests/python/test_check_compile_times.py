"""scripts/check_compile_times.py finds units above the limit, and only those of the CUDA library."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "check_compile_times.py"
HEAD = "# ninja log v7\n"


def check(folder, text):
    (folder / ".ninja_log").write_text(HEAD + text)
    return subprocess.run([sys.executable, SCRIPT, folder], capture_output=True, text=True)


def unit(name, seconds):
    return f"1000\t{1000 + seconds * 1000}\t1\tsrc/cuda/CMakeFiles/plait_cuda.dir/{name}.cu.o\tff\n"


@pytest.mark.parametrize("seconds, status", [(79, 0), (81, 1)])
def test_the_slowest_decides(tmp_path, seconds, status):
    done = check(tmp_path, unit("a", 3) + unit("b", seconds) + "0\t99000\t1\tsrc/cpu/x.cpp.o\tff\n")
    assert done.returncode == status and "2 CUDA units" in done.stdout and f"{seconds}.0 s  b.cu.o" in done.stdout


@pytest.mark.parametrize("units, status", [(51, 0), (52, 1)])
def test_all_together_have_a_limit(tmp_path, units, status):
    assert check(tmp_path, "".join(unit(f"u{i}", 70) for i in range(units))).returncode == status


def test_the_last_compilation_counts(tmp_path):
    assert check(tmp_path, unit("a", 200) + unit("a", 20)).returncode == 0


def test_a_build_without_cuda_is_told(tmp_path):
    done = check(tmp_path, "0\t10\t1\tsrc/cpu/x.cpp.o\tff\n")
    assert done.returncode == 1 and "PLAIT_CUDA=ON" in done.stderr
