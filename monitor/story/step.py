"""One step: what every rank fed for every row, what was sent of it, and which calls were entered."""

from collections.abc import Callable

import msgspec

from stagewatch.monitor.incidents import Report
from stagewatch.monitor.story.picker import Picked
from stagewatch.monitor.story.records import Called, Fed, Masked, Sent
from stagewatch.monitor.story.sides import differing


class RowOfStep(msgspec.Struct, frozen=True):
    """One request in the step's batch."""

    request: str
    fed: tuple[Fed, ...]
    """Rank by rank."""
    masked: tuple[Masked, ...]
    sent: tuple[Sent, ...]
    """The step's broadcast as sent, received and consumed."""
    missing: tuple[int, ...]
    """Ranks that recorded the step without this request, or not at all."""
    differs_in: tuple[str, ...]


class StepStory(msgspec.Struct, frozen=True):
    """All that is on record of one step of one replica of an engine."""

    instance: str
    dp: int
    step: int
    ranks: tuple[int, ...]
    """Ranks that recorded it."""
    rows: tuple[RowOfStep, ...]
    calls: tuple[Called, ...]
    incidents: tuple[Report, ...]
    """Those whose first bad step this is, or whose chain names it."""


def step_story(picked: Picked, step: int, name: Callable[[int], str], incidents: list[Report]) -> StepStory:
    """The story of a step that was picked."""
    count = picked.sizes.pp * picked.sizes.tp
    everybody = range(picked.dp * count, (picked.dp + 1) * count)
    fed = [row for row in picked.fed if row.step == step]
    rows = []
    # In the order of the last stage's batch; the picker keeps each rank's rows in theirs.
    for request in dict.fromkeys(row.request for row in sorted(fed, key=lambda row: -row.rank)):
        of_request = sorted((row for row in fed if row.request == request), key=lambda row: row.rank)
        rows.append(
            RowOfStep(
                name(request),
                tuple(of_request),
                tuple(m for m in picked.masked if m.step == step and m.request == request),
                tuple(s for s in picked.sent if s.step == step and s.request == request),
                tuple(sorted(set(everybody) - {row.rank for row in of_request})),
                differing({row.rank: row for row in of_request}),
            )
        )
    mine = [i for i in incidents if (i.instance, i.dp) == (picked.instance, picked.dp)]
    return StepStory(
        picked.instance,
        picked.dp,
        step,
        tuple(sorted({row.rank for row in fed})),
        tuple(rows),
        # Recorded before the call, under the step that runs: its inputs come first.
        tuple(call for call in picked.called if call.step == step),
        tuple(i for i in mine if i.first_bad_step == step or step in {link.step for link in i.chain}),
    )
