#!/usr/bin/env bash
# compute-sanitizer's memcheck, racecheck and synccheck over the small problems of cuda_test; a summary last.
# Called by `make gpu-sanitize KERNEL=x`. Builds nothing.
#   KERNEL       part of a name among the tests CudaSmall.* (cuda_test --gtest_list_tests), such as mma_attention,
#                mma_decode, mma_split_d, mma_mix, naive_cache; also naive, mma, cache, bad_contents (default: all)
#   TOOLS        which tools (default "memcheck racecheck synccheck")
#   PLAIT_BUILD  the build folder (default build/dev)
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
build=${PLAIT_BUILD:-build/dev}
binary=$build/tests/cuda/cuda_test
sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
if [ ! -x "$binary" ] || [ ! -x "$sanitizer" ]; then
  echo "gpu-sanitize: needs $binary and compute-sanitizer (part of CUDA)" >&2
  exit 1
fi
export LD_LIBRARY_PATH="$build/tests/cuda:$build/src/api:${LD_LIBRARY_PATH:-}"
filter="CudaSmall.*${KERNEL:-}*"
if ! "$binary" --gtest_list_tests --gtest_filter="$filter" 2> /dev/null | grep -q '^  '; then
  echo "gpu-sanitize: KERNEL=${KERNEL:-} selects no test, or there is no GPU; see the head of this script" >&2
  exit 1
fi
failed=0
summary=()
for tool in ${TOOLS:-memcheck racecheck synccheck}; do
  begin=$SECONDS
  log=$(mktemp)
  "$sanitizer" --tool "$tool" --error-exitcode 99 --print-limit 20 \
    "$binary" --gtest_brief=1 --gtest_filter="$filter" --exact 2>&1 | tee "$log"
  status=${PIPESTATUS[0]}
  [ "$status" -eq 0 ] || failed=1
  summary+=("$(printf '%-10s %s in %d s: %s' "$tool" "$([ "$status" -eq 0 ] && echo clean || echo FAILED)" \
    "$((SECONDS - begin))" "$(grep 'SUMMARY' "$log" | tail -n 1 | sed 's/^=* *//')")")
  rm -f "$log"
done
echo
printf '%s\n' "${summary[@]}"
exit $failed
