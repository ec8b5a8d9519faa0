"""stagewatch demo: a real pipeline desynchronises and is caught."""

import argparse
import importlib.util
import queue
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

import msgspec

from stagewatch.agents.errors import StagewatchError
from stagewatch.agents.lab.engine import Lab, LabConfig, LabResult, start_lab
from stagewatch.agents.lab.fault import Plan
from stagewatch.agents.lab.text import text
from stagewatch.agents.lab.workload import Workload
from stagewatch.agents.settings import ProbeSettings
from stagewatch.monitor.demo_stage import DemoError, DemoStage
from stagewatch.monitor.store import Shown, Told
from stagewatch.monitor.text import Style, wrapped
from stagewatch.monitor.unwinding import Unwinding

HELP: Final = "watch a real two-stage pipeline desynchronise and be caught"
EPILOG: Final = "Exit status: 0 if the fault was caught and the sound run was silent, else 1."
RING_BYTES: Final = 8 << 20
DEMO_SEED: Final = 7
LAB_S: Final = 40.0
WORDS_SHOWN: Final = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.epilog = EPILOG
    parser.add_argument(
        "--seed",
        type=int,
        default=DEMO_SEED,
        help="seed of the requests and the model",
    )
    parser.add_argument(
        "--step-ms",
        type=float,
        default=20.0,
        help="pause after each step in milliseconds, so that one can follow",
    )


def run(args: argparse.Namespace) -> int:
    """Run the demo; return its exit status."""
    if importlib.util.find_spec("torch") is None:
        raise StagewatchError("demo runs a real pipeline and needs torch: pip install 'stagewatch[lab]'")
    unwinding = Unwinding()
    demo = Demo(args.seed, args.step_ms, Style.for_stream(sys.stdout), unwinding)
    with ExitStack() as everything:
        with unwinding.held():
            stage = DemoStage(unwinding.held)
            everything.callback(stage.stop)
        stage.start()
        return demo.play(stage)


@dataclass(frozen=True, slots=True)
class Caught:
    """What the faulty run came to."""

    incidents: dict[str, Shown]
    """Critical incidents by request."""
    changed: tuple[str, ...]
    """Requests whose text is not that of the sound run."""


class Demo:
    """Two runs of the same requests: one sound, one with the founding fault."""

    def __init__(self, seed: int, step_ms: float, style: Style, unwinding: Unwinding) -> None:
        self._unwinding = unwinding
        self._seed = seed
        self._step_ms = step_ms
        self._style = style

    def play(self, stage: DemoStage) -> int:
        """Both runs and the summary."""
        self._say(
            "A pipeline of two stages, each a process of its own, decodes with speculation (K = 7). Each stage "
            "records what it feeds; a sidecar ships digests to a collector, which compares the stages."
        )
        self._title("A sound engine")
        sound, silent = self._sound(stage)
        self._title("The same requests, with the fault of vLLM PR 54436")
        self._say("Its broadcast mask leaves out rows that it predicts will finish. They do not.")
        caught = self._faulty(stage, sound)
        return self._summary(sound, silent, caught)

    def _config(self, stage: DemoStage, fault: Plan | None) -> LabConfig:
        probe = ProbeSettings(stage.ring_dir, "demo", RING_BYTES, 0.5, 0.0, 2, fixed_mask=False)
        workload = Workload(requests=8, prompt_len=(8, 24), max_tokens=(24, 48), arrivals_per_iteration=0.3)
        return LabConfig(
            seed=self._seed,
            pp=2,
            spec_tokens=7,
            workload=workload,
            probe=probe,
            fault=fault,
            step_sleep_ms=self._step_ms,
        )

    def _sound(self, stage: DemoStage) -> tuple[LabResult, bool]:
        config = self._config(stage, None)
        result = self._lab(stage, config)
        state = stage.wait_for(config.instance, result.steps)
        rows = int(state["verdicts"].get("CONSISTENT", 0))
        incidents = stage.incidents(config.instance)
        silent = not incidents and sum(state["verdicts"].values()) == rows
        self._say(
            f"{len(result.outputs)} requests finished in {result.steps} steps; {rows} rows compared on both stages, "
            f"{'all' if silent else 'not all'} CONSISTENT; incidents: {len(incidents) or 'none'}."
        )
        return result, silent

    def _faulty(self, stage: DemoStage, sound: LabResult) -> Caught:
        config = self._config(stage, Plan("old-mask"))
        result = self._lab(stage, config)
        stage.wait_for(config.instance, result.steps)
        self._tell(stage, config)
        critical = {
            shown["request"]: msgspec.convert(shown, Shown)
            for shown in stage.incidents(config.instance)
            if shown["severity"] == "critical"
        }
        changed = tuple(
            request
            for request, output in sorted(result.outputs.items())
            if output.tokens != sound.outputs[request].tokens
        )
        for request in changed:
            print()
            print(f"  the end of {request}'s text")
            print(wrapped(f"    sound    {self._ending(sound, request)}", self._style, " " * 13))
            print(wrapped(f"    faulty   {self._ending(result, request)}", self._style, " " * 13))
        return Caught(critical, changed)

    def _lab(self, stage: DemoStage, config: LabConfig) -> LabResult:
        with ExitStack() as running:
            with self._unwinding.held():
                lab = running.enter_context(start_lab(config))
            return self._watch(lab, stage, config)

    def _watch(self, lab: Lab, stage: DemoStage, config: LabConfig) -> LabResult:
        """Tell what the collector says while the lab runs."""
        deadline = time.monotonic() + LAB_S
        while lab.running:
            if time.monotonic() > deadline:
                raise DemoError(f"the lab did not end within {LAB_S:g} s")
            self._tell(stage, config, wait_s=0.05)
        result = lab.wait(LAB_S)
        if result.error:
            raise DemoError(f"the lab ended early: {result.error}")
        return result

    def _tell(self, stage: DemoStage, config: LabConfig, wait_s: float = 0.5) -> None:
        while True:
            try:
                told = stage.told.get(timeout=wait_s)
            except queue.Empty:
                return
            if told.incident.instance == config.instance and told.kind != "updated":
                self._incident(told)

    def _incident(self, told: Told) -> None:
        incident = told.incident
        severity = self._style.paint(f"{incident.severity:<9}", incident.severity)
        last = incident.chain[-1]
        head = f"  step {last.step:<4} "
        if incident.severity != "critical":
            print(wrapped(f"{head}{severity} {incident.request}: {last.text}", self._style, " " * 22))
            return
        stages = ", ".join(f"stage {rank}" for rank in incident.blamed) or "undecided"
        print(wrapped(f"{head}{severity} {incident.request}: {stages} is wrong", self._style, " " * 22))
        for value in incident.values:
            if value.field in ("input_ids", "positions"):
                print(
                    wrapped(
                        f"{' ' * 12}stage {value.rank} {value.field:<10} {value.text}", self._style, " " * 31
                    )
                )
        print(wrapped(f"{' ' * 12}found {_after(incident)}", self._style, " " * 12))
        sys.stdout.flush()

    def _summary(self, sound: LabResult, silent: bool, caught: Caught) -> int:
        self._title("Summary")
        missed = [request for request in caught.changed if request not in caught.incidents]
        found = [*caught.incidents.values()]
        ok = silent and bool(found) and not missed
        self._say(
            f"Sound run: {'silent' if silent else 'NOT SILENT'}. Faulty run: {len(caught.changed)} of "
            f"{len(sound.outputs)} requests answered something else, {len(caught.changed) - len(missed)} of them were "
            f"found"
            + (f" ({', '.join(missed)} missed)" if missed else "")
            + ", each with status 200 for its user."
        )
        if found:
            latency_ms = statistics.median(_latency_ms(incident) for incident in found)
            steps = max(incident.latency_steps for incident in found)
            self._say(
                f"{went_critical(sorted(caught.incidents), caught.changed)} From a request's first wrong step to its "
                f"alarm: median {latency_ms:.0f} ms, at most {steps} step{'s' * (steps != 1)} further on."
            )
            self._say(found[0].remedy)
        return 0 if ok else 1

    def _ending(self, result: LabResult, request: str) -> str:
        return text(result.outputs[request].tokens[-WORDS_SHOWN:])

    def _title(self, title: str) -> None:
        print(f"\n{self._style.paint(wrapped(title, self._style), 'title')}", flush=True)

    def _say(self, sentence: str) -> None:
        print(wrapped(f"  {sentence}", self._style, "  "), flush=True)


def went_critical(critical: Sequence[str], changed: Sequence[str]) -> str:
    """How many requests went critical, and why more of them did than answered something else."""
    same = [request for request in critical if request not in changed]
    also = " and ".join(filter(None, (", ".join(same[:-1]), *same[-1:])))
    why = (
        f"; of these {also} {'were' if len(same) > 1 else 'was'} fed wrong inputs, too, but " if same else ""
    )
    text = f"{'their' if len(same) > 1 else 'its'} text came out the same" if same else ""
    return f"{len(critical)} request{'s' * (len(critical) != 1)} went critical{why}{text}."


def _latency_ms(incident: Shown) -> float:
    return (incident.raised_ns - incident.first_bad_ns) / 1e6


def _after(incident: Shown) -> str:
    steps = incident.latency_steps
    where = "before the next step" if steps == 0 else f"{steps} step{'s' * (steps != 1)} on"
    return f"{_latency_ms(incident):.0f} ms after it happened, {where}"
