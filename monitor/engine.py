"""One group of ranks under watch: its alignment, checks, verdicts and incidents."""

from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from stagewatch.agents.evidence import EventBlock, Evidence
from stagewatch.agents.identity import Fingerprint, Identity, Rank
from stagewatch.agents.probe import Health
from stagewatch.agents.record import Kind
from stagewatch.monitor.alignment import Aligned, Aligner
from stagewatch.monitor.callbook import CallBook
from stagewatch.monitor.checks import registry
from stagewatch.monitor.checks.base import Chunk, ChunkCheck, Finding, RowCheck
from stagewatch.monitor.checks.excluded_row import dropped_rows
from stagewatch.monitor.checks.liveness import LivenessCheck, Progress, RankProgress
from stagewatch.monitor.checks.stall import Stall, stands_still
from stagewatch.monitor.correlate import Context, Correlator
from stagewatch.monitor.history import History
from stagewatch.monitor.incidents import Incident
from stagewatch.monitor.ordinals import Ordinals
from stagewatch.monitor.picture import Picture
from stagewatch.monitor.states import Change, EngineState, RankState, StepSeen
from stagewatch.monitor.statistics import Statistics
from stagewatch.monitor.troubles import Troubles
from stagewatch.monitor.windows import Group, InputsWindow, lives_of

REQUEST_IDS_MAX: Final = 200_000
"""Request ids remembered per group; an id is needed as long as its request runs."""
ENDED_IDS_MAX: Final = 8192
"""The same of requests that ended: more than can end before their last step was judged."""
REQUEST_IDS_AT_REST: Final = 1024
"""The same once nobody was heard of for long: as many as may still run should it come back."""

NEWCOMERS_MAX: Final = 16
"""Requests named as those that joined the batch before a stall."""

Rows = NDArray[np.bool_]

# Looking a member up in an enumeration costs more than comparing a column with its number.
_BIND: Final = int(Kind.BIND)
_FREE: Final = int(Kind.FREE)
_HEARTBEAT: Final = int(Kind.HEARTBEAT)

PRIVACY_FINGERPRINTS: Final = ("digest_key", "request_ids")
"""Configuration that sidecars add: how digests and request keys were made. Ranks must not differ in it."""
DIGESTS_DIFFER: Final = "digests_differ"
"""Why rows are INDETERMINATE: their ranks' sidecars use different digest keys, or only some hide request ids."""

CONSISTENT: Final = "CONSISTENT"
DIVERGED: Final = "DIVERGED"


class Engine:
    """One data-parallel replica of one life of an engine. Deterministic in the evidence it is given."""

    def __init__(self, group: Group) -> None:
        self.group: Final = group
        self.steps = 0
        """Steps that have a verdict."""
        self.verdicts: Counter[str] = Counter()
        """Rows by verdict; INDETERMINATE ones by reason, in lower case."""
        self.picture = Picture(len(group.ranks))
        self._compared_to = 0
        self._begin_comparison()
        self._correlator = Correlator(group)
        self._request_ids: OrderedDict[int, tuple[str, int]] = OrderedDict()
        """Request key -> (id, ordinal of the last step before it was given a slot)."""
        self._ended_ids: OrderedDict[int, tuple[str, int]] = OrderedDict()
        """The same of requests that gave their slot back: what they did last may still be judged."""
        self._ranks: dict[int, RankState] = {}
        self._alike = True
        """Whether the ranks' digests and request keys were made alike, so that equal means equal."""
        self._moved_ns: dict[int, int] = {}
        self._statistics = Statistics(group)
        self._troubles = Troubles(group)
        self._liveness_checks: list[LivenessCheck] = [check() for check in registry.LIVENESS_CHECKS]
        self._first_heard_ns = 0
        self._rested_ns = 0
        """When it was last heard of before its evidence was let go."""
        self._wedged = ""
        self._armed = False
        """Whether the checks that run once all ranks were heard of have run."""

    def _begin_comparison(self) -> None:
        """Forget all evidence; incidents stay. What comes next is only compared with what comes next."""
        self._aligner = Aligner(self.group)
        self._books = [CallBook(self._aligner.names) for _ in self.group.ranks]
        self._chunk_checks: list[ChunkCheck] = [
            check() for check in (*registry.CHUNK_CHECKS, *registry.SYMPTOM_CHECKS)
        ]
        self._row_checks: list[RowCheck] = [check() for check in registry.ROW_CHECKS]
        self._history = History()

    def hello(self, identity: Identity, now_ns: int) -> None:
        """A rank's stream begins, or begins again."""
        index = self.group.ranks.index(identity.rank)
        self._first_heard_ns = self._first_heard_ns or now_ns
        known = self._ranks.get(index)
        if known is None:
            self._ranks[index] = RankState(identity, True, "", 0, now_ns, -1.0, 0)
        else:
            if _privacy(identity) != _privacy(known.identity):
                self.verdicts[DIGESTS_DIFFER] += max(lane.pending_rows for lane in self._aligner.lanes)
                self._compared_to = max(self._compared_to, self._aligner.judged)
                self._begin_comparison()
            self._ranks[index] = replace(known, identity=identity, last_heard_ns=now_ns)
        self._alike = len({_privacy(state.identity) for state in self._ranks.values()}) < 2

    def take(self, rank: Rank, evidence: Evidence, margin_s: float, now_ns: int) -> list[Change]:
        """Take one batch of evidence and judge what it completes."""
        index = self.group.ranks.index(rank)
        state = self._ranks[index]
        if evidence.events is not None:
            state = self._events(state, evidence.events, self._aligner.lanes[index].ordinals)
        inputs = evidence.inputs
        newest = int(inputs.step[-1]) if inputs is not None and len(inputs.step) else 0
        newest = max(newest, state.last_step)
        if not self._alike:
            evidence = self._set_aside(index, evidence)
        calls = self._aligner.push(index, evidence)
        self._books[index].add(calls)
        if evidence.inputs is not None or len(calls) or index not in self._moved_ns:
            self._moved_ns[index] = now_ns
        self._ranks[index] = replace(
            state,
            last_step=newest,
            last_heard_ns=now_ns,
            margin_s=margin_s,
            lost_records=state.lost_records + evidence.lost,
            left_out_records=state.left_out_records + evidence.left_out,
            node=evidence.node or state.node,
        )
        return [*self._arming(now_ns), *self._judge(self._aligner.advance(), now_ns)]

    def _set_aside(self, index: int, evidence: Evidence) -> Evidence:
        """Evidence of which nothing can be compared: its rows are counted, its heartbeats kept."""
        if evidence.inputs is not None and index == self.group.last_stage[0]:
            self.verdicts[DIGESTS_DIFFER] += int(evidence.inputs.rows.sum())
        return replace(evidence, inputs=None, mask=None, sent=None, received=None, consumed=None)

    def finish(self, now_ns: int) -> list[Change]:
        """The evidence has ended: judge the rest."""
        return self._judge(self._aligner.advance(final=True), now_ns)

    def give_up(self, absent: frozenset[int], now_ns: int) -> list[Change]:
        """Stop waiting for some ranks: what the others have recorded becomes INDETERMINATE."""
        return self._judge(self._aligner.advance(absent=absent), now_ns)

    def rest(self, after_ns: int, now_ns: int) -> list[Change]:
        """Judge what is left and let go of the evidence, once nobody was heard of for ``after_ns``.

        A node whose engine restarts for ever would cost memory for ever. Incidents, verdicts and ranks stay; should
        the engine be heard of again, what comes then is only compared with what comes then.
        """
        if self._rested_ns == self.heard_ns or now_ns - self.heard_ns <= after_ns:
            return []
        self._rested_ns = self.heard_ns
        changes = self.finish(now_ns)
        self._compared_to = max(self._compared_to, self._aligner.judged)
        self._begin_comparison()
        self.picture = Picture(len(self.group.ranks))
        while len(self._request_ids) > REQUEST_IDS_AT_REST:
            self._request_ids.popitem(last=False)
        self._ended_ids.clear()
        return changes

    def look(self, now_ns: int) -> list[Change]:
        """Judge what only the passing of time can tell."""
        progress = self.progress(now_ns)
        changes: list[Change] = []
        if stands_still([progress]):
            # Nothing more will come that could tell whether a rank's ordinals are off.
            changes = self._judge(self._aligner.advance(patient=False), now_ns)
        findings = [finding for check in self._liveness_checks for finding in check.look(progress)]
        self._wedged = next((finding.text for finding in findings if finding.check == Stall.NAME), "")
        return [*changes, *self._tell(findings, now_ns)]

    def wedge(self, finding: Finding | None, why: str, now_ns: int) -> list[Change]:
        """The replicas are stuck in a call they share; ``finding`` where it is this one that owes it."""
        self._wedged = self._wedged or why
        return [] if finding is None else self._tell([finding], now_ns)

    def _arming(self, now_ns: int) -> list[Change]:
        """Compare how the ranks are set up, once all were heard of."""
        if self._armed or len(self._ranks) < len(self.group.ranks):
            return []
        self._armed = True
        progress = self.progress(now_ns)
        findings = [found for check in registry.ARMING_CHECKS for found in check().look(progress)]
        return self._tell(findings, now_ns)

    def progress(self, now_ns: int) -> Progress:
        """How far each rank has come."""
        newest = max((lane.newest for lane in self._aligner.lanes), default=0)
        return Progress(
            group=self.group,
            ranks=tuple(self._progress(index, newest) for index in range(len(self.group.ranks))),
            now_ns=now_ns,
            first_heard_ns=self._first_heard_ns,
            newest_requests=tuple(self._newcomers(newest)),
        )

    def _newcomers(self, newest: int) -> Iterator[str]:
        """Requests that were given a slot just before the newest step, newest first."""
        for name, step in islice(reversed(self._request_ids.values()), NEWCOMERS_MAX):
            if step == newest - 1:
                yield name

    def moments(self, first: int, last: int) -> Iterator[StepSeen]:
        """What each rank recorded of steps ``first`` to ``last``, as far as they are remembered."""
        return self._history.moments(first, last)

    @property
    def heard_ns(self) -> int:
        """When any rank was last heard of."""
        return max((state.last_heard_ns for state in self._ranks.values()), default=0)

    def silent(self, after_ns: int) -> frozenset[int]:
        """Indices of ranks not heard of for ``after_ns`` while another one was, or never since the first hello."""
        heard = {index: state.last_heard_ns for index, state in self._ranks.items()}
        newest = max(heard.values(), default=0)
        return frozenset(
            index
            for index in range(len(self.group.ranks))
            if newest - heard.get(index, self._first_heard_ns) > after_ns
        )

    def incidents(self) -> list[Incident]:
        """Every incident, oldest first."""
        return self._correlator.current()

    def state(self) -> EngineState:
        """What is known of the group."""
        ranks = self.group.ranks
        return EngineState(
            deployment=self.group.deployment,
            instance=self.group.instance,
            dp=self.group.dp,
            ranks=tuple(self._rank_state(index) for index in sorted(self._ranks)),
            missing=tuple(rank for index, rank in enumerate(ranks) if index not in self._ranks),
            compared_to=max(self._compared_to, self._aligner.judged),
            verdicts=dict(self.verdicts),
            worst=self._troubles.worst,
            wedged=self._wedged,
            drafts_accepted=self._statistics.accepted,
            drafts_rejected=self._statistics.rejected,
            rows_repeated=self._statistics.repeated,
            rows_sampled=self._statistics.sampled,
            late_rows=sum(lane.late_rows for lane in self._aligner.lanes),
            late_records=sum(lane.late_records for lane in self._aligner.lanes),
            rows_excluded=self._statistics.excluded,
            rows_harmed=self._statistics.harmed,
            broadcast_bytes=self._statistics.broadcast.size_bytes,
            broadcast_steps=self._statistics.broadcast.steps,
            broadcast_rows=self._statistics.broadcast.rows,
            broadcast_rows_fixed=self._statistics.broadcast.rows_fixed,
            troubles=self._troubles.known(),
            heard_ns=self.heard_ns,
        )

    def _rank_state(self, index: int) -> RankState:
        lane = self._aligner.lanes[index]
        return replace(self._ranks[index], late_rows=lane.late_rows, late_records=lane.late_records)

    def _progress(self, index: int, newest: int) -> RankProgress:
        state, lane = self._ranks.get(index), self._aligner.lanes[index]
        return RankProgress(
            index=index,
            identity=state.identity if state else None,
            armed=state.armed if state else False,
            reason=state.reason if state else "",
            newest_step=lane.ordinals.of_step(state.last_step) if state else 0,
            heard_ns=state.last_heard_ns if state else 0,
            moved_ns=self._moved_ns.get(index, 0),
            calls=self._books[index].calls,
            before=self._books[index].before,
            shared_calls=-1 if lane.lossy else self._books[index].shared,
            last_shared=self._books[index].last_shared,
            lossy=any(last >= newest - 1 for _, last in lane.gaps),
        )

    def _note_ids(self, events: EventBlock, ordinals: Ordinals) -> None:
        """Remember the ids of requests that were given a slot; of those that gave theirs back, the newest."""
        at = np.flatnonzero((events.kind == _BIND) | (events.kind == _FREE))
        if not len(at):
            return
        steps = ordinals.of(events.step[at] + 1) - 1
        running, ended_ids, texts = self._request_ids, self._ended_ids, events.text
        columns = (events.kind[at].tolist(), events.request[at].tolist(), steps.tolist())
        for i, kind, key, step in zip(at.tolist(), *columns, strict=True):
            if kind == _BIND:
                running[key] = (texts[i], step)
                running.move_to_end(key)
                if len(running) > REQUEST_IDS_MAX:
                    running.popitem(last=False)
            elif (ended := running.pop(key, None)) is not None:
                ended_ids[key] = ended
                ended_ids.move_to_end(key)
                if len(ended_ids) > ENDED_IDS_MAX:
                    ended_ids.popitem(last=False)

    def _events(self, state: RankState, events: EventBlock, ordinals: Ordinals) -> RankState:
        self._note_ids(events, ordinals)
        beats = np.flatnonzero(events.kind == _HEARTBEAT)
        if len(beats):
            try:
                told = [msgspec.json.decode(events.text[beat], type=Health) for beat in beats]
            except msgspec.MsgspecError:
                return replace(state, reason="its heartbeat cannot be read")
            state = replace(
                state,
                armed=told[-1].armed,
                reason=told[-1].reason,
                probe_drops=told[-1].drops,
                probe_ns=state.probe_ns + sum(health.probe_ns for health in told),
                probe_steps=state.probe_steps + sum(health.busy_steps for health in told),
                probe_p99_ns=told[-1].probe_p99_ns,
                ended=told[-1].ended,
            )
        return state

    def _judge(self, aligned: Aligned | None, now_ns: int) -> list[Change]:
        if aligned is None:
            return []
        chunk = aligned.chunk
        for shifted in chunk.shifted:
            for index in shifted.renumbered:
                self._books[index].renumber(shifted.shift)
        self.verdicts.update(aligned.indeterminate)
        self.steps += len(chunk.unaligned) + (0 if chunk.inputs is None else len(chunk.inputs.steps))
        self._history.remember(chunk.inputs, chunk.sent)
        if chunk.mask is not None:
            chunk = replace(chunk, dropped=tuple(dropped_rows(chunk.mask, self._history)))
        self._statistics.add(chunk, self._history)
        diverged = self._compare_rows(chunk.inputs)
        self.picture.add(chunk, _any_of(diverged) if diverged else None, self._history)
        findings = [*self._explain(chunk.inputs, diverged), *self._examine(chunk)]
        findings.sort(key=lambda f: (f.step, f.phase, registry.ORDER[f.check], f.row))
        changes = self._tell(findings, now_ns)
        self._touch(chunk.inputs, diverged, now_ns)
        self._history.forget()
        return changes

    def _tell(self, findings: list[Finding], now_ns: int) -> list[Change]:
        changes: OrderedDict[str, Change] = OrderedDict()
        for finding in findings:
            context = Context(
                self.name_of(finding.request),
                partial(self._last_good_step, finding),
                max(lane.newest for lane in self._aligner.lanes),
                now_ns,
            )
            changed = self._correlator.add(finding, context)
            self._troubles.note(self._correlator.incident_of(finding), now_ns)
            if changed is None:
                continue
            kind, incident = changed
            self.picture.keep_around(incident.first_bad_step)
            before = changes.get(incident.id)
            changes[incident.id] = Change(before.kind if before and kind == "updated" else kind, incident)
        return list(changes.values())

    def _examine(self, chunk: Chunk) -> Iterator[Finding]:
        for check in self._chunk_checks:
            yield from check.examine(chunk, self.group, self._history)

    def _compare_rows(self, window: InputsWindow | None) -> list[tuple[RowCheck, Rows]]:
        """Count verdicts; return each check that objects with the rows it objects to."""
        if window is None:
            return []
        objections = [
            (check, rows) for check in self._row_checks if (rows := check.differs(window)) is not None
        ]
        diverged = int(_any_of(objections).sum()) if objections else 0
        self.verdicts[DIVERGED] += diverged
        self.verdicts[CONSISTENT] += len(window.blocks[0].request) - diverged
        return objections

    def _explain(
        self, window: InputsWindow | None, objections: list[tuple[RowCheck, Rows]]
    ) -> Iterator[Finding]:
        """Findings on the first diverged row of every request that is not critical already."""
        if window is None or not objections:
            return
        explained: set[tuple[int, int]] = set()
        for key, step, row in _diverged(window, objections):
            if key in explained or self._correlator.is_critical(*key, step):
                continue
            explained.add(key)
            for check, rows in objections:
                if rows[row]:
                    yield check.explain(window, row, self._history)

    def _touch(
        self, window: InputsWindow | None, objections: list[tuple[RowCheck, Rows]], now_ns: int
    ) -> None:
        if window is None or not objections:
            return
        newest = {key: step for key, step, _ in _diverged(window, objections)}
        for key, step in newest.items():
            self._troubles.note(self._correlator.touch(*key, step), now_ns)
        self._statistics.diverged(newest)

    def name_of(self, request: int) -> str:
        """A request's id for its key, where a slot was given to it on record; empty for no request."""
        if not request:
            return ""
        known = self._request_ids.get(request) or self._ended_ids.get(request)
        return f"request {request:016x}" if known is None else known[0]

    def _last_good_step(self, finding: Finding) -> int:
        if not finding.request:
            return 0
        seen = self._history.previous(finding.request, finding.life, finding.step)
        return seen.step if seen is not None else 0


def _any_of(objections: list[tuple[RowCheck, Rows]]) -> Rows:
    found: Rows = np.logical_or.reduce([rows for _, rows in objections])
    return found


def _diverged(
    window: InputsWindow, objections: list[tuple[RowCheck, Rows]]
) -> Iterator[tuple[tuple[int, int], int, int]]:
    """((request, life), step, row) of every diverged row, in the order of steps."""
    block = window.blocks[-1]
    rows = np.flatnonzero(_any_of(objections))
    keys = zip(block.request[rows].tolist(), lives_of(block)[rows].tolist(), strict=True)
    return zip(keys, window.row_steps[rows].tolist(), rows.tolist(), strict=True)


def _privacy(identity: Identity) -> tuple[Fingerprint, ...]:
    return tuple(found for found in identity.config if found.name in PRIVACY_FINGERPRINTS)
