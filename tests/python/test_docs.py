"""The documents tell the truth: every code block of them runs, links lead somewhere, docs/api.md is current."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_readme import LIB, README, blocks

ROOT = README.parent
EXAMPLE = ROOT / "examples" / "flash_attention_2_mma"
PROGRAM = LIB.parent / "bin" / "plait"
DOCUMENTS = [*sorted((ROOT / "docs").glob("*.md")), EXAMPLE / "README.md"]
WITH_PYTHON = [path for path in DOCUMENTS if blocks("python", path) and path.name != "api.md"]


def run(*command, **options) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=300, **options)
    assert done.returncode == 0, (command, done.stdout + done.stderr)
    return done.stdout


def test_the_documents_with_examples_are_found():
    assert {"quickstart.md", "faq.md", "dispatch.md", "README.md"} <= {path.name for path in WITH_PYTHON}


@pytest.mark.parametrize("path", WITH_PYTHON, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_python_blocks_run(path, tmp_path, monkeypatch):
    """Each in a namespace of its own; those of the FAQ share one, as it says."""
    monkeypatch.chdir(tmp_path)
    shared = {"__name__": "__main__"}
    for number, block in enumerate(blocks("python", path), 1):
        code = compile(block, f"{path.name}, block {number}", "exec")
        exec(code, shared if path.name == "faq.md" else {"__name__": "__main__"})


def test_c_and_cpp_blocks_build_with_the_cmake_block_and_run(tmp_path):
    quickstart = ROOT / "docs" / "quickstart.md"
    for name, language in (("hello.cpp", "cpp"), ("hello.c", "c"), ("CMakeLists.txt", "cmake")):
        (block,) = blocks(language, quickstart)
        (tmp_path / name).write_text(block)
    cmake = shutil.which("cmake", path=Path(sys.executable).parent) or shutil.which("cmake")
    assert cmake, "building plait needs cmake, so it should be here"
    (configure,) = re.findall(r"`(cmake -S \. -B build [^`]*)`", quickstart.read_text(encoding="utf-8"))
    path = os.pathsep.join([str(Path(sys.executable).parent), str(Path(cmake).parent), os.environ["PATH"]])
    run("bash", "-c", configure, cwd=tmp_path, env=os.environ | {"PATH": path})
    run(cmake, "--build", tmp_path / "build")
    output = run(tmp_path / "build" / "hello")
    refusal = re.search(r"// (window: got .*)", blocks("cpp", quickstart)[0])[1]
    assert output.startswith("attention_forward on cpu") and output.endswith(f"out[0] = 0.500\n{refusal}\n")
    assert run(tmp_path / "build" / "hello_c") == "out[0] = 0.500\n"


def test_shell_commands_are_commands_of_the_cli():
    commands = [
        line.split("#")[0].split()[1:]
        for path in DOCUMENTS
        for block in blocks("sh", path)
        for line in block.splitlines()
        if line.startswith("plait ")
    ]
    assert {command[0] for command in commands} == {"doctor", "explain", "window", "check", "bench"}
    for command in commands:
        run(PROGRAM, *(command if command[0] != "bench" else ["bench", "--help"]))


def test_the_flash_attention_usage_example_runs(tmp_path):
    output = run(sys.executable, EXAMPLE / "usage.py", cwd=tmp_path)
    difference = float(re.search(r"in float32: (\S+)", output)[1])
    assert difference < 2e-3  # one rounding to half precision of values up to 4
    assert "strategy   split_q" in output and "strategy   split_kv" in output
    assert "refused: strategy: " in output and "missing: strategy split_d" in output


def anchors(path: Path) -> set[str]:
    """The anchors that GitHub makes of the headings of a document."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere():
    count = 0
    for path in [*DOCUMENTS, README, ROOT / "CONTRIBUTING.md"]:
        text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if target.startswith("https://"):
                continue
            file, _, anchor = target.partition("#")
            there = (path.parent / file).resolve() if file else path
            assert there.exists(), f"{path.name} links to {target}"
            assert not anchor or anchor in anchors(there), f"{path.name} links to {target}"
            count += 1
    assert count > 30


def api_reference(*arguments) -> subprocess.CompletedProcess:
    script = ROOT / "scripts" / "api_reference.py"
    return subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True)


def test_the_api_reference_is_current():
    done = api_reference("--check")
    assert done.returncode == 0, done.stderr


def test_the_api_reference_has_every_public_name():
    import plait

    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    for name in plait.functional.__all__:
        assert f"### plait.{name}\n" in text
    for header in (ROOT / "include" / "plait").iterdir():
        assert f"### {header.name}\n" in text


def test_a_changed_docstring_makes_the_api_reference_old(tmp_path):
    for folder in ("python", "include", "docs"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    assert api_reference(tmp_path).returncode == 0
    assert api_reference("--check", tmp_path).returncode == 0
    source = tmp_path / "python" / "plait" / "_iha.py"
    source.write_text(source.read_text().replace("Mixes heads into pseudo-heads", "Mixes the heads"))
    done = api_reference("--check", tmp_path)
    assert done.returncode == 1 and "run python scripts/api_reference.py" in done.stderr
    assert api_reference(tmp_path).returncode == 0
    assert "Mixes the heads" in (tmp_path / "docs" / "api.md").read_text()


def test_a_public_name_without_a_docstring_is_found(tmp_path):
    for folder in ("python", "include", "docs"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    source = tmp_path / "python" / "plait" / "nn.py"
    source.write_text(source.read_text() + "\n\ndef bare(x):\n    return x\n")
    done = api_reference("--check", tmp_path)
    assert done.returncode == 1 and "plait.nn.bare is public and has no docstring" in done.stderr
