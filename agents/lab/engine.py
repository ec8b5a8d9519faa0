"""The multi-process lab, from outside: start it, watch its outputs, wait for it, stop it."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import IO, Final, Self

import msgspec

from stagewatch.agents.identity import Rank
from stagewatch.agents.lab.config import LabConfig
from stagewatch.agents.lab.events import Acted, Ended, Event, Progress, Started
from stagewatch.agents.lab.fault import Fault, Injection
from stagewatch.agents.lab.faults_process import Act, Part, ProcessFault
from stagewatch.agents.lab.messages import Output
from stagewatch.agents.lab.scheduler import LabError

__all__ = ["Hand", "Lab", "LabConfig", "LabError", "LabResult", "run_lab", "start_lab"]


Hand = Callable[[Act, tuple[Rank, ...]], None]
"""Does an act to the part that belongs to the ranks struck."""


@dataclass(frozen=True, slots=True)
class LabResult:
    """A finished run."""

    instance: str
    outputs: dict[str, Output]
    """Finished requests by id."""
    exit_codes: dict[str, int]
    """Of each rank, by its name as in ``dp0.pp1.tp0``; negative: the signal that ended it."""
    error: str
    """Why the run ended before its time; empty if it did not."""
    steps: int
    """Batches executed, by the ranks' own count."""
    preemptions: int
    injections: list[Injection] = field(default_factory=list)
    """What the fault did, on every rank."""


class Lab:
    """A running lab. It is a process group of its own, which `stop` ends whole.

    ``hands`` do to a sidecar or collector what a process fault wants done to it; called from a thread, in order.
    Raises LabError or FaultError for a configuration that cannot run.
    """

    def __init__(
        self,
        config: LabConfig,
        on_output: Callable[[int, Output], None] | None = None,
        hands: Mapping[Part, Hand] | None = None,
    ) -> None:
        self.config: Final = config
        self._on_output = on_output
        self._hands = dict(hands or {})
        self._lock = threading.Lock()
        self._outputs: dict[str, Output] = {}
        self._fresh: list[Output] = []
        self._pids: dict[str, int] = {}
        self._ended: Ended | None = None
        self._started = threading.Event()
        self._check_hands(config.check())
        encoded = config.encode()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "stagewatch.agents.lab.driver"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise LabError("the lab's driver has no pipes")
        stdin.write(encoded)
        stdin.close()
        self._reader = threading.Thread(target=self._read, args=(stdout,), daemon=True)
        self._reader.start()

    def pids(self, timeout_s: float = 60.0) -> dict[Rank, int]:
        """Process of each rank, once they exist. Raises LabError if they do not within ``timeout_s``."""
        if not self._started.wait(timeout_s) or not self._pids:
            raise LabError(f"the lab did not start within {timeout_s:g} s: see its stderr")
        return {_rank(name): pid for name, pid in self._pids.items()}

    def poll(self) -> list[Output]:
        """Outputs reported since the last call: finished requests, and running ones every `stream_every` iterations."""
        with self._lock:
            fresh, self._fresh = self._fresh, []
        return fresh

    @property
    def running(self) -> bool:
        """Whether the lab has not ended yet."""
        return self._process.poll() is None

    def wait(self, timeout_s: float | None = None) -> LabResult:
        """Wait for the end. Raises LabError if it is not reached within ``timeout_s``; the lab then runs on."""
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise LabError(
                f"the lab is still running after {timeout_s:g} s: wait longer or stop it"
            ) from None
        self._reader.join()
        ended = self._ended or Ended(f"the lab's driver ended with status {code}", 0, 0, 0, {}, [])
        return LabResult(
            self.config.instance,
            dict(self._outputs),
            ended.exit_codes,
            ended.error,
            ended.steps,
            ended.preemptions,
            ended.injections,
        )

    def stop(self) -> None:
        """End every process of the lab, at once. Harmless when it has ended."""
        watched = [fd for pid in self._pids.values() if (fd := _watch(pid)) is not None]
        # The group outlives its leader for as long as a rank does, and nobody else can be given its number meanwhile.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for fd in watched:
            select.select([fd], [], [], 10)  # readable once the process has ended
            os.close(fd)
        self._reader.join(10)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def _read(self, stdout: IO[bytes]) -> None:
        decoder = msgspec.json.Decoder(Event)
        for line in stdout:
            event = decoder.decode(line)
            if isinstance(event, Started):
                self._pids = event.pids
                self._started.set()
            elif isinstance(event, Progress):
                self._take(event)
            elif isinstance(event, Acted):
                self._hands[event.act.part](event.act, event.struck)
            else:
                self._ended = event
        self._started.set()

    def _check_hands(self, fault: Fault) -> None:
        parts = fault.parts() if isinstance(fault, ProcessFault) else frozenset()
        missing = sorted(parts - {Part.RANK} - self._hands.keys())
        if missing:
            raise LabError(
                f"fault {fault.NAME} strikes the {' and the '.join(missing)}, which this lab does not run: give it "
                "hands to do so, or simulate the fault"
            )
        if Part.SIDECAR in parts and not (self.config.nodes and self.config.probe):
            raise LabError(f"fault {fault.NAME} strikes a node's sidecar: record, and let stages be nodes")

    def _take(self, event: Progress) -> None:
        output = event.output
        with self._lock:
            self._fresh.append(output)
            if output.finished:
                self._outputs[output.request_id] = output
        if self._on_output is not None:
            self._on_output(event.tick, output)


def start_lab(
    config: LabConfig,
    on_output: Callable[[int, Output], None] | None = None,
    hands: Mapping[Part, Hand] | None = None,
) -> Lab:
    """Start a lab and return at once. ``on_output(tick, output)`` is called from a thread as outputs come."""
    return Lab(config, on_output, hands)


def run_lab(config: LabConfig, timeout_s: float = 120.0) -> LabResult:
    """Run a lab to its end. Raises LabError, and leaves no process behind, if that takes longer than ``timeout_s``."""
    with start_lab(config) as lab:
        return lab.wait(timeout_s)


def _watch(pid: int) -> int | None:
    """Descriptor that becomes readable when ``pid`` ends; None if it has."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


def _rank(name: str) -> Rank:
    dp, pp, tp = (int(part[2:]) for part in name.split("."))
    return Rank(dp, pp, tp)
