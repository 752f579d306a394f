#!/usr/bin/env bash
# Makes a checkout ready: system packages, .venv, pinned Python packages, then libplait, its tests and the package.
# Called by make and .ci/run. Does nothing twice. Usage: scripts/setup.sh [env | build | all]
#   PYTHON        the Python to make .venv from (default python3)
#   PLAIT_WERROR  ON makes compiler warnings errors
#   PLAIT_CUDA    ON, OFF or AUTO (default: where the machine has nvcc 13 or an NVIDIA GPU)
#   PLAIT_CUDA_ARCHITECTURES  GPUs to build for (default: this machine's, else 90a-real)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
venv=.venv
build=build/dev

say() { echo "setup: $*"; }
fail() { echo "setup: $*" >&2; exit 1; }

# Debian's names of what the build, the tests and torch.compile need.
missing_packages() {
  command -v g++ > /dev/null || echo g++
  command -v make > /dev/null || echo make
  command -v readelf > /dev/null || echo binutils
  if ! command -v "$python" > /dev/null; then
    echo python3 python3-venv python3-dev
  else
    "$python" -c 'import ensurepip, venv' 2> /dev/null || echo python3-venv
    "$python" -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' 2> /dev/null ||
      echo python3-dev
  fi
  local package
  for package in libhwy-dev libgtest-dev libcli11-dev libfmt-dev nlohmann-json3-dev; do
    dpkg-query -W -f='${Status}' "$package" 2> /dev/null | grep -q 'ok installed' || echo "$package"
  done
}

system_packages() {
  if ! command -v dpkg-query > /dev/null; then
    say "not a Debian or Ubuntu system: expecting g++, Python headers, Highway, GoogleTest, CLI11, fmt, nlohmann-json"
    return
  fi
  local packages
  packages=$(missing_packages | xargs)
  [ -n "$packages" ] || return 0
  local as_root=()
  if [ "$(id -u)" != 0 ]; then
    if command -v sudo > /dev/null && sudo -n true 2> /dev/null; then
      as_root=(sudo -n)
    else
      fail "missing system packages. Run this, then try again: sudo apt-get install -y $packages"
    fi
  fi
  say "installing system packages: $packages"
  "${as_root[@]}" apt-get update -qq
  # shellcheck disable=SC2086
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $packages > /dev/null
}

# Prints "yes" and the site folders of a torch >= 2.10 that $python imports; nothing when there is none.
host_torch() {
  "$python" - 2> /dev/null << 'PY' || true
import sys, sysconfig, torch
if tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 10):
    venv = sys.prefix != sys.base_prefix
    print("venv" if venv else "system", *dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib")), sep="\n")
PY
}

make_venv() {
  if "$venv/bin/python" -c 'import pip' 2> /dev/null; then return; fi
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "$("$python" --version) is too old for the pinned packages: use Python 3.11 or newer (PYTHON=python3.12 make ...)"
  rm -rf "$venv"
  local torch
  torch=$(host_torch)
  case "$torch" in
    system*)
      say "using the torch of $(command -v "$python")"
      "$python" -m venv --system-site-packages "$venv" ;;
    venv*)  # a venv made inside a venv does not see it, a .pth file does
      say "using the torch of $(command -v "$python")"
      "$python" -m venv "$venv"
      tail -n +2 <<< "$torch" > "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/outer_torch.pth" ;;
    *)
      "$python" -m venv "$venv" ;;
  esac
}

has_gpu() { [ -e /proc/driver/nvidia/version ] && nvidia-smi > /dev/null 2>&1; }

# Whether the machine's own nvcc is CUDA 13 or newer.
has_nvcc() {
  local major
  major=$(nvcc --version 2> /dev/null | sed -n 's/.*release \([0-9]*\).*/\1/p')
  [ "${major:-0}" -ge 13 ]
}

# Whether nvcc comes from the Python packages of requirements/cuda.txt.
cuda_from_pip() {
  case "${PLAIT_CUDA:-AUTO}" in
    OFF) return 1 ;;
    ON) ! has_nvcc ;;
    *) ! has_nvcc && has_gpu ;;
  esac
}

# The GPUs to build for, in CMake's words: this machine's, else Hopper. wgmma and setmaxnreg need 90a.
cuda_architectures() {
  local capability=90
  if has_gpu; then capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d .); fi
  if [ "$capability" = 90 ]; then capability=90a; fi
  echo "${PLAIT_CUDA_ARCHITECTURES:-$capability-real}"
}

python_packages() {
  local stamp="$venv/.plait-requirements" now
  now=$(cat requirements/*.txt <(cuda_from_pip && echo cuda) | sha256sum)
  if [ "$(cat "$stamp" 2> /dev/null)" = "$now" ]; then return; fi
  local pip=("$venv/bin/python" -m pip --disable-pip-version-check install -q)
  if ! "$venv/bin/python" -c 'import torch; assert tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 10)' 2> /dev/null; then
    say "installing $(grep -v '^#' requirements/torch.txt): large, up to several GB with its GPU libraries"
    say "(to use a build of your own, install torch >= 2.10 for $python first and remove $venv)"
    "${pip[@]}" -r requirements/torch.txt
  fi
  say "installing the pinned Python packages"
  "${pip[@]}" -r requirements/build.txt -r requirements/bench.txt -r requirements/dev.txt
  if cuda_from_pip; then
    say "installing nvcc 13.0 into $venv"
    "${pip[@]}" -r requirements/cuda.txt
  fi
  echo "$now" > "$stamp"
}

build_package() {
  local stamp=$build/.plait-built werror=${PLAIT_WERROR:-OFF} cuda=${PLAIT_CUDA:-AUTO} arch config
  arch=$(cuda_architectures)
  config="$werror $cuda $arch"
  local sources=(CMakeLists.txt pyproject.toml cmake include src bindings tools python tests "$venv/.plait-requirements")
  if [ "$(cat "$stamp" 2> /dev/null)" = "$config" ] && [ -x "$venv/bin/plait" ] &&
    [ -z "$(find "${sources[@]}" -newer "$stamp" -not -name '__pycache__' -not -name '*.pyc' -print -quit)" ]; then
    return
  fi
  PATH="$PWD/$venv/bin:$PATH"
  if command -v ccache > /dev/null; then export CMAKE_CXX_COMPILER_LAUNCHER=ccache CMAKE_CUDA_COMPILER_LAUNCHER=ccache; fi
  if cuda_from_pip; then
    local toolkit
    toolkit=$(echo "$PWD/$venv"/lib/python3*/site-packages/nvidia/cu13)
    export CUDACXX=$toolkit/bin/nvcc LIBRARY_PATH="$toolkit/lib${LIBRARY_PATH:+:$LIBRARY_PATH}"
  fi
  say "building libplait, the plait command, the torch shim and the tests"
  mkdir -p "$build"
  local begun
  begun=$(mktemp "$build/.plait-begun.XXXXXX")
  cmake -S . -B "$build" -G Ninja -DPLAIT_TESTS=ON -DPLAIT_PACKAGE=ON -DPLAIT_TORCH=AUTO -DPLAIT_WERROR="$werror" \
    -DPLAIT_CUDA="$cuda" -DCMAKE_CUDA_ARCHITECTURES="$arch" \
    -DCMAKE_INSTALL_LIBDIR=lib -DCMAKE_BUILD_TYPE=Release -DCMAKE_EXPORT_COMPILE_COMMANDS=ON \
    -DPython_EXECUTABLE="$PWD/$venv/bin/python" > "$build/configure.log" 2>&1 ||
    { cat "$build/configure.log" >&2; fail "cmake could not configure the build (above)"; }
  cmake --build "$build"
  python -m pip --disable-pip-version-check install -q --no-build-isolation --no-deps -e . -C build-dir="$build" \
    -C cmake.define.PLAIT_TESTS=ON -C cmake.define.PLAIT_WERROR="$werror" -C cmake.define.PLAIT_CUDA="$cuda" \
    -C cmake.define.CMAKE_CUDA_ARCHITECTURES="$arch"
  # Anything edited while this ran is newer than the stamp and builds next time.
  echo "$config" > "$begun.text" && touch -r "$begun" "$begun.text" && mv "$begun.text" "$stamp" && rm "$begun"
}

case "${1:-all}" in
  env) system_packages; make_venv; python_packages ;;
  build) build_package ;;
  all) system_packages; make_venv; python_packages; build_package ;;
  *) fail "unknown step '$1': env, build or all" ;;
esac
