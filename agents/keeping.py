"""Keeping a sidecar running: started again when it ends, and when it no longer touches its health file.

Nothing of the sidecar's is read here, not even its settings: settings that are no good end it, are told in its log
at every try, and must not end its keeper.
"""

import contextlib
import logging
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Event

from stagewatch.agents.errors import SettingsError
from stagewatch.agents.health import AGE_S_MAX, age_s

log = logging.getLogger("stagewatch.keep")


class Keeper:
    """Keeps one command running. ``pause_s`` passes between its end and its next start."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        health_file: Path | None,
        *,
        pause_s: float = 5.0,
        grace_s: float = 60.0,
        look_s: float = 5.0,
    ) -> None:
        self._command = command
        self._environment = environment
        self._health_file = health_file
        self._pause_s = pause_s
        self._grace_s = grace_s
        """A sidecar that has just started is not judged for so long."""
        self._look_s = look_s
        self._process: subprocess.Popen[bytes] | None = None
        self._ending = Event()

    def end(self) -> None:
        """End the command in order, and `run` with it. May be called from a signal handler."""
        self._ending.set()
        process = self._process
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)

    def run(self) -> int:
        """Run until `end`; the exit status of the command's last run, 0 if it was not running then or ended as told."""
        while not self._ending.is_set():
            status = self._run_once()
            if self._ending.is_set():
                return 0 if status == -signal.SIGTERM else status if status >= 0 else 128 - status
            log.warning("ship ended with status %d: starting it again in %g s", status, self._pause_s)
            self._ending.wait(self._pause_s)
        return 0

    def _run_once(self) -> int:
        started = time.monotonic()
        process = self._process = subprocess.Popen(self._command, env=self._environment)  # noqa: S603  # our own
        if self._ending.is_set():  # said while it was being started, and so not said to it
            process.terminate()
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return process.wait(self._look_s)
                if time.monotonic() - started > self._grace_s and self._hangs():
                    log.warning("ship has not looked for rings for %g s: killing it", AGE_S_MAX)
                    process.kill()
        finally:
            self._process = None

    def _hangs(self) -> bool:
        if self._health_file is None:
            return False
        try:
            return age_s(self._health_file) > AGE_S_MAX
        except SettingsError:
            return False  # no file, no judgement: a disk that takes none must not make us kill what works
