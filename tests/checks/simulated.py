"""The checks' harness: a simulated run, what it must make the watch say, and the watch fed as live or in any other cut.

What is expected comes from what the simulator wrote down: its injections, and the raw tokens of its records, which the
watch never sees.
"""

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np

from stagewatch.agents.digest import Digester
from stagewatch.agents.evidence import Evidence, digest_records, slice_steps
from stagewatch.agents.identity import Rank
from stagewatch.agents.lab.fault import Injection, Plan
from stagewatch.agents.lab.faults import REGISTRY
from stagewatch.agents.lab.simulator import SimConfig, Simulator
from stagewatch.agents.probe import Health
from stagewatch.agents.record import Bind, Heartbeat, Inputs, Kind, Payload, Record
from stagewatch.monitor.incidents import Incident, Severity, report
from stagewatch.monitor.watch import Watch

DIGESTER = Digester(b"\x07" * 16)
S = 10**9
MAJORITY_OF = 3
"""The fewest ranks of which one can be told apart as the odd one out."""


@dataclass(frozen=True, order=True)
class Expected:
    """One incident, as far as a test names it."""

    check: str
    request: str
    first_bad_step: int
    blamed: tuple[int, ...]
    severity: str

    @classmethod
    def of(cls, incident: Incident) -> "Expected":
        return cls(
            incident.check,
            incident.request,
            incident.first_bad_step,
            incident.blamed,
            incident.severity.word,
        )


class Run:
    """A finished simulation and its ground truth."""

    def __init__(self, config: SimConfig) -> None:
        self.config = config
        self.sim = Simulator(config)
        self.iterations: list[dict[Rank, int]] = []
        """How many records each rank made, iteration by iteration."""
        self.records: dict[Rank, list[Record]] = {rank: [] for rank in self.sim.ranks}
        for made in self.sim.iterate():
            self.iterations.append({rank: len(own) for rank, own in made.items()})
            for rank, own in made.items():
                self.records[rank] += own
        self.injections: list[Injection] = self.sim.fault.injections
        self.wedged = self.sim.wedged
        self.identities = self.sim.identities()

    @cached_property
    def evidence(self) -> dict[Rank, Evidence]:
        """Each rank's records digested at once; a record's sequence number is its place."""
        return {
            rank: digest_records(own, self.identities[rank], DIGESTER)
            for rank, own in self.records.items()
            if own
        }

    def number(self, rank: Rank) -> int:
        sizes = self.sim.sizes
        return (rank.dp * sizes.pp + rank.pp) * sizes.tp + rank.tp

    # ---- ground truth

    @cached_property
    def names(self) -> dict[int, str]:
        return {
            record.body.request: record.body.request_id
            for own in self.records.values()
            for record in own
            if isinstance(record.body, Bind)
        }

    @cached_property
    def inputs(self) -> dict[tuple[int, int], dict[Rank, Inputs]]:
        """Inputs of every rank by (replica, step), in the order of steps."""
        found: dict[tuple[int, int], dict[Rank, Inputs]] = {}
        for rank, own in self.records.items():
            for record in own:
                if isinstance(record.body, Inputs):
                    found.setdefault((rank.dp, record.step), {})[rank] = record.body
        ranks = len(self.records) // self.sim.sizes.dp
        return {key: by_rank for key, by_rank in sorted(found.items()) if len(by_rank) == ranks}

    @cached_property
    def skipped(self) -> set[tuple[int, Rank | None]]:
        """(step, rank of the last stage) of broadcasts left out, since their mask is None."""
        return {
            (record.step, rank)
            for rank, own in self.records.items()
            for record in own
            if record.kind is Kind.SENT and isinstance(record.body, Payload) and record.body.skipped
        }

    @cached_property
    def rows(self) -> dict[tuple[str, tuple[int, int]], list[tuple[int, int, int]]]:
        """(request, life) -> (replica, step, row) of each of its steps, in order; lives as the last rank has them."""
        found: dict[tuple[str, tuple[int, int]], list[tuple[int, int, int]]] = {}
        for (dp, step), by_rank in self.inputs.items():
            body = by_rank[max(by_rank)]
            for row, key in enumerate(body.request.tolist()):
                life = int(body.slot[row]), int(body.generation[row])
                found.setdefault((self.names[key], life), []).append((dp, step, row))
        return found

    def differing(self, dp: int, step: int, row: int) -> str:
        """The check whose field differs first among the ranks in one row's raw inputs; empty if none does."""
        by_rank = [*self.inputs[dp, step].values()]
        last = by_rank[-1]
        if any(body.request[row] != last.request[row] for body in by_rank):
            return ""
        drafts = int(last.draft_count[row])
        views = (
            ("draft-block", lambda body: body.draft_tokens[row, :drafts].tolist()),
            ("last-sampled-token", lambda body: body.last_sampled[row] if not last.prefilling[row] else 0),
            ("position-drift", lambda body: (body.computed[row], body.mirror[row])),
            ("input-divergence", lambda body: _fed(body, row)),
        )
        for check, view in views:
            if any(view(body) != view(last) for body in by_rank):
                return check
        return ""

    def divergence(self, request: str, life: tuple[int, int], since: int) -> tuple[int, str] | None:
        """(first step from ``since`` on at which ranks differ on a request, the check of the field)."""
        for dp, step, row in self.rows[request, life]:
            if step >= since and (check := self.differing(dp, step, row)):
                return step, check
        return None

    def stale_rows(self, rank: Rank, at: int) -> Iterator[tuple[int, int]]:
        """(step sent, request key) of what a rank wrote before step ``at`` into slots that had been released."""
        for record in self.records[rank]:
            if record.kind is Kind.CONSUMED and isinstance(record.body, Payload) and record.body.at == at:
                body = record.body
                for row in np.flatnonzero((body.applied != 0) & (body.generation != body.generation_now)):
                    yield record.step, int(body.request[row])

    def life_at(self, request: str, step: int) -> tuple[int, int]:
        """The life in which a request ran at a step."""
        return next(
            life
            for (name, life), rows in self.rows.items()
            if name == request and any(own == step for _, own, _ in rows)
        )


def _fed(body: Inputs, row: int) -> tuple[list[int], list[int]]:
    end = int(body.scheduled[: row + 1].sum())
    start = end - int(body.scheduled[row])
    return body.input_ids[start:end].tolist(), body.positions[start:end].tolist()


# ---- the watch, fed in any way


def cut(evidence: Evidence, first: int, end: int, lost: int = 0) -> Evidence:
    """The part of evidence with sequence numbers from ``first`` up to ``end`` (exclusive)."""

    def part(block: Any) -> Any:
        if block is None:
            return None
        a, b = (int(i) for i in np.searchsorted(block.seq, [first, end]))
        return slice_steps(block, a, b) if a < b else None

    blocks = (
        evidence.inputs,
        evidence.mask,
        evidence.sent,
        evidence.received,
        evidence.consumed,
        evidence.events,
    )
    return Evidence(first, end, lost, *map(part, blocks))


def hello(run: Run, watch: Watch) -> None:
    for identity in run.identities.values():
        watch.hello(identity, S)


def take(run: Run, watch: Watch, rank: Rank, first: int, end: int, lost: int = 0) -> list[Incident]:
    """Hand over a rank's records ``first`` to ``end``; return the incidents that opened or rose."""
    evidence = cut(run.evidence[rank], first, end, lost)
    changes = watch.take(run.identities[rank].instance, rank, evidence, -1.0, 2 * S)
    return [change.incident for change in changes if change.kind != "updated"]


def feed_live(run: Run, watch: Watch) -> list[Incident]:
    """Every iteration as it comes; returns incidents as they were when first told, and as they rose."""
    told: list[Incident] = []
    hello(run, watch)
    at = dict.fromkeys(run.records, 0)
    for made in run.iterations:
        for rank, count in made.items():
            if count:
                told += take(run, watch, rank, at[rank], at[rank] + count)
                at[rank] += count
    return told


def feed_cut(run: Run, watch: Watch, seed: int, records_max: int = 200) -> None:
    """The same records, each rank's cut into batches of random sizes, ranks interleaved at random."""
    rng = random.Random(seed)
    left = {rank: len(own) for rank, own in run.records.items() if own}
    hello(run, watch)
    at = dict.fromkeys(left, 0)
    while left:
        rank = rng.choice(list(left))
        size = rng.randint(1, rng.choice((1, 5, 40, records_max)))
        end = min(at[rank] + size, left[rank])
        take(run, watch, rank, at[rank], end)
        at[rank] = end
        if end == left[rank]:
            del left[rank]


def feed_lossy(run: Run, watch: Watch, seed: int, *, share: float = 0.02) -> int:
    """As `feed_cut`, but stretches of records are gone from any rank's ring; returns how many records."""
    rng = random.Random(seed)
    left = {rank: len(own) for rank, own in run.records.items() if own}
    hello(run, watch)
    at, lost_all = dict.fromkeys(left, 0), 0
    while left:
        rank = rng.choice(list(left))
        lost = rng.randint(1, rng.choice((2, 8, 60))) if rng.random() < share else 0
        lost = min(lost, left[rank] - at[rank] - 1)
        end = min(at[rank] + lost + rng.randint(1, 60), left[rank])
        take(run, watch, rank, at[rank] + lost, end, lost)
        lost_all += lost
        at[rank] = end
        if end == left[rank]:
            del left[rank]
    return lost_all


def beat(run: Run, watch: Watch, now_ns: int, ranks: Iterable[Rank] | None = None) -> None:
    """A heartbeat of every rank, as the probe's timer writes them while nothing else happens."""
    health = msgspec.json.encode(Health(True, "", 1, 0, 0, 0, 0)).decode()
    for rank in run.identities if ranks is None else ranks:
        records, identity = run.records[rank], run.identities[rank]
        seq = records[-1].seq + 1 if records else 0
        step = records[-1].step if records else 0
        evidence = digest_records(
            [Record(Kind.HEARTBEAT, seq, step, seq, Heartbeat(health))], identity, DIGESTER
        )
        watch.take(identity.instance, rank, evidence, -1.0, now_ns)


def settle(run: Run, watch: Watch) -> None:
    """What comes after the last record: a wedged engine stands still, a replay ends."""
    if run.wedged:
        beat(run, watch, 25 * S)
        watch.tick(34 * S)
    watch.finish()


def reports(watch: Watch) -> bytes:
    """All that people are told, as bytes."""
    return msgspec.json.encode([report(incident) for incident in watch.incidents()])


def found(watch: Watch) -> list[Expected]:
    return sorted(Expected.of(incident) for incident in watch.incidents())


# ---- what a fault must make the watch say


def plan(name: str, **overrides: object) -> SimConfig:
    """A run in which the fault ``name`` finds its opportunity; overrides are fields of `SimConfig` or of `Plan`."""
    fault = REGISTRY[name]
    config = SimConfig.benign(
        1,
        pp=max(3, fault.LEAST.pp),
        tp=max(2, fault.LEAST.tp),
        dp=fault.LEAST.dp,
        spec_tokens=max(5, fault.LEAST_SPEC_TOKENS),
        requests=60,
    )
    of_plan = {key: overrides.pop(key) for key in ("from_step", "times", "rank") if key in overrides}
    requests = overrides.pop("requests", None)
    config = replace(config, **overrides)  # type: ignore[arg-type]
    if requests is not None:
        config = replace(config, workload=replace(config.workload, requests=requests))
    if name == "width-mismatch":
        # Under a width that varies by step, one column is right wherever no drafts are verified.
        config = replace(config, variable_width=False)
    if name == "old-mask":
        # Long enough to come near the cap while decoding, which is where the faulty mask strikes.
        config = replace(config, stops=False)
    return replace(config, fault=Plan(name, **of_plan))  # type: ignore[arg-type]


def expected(run: Run) -> list[Expected]:
    """Every incident that the run's injections must lead to, and no other."""
    name = run.sim.fault.NAME
    return sorted(_RULES[name](run)) if run.injections else []


def _numbers(run: Run, injections: Iterable[Injection]) -> tuple[int, ...]:
    return tuple(sorted({run.number(one.rank) for one in injections if one.rank is not None}))


def _earlier(run: Run) -> tuple[int, ...]:
    last = run.sim.sizes.pp - 1
    return tuple(run.number(rank) for rank in run.sim.ranks if rank.pp < last and rank.dp == 0)


def _state(run: Run) -> Iterator[Expected]:
    """Ranks' states differ from the request's next step on: it is found there, in the field that differs."""
    for (request, life), rows in run.rows.items():
        own = [one for one in run.injections if one.request_id in ("", request)]
        if not own:
            continue
        first = run.divergence(request, life, min(one.step for one in own))
        if first is None:
            continue
        step, check = first
        began = rows[0][1]
        struck = [one for one in own if began <= one.step <= step]
        blamed = _numbers(run, struck) or _earlier(run)
        yield Expected(check, request, step, blamed, "critical")


def _first_per_life(
    run: Run, injections: Iterable[Injection], *, consumed: bool
) -> dict[tuple[str, tuple[int, int]], list[Injection]]:
    """The earliest ``injections`` of each life of each struck request."""
    found: dict[tuple[str, tuple[int, int]], list[Injection]] = {}
    for one in injections:
        for (request, life), rows in run.rows.items():
            if request != one.request_id:
                continue
            steps = [step for _, step, _ in rows]
            if one.step in steps if not consumed else _lives_at(run, request, life, one.step):
                before = found.get((request, life))
                if before is None or one.step < before[0].step:
                    found[request, life] = [one]
                elif one.step == before[0].step:
                    before.append(one)
    return found


def _lives_at(run: Run, request: str, life: tuple[int, int], step: int) -> bool:
    """Whether ``life`` is the request's newest one that began before ``step``."""
    began = {
        other: rows[0][1] for (name, other), rows in run.rows.items() if name == request and rows[0][1] < step
    }
    return bool(began) and max(began, key=lambda other: began[other]) == life


def _payload(check: str, *, consumed: bool) -> object:
    def rule(run: Run) -> Iterator[Expected]:
        for (request, _), own in _first_per_life(run, run.injections, consumed=consumed).items():
            yield Expected(check, request, own[0].step, _numbers(run, own), "critical")

    return rule


def _old_mask(run: Run) -> Iterator[Expected]:
    for (request, life), own in _first_per_life(run, run.injections, consumed=False).items():
        steps = [step for _, step, _ in run.rows[request, life]]
        excluded = own[0].step
        again = next((step for step in steps if step > excluded), None)
        harmed = run.divergence(request, life, excluded)
        if harmed is not None:
            yield Expected("excluded-row", request, harmed[0], _earlier(run), "critical")
        elif again is not None:
            yield Expected("excluded-row", request, again, (), "warning")
        else:
            yield Expected("excluded-row", request, excluded, (), "notice")


def _stale_slot(run: Run) -> Iterator[Expected]:
    """The slot's new owner is harmed; where the slot is free, the payload's own request gets a warning."""
    harmed = _first_per_life(run, run.injections, consumed=True)
    for (request, _), own in harmed.items():
        yield Expected("slot-generation", request, own[0].step, _numbers(run, own), "critical")
    free: dict[tuple[str, tuple[int, int]], list[Injection]] = {}
    for (step, rank), struck in _by_step_and_rank(run.injections).items():
        # Injections of one consumption are written down in the order of its rows.
        for one, (sent, key) in zip(struck, run.stale_rows(rank, step), strict=True):
            if not one.request_id:
                free.setdefault((run.names[key], run.life_at(run.names[key], sent)), []).append(one)
    for (request, life), own in free.items():
        if (request, life) in harmed:
            continue  # the same life is told of already, and worse
        first = min(one.step for one in own)
        blamed = _numbers(run, own)
        yield Expected("slot-generation", request, first, blamed, "warning")


def _by_step_and_rank(injections: Iterable[Injection]) -> dict[tuple[int, Rank], list[Injection]]:
    found: dict[tuple[int, Rank], list[Injection]] = {}
    for one in injections:
        if one.rank is not None:
            found.setdefault((one.step, one.rank), []).append(one)
    return found


def _engine(check: str, severity: str = "critical", *, among: str = "") -> object:
    """One incident of the whole engine, at the first step struck; two ranks cannot outvote each other."""

    def rule(run: Run) -> Iterator[Expected]:
        first = min(one.step for one in run.injections)
        blamed = _numbers(run, [one for one in run.injections if one.step == first])
        if among and getattr(run.sim.sizes, among) < MAJORITY_OF:
            blamed = ()
        yield Expected(check, "", first, blamed, severity)

    return rule


def _cadence(run: Run) -> Iterator[Expected]:
    for (request, life), rows in run.rows.items():
        for (dp, before, row), (_, step, after) in pairwise(rows):
            one, other = _last(run, dp, before), _last(run, dp, step)
            samples = one.mirror[row] + one.scheduled[row] >= one.prefill_len[row]
            if samples and not other.prefilling[after] and other.tick - one.tick < run.sim.sizes.pp:
                harmed = run.divergence(request, life, step)
                if harmed is None:
                    yield Expected("decode-cadence", request, step, (), "warning")
                else:
                    yield Expected("decode-cadence", request, harmed[0], (), "critical")
                break


def _last(run: Run, dp: int, step: int) -> Inputs:
    by_rank = run.inputs[dp, step]
    return by_rank[max(by_rank)]


def _stale_output(run: Run) -> Iterator[Expected]:
    """The scheduler takes rejections off twice: seen wherever its mirror falls below what the device counts."""
    struck = {one.request_id for one in run.injections}
    for (request, life), rows in run.rows.items():
        if request not in struck:
            continue
        for dp, step, row in rows:
            body = _last(run, dp, step)
            if body.mirror[row] < body.computed[row]:
                harmed = run.divergence(request, life, step)
                yield Expected(
                    "mirror-behind",
                    request,
                    harmed[0] if harmed else step,
                    (),
                    "critical" if harmed else "warning",
                )
                break


def _tp(run: Run) -> Iterator[Expected]:
    """Where a step broadcasts nothing its samples are not recorded: what was struck there cannot be seen."""
    blame = run.sim.sizes.tp >= MAJORITY_OF
    seen = [one for one in run.injections if (one.step, one.rank) not in run.skipped]
    for (request, _), own in _first_per_life(run, seen, consumed=False).items():
        yield Expected(
            "tp-disagreement", request, own[0].step, _numbers(run, own) if blame else (), "critical"
        )


def _silence(run: Run) -> Iterator[Expected]:
    return iter(())


_RULES = {
    "old-mask": _old_mask,
    "drafts-not-relayed": _state,
    "rejection-not-subtracted": _state,
    "rollback-broken": _state,
    "tokens-at-wrong-offset": _state,
    "mirror-inflates": _state,
    "stale-anchor": _state,
    "hit-tokens-disagree": _state,
    "payload-altered": _payload("payload-mismatch", consumed=True),
    "buffer-overwritten": _payload("payload-mismatch", consumed=True),
    "placeholder-not-overwritten": _payload("payload-mismatch", consumed=True),
    "first-column-only": _payload("payload-mismatch", consumed=False),
    "mask-differs": _payload("mask-disagreement", consumed=False),
    "stale-slot-write": _stale_slot,
    "all-chunk-broadcast": _engine("mask-disagreement"),
    "batch-reordered": _engine("batch-disagreement"),
    "drafter-skipped": _engine("path-choice"),
    "width-mismatch": _engine("collective-order"),
    "size-mismatch": _engine("collective-order", among="tp"),
    "op-dropped": _engine("stall"),
    "order-swapped": _engine("stall"),
    "dummy-skipped": _engine("stall"),
    "drafter-layout-differs": _engine("configuration", "warning"),
    "cadence-unguarded": _cadence,
    "stale-output-after-preemption": _stale_output,
    "tp-samples-apart": _tp,
    "drafter-uninitialised": _silence,
    "strided-prefill-state": _silence,
    "state-of-row": _silence,
    "grammar-stale": _silence,
    "dummy-writes-stale-rows": _silence,
}
"""How each fault's injections become expectations. A fault without a rule fails the tests."""

__all__ = [
    "Expected",
    "Run",
    "Severity",
    "beat",
    "expected",
    "feed_cut",
    "feed_live",
    "found",
    "plan",
    "reports",
    "settle",
]
