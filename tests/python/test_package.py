"""The package as a whole: how its library is found, what the binary links, its signatures, versions and example."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import plait
import pytest
from plait import _library

ROOT = Path(__file__).parents[2]
SHIM = next(Path(folder) / "lib" / _library.SHIM for folder in plait.__path__ if (Path(folder) / "lib").is_dir())


def test_a_missing_library_is_explained(tmp_path):
    with pytest.raises(ImportError, match=re.escape(str(tmp_path / "lib")) + ".*install plait again"):
        _library.load([str(tmp_path)])


def test_a_broken_library_is_explained(tmp_path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / _library.SHIM).write_bytes(b"not a library")
    with pytest.raises(ImportError, match="cannot load .*" + re.escape(_library.SHIM)):
        _library.load([str(tmp_path)])


def test_torch_that_is_too_old_is_refused(monkeypatch):
    monkeypatch.setattr("torch.__version__", "2.9.1+cpu")
    with pytest.raises(ImportError, match="torch >= 2.10, found 2.9.1"):
        _library.load(plait.__path__)


def test_the_shim_links_no_cuda_and_no_python():
    text = subprocess.run(["readelf", "-d", str(SHIM)], capture_output=True, text=True, check=True).stdout
    needed = set(re.findall(r"NEEDED.*\[(.+)\]", text))
    system = {"libstdc++.so.6", "libgcc_s.so.1", "libm.so.6", "libc.so.6", "ld-linux-x86-64.so.2"}
    assert "libtorch_cpu.so" in needed
    assert all(re.match(r"libplait\.so|libtorch_cpu\.so$", name) for name in needed - system), needed


def test_the_shim_uses_only_the_stable_abi():
    text = subprocess.run(
        ["nm", "-D", "--undefined-only", str(SHIM)], capture_output=True, text=True, check=True
    ).stdout
    symbols = [line.split()[-1] for line in text.splitlines()]
    assert any(s.startswith("aoti_torch_") for s in symbols)
    assert [s for s in symbols if re.match(r"_ZNK?(S\w)?\d*(c10|2at|5torch|3c10)", s)] == []


def test_functions_keep_options_keyword_only():
    leading = {
        "attention_backward": ["dout", "q", "k", "v", "out", "lse"],
        "attention_with_kvcache": ["q", "k_cache", "v_cache"],
        "explain": ["q", "k", "v"],
        "flash_attention": ["q", "k", "v"],
        "flash_attention_varlen": ["q", "k", "v"],
        "flop_matched_window": ["N", "P"],
        "fold_premix_into_projection": ["weight", "w"],
        "iha_attention": ["q", "k", "v", "w_q", "w_k", "w_v"],
        "iha_attention_with_kvcache": ["q", "k_new", "v_new", "cache", "w_q", "w_k", "w_v"],
        "merge_states": ["outs", "lses"],
        "premix": ["x", "w"],
    }
    assert set(plait.functional.__all__) == set(leading)
    for name, expected in leading.items():
        function = getattr(plait, name)
        assert function is getattr(plait.functional, name)
        assert function.__doc__
        parameters = inspect.signature(function).parameters.values()
        assert [p.name for p in parameters if p.kind == p.POSITIONAL_OR_KEYWORD] == expected
    common = {"causal", "window", "scale", "softcap", "sinks", "strategy", "backend", "deterministic", "out_dtype",
              "split_size", "layout", "return_lse"}  # fmt: skip
    for name in ("flash_attention", "flash_attention_varlen", "iha_attention"):
        assert common <= set(inspect.signature(getattr(plait, name)).parameters)


def test_versions_agree():
    version = re.compile(r'^version = "(.+)"', re.MULTILINE).search((ROOT / "pyproject.toml").read_text())[1]
    assert plait.__version__ == version
    assert f"project(plait VERSION {version} " in (ROOT / "CMakeLists.txt").read_text()


def test_the_quickstart_runs():
    script = ROOT / "examples" / "python" / "quickstart.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert len(losses) == 4 and losses[-1] < losses[0] / 2, done.stdout
    difference = re.search(r"differs from attention by (\S+)", done.stdout)[1]
    assert float(difference) < 1e-5
