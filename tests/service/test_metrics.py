"""Metrics: what is declared is what Prometheus sees, under the names the docs give, with bounded labels."""

from prometheus_client.parser import text_string_to_metric_families
from service_records import identity
from test_store import incident

from stagewatch.monitor.incidents import Severity
from stagewatch.monitor.journal import Health
from stagewatch.monitor.metrics import ENGINES_MAX, INSTRUMENTS, Metrics, Snapshot
from stagewatch.monitor.states import EngineState, RankState

JOURNAL = Health(10, 1, 0, "", 1, 0.1, 0)
NOW_NS = 5 * 10**9


def engine(number: int = 0) -> EngineState:
    ranks = tuple(RankState(identity(stage), True, "", 10 - stage, 1, 2.5, 3) for stage in (0, 1))
    verdicts = {"CONSISTENT": 40, "DIVERGED": 2, "rank missing": 7}
    return EngineState("prod", f"life-{number}", 0, ranks, (), 9, verdicts, None, "")


def exercised(engines: list[EngineState]) -> Metrics:
    metrics = Metrics(lambda: Snapshot(engines, JOURNAL, 1, 0, 0, NOW_NS))
    for item in INSTRUMENTS:
        if item.kind == "counter":
            metrics.count(item.name, **dict.fromkeys(item.labels, "x"))
    metrics.incident(incident(severity=Severity.CRITICAL))
    metrics.journal_synced(0.001)
    return metrics


def samples(metrics: Metrics) -> list[tuple[str, dict[str, str], float]]:
    families = text_string_to_metric_families(metrics.render().decode())
    return [(sample.name, sample.labels, sample.value) for family in families for sample in family.samples]


def test_every_instrument_appears_under_its_documented_name_and_labels_and_nothing_else_does() -> None:
    found: dict[str, set[str]] = {}
    for name, labels, _ in samples(exercised([engine()])):
        base = name
        for suffix in ("_bucket", "_sum", "_count"):
            base = base.removesuffix(suffix)
        found.setdefault(base, set()).update(labels.keys() - {"le"})
    assert found == {item.prometheus_name: set(item.labels) for item in INSTRUMENTS}


def test_verdicts_carry_their_reason() -> None:
    rows = {
        (labels["verdict"], labels["reason"]): value
        for name, labels, value in samples(exercised([engine()]))
        if name == "stagewatch_rows_compared_total"
    }
    assert rows == {("consistent", ""): 40, ("diverged", ""): 2, ("indeterminate", "rank missing"): 7}


def test_a_rank_is_as_far_behind_as_the_foremost_is_ahead() -> None:
    behind = {
        labels["stage"]: value
        for name, labels, value in samples(exercised([engine()]))
        if name == "stagewatch_rank_steps_behind"
    }
    assert behind == {"0": 0, "1": 1}


def test_no_more_engines_than_allowed_become_labels_and_the_newest_stay() -> None:
    engines = [engine(number) for number in range(ENGINES_MAX + 5)]
    labels = {labels["engine"] for _, labels, _ in samples(exercised(engines)) if "engine" in labels}
    assert labels == {f"life-{number}" for number in range(5, ENGINES_MAX + 5)}


def test_new_engines_appear_however_many_there_were_before() -> None:
    """A collector lives for longer than its engines, and each start of one has labels of its own."""
    engines: list[EngineState] = []
    metrics = Metrics(lambda: Snapshot(engines, JOURNAL, 1, 0, 0, NOW_NS))
    for number in range(0, 3000, 50):
        engines[:] = [engine(number + more) for more in range(50)]
        labels = {labels["engine"] for _, labels, _ in samples(metrics) if "engine" in labels}
        assert labels == {f"life-{number + more}" for more in range(50)}


def test_latency_is_measured_from_the_first_bad_step_and_not_for_notices() -> None:
    metrics = Metrics(lambda: Snapshot([], JOURNAL, 0, 0, 0, NOW_NS))
    metrics.incident(incident(severity=Severity.NOTICE))
    metrics.incident(incident(severity=Severity.WARNING, first_bad_ns=10**9, raised_ns=3 * 10**9))
    latency = {name: value for name, _, value in samples(metrics) if name.startswith("stagewatch_detection")}
    assert latency["stagewatch_detection_latency_seconds_count"] == 1
    assert latency["stagewatch_detection_latency_seconds_sum"] == 2


def test_no_label_can_be_a_request() -> None:
    allowed = {"deployment", "engine", "dp", "stage", "tp", "check", "severity", "verdict", "reason", "place"}
    assert {label for item in INSTRUMENTS for label in item.labels} <= allowed
