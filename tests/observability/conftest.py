"""The observability tests share the checks' simulated runs and the service tests' processes."""

import sys
from pathlib import Path

TESTS = Path(__file__).parent.parent
sys.path[:0] = [str(TESTS / "checks"), str(TESTS / "service")]
