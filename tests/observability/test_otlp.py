"""The push, against a receiver in a process of its own that decodes what it is sent with opentelemetry-proto."""

import base64
import json
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from service_processes import Process, wait_until
from test_metrics import engine, snapshot
from test_store import incident

from stagewatch.agents.errors import SettingsError
from stagewatch.agents.identity import Rank
from stagewatch.monitor.incidents import Severity, Value
from stagewatch.monitor.instruments import INSTRUMENTS
from stagewatch.monitor.metrics import Metrics
from stagewatch.monitor.otlp.push import WAITING_MAX, Push
from stagewatch.monitor.otlp.settings import OtlpSettings, settings_of
from stagewatch.monitor.otlp.story import Told, request_context, spans
from stagewatch.monitor.states import StepSeen

RECEIVER = Path(__file__).parent / "otlp_receiver.py"
S = 10**9


class Receiver:
    def __init__(self, directory: Path, protocol: str, *options: str) -> None:
        self.path = directory / "received.jsonl"
        log = directory / f"receiver-{len(list(directory.iterdir()))}.log"
        self._process = Process([sys.executable, RECEIVER, protocol, self.path, *options], log)
        line = wait_until(
            lambda: "listening on" in log.read_text() and log.read_text(), "the receiver listens"
        )
        self.port = line.split()[-1]
        self.endpoint = f"http://127.0.0.1:{self.port}"

    def taken(self, signal: str) -> list[Any]:
        if not self.path.exists():
            return []
        lines = [json.loads(line) for line in self.path.read_text().splitlines()]
        return [line for line in lines if line["signal"] == signal]

    def close(self) -> None:
        self._process.kill()


@pytest.fixture(params=["grpc", "http/protobuf"])
def protocol(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def receiver(tmp_path: Path, protocol: str) -> Iterator[Receiver]:
    with closing(Receiver(tmp_path, protocol)) as made:
        yield made


def push_to(endpoint: str, protocol: str, **environment: str) -> tuple[Push, Counter[tuple[str, str]]]:
    settings = settings_of(endpoint, protocol, environment)
    assert settings is not None
    push, drops = Push(settings), Counter[tuple[str, str]]()
    push.start(
        lambda: snapshot(engine()), lambda place, reason, amount: drops.update({(place, reason): amount})
    )
    return push, drops


def critical(**changes: Any) -> Any:
    return incident(
        severity=Severity.CRITICAL,
        first_bad_step=12,
        first_bad_ns=12 * S,
        raised_ns=13 * S,
        blamed=(0,),
        values=(Value(0, "last_sampled", "31337"),),
        **changes,
    )


def steps(first: int, last: int) -> tuple[StepSeen, ...]:
    return tuple(
        StepSeen(Rank(0, stage, 0), step, step * S + stage * 1000, 4)
        for step in range(first, last + 1)
        for stage in (0, 1)
    )


def attributes(found: Any) -> dict[str, Any]:
    return {
        each["key"]: next(iter(value.values())) if (value := each["value"]) else ""
        for each in found.get("attributes", [])
    }


class TestLogs:
    def test_an_incident_is_one_event_with_what_people_need_to_know(
        self, receiver: Receiver, protocol: str
    ) -> None:
        push, drops = push_to(receiver.endpoint, protocol)
        found = critical()
        push.event(Told(found, "vllm"))
        wait_until(lambda: receiver.taken("logs"), "the event is received")
        push.close()
        (request,) = receiver.taken("logs")
        (resource,) = request["body"]["resourceLogs"]
        assert attributes(resource["resource"])["service.name"] == "stagewatch"
        (record,) = resource["scopeLogs"][0]["logRecords"]
        told = attributes(record)
        assert record["eventName"] == "stagewatch.incident"
        assert (record["severityText"], record["severityNumber"]) == ("critical", "SEVERITY_NUMBER_ERROR2")
        assert record["timeUnixNano"] == str(13 * S)
        assert found.id in record["body"]["stringValue"]
        assert (told["gen_ai.request.id"], told["gen_ai.provider.name"]) == (found.request, "vllm")
        assert (told["error.type"], told["stagewatch.step.first_bad"]) == (found.check, "12")
        assert told["stagewatch.ranks.blamed"] == {"values": [{"intValue": "0"}]}
        assert not drops

    def test_what_ranks_held_does_not_leave(self, receiver: Receiver, protocol: str) -> None:
        """Raw tokens may be among an incident's values, where the operator shows them on the page."""
        push, _ = push_to(receiver.endpoint, protocol)
        push.event(Told(critical(), "vllm"))
        push.trace(Told(critical(), "vllm", steps(11, 13)))
        wait_until(lambda: receiver.taken("logs") and receiver.taken("traces"), "both are received")
        push.close()
        assert "31337" not in receiver.path.read_text()


class TestTraces:
    def test_a_request_holds_a_lane_for_each_rank_and_a_lane_its_steps(
        self, receiver: Receiver, protocol: str
    ) -> None:
        push, _ = push_to(receiver.endpoint, protocol)
        found = critical()
        push.trace(Told(found, "vllm", steps(10, 14)))
        wait_until(lambda: receiver.taken("traces"), "the trace is received")
        push.close()
        (request,) = receiver.taken("traces")
        told = request["body"]["resourceSpans"][0]["scopeSpans"][0]["spans"]
        assert len({span["traceId"] for span in told}) == 1
        by_id = {span["spanId"]: span for span in told}
        assert len(by_id) == len(told) == 1 + 2 + 2 * 5
        (root,) = [span for span in told if "parentSpanId" not in span]
        lanes = [span for span in told if span.get("parentSpanId") == root["spanId"]]
        assert [lane["name"] for lane in lanes] == ["rank dp0.pp0.tp0", "rank dp0.pp1.tp0"]
        for lane in lanes:
            own = [span for span in told if span.get("parentSpanId") == lane["spanId"]]
            assert [span["name"] for span in own] == [f"step {step}" for step in range(10, 15)]
            ends = [int(span["endTimeUnixNano"]) for span in own]
            begins = [int(span["startTimeUnixNano"]) for span in own]
            assert ends[:-1] == begins[1:]
            assert int(lane["startTimeUnixNano"]) == begins[0]
            assert int(lane["endTimeUnixNano"]) == ends[-1] > begins[-1]
            bad = [span["name"] for span in own if span["status"].get("code") == "STATUS_CODE_ERROR"]
            assert bad == ["step 12"]
        assert int(root["startTimeUnixNano"]) == 10 * S
        assert root["status"]["code"] == "STATUS_CODE_ERROR"
        assert attributes(root)["gen_ai.request.id"] == found.request

    def test_event_and_trace_point_to_one_another(self, receiver: Receiver, protocol: str) -> None:
        push, _ = push_to(receiver.endpoint, protocol)
        push.event(Told(critical(), ""))
        push.trace(Told(critical(), "", steps(12, 12)))
        wait_until(lambda: receiver.taken("logs") and receiver.taken("traces"), "both are received")
        push.close()
        record = receiver.taken("logs")[0]["body"]["resourceLogs"][0]["scopeLogs"][0]["logRecords"][0]
        root = receiver.taken("traces")[0]["body"]["resourceSpans"][0]["scopeSpans"][0]["spans"][0]
        assert (record["traceId"], record["spanId"]) == (root["traceId"], root["spanId"])

    def test_an_incident_that_rises_is_told_again_in_the_same_trace_by_other_spans(self) -> None:
        warning = msgspec.structs.replace(critical(), severity=Severity.WARNING)
        told = [
            spans(Told(each, "", steps(11, 13)), Push(settings()).resource) for each in (warning, critical())
        ]
        contexts = [[span.context for span in each if span.context] for each in told]
        assert len({context.trace_id for each in contexts for context in each}) == 1
        assert not {c.span_id for c in contexts[0]} & {c.span_id for c in contexts[1]}

    def test_an_incident_without_steps_is_its_request_alone(self) -> None:
        (span,) = spans(Told(critical(), ""), Push(settings()).resource)
        assert (span.start_time, span.end_time) == (12 * S, 13 * S)


def settings() -> OtlpSettings:
    found = settings_of("http://127.0.0.1:1", "http/protobuf", {})
    assert found is not None
    return found


def received_metrics(receiver: Receiver) -> dict[str, Any]:
    return {
        metric["name"]: metric
        for request in receiver.taken("metrics")
        for resource in request["body"]["resourceMetrics"]
        for scope in resource["scopeMetrics"]
        for metric in scope["metrics"]
    }


class TestMetrics:
    def test_all_that_prometheus_sees_is_pushed_with_the_same_values(
        self, receiver: Receiver, protocol: str
    ) -> None:
        """Observed metrics bypass the SDK, which keeps label sets for ever; they must be pushed all the same."""
        push, _ = push_to(receiver.endpoint, protocol)
        metrics = Metrics(lambda: snapshot(engine()), push)
        metrics.incident(critical())
        metrics.journal_synced(0.001)
        metrics.close()
        push.close()
        found = received_metrics(receiver)
        assert found.keys() == {item.name for item in INSTRUMENTS}
        (rank, *_) = found["stagewatch.rank.steps.behind"]["gauge"]["dataPoints"]
        assert attributes(rank).keys() == {"deployment", "engine", "dp", "stage", "tp"}
        rows = found["stagewatch.rows.compared"]["sum"]
        assert rows["isMonotonic"]
        assert rows["aggregationTemporality"] == "AGGREGATION_TEMPORALITY_CUMULATIVE"
        by_verdict = {
            attributes(point)["verdict"]: point["asDouble" if "asDouble" in point else "asInt"]
            for point in rows["dataPoints"]
        }
        assert {key: float(value) for key, value in by_verdict.items()} == {
            "consistent": 40,
            "diverged": 2,
            "indeterminate": 7,
        }

    def test_an_exemplar_of_the_latency_histogram_is_the_incidents_trace(
        self, receiver: Receiver, protocol: str
    ) -> None:
        push, _ = push_to(receiver.endpoint, protocol)
        metrics, found = Metrics(lambda: snapshot(), push), critical()
        metrics.incident(found)
        metrics.close()
        push.close()
        (point,) = received_metrics(receiver)["stagewatch.detection.latency"]["histogram"]["dataPoints"]
        (exemplar,) = point["exemplars"]
        assert int.from_bytes(base64.b64decode(exemplar["traceId"])) == request_context(found).trace_id


class TestPeace:
    """Whatever the receiver does, nothing waits for it, nothing piles up, and everything is counted."""

    @pytest.mark.parametrize("hangs", [True, False])
    def test_a_receiver_that_is_gone_or_hangs_costs_counted_incidents(
        self, tmp_path: Path, protocol: str, hangs: bool
    ) -> None:
        receiver = Receiver(tmp_path, protocol, "--hang") if hangs else None
        endpoint = receiver.endpoint if receiver else "http://127.0.0.1:1"
        push, drops = push_to(endpoint, protocol, OTEL_METRICS_EXPORTER="none", OTEL_TRACES_EXPORTER="none")
        try:
            for number in range(WAITING_MAX + 200):
                push.event(Told(incident(number), ""))
            assert threading.active_count() < 50
            assert len(push._waiting) <= WAITING_MAX
            assert drops["otlp", "queue_full"] >= 100
        finally:
            push.close()
            if receiver:
                receiver.close()
        wait_until(lambda: sum(drops.values()) == WAITING_MAX + 200, "every incident is counted")

    def test_after_an_outage_incidents_go_through_again(
        self, tmp_path: Path, protocol: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
        receiver = Receiver(tmp_path, protocol)
        receiver.close()
        push, drops = push_to(receiver.endpoint, protocol)
        push.event(Told(critical(), ""))
        wait_until(lambda: drops, "the outage is noticed")
        assert drops == {("otlp", "failed"): 1}
        with closing(Receiver(tmp_path, protocol, "--port", receiver.port)) as again:
            pushed = 0

            def settled() -> int:
                return len(again.taken("logs")) + drops["otlp", "failed"] - 1

            while not again.taken("logs"):  # gRPC waits a little before it tries again
                push.event(Told(critical(), ""))
                pushed += 1
                wait_until(lambda expected=pushed: settled() >= expected, "it is received or counted")
            push.close()
            assert settled() == pushed


class TestSettings:
    def test_nothing_said_nothing_pushed(self) -> None:
        assert settings_of("", "", {}) is None

    @pytest.mark.parametrize(
        "environment",
        [
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x:4317"},
            {"OTEL_METRICS_EXPORTER": "otlp", "OTEL_LOGS_EXPORTER": "otlp", "OTEL_TRACES_EXPORTER": "otlp"},
        ],
    )
    def test_opentelemetrys_own_variables_turn_it_on(self, environment: dict[str, str]) -> None:
        found = settings_of("", "", environment)
        assert found is not None
        assert set(found.protocols) == {"metrics", "logs", "traces"}
        assert found.endpoint_of("logs") is None  # the exporter reads it

    def test_one_signal_alone(self) -> None:
        found = settings_of("", "", {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://x:4317"})
        assert found is not None
        assert set(found.protocols) == {"traces"}
        found = settings_of("http://x:4317", "", {"OTEL_METRICS_EXPORTER": "none"})
        assert found is not None
        assert set(found.protocols) == {"logs", "traces"}

    def test_the_sdk_can_be_switched_off(self) -> None:
        assert settings_of("http://x:4317", "", {"OTEL_SDK_DISABLED": "true"}) is None

    def test_our_flags_win_over_the_variables(self) -> None:
        found = settings_of("http://x:4318/", "http/protobuf", {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"})
        assert found is not None
        assert found.endpoint_of("logs") == "http://x:4318/v1/logs"

    def test_a_protocol_may_be_said_for_one_signal(self) -> None:
        found = settings_of("http://x", "", {"OTEL_EXPORTER_OTLP_LOGS_PROTOCOL": "http/protobuf"})
        assert found is not None
        assert found.protocols == {"metrics": "grpc", "logs": "http/protobuf", "traces": "grpc"}

    @pytest.mark.parametrize(
        "endpoint", ["localhost:4317", "ftp://x", "http://", "http://u:secret@x", "http://x?k=secret"]
    )
    def test_what_is_no_address_is_refused_in_one_line_without_its_secret(self, endpoint: str) -> None:
        with pytest.raises(SettingsError) as refused:
            settings_of(endpoint, "", {})
        assert "\n" not in str(refused.value)
        assert "secret" not in str(refused.value)

    def test_a_protocol_nobody_speaks_is_refused(self) -> None:
        with pytest.raises(SettingsError, match="http/json"):
            settings_of("http://x", "", {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"})
