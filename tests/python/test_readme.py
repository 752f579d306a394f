"""The examples of README.md and examples/cpp run as printed, against the installed package."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"
FOLDERS = [Path(folder) for folder in importlib.util.find_spec("plait").submodule_search_locations]
LIB = next(folder / "lib" for folder in FOLDERS if (folder / "lib" / "libplait.so").is_file())
INCLUDE = LIB.parent / "include"


def blocks(language: str, document: Path = README) -> list[str]:
    """The code blocks of one language in a document."""
    return re.findall(rf"^```{language}\n(.*?)^```", document.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("index", range(2))
def test_python_example_runs(tmp_path, index):
    examples = blocks("python")
    assert len(examples) == 2
    done = subprocess.run(
        [sys.executable, "-c", examples[index]], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    if index == 0:
        first = "(1, 8, 2048, 64) (1, 8, 2048, 64) left = 511, 1.03 times the key tiles of causal attention\n"
        assert done.stdout.startswith(first) and re.search("^  backend    (cpu|cuda_mma)$", done.stdout, re.MULTILINE)
    else:
        largest = float(re.search(r"tensor\(([^,)]*)", done.stdout).group(1))
        assert largest < 1e-4  # the converted model starts as the same function


def compile_and_run(source: Path, folder: Path) -> str:
    program = folder / "program"
    command = ["g++", "-std=c++20", "-Wall", "-Wextra", "-Werror", f"-I{INCLUDE}", source, f"-L{LIB}", "-lplait"]
    built = subprocess.run([*command, f"-Wl,-rpath,{LIB}", "-pthread", "-o", program], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    done = subprocess.run([program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_cpp_example_runs(tmp_path):
    (example,) = blocks("cpp")
    (tmp_path / "example.cpp").write_text(example)
    output = compile_and_run(tmp_path / "example.cpp", tmp_path)
    assert "attention_forward on cpu" in output
    assert output.endswith("out[0] = 0.500\n")  # a mean of values that are all 0.5


def test_examples_cpp_trains_a_step(tmp_path):
    """examples/cpp: premix by the identity makes joint IHA plain windowed attention, so torch can check the norms."""
    output = compile_and_run(README.parent / "examples" / "cpp" / "train_step.cpp", tmp_path)
    line = output.splitlines()[-1]
    numbers = [float(text) for text in re.findall(r"[\d.]+", line)]
    window, norms = int(numbers[0]), numbers[1:]

    import plait
    import torch

    assert window == plait.flop_matched_window(512, 2)[0]

    def fill(seed, count):
        values = []
        for _ in range(count):
            seed = (seed * 1664525 + 1013904223) % 2**32
            values.append((seed >> 8) / 8388608.0 - 1.0)
        return torch.tensor(values, dtype=torch.float64).view(1, 4, 512, 32)

    x, dout = fill(1, 4 * 512 * 32), fill(2, 4 * 512 * 32)
    q, k, v = (x.clone().requires_grad_() for _ in range(3))
    i = torch.arange(512)
    seen = (i[None] <= i[:, None]) & (i[None] >= i[:, None] - window)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    out.backward(dout)
    # Each of the two equal pseudo-heads carries half of every gradient.
    expected = [out.detach().norm(), *(t.grad.norm() / 2**0.5 for t in (q, k, v))]
    assert norms == pytest.approx([float(value) for value in expected], rel=1e-3)


def test_shell_commands_of_the_readme_are_commands_of_the_cli():
    program = LIB.parent / "bin" / "plait"
    commands = [
        line.split("#")[0].split()[1:]
        for block in blocks("sh")
        for line in block.splitlines()
        if line.startswith("plait ")
    ]
    assert len(commands) >= 5
    for command in commands:
        if command[0] != "bench":
            done = subprocess.run([program, *command], capture_output=True, text=True, timeout=300)
            assert done.returncode == 0, (command, done.stderr)


def test_the_ratios_that_it_names_are_the_rule_s():
    import plait

    text = " ".join(README.read_text(encoding="utf-8").split())
    named = re.search(
        r"P = 4, ([\d.]+) times causal attention at N = (\d+), ([\d.]+) at (\d+), ([\d.]+) at (\d+);", text
    )
    ratios = named.groups()
    for ratio, length in zip(ratios[::2], ratios[1::2], strict=True):
        assert f"{plait.flop_matched_window(int(length), 4)[1]:.2f}" == ratio


def test_it_has_a_place_for_the_benchmark_tables():
    tables = (README.parent / "python" / "plait" / "bench" / "tables.py").read_text(encoding="utf-8")
    begin, end = re.search(r'^BEGIN, END = "(.*)", "(.*)"$', tables, re.MULTILINE).groups()
    text = README.read_text(encoding="utf-8")
    assert text.count(begin) == text.count(end) == 1 and text.index(begin) < text.index(end)


def test_make_targets_of_the_documents_exist():
    listed = subprocess.run(["make", "-s", "help"], cwd=README.parent, capture_output=True, text=True).stdout
    texts = [(README.parent / name).read_text(encoding="utf-8") for name in ("README.md", "CONTRIBUTING.md")]
    targets = {target for text in texts for target in re.findall(r"(?:^|`)make ([a-z][a-z-]*)", text, re.MULTILINE)}
    assert {"demo", "test", "setup", "format", "lint", "help"} <= targets
    assert not [target for target in targets if not re.search(rf"^{target}\b", listed, re.MULTILINE)]
