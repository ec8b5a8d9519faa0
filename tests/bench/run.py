"""Every benchmark in turn, each in a process of its own: `make bench`. About a quarter of an hour on two idle cores.

    python tests/bench/run.py [NAME ...] [--json docs/bench.json] [--table docs/benchmarks.md]

The JSON holds what each told, and the table is made of the JSON alone. With names only these are run, and what the
JSON holds of the others is kept.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from report import markdown

BENCHMARKS = ("probe", "hooks", "alternatives", "lab_engine", "sidecar", "collector", "scaling", "alert")


def run(name: str, repeats: int) -> dict[str, Any] | None:
    """What a benchmark told; None if it failed."""
    with tempfile.TemporaryDirectory() as directory:
        told = Path(directory) / "told.json"
        command = [sys.executable, str(Path(__file__).parent / f"{name}.py"), "--repeats", str(repeats)]
        failed = subprocess.run(
            [*command, "--json", str(told)], stdout=subprocess.DEVNULL, check=False
        ).returncode
        if failed:
            return None
        found: dict[str, Any] = json.loads(told.read_text())
    found["command"] = f"python tests/bench/{name}.py --repeats {repeats}"
    return found


def main() -> int:
    """Run them; return the number that failed."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}; all by default"
    )
    options.add_argument("--repeats", type=int, default=5, help="runs of each part; the median is shown")
    options.add_argument("--json", type=Path, help="keep what was told in this file, by benchmark")
    options.add_argument("--table", type=Path, help="make the docs' table of it, too")
    arguments = options.parse_args()
    if unknown := {*arguments.names} - {*BENCHMARKS}:
        options.error(f"no benchmark is called {min(unknown)}: choose of {', '.join(BENCHMARKS)}")
    kept: dict[str, Any] = {}
    if arguments.json is not None and arguments.json.exists():
        kept = json.loads(arguments.json.read_text())
    failed = 0
    for name in arguments.names or BENCHMARKS:
        print(f"\n{name}", file=sys.stderr, flush=True)
        found = run(name, arguments.repeats)
        if found is None:
            failed += 1
            continue
        kept[name] = found
        # Written after each: a run that is broken off keeps what it has.
        ordered = {each: kept[each] for each in BENCHMARKS if each in kept}
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(ordered, indent=1) + "\n")
        if arguments.table is not None:
            arguments.table.write_text(markdown(ordered))
    return failed


if __name__ == "__main__":
    sys.exit(main())
