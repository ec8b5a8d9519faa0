"""Observed metrics: read from the state at each scrape or push, so a series ends with what it tells of.

Not OpenTelemetry's own asynchronous instruments: those keep every label set they ever saw, and past 2000 of them,
which are a few hundred starts of an engine, take no new one.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from stagewatch.monitor.checks.registry import NAMES as CHECKS
from stagewatch.monitor.incidents import Severity
from stagewatch.monitor.instruments import DROPS
from stagewatch.monitor.states import EngineState, RankState
from stagewatch.monitor.troubles import NOBODY

ENGINES_MAX: Final = 64
"""Replicas with series of their own; those heard of last stay."""
ENDED_S: Final = 30.0
"""An engine that was shut down in good order keeps its series for so long, so that a last scrape sees its end."""
FORGOTTEN_S: Final = 900.0
"""An engine that fell silent otherwise keeps its series for so long: long enough to be alarmed about."""
UNDECIDED: Final = "undecided"


class JournalHealth(Protocol):
    """What is read of the journal."""

    @property
    def bytes_kept(self) -> int: ...  # noqa: D102
    @property
    def bytes_waiting(self) -> int: ...  # noqa: D102
    @property
    def failure(self) -> str: ...  # noqa: D102
    @property
    def pinned_bytes(self) -> int: ...  # noqa: D102
    @property
    def damaged_bytes(self) -> int: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What observed metrics read: the state at one moment."""

    engines: Sequence[EngineState]
    journal: JournalHealth
    sessions: int
    duplicates: int
    readers: int
    now_ns: int
    """By the clock that ranks are heard by."""
    rings_refused: int = 0
    incidents: Mapping[tuple[str, str, str], int] = field(default_factory=dict)
    """By (deployment, check, severity)."""
    drops: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """By (place, reason), one of `DROPS`."""


Observed = Iterable[tuple[float, tuple[str, ...]]]
"""Values with their labels, in the order the instrument declares."""


def living(now: Snapshot) -> list[EngineState]:
    """Engines that are running, or ended so lately that it is news; those heard of last at the end."""
    kept = []
    for engine in now.engines:
        silent_s = (now.now_ns - engine.heard_ns) / 1e9
        if silent_s <= (ENDED_S if engine.ended else FORGOTTEN_S):
            kept.append(engine)
    return sorted(kept, key=lambda engine: engine.heard_ns)


def shown(now: Snapshot) -> list[EngineState]:
    """Engines that have series."""
    return living(now)[-ENGINES_MAX:]


def _engine_labels(engine: EngineState) -> tuple[str, ...]:
    return engine.deployment, engine.instance, str(engine.dp)


def _by_engine(value: Callable[[EngineState], float]) -> Callable[[Snapshot], Observed]:
    return lambda now: [(value(engine), _engine_labels(engine)) for engine in shown(now)]


def _ranks(now: Snapshot) -> Iterator[tuple[EngineState, RankState, tuple[str, ...]]]:
    for engine in shown(now):
        for rank in engine.ranks:
            place = rank.identity.rank
            yield engine, rank, (*_engine_labels(engine), str(place.pp), str(place.tp))


def _by_rank(value: Callable[[EngineState, RankState], float]) -> Callable[[Snapshot], Observed]:
    return lambda now: [(value(engine, rank), labels) for engine, rank, labels in _ranks(now)]


def _heartbeat_ages(now: Snapshot) -> Observed:
    return _by_rank(lambda engine, rank: max(now.now_ns - rank.last_heard_ns, 0) / 1e9)(now)


def _margins(now: Snapshot) -> Observed:
    return [(rank.margin_s, labels) for _, rank, labels in _ranks(now) if rank.margin_s >= 0]


def _record_drops(now: Snapshot) -> Observed:
    for _, rank, labels in _ranks(now):
        for value, place, reason in (
            (rank.probe_drops, "probe", "not_stored"),
            (rank.lost_records - rank.left_out_records, "ring", "overwritten"),
            (rank.left_out_records, "sidecar", "left_out"),
            (rank.late_rows, "alignment", "late_rows"),
            (rank.late_records, "alignment", "late_records"),
        ):
            yield value, (*labels, place, reason)


def _verdicts(now: Snapshot) -> Observed:
    for engine in shown(now):
        labels = _engine_labels(engine)
        for verdict in ("CONSISTENT", "DIVERGED"):
            # Also at 0: a counter that is born at 1 has no increase that an alert could see.
            yield engine.verdicts.get(verdict, 0), (*labels, verdict.lower(), "")
        for reason, rows in engine.verdicts.items():
            if reason not in ("CONSISTENT", "DIVERGED"):
                yield rows, (*labels, "indeterminate", reason)


def _troubles(*, first: bool) -> Callable[[Snapshot], Observed]:
    def observe(now: Snapshot) -> Observed:
        for engine in shown(now):
            for trouble in engine.troubles:
                stage = UNDECIDED if trouble.stage == NOBODY else str(trouble.stage)
                moment = trouble.first_ns if first else trouble.last_ns
                labels = (*_engine_labels(engine), trouble.check, trouble.severity.word, stage)
                yield moment / 1e9, labels

    return observe


def _incidents(now: Snapshot) -> Observed:
    """Every check and severity of every deployment known, also at 0."""
    known = {key[0] for key in now.incidents} | {engine.deployment for engine in shown(now)}
    for deployment in sorted(known):
        for check in CHECKS:
            for severity in Severity:
                labels = (deployment, check, severity.word)
                yield now.incidents.get(labels, 0), labels


def _drops(now: Snapshot) -> Observed:
    return [(now.drops.get(key, 0), key) for key in DROPS]


def _single(value: Callable[[Snapshot], float]) -> Callable[[Snapshot], Observed]:
    return lambda now: [(value(now), ())]


def _steps_behind(engine: EngineState, rank: RankState) -> float:
    return max(other.last_step for other in engine.ranks) - rank.last_step


OBSERVERS: Final[dict[str, Callable[[Snapshot], Observed]]] = {
    "stagewatch.rows.compared": _verdicts,
    "stagewatch.steps.compared": _by_engine(lambda engine: engine.compared_to),
    "stagewatch.engine.wedged": _by_engine(lambda engine: int(bool(engine.wedged))),
    "stagewatch.ranks.missing": _by_engine(lambda engine: len(engine.missing)),
    "stagewatch.rows.excluded": _by_engine(lambda engine: engine.rows_excluded),
    "stagewatch.rows.harmed": _by_engine(lambda engine: engine.rows_harmed),
    "stagewatch.trouble.first.timestamp": _troubles(first=True),
    "stagewatch.trouble.last.timestamp": _troubles(first=False),
    "stagewatch.drafts.accepted": _by_engine(lambda engine: engine.drafts_accepted),
    "stagewatch.drafts.rejected": _by_engine(lambda engine: engine.drafts_rejected),
    "stagewatch.rows.sampled": _by_engine(lambda engine: engine.rows_sampled),
    "stagewatch.rows.repeated": _by_engine(lambda engine: engine.rows_repeated),
    "stagewatch.broadcast.size": _by_engine(lambda engine: engine.broadcast_bytes),
    "stagewatch.broadcast.steps": _by_engine(lambda engine: engine.broadcast_steps),
    "stagewatch.broadcast.rows": _by_engine(lambda engine: engine.broadcast_rows),
    "stagewatch.broadcast.rows.fix.only": _by_engine(lambda engine: engine.broadcast_rows_fixed),
    "stagewatch.rank.armed": _by_rank(lambda engine, rank: int(rank.armed)),
    "stagewatch.rank.heartbeat.age": _heartbeat_ages,
    "stagewatch.rank.steps.behind": _by_rank(_steps_behind),
    "stagewatch.ring.margin": _margins,
    "stagewatch.records.dropped": _record_drops,
    "stagewatch.probe.time": _by_rank(lambda engine, rank: rank.probe_ns / 1e9),
    "stagewatch.probe.steps": _by_rank(lambda engine, rank: rank.probe_steps),
    "stagewatch.probe.step.p99": _by_rank(lambda engine, rank: rank.probe_p99_ns / 1e9),
    "stagewatch.incidents": _incidents,
    "stagewatch.engines.watched": _single(lambda now: len(shown(now))),
    "stagewatch.engines.hidden": _single(lambda now: max(len(living(now)) - ENGINES_MAX, 0)),
    "stagewatch.rings.refused": _single(lambda now: now.rings_refused),
    "stagewatch.drops": _drops,
    "stagewatch.ingest.sessions": _single(lambda now: now.sessions),
    "stagewatch.ingest.duplicates": _single(lambda now: now.duplicates),
    "stagewatch.journal.size": _single(lambda now: now.journal.bytes_kept),
    "stagewatch.journal.pinned": _single(lambda now: now.journal.pinned_bytes),
    "stagewatch.journal.waiting": _single(lambda now: now.journal.bytes_waiting),
    "stagewatch.journal.failing": _single(lambda now: int(bool(now.journal.failure))),
    "stagewatch.journal.damaged": _single(lambda now: now.journal.damaged_bytes),
    "stagewatch.events.readers": _single(lambda now: now.readers),
}
