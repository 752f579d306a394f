"""The wheel, as `pip wheel .` makes it: one for every Python, complete, and at work in a fresh environment without
compiler, source tree or system package. Built once with torch and once without.

The build folder is kept (build/wheel), so that only the first run compiles, through ccache where it is there.
"""

import email
import os
import re
import shutil
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VERSION = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
TOOLS = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


def run(*command, **options) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=900, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(folder: Path, **defines: str) -> Path:
    """The one wheel that pip makes of this checkout. PLAIT_WHEEL_CUDA=ON takes the CUDA kernels into it: slow."""
    defines["PLAIT_CUDA"] = os.environ.get("PLAIT_WHEEL_CUDA", "OFF")
    environment = {**os.environ, "PATH": TOOLS}
    if shutil.which("ccache"):  # called as in the builds of scripts/setup.sh, whose objects it then finds
        environment.setdefault("CMAKE_CXX_COMPILER_LAUNCHER", "ccache")
        environment.setdefault("CXX", "c++")
        defines["PLAIT_WERROR"] = os.environ.get("PLAIT_WERROR", "OFF")
    settings = [f"build-dir={ROOT / 'build' / 'wheel'}", *(f"cmake.define.{k}={v}" for k, v in defines.items())]
    options = [word for setting in settings for word in ("-C", setting)]
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-build-isolation", "--no-deps")
    run(*pip, *options, "-w", folder, ROOT, env=environment)
    (wheel,) = folder.iterdir()
    return wheel


class Environment:
    """A virtual environment with nothing in it but a wheel, and the torch of this one if asked for."""

    def __init__(self, folder: Path, wheel: Path):
        run(sys.executable, "-m", "venv", "--without-pip", folder)
        self.folder, self.python = folder, folder / "bin" / "python"
        pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", self.python)
        run(*pip, "install", "-q", "--no-deps", "--no-index", wheel)
        (self.site,) = folder.glob("lib/python*/site-packages")

    def show_torch(self) -> None:
        places = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
        (self.site / "torch_of_the_tests.pth").write_text("\n".join(places))

    def start(self, *command, check: bool = True) -> subprocess.CompletedProcess:
        """Runs a program of the environment with no other on the PATH."""
        done = subprocess.run(
            [self.folder / "bin" / command[0], *command[1:]], capture_output=True, text=True, timeout=300,
            cwd=self.folder, env={"PATH": str(self.folder / "bin"), "HOME": str(self.folder)},
        )  # fmt: skip
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    environment = Environment(tmp_path_factory.mktemp("fresh"), wheel)
    environment.show_torch()
    return environment


@pytest.fixture(scope="module")
def without_torch(tmp_path_factory):
    wheel = build(tmp_path_factory.mktemp("wheel_without_torch"), PLAIT_TORCH="OFF")
    return Environment(tmp_path_factory.mktemp("fresh_without_torch"), wheel)


def test_one_wheel_serves_every_python(wheel):
    assert re.fullmatch(rf"plait-{re.escape(VERSION)}-py3-none-linux_\w+\.whl", wheel.name)


def test_the_wheel_is_complete_and_holds_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        entries = {entry.filename: entry for entry in archive.infolist() if not entry.is_dir()}
        metadata = email.message_from_bytes(archive.read(f"plait-{VERSION}.dist-info/METADATA"))
    assert not [name for name, entry in entries.items() if stat.S_ISLNK(entry.external_attr >> 16)]
    package = ROOT / "python" / "plait"
    sources = {f"plait/{path.relative_to(package)}" for path in package.rglob("*.py")}
    headers = {f"plait/include/plait/{path.name}" for path in (ROOT / "include" / "plait").iterdir()}
    binaries = {"plait/lib/libplait.so", "plait/lib/libplait_torch.so", "plait/bin/plait"}
    assert sources | headers | binaries <= set(entries)
    rest = set(entries) - sources - headers - binaries
    kinds = (
        r"plait/lib/libhwy\.so\.\d+",
        r"plait/share/cmake/plait/plait\w+(-release)?\.cmake",
        rf"plait-{re.escape(VERSION)}\.data/scripts/plait",
        rf"plait-{re.escape(VERSION)}\.dist-info/.+",
    )
    assert not [name for name in rest if not any(re.fullmatch(kind, name) for kind in kinds)]
    assert {Path(name).name for name in rest} >= {"plaitConfig.cmake", "plaitTargets.cmake", "LICENSE", "NOTICE"}
    assert entries["plait/bin/plait"].external_attr >> 16 & stat.S_IXUSR
    assert metadata["Version"] == VERSION and metadata["Requires-Python"] == ">=3.10"
    assert all("extra ==" in needed for needed in metadata.get_all("Requires-Dist", []))


STEP = """
import shutil, sys
assert not any(shutil.which(tool) for tool in ("cc", "c++", "gcc", "g++", "clang++", "cmake", "ninja", "nvcc"))
import torch
import plait

q, k, v = (torch.randn(2, 4, 130, 32, requires_grad=True) for _ in range(3))
torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).square().sum().backward()
expected = [x.grad.clone() for x in (q, k, v)]
for x in (q, k, v):
    x.grad = None
plait.flash_attention(q, k, v, causal=True).square().sum().backward()
for x, grad in zip((q, k, v), expected):
    torch.testing.assert_close(x.grad, grad, atol=1e-4, rtol=1e-4)
layer = plait.nn.InterleavedHeadAttention(32, heads=4, kv_heads=2, head_dim=8, P=2)
layer(torch.randn(2, 20, 32)).sum().backward()
assert layer.w_q.grad is not None
print(plait.__version__, plait.__file__)
print(*{line.split()[-1] for line in open("/proc/self/maps") if "libplait" in line or "libhwy" in line}, sep="\\n")
"""


def test_attention_runs_forward_and_backward(installed):
    first, *libraries = installed.start("python", "-c", STEP).stdout.splitlines()
    assert first == f"{VERSION} {installed.site / 'plait' / '__init__.py'}"
    assert {Path(path).parent for path in libraries} == {installed.site / "plait" / "lib"}
    assert {re.sub(r"\.so.*", "", Path(path).name) for path in libraries} == {"libplait", "libplait_torch", "libhwy"}


def test_every_module_imports(installed):
    code = """
import importlib, pkgutil, plait
found = [m.name for m in pkgutil.walk_packages(plait.__path__, "plait.") if not m.name.endswith("__main__")]
for name in found:
    importlib.import_module(name)
print(*found)
"""
    names = installed.start("python", "-c", code).stdout.split()
    assert {"plait.compat.flash_attn_3", "plait.integrations.transformers", "plait.bench.llama"} <= set(names)


@pytest.mark.parametrize("kind", ["installed", "without_torch"])
def test_the_command_runs(kind, request):
    environment = request.getfixturevalue(kind)
    assert environment.start("plait", "--version").stdout == f"plait {VERSION}\n"
    environment.start("plait", "check", "--seqlen-q", "70", "--head-dim", "24", "--causal")
    assert "cpu" in environment.start("plait", "doctor").stdout


def test_without_torch_import_says_what_is_missing(without_torch):
    assert not (without_torch.site / "plait" / "lib" / "libplait_torch.so").exists()
    done = without_torch.start("python", "-c", "import plait", check=False)
    assert done.returncode == 1
    assert "ImportError: plait needs torch >= 2.10: pip install torch" in done.stderr

    without_torch.show_torch()
    done = without_torch.start("python", "-c", "import plait", check=False)
    assert done.returncode == 1
    assert "plait was installed without its compiled library" in done.stderr
    assert "install plait again with torch importable" in done.stderr


def test_without_torch_the_c_and_cpp_library_is_there(without_torch, tmp_path):
    cmake = shutil.which("cmake", path=TOOLS)
    tree = without_torch.site / "plait"
    run(cmake, "-S", ROOT / "examples" / "c", "-B", tmp_path, f"-DCMAKE_PREFIX_PATH={tree}")
    run(cmake, "--build", tmp_path)
    assert "refused as it should be: window" in run(tmp_path / "forward")
