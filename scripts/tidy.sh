#!/usr/bin/env bash
# clang-tidy on the C++ files that differ from a commit (default HEAD~1; every file where there is no such commit).
# Called by .ci/run and `make lint`, after a build. Usage: scripts/tidy.sh [COMMIT] [SECONDS]
# Files not begun after SECONDS (default 480) are skipped by name, so that a sweeping change does not stop the rest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
base=${1:-HEAD~1}
export build=build/dev deadline=$((EPOCHSECONDS + ${2:-480}))

if git rev-parse -q --verify "$base^{commit}" > /dev/null; then
  changed=$( (git diff --name-only --diff-filter=d "$base" -- '*.cpp'; git ls-files -o --exclude-standard '*.cpp') | sort -u)
else
  changed=$(git ls-files -co --exclude-standard '*.cpp' | sort -u)
fi
# Only what the build compiles has the flags that clang-tidy needs.
compiled=$(grep -o '"file": *"[^"]*"' "$build/compile_commands.json" | cut -d'"' -f4 | sed "s|^$PWD/||" | sort -u)
files=$(comm -12 <(echo "$changed") <(echo "$compiled"))
if [ -z "$files" ]; then
  echo "clang-tidy: no compiled file differs from $base"
  exit 0
fi
echo "clang-tidy: $(wc -l <<< "$files") files differ from $base"
# shellcheck disable=SC2016
xargs -n 1 -P "$(nproc)" bash -c '
  if [ "$EPOCHSECONDS" -gt "$deadline" ]; then echo "clang-tidy: out of time, skipped $0"; exit 0; fi
  .venv/bin/clang-tidy --quiet -p "$build" "$0" 2> >(grep -v "warnings\? generated\|Suppressed\|Use -header-filter" >&2)
' <<< "$files"
