"""Metrics: what is declared is what Prometheus sees, and no longer than there is something to tell."""

import inspect
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_families
from prometheus_client.parser import text_string_to_metric_families
from service_records import identity
from test_store import incident

from stagewatch.agents import wire
from stagewatch.monitor import ingest
from stagewatch.monitor.checks.registry import NAMES
from stagewatch.monitor.identities import fault_of
from stagewatch.monitor.incidents import Severity
from stagewatch.monitor.instruments import DROPS, INSTRUMENTS, LABELS, RECORD_DROPS, REFUSALS
from stagewatch.monitor.metrics import DEPLOYMENTS_MAX, OTHERS, Metrics
from stagewatch.monitor.observers import ENDED_S, ENGINES_MAX, FORGOTTEN_S, OBSERVERS, Snapshot
from stagewatch.monitor.otlp.story import context_of, request_context
from stagewatch.monitor.sessions import HELLO_CODES
from stagewatch.monitor.states import EngineState, RankState, Trouble

S = 10**9
NOW_NS = 5000 * S


class Journal:
    bytes_kept, bytes_waiting, failure, damaged_bytes, pinned_bytes = 10, 1, "", 0, 0


def rank(stage: int, **changed: Any) -> RankState:
    made = RankState(identity(stage), True, "", 10 - stage, NOW_NS - S, 2.5, 3)
    return replace(made, **changed)


def engine(number: int = 0, heard_ns: int = NOW_NS - S, **changed: Any) -> EngineState:
    verdicts = {"CONSISTENT": 40, "DIVERGED": 2, "rank missing": 7}
    troubles = (
        Trouble("draft-block", Severity.CRITICAL, 0, 100 * S, 200 * S),
        Trouble("excluded-row", Severity.NOTICE, -1, 100 * S, 150 * S),
    )
    made = EngineState(
        "prod",
        f"life-{number}",
        0,
        (rank(0), rank(1)),
        (),
        9,
        verdicts,
        None,
        "",
        troubles=troubles,
        heard_ns=heard_ns,
    )
    return replace(made, **changed)


def snapshot(*engines: EngineState, **changed: Any) -> Snapshot:
    return replace(Snapshot(engines, Journal(), 1, 0, 0, NOW_NS), **changed)


def metrics_of(*engines: EngineState, pushed: Any = None) -> Metrics:
    return Metrics(lambda: snapshot(*engines), pushed)


def samples(metrics: Metrics) -> list[tuple[str, dict[str, str], float]]:
    families = text_string_to_metric_families(metrics.render().decode())
    return [(sample.name, sample.labels, sample.value) for family in families for sample in family.samples]


def values(metrics: Metrics, name: str, *labels: str) -> dict[tuple[str, ...], float]:
    """Value by the given labels of one metric's samples."""
    return {
        tuple(found.get(label, "") for label in labels): value
        for name_, found, value in samples(metrics)
        if name_ == name
    }


def test_every_instrument_appears_under_its_documented_name_and_labels_and_nothing_else_does() -> None:
    metrics = metrics_of(engine())
    metrics.incident(incident(severity=Severity.CRITICAL, first_bad_ns=S, raised_ns=2 * S))
    metrics.journal_synced(0.001)
    found: dict[str, set[str]] = {}
    for name, labels, _ in samples(metrics):
        base = name
        for suffix in ("_bucket", "_sum", "_count"):
            base = base.removesuffix(suffix)
        found.setdefault(base, set()).update(labels.keys() - {"le"})
    assert found == {item.prometheus_name: set(item.labels) for item in INSTRUMENTS}


def test_every_observed_instrument_has_its_observer_and_no_observer_is_left_over() -> None:
    assert OBSERVERS.keys() == {item.name for item in INSTRUMENTS if item.kind.startswith("observed")}


def test_no_label_can_be_a_request() -> None:
    assert {label for item in INSTRUMENTS for label in item.labels} == set(LABELS)
    assert not {"request", "request_id", "slot", "step"} & set(LABELS)


class TestValues:
    def test_verdicts_carry_their_reason(self) -> None:
        rows = values(metrics_of(engine()), "stagewatch_rows_compared_total", "verdict", "reason")
        assert rows == {("consistent", ""): 40, ("diverged", ""): 2, ("indeterminate", "rank missing"): 7}

    def test_a_rank_is_as_far_behind_as_the_foremost_is_ahead(self) -> None:
        behind = values(metrics_of(engine()), "stagewatch_rank_steps_behind", "stage")
        assert behind == {("0",): 0, ("1",): 1}

    def test_heartbeat_age_is_the_time_since_the_rank_was_heard(self) -> None:
        ages = values(metrics_of(engine()), "stagewatch_rank_heartbeat_age_seconds", "stage")
        assert ages == {("0",): 1, ("1",): 1}

    def test_a_margin_that_is_unknown_is_no_margin(self) -> None:
        """Else an idle engine, whose ring nobody writes, would look as if it were about to be overrun."""
        idle = engine(ranks=(rank(0), rank(1, margin_s=-1.0)))
        assert values(metrics_of(idle), "stagewatch_ring_margin_seconds", "stage") == {("0",): 2.5}

    def test_troubles_name_the_stage_or_nobody(self) -> None:
        found = values(
            metrics_of(engine()), "stagewatch_trouble_last_timestamp_seconds", "check", "severity", "stage"
        )
        assert found == {
            ("draft-block", "critical", "0"): 200,
            ("excluded-row", "notice", "undecided"): 150,
        }

    def test_records_are_dropped_at_every_place_there_is_and_counted_once(self) -> None:
        lossy = rank(
            0,
            lost_records=10,
            left_out_records=4,
            late_rows=5,
            late_records=6,
            probe_drops=7,
        )
        metrics = metrics_of(engine(ranks=(lossy,)))
        found = values(metrics, "stagewatch_records_dropped_total", "place", "reason")
        assert found.keys() == RECORD_DROPS.keys()
        assert list(found.values()) == [7, 6, 4, 5, 6]

    def test_probe_cost_is_seconds(self) -> None:
        busy = rank(0, probe_ns=3 * S, probe_steps=100, probe_p99_ns=50_000)
        metrics = metrics_of(engine(ranks=(busy,)))
        names = ("stagewatch_probe_time_seconds_total", "stagewatch_probe_steps_total")
        assert [values(metrics, name)[()] for name in names] == [3, 100]
        assert values(metrics, "stagewatch_probe_step_p99_seconds")[()] == pytest.approx(50e-6)

    def test_latency_is_measured_from_the_first_bad_step_and_not_for_notices(self) -> None:
        metrics = metrics_of()
        metrics.incident(incident(severity=Severity.NOTICE))
        metrics.incident(incident(severity=Severity.WARNING, first_bad_ns=S, raised_ns=3 * S))
        names = ("stagewatch_detection_latency_seconds_count", "stagewatch_detection_latency_seconds_sum")
        assert [list(values(metrics, name).values()) for name in names] == [[1], [2]]

    def test_names_that_somebody_invents_do_not_make_series_without_end(self) -> None:
        """GIVEN incidents of ever new deployments THEN the first have series of their own; all are counted."""
        metrics = metrics_of()
        for number in range(DEPLOYMENTS_MAX + 3):
            metrics.incident(incident(severity=Severity.CRITICAL, deployment=f"made-up-{number}"))
        name, labels = "stagewatch_incidents_total", ("deployment", "severity", "check")
        counted = {key[0]: value for key, value in values(metrics, name, *labels).items() if value}
        assert len(counted) == DEPLOYMENTS_MAX + 1
        assert counted[OTHERS] == 3
        assert fault_of(msgspec.structs.replace(identity(), deployment=OTHERS))


class TestFirstEvents:
    """A counter that is born at 1 has no increase, and an alert on it would miss the first event."""

    def test_incidents_of_a_known_deployment_begin_at_nought(self) -> None:
        metrics = metrics_of(engine())
        name = "stagewatch_incidents_total"
        before = values(metrics, name, "deployment", "check", "severity")
        assert before.keys() == {("prod", check, severity.word) for check in NAMES for severity in Severity}
        assert set(before.values()) == {0}
        found = incident(severity=Severity.CRITICAL, deployment="prod")
        metrics.incident(found)
        after = values(metrics, name, "deployment", "check", "severity")
        assert {key for key, value in after.items() if value != before[key]} == {
            ("prod", found.check, "critical")
        }

    def test_divergence_drops_refusals_and_errors_begin_at_nought(self) -> None:
        metrics = metrics_of(engine(verdicts={}))
        rows = values(metrics, "stagewatch_rows_compared_total", "verdict")
        assert rows == {("consistent",): 0, ("diverged",): 0}
        assert values(metrics, "stagewatch_drops_total", "place", "reason") == dict.fromkeys(DROPS, 0)
        assert values(metrics, "stagewatch_ingest_refused_total", "reason")["malformed",] == 0
        assert values(metrics, "stagewatch_internal_errors_total", "place")["watch",] == 0

    def test_every_reason_for_which_frames_are_refused_is_explained_and_begins_at_nought(self) -> None:
        given = set(re.findall(r'refuse\(\s*"(\w+)"', inspect.getsource(ingest)))
        assert {"protocol", "no_hello", "out_of_order"} <= given
        assert given | {*HELLO_CODES, *wire.LIMITS} <= REFUSALS.keys()
        refused = values(metrics_of(engine()), "stagewatch_ingest_refused_total", "reason")
        assert refused == {(reason,): 0 for reason in REFUSALS}

    def test_drops_are_counted_wherever_they_are_noticed(self) -> None:
        metrics = Metrics(lambda: snapshot(drops={("events", "slow_reader"): 2}))
        metrics.drop("otlp", "failed", 3)
        metrics.drop("events", "slow_reader")
        drops = values(metrics, "stagewatch_drops_total", "place", "reason")
        assert {key: value for key, value in drops.items() if value} == {
            ("events", "slow_reader"): 3,
            ("otlp", "failed"): 3,
        }

    def test_a_drop_that_is_not_declared_is_an_error(self) -> None:
        with pytest.raises(ValueError, match="no drop is known"):
            metrics_of().drop("somewhere", "somehow")


def engines_told(metrics: Metrics) -> set[str]:
    return {labels["engine"] for _, labels, _ in samples(metrics) if "engine" in labels}


class TestLifetime:
    """Series end with what they tell of."""

    def test_an_engine_that_ended_well_goes_once_its_end_was_seen(self) -> None:
        ended = (rank(0, ended=True), rank(1, ended=True))
        lately, long_ago = NOW_NS - int((ENDED_S - 1) * S), NOW_NS - int((ENDED_S + 1) * S)
        metrics = metrics_of(
            engine(1, ranks=ended, heard_ns=lately),
            engine(2, ranks=ended, heard_ns=long_ago),
            engine(3, heard_ns=long_ago),
        )
        assert engines_told(metrics) == {"life-1", "life-3"}

    def test_an_engine_that_fell_silent_stays_for_an_alarm_and_then_goes(self) -> None:
        lately, long_ago = NOW_NS - int((FORGOTTEN_S - 1) * S), NOW_NS - int((FORGOTTEN_S + 1) * S)
        metrics = metrics_of(engine(1, heard_ns=lately), engine(2, heard_ns=long_ago))
        assert engines_told(metrics) == {"life-1"}

    def test_past_the_limit_those_heard_of_last_stay_and_the_rest_are_counted(self) -> None:
        """The order in which engines came does not matter: an old one that runs is more than a new one that died."""
        engines = [engine(number, heard_ns=NOW_NS - number * S) for number in range(ENGINES_MAX + 5)]
        metrics = metrics_of(*engines)
        assert engines_told(metrics) == {f"life-{number}" for number in range(ENGINES_MAX)}
        assert values(metrics, "stagewatch_engines_watched") == {(): ENGINES_MAX}
        assert values(metrics, "stagewatch_engines_hidden") == {(): 5}

    def test_new_engines_appear_however_many_there_were_before(self) -> None:
        """A collector lives for longer than its engines, and each start of one has labels of its own."""
        engines: list[EngineState] = []
        metrics = Metrics(lambda: snapshot(*engines))
        for number in range(0, 3000, 50):
            engines[:] = [engine(number + more) for more in range(50)]
            assert engines_told(metrics) == {f"life-{number + more}" for more in range(50)}


def test_a_token_for_some_deployments_sees_their_series_alone() -> None:
    metrics = metrics_of(engine(1), engine(2, deployment="other"))
    text, _ = metrics.scrape(deployments=frozenset({"other"}))
    families = text_string_to_metric_families(text.decode())
    told = [sample.labels for family in families for sample in family.samples]
    assert {labels.get("deployment") for labels in told} == {"other"}


class TestExemplars:
    OPEN = "application/openmetrics-text; version=1.0.0"

    class Traced:
        readers: Sequence[Any] = ()
        resource = Resource({})

        def context_of(self, found: Any) -> Context:
            return context_of(found)

    def exemplars(self, metrics: Metrics) -> dict[str, dict[str, str]]:
        text, content_type = metrics.scrape(self.OPEN)
        assert content_type.startswith("application/openmetrics-text")
        return {
            sample.labels["le"]: dict(sample.exemplar.labels)
            for family in open_families(text.decode())
            for sample in family.samples
            if sample.exemplar
        }

    def test_the_latency_histogram_points_to_the_trace_at_every_scrape(self) -> None:
        metrics = metrics_of(pushed=self.Traced())
        found = incident(severity=Severity.CRITICAL, first_bad_ns=S, raised_ns=S + S // 5)
        metrics.incident(found)
        own = request_context(found)
        expected = {"0.25": {"trace_id": f"{own.trace_id:032x}", "span_id": f"{own.span_id:016x}"}}
        assert self.exemplars(metrics) == expected
        assert self.exemplars(metrics) == expected

    def test_without_traces_there_are_none(self) -> None:
        metrics = metrics_of()
        metrics.incident(incident(severity=Severity.CRITICAL, first_bad_ns=S, raised_ns=2 * S))
        assert self.exemplars(metrics) == {}

    def test_everything_is_readable_as_openmetrics(self) -> None:
        text, _ = metrics_of(engine()).scrape(self.OPEN)
        names = {family.name for family in open_families(text.decode())}
        assert "stagewatch_rows_compared" in names
