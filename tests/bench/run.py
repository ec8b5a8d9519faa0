"""Every benchmark in turn, each in a process of its own: `make bench`."""

import argparse
import subprocess
import sys
from pathlib import Path

BENCHMARKS = ("probe", "hooks", "collector", "alert")


def main() -> int:
    """Run them; return the number that failed."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--repeats", type=int, default=5, help="runs of each part; the median is shown")
    options.add_argument("--json-dir", type=Path, help="also write each benchmark's JSON there, as NAME.json")
    arguments = options.parse_args()
    failed = 0
    for name in BENCHMARKS:
        print(f"\n{name}", file=sys.stderr, flush=True)
        command = [sys.executable, Path(__file__).parent / f"{name}.py", "--repeats", str(arguments.repeats)]
        if arguments.json_dir is not None:
            arguments.json_dir.mkdir(parents=True, exist_ok=True)
            command += ["--json", arguments.json_dir / f"{name}.json"]
        failed += bool(subprocess.run(command, check=False).returncode)
    return failed


if __name__ == "__main__":
    sys.exit(main())
