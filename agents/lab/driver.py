"""The lab's engine core: a process that forks the ranks, schedules for them, and reports as JSON lines on its stdout.

    python -m stagewatch.agents.lab.driver < CONFIG.json

torch is imported once, here, and the ranks are forked from it. They end with their driver: its death closes their
pipes. One rank's death ends the run, when the script that killed it is over. Lines are `Started`, then `Progress` and
`Acted` as they come, then `Ended`.
"""

import contextlib
import dataclasses
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path

import msgspec

from stagewatch.agents.errors import StagewatchError
from stagewatch.agents.identity import Rank
from stagewatch.agents.lab.batch import dummy_order
from stagewatch.agents.lab.config import LabConfig
from stagewatch.agents.lab.events import Acted, Ended, Event, Progress, Started
from stagewatch.agents.lab.fault import Fault
from stagewatch.agents.lab.faults import make_fault
from stagewatch.agents.lab.faults_process import Act, ProcessFault
from stagewatch.agents.lab.messages import StepResult
from stagewatch.agents.lab.player import Player
from stagewatch.agents.lab.scheduler import LabError, Scheduler
from stagewatch.agents.lab.worker import Farewell, run_rank


class Driver:
    """Runs one `LabConfig` to its end."""

    def __init__(self, config: LabConfig) -> None:
        self._config = config
        self._fault = config.check()
        requests = config.workload.draw(config.seed, config.vocab_size)
        self._scheduler = Scheduler(config.scheduler_config(), requests, self._fault)
        self._ranks = [Rank(0, pp, tp) for pp in range(config.pp) for tp in range(config.tp)]
        self._processes: list[ForkProcess] = []
        self._pipes: list[Connection] = []
        self._farewells: list[Farewell] = []
        self._player: Player | None = None

    def run(self) -> Ended:
        """Fork, drive, and join the ranks; emit every event but the last, which is returned."""
        error = ""
        with tempfile.TemporaryDirectory(prefix="stagewatch-lab-") as directory:
            try:
                self._fork(Path(directory) / "store")
                self._drive()
                self._play_on()
                self._stop()
            except LabError as found:
                error = str(found)
                # Whoever waits for the dead is watched while it waits.
                self._play_on()
            finally:
                codes = self._end_all()
        if self._player is not None:
            error = error or self._player.error
        injections = [*self._fault.injections, *(one for word in self._farewells for one in word.injections)]
        steps = max((word.steps for word in self._farewells), default=0)
        return Ended(error, steps, self._scheduler.tick, self._scheduler.preemptions, codes, injections)

    def _fork(self, store: Path) -> None:
        context = multiprocessing.get_context("fork")
        started_ns = time.time_ns()
        for rank in self._ranks:
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_rank_main, args=(self._config, rank, store, theirs, [*self._pipes, ours], started_ns)
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        pids = {
            str(rank): process.pid or 0 for rank, process in zip(self._ranks, self._processes, strict=True)
        }
        if isinstance(self._fault, ProcessFault):
            self._player = self._make_player(self._fault)
        emit(Started(self._config.instance, pids))

    def _make_player(self, fault: ProcessFault) -> Player:
        config = self._config
        pids = {rank: process.pid or 0 for rank, process in zip(self._ranks, self._processes, strict=True)}
        rings = {rank: probe.ring_dir for rank in self._ranks if (probe := config.probe_of(rank)) is not None}
        return Player(fault, config.sizes, pids, _tell, rings, config.instance)

    def _drive(self) -> None:
        config, scheduler = self._config, self._scheduler
        results = self._pipes[(config.pp - 1) * config.tp]
        in_flight: deque[bool] = deque()
        drained = steps = 0
        while drained <= config.pp:
            drained = drained + 1 if scheduler.idle else 0
            order = scheduler.schedule()
            steps += len(order.handles) > 0
            if self._player is not None:
                self._player.begin(steps)
            for rank, pipe in enumerate(self._pipes):
                self._send(rank, pipe, order)
            in_flight.append(len(order.handles) > 0)
            while len(in_flight) > (0 if scheduler.idle else config.pp):
                scheduler.update(self._result(results) if in_flight.popleft() else None)
            self._report()
            if config.step_sleep_ms:
                time.sleep(config.step_sleep_ms / 1e3)

    def _send(self, rank: int, pipe: Connection, message: object) -> None:
        try:
            pipe.send(message)
        except OSError:
            raise LabError(self._obituary(rank)) from None

    def _result(self, pipe: Connection) -> StepResult:
        """The next result; LabError as soon as any rank is gone."""
        sentinels = [process.sentinel for process in self._processes]
        while not pipe.poll():
            for found in wait([pipe, *sentinels]):
                if isinstance(found, int):
                    raise LabError(self._obituary(sentinels.index(found)))
        try:
            result = pipe.recv()
        except EOFError:
            raise LabError(self._obituary((self._config.pp - 1) * self._config.tp)) from None
        if not isinstance(result, StepResult):
            raise LabError(f"the last stage answered {type(result).__name__} instead of a step's result")
        return result

    def _obituary(self, index: int) -> str:
        process = self._processes[index]
        process.join(5)
        code = process.exitcode
        how = (
            f"was ended by signal {signal.Signals(-code).name}"
            if code and code < 0
            else f"ended with status {code}"
        )
        return f"rank {self._ranks[index]} {how}: the run is over"

    def _report(self) -> None:
        scheduler = self._scheduler
        every = self._config.stream_every
        if every and scheduler.tick % every == 0:
            for output in scheduler.progress():
                emit(Progress(scheduler.tick, output))
        for output in scheduler.take_outputs():
            emit(Progress(scheduler.tick, output))

    def _play_on(self) -> None:
        """Let the script come to its end, and its ranks to themselves."""
        if self._player is not None:
            self._player.join()
            self._player.end()

    def _stop(self) -> None:
        order = dataclasses.replace(dummy_order(0), stop=True)
        for rank, pipe in enumerate(self._pipes):
            self._send(rank, pipe, order)
        for rank, pipe in enumerate(self._pipes):
            try:
                word = pipe.recv()
            except EOFError:
                raise LabError(self._obituary(rank)) from None
            if isinstance(word, Farewell):
                self._farewells.append(word)

    def _end_all(self) -> dict[str, int]:
        """Wait for the ranks, after an error not for long; return their exit statuses."""
        if self._player is not None:
            self._player.end()
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(10 if len(self._farewells) == len(self._processes) else 0.2)
            if process.is_alive():
                process.kill()
                process.join()
        return {
            str(rank): process.exitcode or 0
            for rank, process in zip(self._ranks, self._processes, strict=False)
        }


def _rank_main(
    config: LabConfig, rank: Rank, store: Path, pipe: Connection, others: list[Connection], started_ns: int
) -> None:
    for other in others:
        # A copy of the driver's end would keep this pipe open after the driver is gone.
        other.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    fault = make_fault(config.fault, config.sizes, config.spec_tokens)
    try:
        run_rank(config, rank, store, pipe, started_ns, fault)
    except (EOFError, BrokenPipeError):
        os._exit(3)  # the driver is gone
    except Exception as error:  # noqa: BLE001  # whatever ended it is the run's end: say it and go
        if _waits_for_the_dead(fault, error):
            _wait_for_the_driver(pipe)
            os._exit(3)
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def _waits_for_the_dead(fault: Fault, error: Exception) -> bool:
    """Whether the call that failed is one that would not return: NCCL's do not tell that a peer is gone; gloo's do."""
    return isinstance(fault, ProcessFault) and fault.WEDGES and isinstance(error, RuntimeError)


def _wait_for_the_driver(pipe: Connection) -> None:
    """Stay alive, and record heartbeats, until the driver ends the run."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            pipe.recv()


_emitting = threading.Lock()


def emit(event: Event) -> None:
    """Write one event to stdout; from any thread."""
    with _emitting:
        sys.stdout.write(msgspec.json.encode(event).decode() + "\n")
        sys.stdout.flush()


def _tell(act: Act, struck: tuple[Rank, ...]) -> None:
    emit(Acted(act, struck))


def main() -> int:
    """Read a `LabConfig` from stdin and run it. 0: it came to its end; 1: a rank died; 2: it cannot be run."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        return _run()
    except BrokenPipeError:
        # Whoever started us is gone. Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run() -> int:
    try:
        ended = Driver(LabConfig.decode(sys.stdin.buffer.read())).run()
    except (StagewatchError, msgspec.MsgspecError) as error:
        emit(Ended(str(error), 0, 0, 0, {}, []))
        return 2
    emit(ended)
    return 1 if ended.error else 0


if __name__ == "__main__":
    sys.exit(main())
