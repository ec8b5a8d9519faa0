"""A keeper runs the sidecar again whatever ends it, so that its container never restarts."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stagewatch.agents.health import AGE_S_MAX
from stagewatch.agents.keeping import Keeper

WAIT_S = 60.0


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Kept:
    """A keeper, in a thread, of a small Python program that notes each start in a file."""

    def __init__(
        self, tmp_path: Path, program: str, health_file: Path | None = None, grace_s: float = 0.0
    ) -> None:
        self.starts = tmp_path / "starts"
        noted = f"import os, sys, time; open({str(self.starts)!r}, 'a').write(f'{{os.getpid()}} '); {program}"
        self.keeper = Keeper(
            [sys.executable, "-c", noted], os.environ, health_file, pause_s=0.01, grace_s=grace_s, look_s=0.01
        )
        self.status: int | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self.status = self.keeper.run()

    @property
    def pids(self) -> list[int]:
        return [int(pid) for pid in self.starts.read_text().split()] if self.starts.exists() else []

    def end(self) -> None:
        self.keeper.end()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()


def test_whatever_ends_it_is_started_again(tmp_path: Path) -> None:
    kept = Kept(tmp_path, "sys.exit(2)")
    wait_until(lambda: len(kept.pids) >= 2)
    kept.end()


def test_one_that_hangs_is_killed_and_started_again(tmp_path: Path) -> None:
    # GIVEN a sidecar that once touched its file, and then heeds no signal
    health = tmp_path / "alive"
    health.touch()
    old = time.time() - AGE_S_MAX - 1
    os.utime(health, (old, old))
    hanging = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    kept = Kept(tmp_path, hanging, health, grace_s=1.0)
    # THEN others are started in its place
    wait_until(lambda: len(kept.pids) >= 2)
    # AND the keeper's own end does not hang on it
    kept.end()


def test_without_a_health_file_nobody_is_killed(tmp_path: Path) -> None:
    kept = Kept(tmp_path, "time.sleep(60)", tmp_path / "never")
    wait_until(lambda: len(kept.pids) == 1)
    kept.end()
    assert kept.status == 0  # and not 137, for it was told to end and not killed


def test_its_end_is_the_sidecars_orderly_end(tmp_path: Path) -> None:
    orderly = "import signal; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); time.sleep(60)"
    kept = Kept(tmp_path, orderly)
    wait_until(lambda: len(kept.pids) == 1)
    # The handler may not be in place yet: SIGTERM then ends it all the same, by its default.
    kept.end()
    assert kept.status in (7, 0)


@pytest.mark.parametrize("variable", ["STAGEWATCH_DRAIN_S", "STAGEWATCH_TOKEN_FILE"])
def test_settings_that_are_no_good_do_not_end_it(tmp_path: Path, variable: str) -> None:
    """GIVEN a sidecar that cannot start WHEN it is kept THEN its error is told and the keeper stays."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("STAGEWATCH_")}
    environment |= {"STAGEWATCH_RING_DIR": str(tmp_path), variable: "no-good"}
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "stagewatch.agents", "keep"], env=environment, stderr=output
        )
    try:
        wait_until(lambda: "starting it again" in log.read_text())
        assert "stagewatch-agent: " in log.read_text().splitlines()[0]
        assert process.poll() is None
        process.terminate()
        assert process.wait(WAIT_S) == 0
    finally:
        process.kill()
        process.wait()
