"""What would have happened under the fixed mask: derived from what was sent, never guessed.

The faulty mask leaves a row out of a broadcast that the fixed mask keeps. What the last stage sampled and proposed for
it is on record, and what an earlier stage makes of a broadcast is fixed: it takes over the last token and the draft
block, and counts ``computed + scheduled - rejected``. So what it would have held at the request's next step follows,
and can be compared with what the last stage fed there.
"""

from collections.abc import Mapping, Sequence
from typing import Final, Literal

import msgspec

from stagewatch.monitor.story.records import Fed, Masked, Sent
from stagewatch.monitor.story.sides import differing

AGREED: Final = "the ranks would have agreed"
STILL_APART: Final = "the ranks would still have differed"
HARMLESS: Final = "nothing: no later step of the request used what was left out"
UNKNOWN: Final = "cannot be told"
NO_CHANGE: Final = "nothing: the engine's mask left out no row of this request that the fixed mask keeps"

Answer = Literal[
    "the ranks would have agreed",
    "the ranks would still have differed",
    "nothing: no later step of the request used what was left out",
    "cannot be told",
    "nothing: the engine's mask left out no row of this request that the fixed mask keeps",
]


class WouldHold(msgspec.Struct, frozen=True):
    """One field at the request's next step: as an earlier stage held it, as it would have, as the last stage did."""

    field: str
    rank: int
    held: str
    would_hold: str
    last_stage: str


class WhatIf(msgspec.Struct, frozen=True):
    """The answer."""

    answer: Answer
    why: str
    """What `answer` rests on, or what is missing."""
    excluded_steps: tuple[int, ...]
    """Steps at which the engine's mask left the row out and the fixed mask keeps it."""
    next_step: int
    """The step whose values are compared; 0 where there is none."""
    values: tuple[WouldHold, ...]


def under_fixed_mask(
    steps: Mapping[int, Mapping[int, Fed]],
    masked: Sequence[Masked],
    sent: Sequence[Sent],
    authority: int,
    tp: int = 1,
) -> WhatIf:
    """What the fixed mask changes for one life of a request, whose steps are in order.

    ``authority`` is the last stage's last rank, ``tp`` how many ranks a stage has.
    """
    excluded = tuple(sorted({m.step for m in masked if m.fixed and not m.engine and m.step in steps}))
    if not excluded:
        if not masked:
            return WhatIf(UNKNOWN, "no mask of this request is on record", (), 0, ())
        return WhatIf(NO_CHANGE, "the two masks are equal at every step on record", (), 0, ())
    apart = next((step for step, rows in steps.items() if step > excluded[0] and differing(rows)), None)
    if apart is None:
        later = [step for step in steps if step > excluded[-1]]
        why = "the request ran again, and every rank agreed" if later else "the request did not run again"
        return WhatIf(HARMLESS, why, excluded, later[0] if later else 0, ())
    left_out = max(step for step in excluded if step < apart)
    return _compared(steps, sent, (authority, authority - tp + 1), excluded, left_out, apart)


def _compared(
    steps: Mapping[int, Mapping[int, Fed]],
    sent: Sequence[Sent],
    last_ranks: tuple[int, int],
    excluded: tuple[int, ...],
    left_out: int,
    apart: int,
) -> WhatIf:
    authority, last_stage = last_ranks
    broadcast = next((s for s in sent if s.kind == "sent" and s.step == left_out), None)
    reference, before = steps[apart].get(authority), steps[left_out]
    between = [step for step in steps if left_out < step < apart]
    missing = (
        "the last stage's row of the next step is not on record"
        if reference is None
        else f"what step {left_out} sampled is not on record: the engine broadcast nothing at all"
        if broadcast is None or broadcast.num_sampled < 1
        else f"steps between {left_out} and {apart} came before the difference"
        if between
        else ""
    )
    if missing or reference is None or broadcast is None:
        return WhatIf(UNKNOWN, missing, excluded, apart, ())
    values: list[WouldHold] = []
    # Digests are of a whole block: where the step uses a part of what was sent, they cannot be compared.
    drafts_compared = reference.draft_count == broadcast.drafts
    for rank, row in sorted(steps[apart].items()):
        earlier = before.get(rank)
        if rank >= last_stage or earlier is None:
            continue
        computed = int(earlier.computed) + earlier.scheduled - broadcast.num_rejected
        values.append(WouldHold("num_computed", rank, row.computed, str(computed), reference.computed))
        values.append(
            WouldHold("last_sampled_tokens", rank, row.last_sampled, broadcast.last, reference.last_sampled)
        )
        if drafts_compared and broadcast.draft_tokens:
            would = broadcast.draft_tokens
            values.append(WouldHold("draft_tokens", rank, row.draft_tokens, would, reference.draft_tokens))
    agreed = all(value.would_hold == value.last_stage for value in values)
    why = (
        f"step {left_out} sampled {broadcast.num_sampled} tokens and rejected {broadcast.num_rejected}; with that "
        f"broadcast, every earlier stage would hold at step {apart} what {'follows' if agreed else 'is shown'} below"
    )
    if not drafts_compared and broadcast.drafts:
        why += f" (step {apart} uses {reference.draft_count} of the {broadcast.drafts} drafts sent: not compared)"
    return WhatIf(AGREED if agreed else STILL_APART, why, excluded, apart, tuple(values))
