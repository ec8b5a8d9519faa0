"""The main job: a real pipeline of processes, through ring, sidecar and collector, to its incidents."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from service_processes import BIN, CollectorProcess, wait_until

from stagewatch.agents.lab.engine import LabConfig, LabResult, run_lab
from stagewatch.agents.lab.fault import Plan
from stagewatch.agents.lab.workload import Workload
from stagewatch.agents.settings import ProbeSettings

REPORT = (
    "id",
    "check",
    "severity",
    "request",
    "first_bad_step",
    "last_good_step",
    "ranks",
    "blamed",
    "fields",
    "chain",
    "values",
)


def config(ring_dir: Path, fault: Plan | None = None) -> LabConfig:
    return LabConfig(
        seed=7,
        pp=2,
        spec_tokens=7,
        workload=Workload(requests=6, prompt_len=(8, 24), max_tokens=(16, 32), arrivals_per_iteration=0.5),
        probe=ProbeSettings(ring_dir, "test", 8 << 20, 0.2, 0.0, 2, fixed_mask=False),
        fault=fault,
    )


def watched(collector: CollectorProcess, lab: LabConfig) -> tuple[LabResult, Any, list[dict[str, Any]]]:
    """Run a lab; (its result, the engine's state, its incidents) once everything it recorded is judged."""
    result = run_lab(lab)
    assert result.error == ""

    def judged() -> Any:
        answer = collector.http.get(f"/v1/engines/{lab.instance}")
        found = answer.json().get("engines") if answer.status_code == 200 else None
        return found[0] if found and found[0]["compared_to"] >= result.steps else None

    state = wait_until(judged, "every step is judged")
    return result, state, collector.get(f"/v1/incidents?instance={lab.instance}&limit=500")["incidents"]


def replayed(*arguments: Path | str) -> Any:
    done = subprocess.run(
        [BIN / "stagewatch", "replay", *arguments, "--json"], capture_output=True, text=True, check=False
    )
    return json.loads(done.stdout)


def reports(incidents: list[dict[str, Any]], instance: str) -> list[str]:
    kept = [incident for incident in incidents if incident["instance"] == instance]
    return sorted(json.dumps({name: incident[name] for name in REPORT}) for incident in kept)


@pytest.mark.timeout(180)
def test_a_broken_mask_is_caught_and_a_sound_engine_is_left_alone(stage: Any) -> None:
    """The founding fault, with its twin.

    GIVEN a collector and a sidecar
    WHEN the same requests run on a sound pipeline and on one with the founding fault
    THEN the sound run raises nothing, each request that went wrong is critical with the first stage blamed and
    nothing else is, and journal and rings replay to the same incidents.
    """
    collector = stage.collector()
    stage.sidecar(collector, "--raw-tokens")
    sound_config = config(stage.ring_dir)
    sound, sound_state, sound_incidents = watched(collector, sound_config)
    broken_config = replace(config(stage.ring_dir, Plan("old-mask")), instance="lab-broken")
    broken, broken_state, incidents = watched(collector, broken_config)

    rows = sum(sound_state["verdicts"].values())
    assert (sound_incidents, sound_state["verdicts"].get("CONSISTENT"), rows > 0) == ([], rows, True)

    changed = {r for r, output in broken.outputs.items() if output.tokens != sound.outputs[r].tokens}
    critical = {incident["request"]: incident for incident in incidents if incident["severity"] == "critical"}
    excluded = {injection.request_id for injection in broken.injections}
    assert changed
    assert changed <= critical.keys() <= excluded
    assert {incident["request"] for incident in incidents} == excluded
    assert {incident["check"] for incident in incidents} == {"excluded-row"}
    assert {tuple(incident["blamed"]) for incident in critical.values()} == {(0,)}
    assert broken_state["verdicts"]["DIVERGED"] > 0

    live = reports(incidents, "lab-broken")
    assert reports(replayed(stage.data_dir)["incidents"], "lab-broken") == live
    assert reports(replayed(stage.ring_dir, "--raw-tokens")["incidents"], "lab-broken") == live
