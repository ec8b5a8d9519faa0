"""Coverage-guided fuzzing of one target, for a given time: what each `fuzz_*.py` runs."""

import argparse
import sys
import tempfile
from pathlib import Path

import atheris

FOUND = Path(__file__).parents[2] / "build" / "fuzz"
"""Where the input that broke something is left."""


def main(name: str) -> None:
    """Fuzz until the time is up (status 0) or something breaks: an exception, a hang, too much memory."""
    options = argparse.ArgumentParser(description=f"Fuzz {name} from seeds that the code makes.")
    options.add_argument("--seconds", type=int, default=60)
    options.add_argument(
        "--corpus", type=Path, help="directory to keep what was learned in, for the next run"
    )
    options.add_argument("--reproduce", type=Path, help="run one input that was found")
    args = options.parse_args()
    with atheris.instrument_imports(include=["stagewatch"], enable_loader_override=False):
        from targets import TARGETS
    target = TARGETS[name]
    if args.reproduce:
        target.run(args.reproduce.read_bytes())
        return
    FOUND.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as seeds:
        for number, seed in enumerate(target.seeds()):
            (Path(seeds) / f"{number}").write_bytes(seed)
        corpus = args.corpus or Path(seeds)
        atheris.Setup(
            [
                sys.argv[0],
                f"-max_total_time={args.seconds}",
                "-timeout=20",
                "-rss_limit_mb=1024",
                "-max_len=262144",
                "-print_final_stats=1",
                f"-artifact_prefix={FOUND}/{name}-",
                str(corpus),
                *([seeds] if args.corpus else []),
            ],
            target.run,
        )
        atheris.Fuzz()
