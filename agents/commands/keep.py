"""`stagewatch-agent keep`: run `ship`, and run it again when it ends or hangs.

For containers that must not restart. A LeaderWorkerSet with `RecreateGroupOnPodRestart` recreates the whole engine
when any container of a pod has restarted (pkg/utils/pod/pod_utils.go of kubernetes-sigs/lws, ContainerRestarted),
and a pod whose sidecar waits to be restarted is not ready, so its engine gets no requests.
"""

import argparse
import logging
import os
import signal
import sys
from pathlib import Path

from stagewatch.agents.keeping import Keeper

HELP = "run ship, and run it again when it ends or hangs; for containers that must not restart"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options. All others are those of `ship`, which takes them from its variables."""
    parser.add_argument(
        "--health-file", type=Path, help="file that ship is to touch; without one only its end is noticed"
    )


def run(args: argparse.Namespace) -> int:
    """Run until SIGTERM or SIGINT, and end with `ship`'s own status."""
    logging.basicConfig(level=logging.INFO, format="stagewatch-agent: %(message)s", stream=sys.stderr)
    environment = dict(os.environ)
    if args.health_file is not None:
        environment["STAGEWATCH_HEALTH_FILE"] = str(args.health_file)
    keeper = Keeper([sys.executable, "-m", "stagewatch.agents", "ship"], environment, args.health_file)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: keeper.end())
    return keeper.run()
