"""A request's whole life: where it ran, what each step yielded, what was left out, how it ended."""

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from stagewatch.monitor.incidents import Report
from stagewatch.monitor.story.picker import Picked
from stagewatch.monitor.story.records import Bound, Fed, Freed, Sent
from stagewatch.monitor.story.sides import Divergence, by_step, differing, divergence
from stagewatch.monitor.story.whatif import WhatIf, under_fixed_mask

End = Literal["finished or aborted", "preempted", "running at the end of the recordings"]


class Consumed(msgspec.Struct, frozen=True):
    """What one earlier stage did with a step's broadcast."""

    rank: int
    at: int
    """The step before which it was consumed."""
    applied: bool
    """Whether the row was written to its slot."""


class StepOfRequest(msgspec.Struct, frozen=True):
    """One step of a request, as the last stage ran it. Counts are tokens; steps are ordinals."""

    step: int
    what: Literal["prefill chunk", "last prefill chunk", "decode"]
    scheduled: int
    drafts: int
    """Draft tokens that the step verified."""
    position: str
    accepted: int
    """Drafts that the last stage accepted; -1 where what it sampled is not on record."""
    rejected: int
    sampled: int
    tokens: str
    """What was sampled: a digest in hex, or tokens."""
    excluded: bool
    """The engine's mask left the row out of the broadcast, and the fixed mask keeps it."""
    consumed: tuple[Consumed, ...]
    ranks: tuple[int, ...]
    """Ranks that recorded it."""
    differs_in: tuple[str, ...]
    """Fields in which ranks differ."""


class Life(msgspec.Struct, frozen=True):
    """A request's time in one slot of the last stage. A preempted request has several."""

    slot: int
    generation: int
    admitted_after: int
    """Step after which it was given its slot; -1 where that is not on record."""
    prompt_len: int
    cap: int
    ended_after: int
    """Step after which the slot was given back; -1 where that is not on record."""
    end: End
    steps: tuple[StepOfRequest, ...]
    tokens: int
    """Tokens sampled, as far as they are on record."""
    divergence: Divergence | None
    fixed_mask: WhatIf


class RequestStory(msgspec.Struct, frozen=True):
    """All that is on record of one request on one replica of an engine."""

    instance: str
    dp: int
    request: str
    key: str
    """The request's key, 16 hex digits."""
    ranks: tuple[int, ...]
    lives: tuple[Life, ...]
    incidents: tuple[Report, ...]
    lost_records: int
    """Records that ranks lost; where there are any, steps may be missing."""
    rows_left_out: int
    """Rows beyond the most that a story holds."""


def request_story(picked: Picked, name: str, key: int, incidents: Sequence[Report]) -> RequestStory:
    """The story of the request that was picked."""
    ranks = picked.sizes.pp * picked.sizes.tp
    return RequestStory(
        picked.instance,
        picked.dp,
        name,
        f"{key:016x}",
        tuple(sorted(picked.ranks)),
        tuple(_lives(picked, ranks)),
        tuple(
            i for i in incidents if i.request == name and (i.instance, i.dp) == (picked.instance, picked.dp)
        ),
        picked.lost,
        picked.beyond,
    )


def _lives(picked: Picked, ranks: int) -> Iterable[Life]:
    """Lives in order. Each rank has slots of its own, so a step belongs to the life the last stage ran it in."""
    authority = picked.authority
    if not any(row.rank == authority for row in picked.fed):
        authority = max((row.rank for row in picked.fed), default=authority)
    all_steps = by_step(picked.fed)
    of_life: dict[tuple[int, int], dict[int, dict[int, Fed]]] = {}
    for step, rows in all_steps.items():
        row = rows.get(authority)
        if row is not None:
            of_life.setdefault((row.slot, row.generation), {})[step] = rows
    bound = {(b.slot, b.generation): b for b in picked.bound if b.rank == authority}
    freed = {(f.slot, f.generation): f for f in picked.freed if f.rank == authority}
    keys = sorted({*of_life, *bound}, key=lambda life: _began(life, bound, of_life))
    for place, life in enumerate(keys):
        steps = of_life.get(life, {})
        yield _life(
            picked, life, steps, bound.get(life), freed.get(life), place + 1 < len(keys), authority, ranks
        )


def _began(
    life: tuple[int, int],
    bound: dict[tuple[int, int], Bound],
    of_life: dict[tuple[int, int], dict[int, dict[int, Fed]]],
) -> tuple[int, int]:
    steps = of_life.get(life)
    first = next(iter(steps)) if steps else 1 << 62
    return (bound[life].step if life in bound else first - 1, first)


def _life(
    picked: Picked,
    life: tuple[int, int],
    steps: dict[int, dict[int, Fed]],
    bound: Bound | None,
    freed: Freed | None,
    is_followed: bool,
    authority: int,
    ranks: int,
) -> Life:
    sent = {s.step: s for s in picked.sent if s.kind == "sent" and s.step in steps and s.rank == authority}
    left_out = {m.step for m in picked.masked if m.step in steps and m.fixed and not m.engine}
    consumed: dict[int, list[Sent]] = {}
    for each in picked.sent:
        if each.kind == "consumed" and each.step in steps:
            consumed.setdefault(each.step, []).append(each)
    told = tuple(
        _step(rows, authority, sent.get(step), step in left_out, consumed.get(step, []))
        for step, rows in steps.items()
    )
    end: End = "running at the end of the recordings"
    if freed is not None or is_followed:
        end = "preempted" if is_followed else "finished or aborted"
    masked = [m for m in picked.masked if m.step in steps]
    return Life(
        *life,
        bound.step if bound else -1,
        bound.prompt_len if bound else next(iter(steps.values()))[authority].prefill_len,
        bound.cap if bound else next(iter(steps.values()))[authority].cap,
        freed.step if freed else -1,
        end,
        told,
        sum(max(each.sampled, 0) for each in told),
        divergence(steps, ranks),
        under_fixed_mask(steps, masked, [*sent.values()], authority, picked.sizes.tp),
    )


def _step(
    rows: dict[int, Fed], authority: int, sent: Sent | None, left_out: bool, consumed: list[Sent]
) -> StepOfRequest:
    row = rows[authority]
    drafts = 0 if row.prefilling else row.draft_count
    is_last = row.prefilling and int(row.mirror) + row.scheduled >= row.prefill_len
    return StepOfRequest(
        row.step,
        "last prefill chunk" if is_last else "prefill chunk" if row.prefilling else "decode",
        row.scheduled,
        drafts,
        row.position,
        -1 if sent is None else min(max(sent.num_sampled - 1, 0), drafts),
        -1 if sent is None else sent.num_rejected,
        -1 if sent is None else sent.num_sampled,
        sent.tokens if sent is not None and sent.num_sampled > 0 else "",
        left_out,
        tuple(Consumed(each.rank, each.at, each.applied) for each in sorted(consumed, key=lambda c: c.rank)),
        tuple(sorted(rows)),
        differing(rows),
    )
