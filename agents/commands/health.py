"""`stagewatch-agent health`: ask whether the sidecar is alive, for container health checks."""

import argparse
from pathlib import Path

from stagewatch.agents.errors import SettingsError
from stagewatch.agents.health import AGE_S_MAX, age_s

HELP = "say whether the sidecar that touches a health file is alive"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--health-file", type=Path, help="the sidecar's --health-file")


def run(args: argparse.Namespace) -> int:
    """0: alive; 1: not any more; 2: there is no such file."""
    if args.health_file is None:
        raise SettingsError("--health-file (or STAGEWATCH_HEALTH_FILE) is missing: give the sidecar's")
    age = age_s(args.health_file)
    if age > AGE_S_MAX:
        print(f"not alive: the sidecar last looked for rings {age:.0f} s ago, {AGE_S_MAX:.0f} s are allowed")
        return 1
    print(f"alive: the sidecar looked for rings {max(age, 0):.1f} s ago")
    return 0
