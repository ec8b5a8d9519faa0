"""How long a collector takes to be ready again over a large journal: with its checkpoint, and without.

    python tests/chaos/recovery_time.py --gigabytes 2

Fills a journal over the real wire with the load of `soak_memory`, kills the collector, and starts it twice.
"""

import argparse
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
from soak_memory import TOKEN, generate


def started(directory: Path) -> tuple[subprocess.Popen[str], str, float]:
    """A collector's process, its address, and the seconds until it was ready."""
    command = [Path(sys.executable).parent / "stagewatch", "collect", "--port", "0", "--data-dir", directory]
    began = time.monotonic()
    with (directory.parent / "collector.log").open("a") as log:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "STAGEWATCH_TOKEN": TOKEN},
        )
    assert process.stdout is not None
    url = process.stdout.readline().split()[-1]
    while httpx.get(f"{url}/readyz").status_code != 200:
        time.sleep(0.02)
    return process, url, time.monotonic() - began


def journal_bytes(directory: Path) -> int:
    """Bytes of journal on disk."""
    return sum(path.stat().st_size for path in (directory / "journal").glob("*.journal"))


def main() -> None:
    """Fill, kill, start, and say how long it took."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--rows-per-s", type=float, default=1e6)
    parser.add_argument("--directory", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.directory) as temporary:
        directory = Path(temporary) / "data"
        directory.mkdir(mode=0o700)
        process, url, empty_s = started(directory)
        address = url.replace("http", "ws") + "/v1/ingest"
        load = multiprocessing.get_context("spawn").Process(
            target=generate, args=(address, args.rows_per_s, 3600.0, 1)
        )
        load.start()
        try:
            while journal_bytes(directory) < args.gigabytes * 2**30 and load.is_alive():
                time.sleep(0.5)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
            load.kill()
        found = {"journal_mib": journal_bytes(directory) >> 20, "empty_s": round(empty_s, 2)}
        for name in ("with_checkpoint_s", "without_s"):
            if name == "without_s":
                (directory / "checkpoint").unlink()
            process, _, ready_s = started(directory)
            found[name] = round(ready_s, 2)
            process.send_signal(signal.SIGKILL)
            process.wait()
        print(json.dumps(found))
        print((directory.parent / "collector.log").read_text(), file=sys.stderr, end="")


if __name__ == "__main__":
    main()
