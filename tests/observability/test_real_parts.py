"""The whole chain on real parts: lab, sidecar, collector, Prometheus, Alertmanager, a webhook, an OTLP receiver.

One scene, told once: a sound engine runs and ends, a broken one runs, its alert comes and goes, the collector
restarts. What was seen on the way is kept, and the tests look at it.
"""

import base64
import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
import yaml
from prometheus_processes import ABSENT, Alertmanager, Prometheus, Served, Webhook, vllm_metrics
from service_processes import CollectorProcess, Process, SidecarProcess, wait_until
from test_otlp import Receiver, attributes

from stagewatch.agents.lab.engine import LabConfig, run_lab
from stagewatch.agents.lab.fault import Plan
from stagewatch.agents.lab.workload import Workload
from stagewatch.agents.settings import ProbeSettings
from stagewatch.dashboards.__main__ import DIRECTORY
from stagewatch.dashboards.rules import BAD_S, RULES

pytestmark = [
    pytest.mark.observability,
    pytest.mark.timeout(170),
    pytest.mark.skipif(bool(ABSENT), reason=ABSENT),
]

ALERT = "StagewatchDesynchronised"
FAST_BAD_S = 6
VARIABLES = {
    "$__rate_interval": "45s",
    "$deployment": "test",
    "$dp": ".*",
    "$model": ".*",
}
INCIDENT_ONLY = re.compile(
    r"_trouble_(first|last)_timestamp_seconds\{deployment|detection_latency|incidents_total"
)
"""Expressions without a series as long as nothing ever went wrong."""


def expressions() -> dict[str, str]:
    """Every panel's expressions, by board and title."""
    return {
        f"{board}: {panel['title']} {target['refId']}": target["expr"]
        for board in ("overview", "engine", "health")
        for panel in json.loads((DIRECTORY / f"{board}.json").read_text())["panels"]
        for target in panel["targets"]
    }


def fast_rules(path: Path) -> Path:
    """The rules as committed, but the alert that is waited for ends after seconds instead of minutes."""
    rules = yaml.safe_load((DIRECTORY / "prometheus-rules.yml").read_text())
    (group,) = rules["groups"]
    group["interval"] = "1s"
    (waited_for,) = [rule for rule in group["rules"] if rule["alert"] == ALERT]
    waited_for["expr"] = waited_for["expr"].replace(f"< {BAD_S}", f"< {FAST_BAD_S}")
    waited_for["keep_firing_for"] = "1s"
    path.write_text(yaml.safe_dump(rules))
    return path


def config(ring_dir: Path, instance: str, fault: Plan | None = None) -> LabConfig:
    return LabConfig(
        seed=7,
        pp=2,
        spec_tokens=7,
        workload=Workload(requests=14, prompt_len=(8, 24), max_tokens=(16, 40), arrivals_per_iteration=0.25),
        probe=ProbeSettings(ring_dir, "test", 8 << 20, 0.2, 0.0, 2, fixed_mask=False),
        fault=fault,
        step_sleep_ms=60,
        instance=instance,
    )


@dataclass
class Seen:
    """What was seen on the way."""

    values: dict[str, dict[str, int]] = field(default_factory=dict)
    """By act and panel, how many series its expression gave."""
    firing: dict[str, list[str]] = field(default_factory=dict)
    told: dict[str, list[tuple[str, str, str]]] = field(default_factory=dict)
    exemplars: list[Any] = field(default_factory=list)
    incidents: list[dict[str, Any]] = field(default_factory=list)
    logs: list[Any] = field(default_factory=list)
    traces: list[Any] = field(default_factory=list)
    metrics_pushed: set[str] = field(default_factory=set)


P = TypeVar("P", bound=Process)


class Scene:
    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self._directory, self._stack = directory, stack
        self.ring_dir = directory / "rings"
        self.receiver = Receiver(directory, "grpc")
        stack.callback(self.receiver.close)
        self.collector: CollectorProcess = self.start_collector()
        self.kept(SidecarProcess(self.ring_dir, self.collector.url, token=self.collector.token))
        self.webhook = Webhook()
        vllm = Served(vllm_metrics)
        for served in (self.webhook, vllm):
            stack.callback(served.close)
        alertmanager = self.kept(Alertmanager(directory, self.webhook))
        targets = {"stagewatch": (self.collector.port, self.collector.token_file), "vllm": (vllm.port, None)}
        rules = fast_rules(directory / "rules.yml")
        self.prometheus = self.kept(Prometheus(directory, rules, alertmanager, targets))
        self.seen = Seen()

    def kept(self, process: P) -> P:
        """It does not outlive the scene."""
        self._stack.callback(process.kill)
        return process

    def start_collector(self, port: int = 0) -> CollectorProcess:
        options = ("--otlp-endpoint", self.receiver.endpoint)
        return self.kept(CollectorProcess(self._directory / "data", *options, port=port))

    def run(self, instance: str, fault: Plan | None = None) -> None:
        """Run an engine to its end, and wait until all of it is judged and scraped."""
        lab = config(self.ring_dir, instance, fault)
        wait_until(lambda: self.prometheus.query('up{job="stagewatch"} == 1'), "the collector is scraped")
        result = run_lab(lab)
        assert result.error == ""
        judged = f'stagewatch_steps_compared{{engine="{instance}"}} >= {result.steps}'
        wait_until(lambda: self.prometheus.query(judged), "every step is judged and scraped")

    def look(self, act: str, instance: str) -> None:
        """Every panel's expression, and what fires."""
        for name, expression in expressions().items():
            for variable, value in {**VARIABLES, "$engine": instance}.items():
                expression = expression.replace(variable, value)
            assert "$" not in expression
            self.seen.values.setdefault(act, {})[name] = len(self.prometheus.query(expression))
        for rule in RULES:
            self.prometheus.query(rule.expression)

    def note(self, act: str) -> None:
        self.seen.firing[act] = self.prometheus.alerts()
        self.seen.told[act] = list(self.webhook.told)

    def play(self) -> None:
        self.run("sound")
        self.look("sound", "sound")
        self.note("sound")
        gone = 'stagewatch_steps_compared{engine="sound"}'
        wait_until(lambda: not self.prometheus.query(gone), "the engine that ended has no series any more")
        self.prometheus.evaluated(3)
        self.note("ended")
        self.run("broken", Plan("old-mask"))
        wait_until(lambda: self.webhook.count(ALERT, "firing", "broken"), "the alert arrives")
        self.look("broken", "broken")
        self.note("broken")
        answer = self.prometheus.http.get(
            "/api/v1/query_exemplars",
            params={"query": "stagewatch_detection_latency_seconds_bucket", "start": 0, "end": 2**33},
        ).json()
        self.seen.exemplars = [each for series in answer["data"] for each in series["exemplars"]]
        self.seen.incidents = self.collector.get("/v1/incidents?instance=broken&limit=500")["incidents"]
        wait_until(lambda: self.webhook.count(ALERT, "resolved", "broken"), "the alert is resolved")
        self.note("resolved")
        self.collector.end()
        again = self.start_collector(self.collector.port)
        assert again.port == self.collector.port
        started = "(time() - stagewatch_ingest_sessions) > 0 and stagewatch_ingest_sessions == 1"
        wait_until(lambda: self.prometheus.query(started), "the sidecar is back")
        self.prometheus.evaluated(5)
        self.note("restarted")
        again.end()
        self.seen.logs = [
            record
            for request in self.receiver.taken("logs")
            for resource in request["body"]["resourceLogs"]
            for record in resource["scopeLogs"][0]["logRecords"]
        ]
        self.seen.traces = [
            span
            for request in self.receiver.taken("traces")
            for resource in request["body"]["resourceSpans"]
            for span in resource["scopeSpans"][0]["spans"]
        ]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    with ExitStack() as stack:
        scene = Scene(tmp_path_factory.mktemp("scene"), stack)
        scene.play()
        yield scene.seen


def test_a_sound_engine_fills_every_panel_that_is_not_about_incidents(seen: Seen) -> None:
    empty = {name for name, count in seen.values["sound"].items() if not count}
    assert (
        empty
        == {name for name, expression in expressions().items() if INCIDENT_ONLY.search(expression)} & empty
    )
    assert not {name for name in empty if "Stages over time" in name or "Every engine" in name}


def test_a_broken_engine_fills_every_panel(seen: Seen) -> None:
    assert {name for name, count in seen.values["broken"].items() if not count} == set()


def test_no_alert_for_a_sound_engine_nor_for_its_end(seen: Seen) -> None:
    assert (seen.firing["sound"], seen.firing["ended"], seen.told["ended"]) == ([], [], [])


def test_the_faults_alert_arrives_once_and_is_resolved_once(seen: Seen) -> None:
    ours = [told for told in seen.told["resolved"] if told[0] == ALERT]
    assert ours == [(ALERT, "broken", "firing"), (ALERT, "broken", "resolved")]


def test_nothing_fires_but_what_the_fault_explains(seen: Seen) -> None:
    assert {alert for alert, _, _ in seen.told["resolved"]} <= {
        ALERT,
        "StagewatchRowsExcluded",
        "StagewatchAboutToDiverge",
    }


def test_a_restart_of_the_collector_raises_no_new_alert(seen: Seen) -> None:
    before, after = (
        [told for told in seen.told[act] if told[2] == "firing"] for act in ("resolved", "restarted")
    )
    assert after == before


def test_prometheus_holds_exemplars_that_are_the_incidents_traces(seen: Seen) -> None:
    pushed = {base64.b64decode(span["traceId"]).hex() for span in seen.traces}
    found = {each["labels"]["trace_id"] for each in seen.exemplars}
    assert found
    assert found <= pushed


def test_every_incident_was_pushed_as_an_event(seen: Seen) -> None:
    told = {attributes(record)["stagewatch.incident.id"] for record in seen.logs}
    assert told == {incident["id"] for incident in seen.incidents}


def test_a_trace_has_a_lane_for_each_stage_with_the_first_bad_step_in_it(seen: Seen) -> None:
    roots = [span for span in seen.traces if "parentSpanId" not in span]
    (root, *_) = [span for span in roots if attributes(span)["stagewatch.severity"] == "critical"]
    lanes = {
        span["spanId"]: span["name"] for span in seen.traces if span.get("parentSpanId") == root["spanId"]
    }
    assert sorted(lanes.values()) == ["rank dp0.pp0.tp0", "rank dp0.pp1.tp0"]
    first = attributes(root)["stagewatch.step.first_bad"]
    for lane in lanes:
        steps = {span["name"] for span in seen.traces if span.get("parentSpanId") == lane}
        assert f"step {first}" in steps
        assert len(steps) > 8
