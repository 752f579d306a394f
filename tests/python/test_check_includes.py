"""scripts/check_includes.py finds what it is for, in small trees with one fault each."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "check_includes.py"

GOOD = {
    "include/plait/attention.hpp": "#include <cstdint>\n",
    "src/catalog/catalog.hpp": '#include "plait/attention.hpp"\n',
    "src/core/problem.hpp": '#include "catalog/catalog.hpp"\n',
    "src/core/mask.hpp": '#include "core/problem.hpp"\n',
    "src/reference/attention.cpp": '#include "core/problem.hpp"\n',
    "src/cpu/attention.cpp": '#include "core/mask.hpp"\n#include <hwy/highway.h>\n',
    "src/api/attention.cpp": '#include "core/mask.hpp"\n',
    "bindings/torch/library.cpp": '#include <torch/csrc/stable/library.h>\n#include "plait/attention.hpp"\n',
    "tools/cli/main.cpp": '#include "plait/attention.hpp"\n',
}

FAULTS = {
    "core includes a backend": ("src/core/plan.cpp", '#include "cpu/cpu.hpp"\n'),
    "catalog includes core": ("src/catalog/catalog.cpp", '#include "core/problem.hpp"\n'),
    "public header includes core": ("include/plait/plan.hpp", '#include "../../src/core/problem.hpp"\n'),
    "public header includes CUDA": ("include/plait/plan.hpp", "#include <cuda_runtime.h>\n"),
    "library includes torch": ("src/api/api.cpp", "#include <torch/torch.h>\n"),
    "library includes ATen": ("src/cpu/plan.cpp", "  #  include <ATen/ATen.h>\n"),
    "backend includes another": ("src/cpu/plan.cpp", '#include "reference/reference.hpp"\n'),
    "oracle includes the mask": ("src/reference/iha.cpp", '#include "core/mask.hpp"\n'),
    "oracle reaches the mask": ("src/core/helper.hpp", '#include "core/mask.hpp"\n'),
    "command includes internals": ("tools/cli/main.cpp", '#include "../../src/core/problem.hpp"\n'),
}


def check(root: Path, files: dict[str, str]) -> subprocess.CompletedProcess:
    extra = {
        "src/cpu/cpu.hpp": "",
        "src/reference/reference.hpp": "",
        "src/reference/head.hpp": '#include "core/helper.hpp"\n',
        "src/core/helper.hpp": "",
    }
    for name, text in {**GOOD, **extra, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return subprocess.run([sys.executable, SCRIPT, root], capture_output=True, text=True)


def test_a_good_tree_passes(tmp_path):
    done = check(tmp_path, {})
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("0 violations\n")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(tmp_path, fault):
    path, text = FAULTS[fault]
    done = check(tmp_path, {path: text})
    assert done.returncode == 1
    culprit = "src/reference/head.hpp" if fault == "oracle reaches the mask" else path
    assert [line.split(":")[0] for line in done.stderr.splitlines()] == [culprit]


def test_an_empty_tree_is_no_pass(tmp_path):
    assert subprocess.run([sys.executable, SCRIPT, tmp_path], capture_output=True).returncode == 1


def test_this_tree_passes():
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
