"""Runs of the simulator's faults come from the checks' tests, processes from the service's."""

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "checks"), str(TESTS / "service"), str(TESTS / "replay")]
