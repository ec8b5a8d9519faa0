"""Process faults on real processes: ranks, a sidecar for each stage and a collector, by the registry's own names."""

import contextlib
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from processes import Found, unexplained, wrong
from service_processes import CollectorProcess, Stage, wait_until

from stagewatch.agents.errors import StagewatchError
from stagewatch.agents.identity import Rank, Sizes
from stagewatch.agents.lab.engine import LabConfig, LabResult, start_lab
from stagewatch.agents.lab.fault import Injection, Plan
from stagewatch.agents.lab.faults_process import (
    PROCESS_REGISTRY,
    Act,
    Part,
    Pause,
    ProcessFault,
    RingOverrun,
    Script,
    Verb,
)
from stagewatch.agents.lab.identities import lab_identity
from stagewatch.agents.lab.nodes import Nodes
from stagewatch.agents.lab.player import Player
from stagewatch.agents.lab.workload import Workload
from stagewatch.agents.record import Kind, Note
from stagewatch.agents.ring import RingReader, RingWriter
from stagewatch.agents.settings import ProbeSettings

pytest.importorskip("torch", reason="the lab needs torch: pip install 'stagewatch[lab]'")

SIZES = Sizes(1, 2, 1)
RANK = Rank(0, 1, 0)
FROM_STEP = 20


class TestPlayer:
    """The script on any process, without a lab around it."""

    @pytest.fixture
    def process(self) -> Iterator[subprocess.Popen[bytes]]:
        sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        yield sleeper
        sleeper.kill()
        sleeper.wait()

    def test_nothing_happens_before_the_step_of_the_plan(self, process: subprocess.Popen[bytes]) -> None:
        player = play(process, Act(Verb.KILL, Part.RANK), step=FROM_STEP - 1)
        player.join()
        player.end()
        assert process.poll() is None

    def test_killed_is_killed(self, process: subprocess.Popen[bytes]) -> None:
        play(process, Act(Verb.KILL, Part.RANK)).join()
        assert process.wait(60) == -signal.SIGKILL

    def test_stopped_stays_stopped_until_it_is_continued(self, process: subprocess.Popen[bytes]) -> None:
        play(process, Act(Verb.STOP, Part.RANK)).join()
        wait_until(lambda: state(process) == "T", "the process is stopped")
        play(process, Act(Verb.CONTINUE, Part.RANK)).join()
        wait_until(lambda: state(process) != "T", "the process goes on")

    def test_whatever_the_script_left_stopped_goes_on_at_the_end(
        self, process: subprocess.Popen[bytes]
    ) -> None:
        player = play(process, Act(Verb.STOP, Part.RANK), Pause(600))
        wait_until(lambda: state(process) == "T", "the process is stopped")
        player.end()
        wait_until(lambda: state(process) != "T", "the process goes on")

    def test_slow_is_stopped_and_continued_in_turns(self, process: subprocess.Popen[bytes]) -> None:
        player = play(process, Act(Verb.SLOW, Part.RANK))
        player.join()
        for wanted in (True, False) * 2:
            wait_until(lambda wanted=wanted: (state(process) == "T") == wanted, "it takes turns")
        player.end()
        wait_until(lambda: state(process) != "T", "the process goes on")

    def test_other_parts_are_their_owners_to_strike(self, process: subprocess.Popen[bytes]) -> None:
        """Told in the order of the script, each with the ranks struck; and the injection is written down."""
        told: list[tuple[Act, tuple[Rank, ...]]] = []
        acts = Act(Verb.KILL, Part.SIDECAR), Act(Verb.START, Part.SIDECAR)
        fault = scripted(*acts)
        player = Player(fault, SIZES, {RANK: process.pid}, lambda act, ranks: told.append((act, ranks)))
        player.begin(FROM_STEP + 1)
        player.begin(FROM_STEP + 2)
        player.join()
        assert told == [(act, (RANK,)) for act in acts]
        assert fault.injections == [Injection(FROM_STEP + 1, RANK, "")]
        assert process.poll() is None

    def test_a_ring_is_outrun_when_all_of_it_was_overwritten(self, tmp_path: Path) -> None:
        """GIVEN a sidecar that died WHEN its ring is written on THEN it is started when what it left is gone."""
        identity = lab_identity(
            RANK, SIZES, deployment="lab", instance="outrun", spec_tokens=1, vocab_size=9, max_model_len=9
        )
        writer = RingWriter(tmp_path, identity, 1 << 16)
        writer.append(Kind.NOTE, 0, 0, Note("the last that was shipped"))
        [path] = tmp_path.glob("*.ring")
        reader = RingReader(path)
        assert len(list(reader.read())) == 1
        lost_at_start: list[int] = []

        def told(act: Act, ranks: tuple[Rank, ...]) -> None:
            list(reader.read(1 << 20))
            lost_at_start.append(reader.lost)

        acts = Act(Verb.OUTRUN, Part.SIDECAR), Act(Verb.START, Part.SIDECAR)
        player = Player(scripted(*acts), SIZES, {RANK: 1 << 30}, told, {RANK: tmp_path}, "outrun")
        player.begin(FROM_STEP)
        written = 0
        while not lost_at_start and written < 1_000_000:
            writer.append(Kind.NOTE, 0, 0, Note("one more"))
            written += 1
        player.join()
        assert player.error == ""
        assert lost_at_start[0] > 0
        reader.close()
        writer.close()

    def test_rings_that_are_not_there_cannot_be_outrun(self) -> None:
        player = Player(scripted(*RingOverrun.SCRIPT[2:]), SIZES, {RANK: 1 << 30}, lambda act, ranks: None)
        player.begin(FROM_STEP)
        player.join()
        assert "were not overrun" in player.error


def scripted(*script: Act | Pause) -> ProcessFault:
    class Scripted(ProcessFault):
        SCRIPT: Script = script

    return Scripted(Plan("scripted", RANK, FROM_STEP))


def play(process: subprocess.Popen[bytes], *script: Act | Pause, step: int = FROM_STEP) -> Player:
    player = Player(scripted(*script), SIZES, {RANK: process.pid}, lambda act, ranks: None)
    player.begin(step)
    return player


def state(process: subprocess.Popen[bytes]) -> str:
    return Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sidecar-dead", "sidecar-dead strikes the sidecar, which this lab does not run"),
        ("collector-restarted", "strikes the collector"),
    ],
)
def test_a_fault_of_a_part_that_nobody_runs_is_refused(name: str, message: str) -> None:
    with pytest.raises(StagewatchError, match=message):
        start_lab(LabConfig(fault=Plan(name)))


# ---- the whole house


@dataclass
class Real:
    """What a collector says of a run of the lab."""

    fault: ProcessFault
    sizes: Sizes
    result: LabResult
    found: Found
    blamed: set[int]
    verdicts: Counter[str]

    @property
    def injections(self) -> list[Injection]:
        return self.result.injections


@contextlib.contextmanager
def house() -> Iterator[tuple[Stage, Path]]:
    """Where processes are started, and a place in memory for rings."""
    rings = Path(tempfile.mkdtemp(prefix="stagewatch-test-", dir="/dev/shm"))
    data = Path(tempfile.mkdtemp(prefix="stagewatch-test-"))
    stage = Stage(data)
    try:
        yield stage, rings
    finally:
        stage.close()
        shutil.rmtree(rings)
        shutil.rmtree(data)


class Collector:
    """The house's collector, whichever process it is just now."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.now: CollectorProcess = stage.collector()

    def do(self, act: Act, struck: tuple[Rank, ...]) -> None:
        if act.verb is Verb.KILL:
            self.now.kill()
        else:
            self.now = self._stage.collector(port=self.now.port)

    def engine(self, config: LabConfig) -> dict[str, Any]:
        return dict(self.now.get(f"/v1/engines/{config.instance}")["engines"][0])


def config_of(name: str, rings: Path) -> LabConfig:
    # Overrun rings must be small, and still be in use when their sidecar is back.
    overrun = name == "ring-overrun"
    probe = ProbeSettings(rings, "lab", 1 << 16 if overrun else 1 << 22, 1.0, 0.0, 2, fixed_mask=False)
    workload = Workload(
        requests=500 if overrun else 60,
        prompt_len=(8, 40),
        max_tokens=(16, 48),
        arrivals_per_iteration=0.5,
    )
    return LabConfig(
        seed=3,
        pp=3,
        spec_tokens=4,
        workload=workload,
        probe=probe,
        nodes=True,
        step_sleep_ms=20 if overrun else 10,
        fault=Plan(name, from_step=FROM_STEP),
    )


def played(name: str) -> Real:
    with house() as (stage, rings):
        collector, config = Collector(stage), config_of(name, rings)
        url = collector.now.url.replace("http:", "ws:")
        with Nodes(rings, config.pp, ("--collector", url, "--token-file", collector.now.token_file)) as nodes:
            hands = {Part.SIDECAR: nodes.do, Part.COLLECTOR: collector.do}
            with start_lab(config, hands=hands) as lab:
                result = lab.wait(300)
        # Its sidecars have shipped everything.
        if not result.error:
            wait_until(
                lambda: collector.engine(config)["compared_to"] == result.steps, "everything is compared"
            )
        incidents = collector.now.get(f"/v1/incidents?instance={config.instance}&limit=500")["incidents"]
        fault = config.check()
        assert isinstance(fault, ProcessFault)
        return Real(
            fault,
            config.sizes,
            result,
            sorted((each["check"], tuple(each["ranks"])) for each in incidents),
            {rank for each in incidents for rank in each["blamed"]},
            Counter(
                {verdict: rows for verdict, rows in collector.engine(config)["verdicts"].items() if rows}
            ),
        )


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", PROCESS_REGISTRY)
def test_real_processes_come_to_what_the_fault_says_and_nothing_else(name: str) -> None:
    """GIVEN three stages on nodes of their own WHEN the script is played THEN its incidents are told, and no other."""
    run = played(name)
    assert wrong(run) == []
    if run.fault.part() is Part.SIDECAR:
        assert unexplained(run) == []
    killed = run.fault.WEDGES
    assert run.result.error == (
        "rank dp0.pp1.tp0 was ended by signal SIGKILL: the run is over" if killed else ""
    )
    assert {one.step for one in run.injections} == {FROM_STEP}
    if not killed:
        # The engine did not notice.
        assert len(run.result.outputs) == config_of(name, Path()).workload.requests
