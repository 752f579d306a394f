"""The compile budget of the CUDA kernels: how long each translation unit took in a build folder, the slowest first.

Called by .ci/run: python scripts/check_compile_times.py build/dev. Fails above the limits, which are twice what a quiet
core may take, 40 seconds for a unit and 15 minutes of two cores for all: CI machines are not always quiet. What a
compiler cache answered counts as it came, so only a build without one proves the limits.
"""

import sys
from pathlib import Path

LIMIT_S, TOTAL_LIMIT_S, SHOWN = 80, 2 * 2 * 15 * 60, 5


def times(log: Path) -> dict[str, float]:
    """Seconds by object file, of its last compilation, from a .ninja_log (start and end in ms, mtime, output, hash)."""
    found = {}
    for line in log.read_text().splitlines():
        fields = line.split("\t")
        if len(fields) == 5 and "plait_cuda" in fields[3] and fields[3].endswith(".o"):
            found[fields[3].rpartition("/")[2]] = (int(fields[1]) - int(fields[0])) / 1000
    return found


def main() -> int:
    log = Path(sys.argv[1]) / ".ninja_log"
    found = times(log)
    if not found:
        sys.exit(f"check_compile_times: {log} names no CUDA object; build with PLAIT_CUDA=ON first")
    slowest = sorted(found.items(), key=lambda item: -item[1])
    total = sum(found.values())
    print(
        f"{len(found)} CUDA units, {total:.0f} s of compiling (limit {TOTAL_LIMIT_S}); the slowest (limit {LIMIT_S}):"
    )
    for name, seconds in slowest[:SHOWN]:
        print(f"  {seconds:6.1f} s  {name}")
    return int(slowest[0][1] > LIMIT_S or total > TOTAL_LIMIT_S)


if __name__ == "__main__":
    sys.exit(main())
