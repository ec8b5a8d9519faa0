"""The sidecars of a lab whose stages are nodes: a `stagewatch-agent ship` for each, to be killed and started."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from stagewatch.agents.credentials import KEY_FILE_NAME, key_of_directory
from stagewatch.agents.identity import Rank
from stagewatch.agents.lab.config import node_dir
from stagewatch.agents.lab.faults_process import Act, Verb
from stagewatch.agents.ring import check_directory

DRAIN_S: Final = 30
"""How long a sidecar may take to ship what is left: longer than it waits before it tries a collector again."""
END_S: Final = 40.0


class Nodes:
    """Sidecars of ``stages`` nodes below ``ring_dir``, which share its digest key.

    ``options`` are those of `stagewatch-agent ship` that say where to and how. Raises RingError or SettingsError where
    the directory or key cannot be made.
    """

    def __init__(self, ring_dir: Path, stages: int, options: Sequence[str | Path]) -> None:
        check_directory(ring_dir)
        key_of_directory(ring_dir)
        self._ring_dir: Final = ring_dir
        self._options: Final = [str(option) for option in options]
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        for stage in range(stages):
            self._start(stage)

    def do(self, act: Act, struck: tuple[Rank, ...]) -> None:
        """Kill or start the sidecars of the stages struck: the hand of a lab for its sidecars."""
        for stage in sorted({rank.pp for rank in struck}):
            if act.verb is Verb.START:
                self._start(stage)
            else:
                self._processes[stage].kill()
                self._processes[stage].wait()

    def end(self) -> None:
        """Let every sidecar ship what is left, and end."""
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def _start(self, stage: int) -> None:
        directory = node_dir(self._ring_dir, stage)
        with (self._ring_dir / f"stage{stage}.log").open("ab") as log:
            self._processes[stage] = subprocess.Popen(  # noqa: S603  # our own command, with our own options
                [
                    *(sys.executable, "-m", "stagewatch.agents", "ship", "--ring-dir", str(directory)),
                    *(
                        "--key-file",
                        str(self._ring_dir / KEY_FILE_NAME),
                        "--drain-s",
                        str(DRAIN_S),
                        *self._options,
                    ),
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
