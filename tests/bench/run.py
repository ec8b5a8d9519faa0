"""Every benchmark in turn, each in a process of its own: `make bench`."""

import subprocess
import sys
from pathlib import Path

BENCHMARKS = ("probe", "collector", "alert")


def main() -> int:
    """Run them; return the number that failed."""
    here = Path(__file__).parent
    failed = 0
    for name in BENCHMARKS:
        print(f"\n{name}", file=sys.stderr, flush=True)
        failed += bool(
            subprocess.run([sys.executable, here / f"{name}.py", *sys.argv[1:]], check=False).returncode
        )  # our own scripts
    return failed


if __name__ == "__main__":
    sys.exit(main())
