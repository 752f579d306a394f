#!/usr/bin/env bash
# Tests on the GPU of this machine: build/dev's cuda_test, its attention and IHA once more in the tiles of GPUs with less
# shared memory, then tests/python/gpu; a summary last.
# Called by `make gpu-test`. Builds nothing: it also runs in a copy of a tree that was built elsewhere.
# Usage: scripts/gpu_test.sh [seconds, default 300]
#   PYTHON       the Python that has torch with CUDA (default .venv/bin/python, else python3)
#   PLAIT_BUILD  the build folder (default build/dev)
#   SHARDS       processes of a cuda_test (default half of the cores, 1 to 8)
#   SUITES       of "cpp small_gpus python large" (default all but large, which takes 40 GB and more on the device)
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
budget=${1:-300}
build=${PLAIT_BUILD:-build/dev}
suites=${SUITES:-cpp small_gpus python}
shards=$(($(nproc) / 2))
shards=${SHARDS:-$((shards < 1 ? 1 : shards > 8 ? 8 : shards))}
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
work=$(mktemp -d "${TMPDIR:-/tmp}/plait-gpu-test.XXXXXX")
trap 'rm -rf "$work"' EXIT
failed=0
summary=()
if ! nvidia-smi > /dev/null 2>&1; then
  echo "gpu-test: nvidia-smi finds no GPU here; nothing was tested" >&2
  exit 1
fi

left() { echo $((budget - SECONDS > 1 ? budget - SECONDS : 1)); }

# name, status, log, begin: one line of the summary.
note() {
  local what=passed
  if [ "$2" -eq 124 ]; then what="STOPPED, the $budget s are over"; elif [ "$2" -ne 0 ]; then what=FAILED; fi
  [ "$2" -eq 0 ] || failed=1
  summary+=("$(printf '%-8s %s in %d s: %s' "$1" "$what" "$((SECONDS - $4))" "$3")")
}

# name, cuda_test's arguments. In several processes: most of the time goes to the oracle, on the CPU.
run_cuda_test() {
  local name=$1 begin=$SECONDS status=0 binary=$build/tests/cuda/cuda_test shard
  shift
  if [ ! -x "$binary" ]; then
    note "$name" 1 "no $binary; build with PLAIT_CUDA=ON PLAIT_TESTS=ON" "$begin"
    return
  fi
  for ((shard = 0; shard < shards; ++shard)); do
    (
      export GTEST_TOTAL_SHARDS=$shards GTEST_SHARD_INDEX=$shard
      LD_LIBRARY_PATH="$build/tests/cuda:$build/src/api:${LD_LIBRARY_PATH:-}" timeout "$(left)" \
        "$binary" --gtest_brief=1 --seconds "$((budget / 8))" "$@" > "$work/$name.$shard" 2>&1
      echo $? > "$work/$name.status.$shard"
    ) &
  done
  wait
  for ((shard = 0; shard < shards; ++shard)); do
    cat "$work/$name.$shard"
    [ "$status" -ne 0 ] || status=$(cat "$work/$name.status.$shard")
  done
  if cat "$work/$name".[0-9]* | grep -q 'skipped, plait finds no CUDA device'; then status=1; fi
  note "$name" "$status" "$(cat "$work/$name".[0-9]* | awk '/PASSED/ { passed += $4 }
    /^cuda_test: |FAILED TEST|SKIPPED / && !/listed below/ { sub(/^\[[ A-Z]*\] */, ""); text = text "; " $0 }
    END { print passed + 0 " passed" text }' | cut -c 1-200)" "$begin"
}

run_cpp() { run_cuda_test cpp; }

# Turing's shared memory, and that of Ampere and Ada for consumers.
run_small_gpus() {
  local filter='CudaAttention.*:CudaPremix.*:CudaCollapse.*-*AccuracyBars'
  for kib in 64 99; do run_cuda_test "smem_$kib" --smem "$kib" --gtest_filter="$filter"; done
}

run_large() { run_cuda_test large --large --gtest_filter='CudaLarge.*'; }

# The package as it is installed: the sources, with the compiled libraries of the build in lib/.
lay_out_package() {
  mkdir -p "$work/site"
  cp -r python/plait "$work/site/plait"
  mkdir -p "$work/site/plait/lib" "$work/site/plait/bin"
  cp -a "$build"/bindings/torch/libplait_torch.so "$build"/src/api/libplait.so* "$work/site/plait/lib/" &&
    cp -a "$build"/tests/cuda/libhwy.so* "$work/site/plait/lib/" 2> /dev/null
  cp -a "$build"/tools/cli/plait "$work/site/plait/bin/" 2> /dev/null
  [ -f "$work/site/plait/lib/libplait_torch.so" ]
}

run_python() {
  local begin=$SECONDS status parallel=()
  if ! lay_out_package; then
    note python 1 "no $build/bindings/torch/libplait_torch.so; build with PLAIT_TORCH=ON" "$begin"
    return
  fi
  # A few processes: each has a CUDA context, and small kernels leave the GPU idle.
  if "$python" -c 'import xdist' 2> /dev/null; then parallel=(-n "${WORKERS:-6}" --dist loadfile); fi
  PYTHONPATH="$work/site:${PYTHONPATH:-}" LD_LIBRARY_PATH="$work/site/plait/lib:${LD_LIBRARY_PATH:-}" \
    timeout "$(left)" "$python" -m pytest tests/python/gpu -v --tb=short -p no:cacheprovider -p no:benchmark "${parallel[@]}" 2>&1 |
    tee "$work/python.log"
  status=${PIPESTATUS[0]}
  note python "$status" "$(tail -n 1 "$work/python.log" | tr -d '=')" "$begin"
}

for suite in $suites; do "run_$suite"; done
echo
echo "gpu-test on $(nvidia-smi --query-gpu=name --format=csv,noheader 2> /dev/null | head -n 1 || true)"
printf '%s\n' "${summary[@]}"
exit $failed
