"""Plays the script of a process fault on a running lab: on its ranks by signals, on other parts by word of mouth.

The engine's semantics take no part in it. The script runs by the clock, on a thread of its own, from the step that the
plan names; sidecars and the collector belong to whoever started the lab, who is told what to do to them.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from stagewatch.agents.errors import RingError
from stagewatch.agents.identity import Rank, Sizes
from stagewatch.agents.lab.faults_process import Act, Part, Pause, ProcessFault, Verb
from stagewatch.agents.ring import RingReader

SLOW_STOPPED_S: Final = 0.06
SLOW_RUNNING_S: Final = 0.02
"""A slow rank is stopped and let run in turns, as a container is that has used up its share of the processor."""
OUTRUN_S: Final = 60.0
"""How long rings may take to be overrun."""
_POLL_S: Final = 0.05

_SIGNALS: Final = {Verb.KILL: signal.SIGKILL, Verb.STOP: signal.SIGSTOP, Verb.CONTINUE: signal.SIGCONT}


class Player:
    """One script on the ranks ``pids``; ``tell`` is called with every act on another part, and the ranks struck.

    ``rings`` holds the struck ranks' ring files, of ``instance``; None where nothing is recorded.
    """

    def __init__(
        self,
        fault: ProcessFault,
        sizes: Sizes,
        pids: Mapping[Rank, int],
        tell: Callable[[Act, tuple[Rank, ...]], None],
        rings: Mapping[Rank, Path] | None = None,
        instance: str = "",
    ) -> None:
        self._fault = fault
        self._struck: Final = fault.struck(sizes)
        self._pids = {rank: pids[rank] for rank in self._struck}
        self._tell = tell
        self._directories = rings
        self._instance = instance
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []
        self.error = ""
        """Why the script could not be played to its end."""

    def begin(self, step: int) -> None:
        """Play from now on, if it is time to; ``step`` is the ordinal of the step about to be ordered."""
        if self._threads or step < self._fault.plan.from_step:
            return
        for rank in self._struck:
            self._fault.did(step, rank)
        self._start(self._play)

    def join(self) -> None:
        """Wait for the script's end; at once if it never began."""
        if self._threads:
            self._threads[0].join()

    def end(self) -> None:
        """Leave the ranks alone from now on, running."""
        self._ended.set()
        for thread in self._threads:
            thread.join()
        if self._threads:
            self._signal(signal.SIGCONT)

    # ---- inside

    def _start(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _play(self) -> None:
        readers = self._readers()
        written = {reader: reader.margin().bytes_written for reader in readers}
        for act in self._fault.SCRIPT:
            if isinstance(act, Pause):
                self._ended.wait(act.seconds)
            elif not self._ended.is_set():
                self._do(act, written)
        for reader in readers:
            reader.close()

    def _do(self, act: Act, written: Mapping[RingReader, int]) -> None:
        match act:
            case Act(Verb.SLOW, Part.RANK):
                self._start(self._slow)
            case Act(Verb.OUTRUN):
                self._outrun(written)
            case Act(verb, Part.RANK):
                self._signal(_SIGNALS[verb])
            case _:
                self._tell(act, self._struck)

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _slow(self) -> None:
        while not self._ended.is_set():
            self._signal(signal.SIGSTOP)
            self._ended.wait(SLOW_STOPPED_S)
            self._signal(signal.SIGCONT)
            self._ended.wait(SLOW_RUNNING_S)

    def _readers(self) -> list[RingReader]:
        """The struck ranks' rings; empty where the script overruns none."""
        if Act(Verb.OUTRUN, Part.SIDECAR) not in self._fault.SCRIPT:
            return []
        found: list[RingReader] = []
        for rank, directory in (self._directories or {}).items():
            for path in directory.glob(f"*.{rank}.ring") if rank in self._struck else ():
                with contextlib.suppress(RingError):
                    reader = RingReader(path)
                    if reader.identity.instance == self._instance:
                        found.append(reader)
                    else:
                        reader.close()
        return found

    def _outrun(self, written: Mapping[RingReader, int]) -> None:
        """Wait until each ring has been written all round since the script began."""
        deadline = time.monotonic() + OUTRUN_S
        while not self._ended.is_set():
            margins = {reader: reader.margin() for reader in written}
            if written and all(
                margin.bytes_written - written[reader] > margin.capacity for reader, margin in margins.items()
            ):
                return
            if not written or time.monotonic() > deadline:
                self.error = (
                    f"the rings of {', '.join(map(str, self._struck))} were not overrun within {OUTRUN_S:g} s: "
                    "make them smaller, or serve more requests"
                )
                return
            self._ended.wait(_POLL_S)
