"""The compile budget of the CUDA kernels: how long each translation unit took in a build folder, the slowest first.

Called by .ci/run: python scripts/check_compile_times.py build/dev. Fails above the limit, which is twice the 40 seconds
that a unit may take on a quiet core: CI machines are not always quiet.
"""

import sys
from pathlib import Path

LIMIT_S, SHOWN = 80, 5


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
    print(f"{len(found)} CUDA units, {sum(found.values()):.0f} s of compiling; the slowest:")
    for name, seconds in slowest[:SHOWN]:
        print(f"  {seconds:6.1f} s  {name}")
    return int(slowest[0][1] > LIMIT_S)


if __name__ == "__main__":
    sys.exit(main())
