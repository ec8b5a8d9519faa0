"""Who is wrong, when ranks differ. Blames only on evidence; an empty answer means undecided.

In this order:

1. Where the last stage's broadcast of the row's previous step is known, it says what every rank must hold
   now. Whoever holds something else is wrong, the last stage included. If nobody holds it, nobody can tell.
2. Sampled tokens and draft blocks come from the last stage. If its TP ranks agree, it is the authority; but not
   before a request's first sampling step, when no rank has them from there.
3. Among more than two ranks a strict majority blames the minority; but where what is compared may have come with
   a broadcast, earlier stages do not outvote the last one: they all took it from there, and may err alike.
4. Otherwise the disagreement is named and nobody is blamed.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import TypeVar

from stagewatch.monitor.windows import Group

T = TypeVar("T", bound=Hashable)


def blame(
    group: Group,
    indices: Sequence[int],
    values: Sequence[int],
    *,
    expected: int | None,
    sampled: bool,
    relayed: bool = False,
) -> tuple[int, ...]:
    """Rank numbers found wrong. ``values[i]`` is what rank index ``indices[i]`` holds.

    ``expected`` is the value that follows from the last stage's broadcast, if known. ``sampled`` is true for
    values that the last stage produces: tokens and drafts; ``relayed`` for others that its broadcast changes.
    """
    right = _right_value(group, indices, values, expected, sampled)
    if relayed and expected is None and right not in _authority(group, indices, values):
        return ()
    if right is None:
        return ()
    return tuple(group.number(i) for i, value in zip(indices, values, strict=True) if value != right)


def _right_value(
    group: Group, indices: Sequence[int], values: Sequence[int], expected: int | None, sampled: bool
) -> int | None:
    if expected is not None:
        return expected if expected in values else None
    if sampled:
        authority = _authority(group, indices, values)
        if len(set(authority)) == 1:
            return authority[0]
        return majority(authority)
    return majority(values)


def _authority(group: Group, indices: Sequence[int], values: Sequence[int]) -> list[int]:
    return [value for index, value in zip(indices, values, strict=True) if index in group.last_stage]


def majority(values: Sequence[T]) -> T | None:
    """The value that more than half of more than two peers hold; None if there is none."""
    if len(values) <= 2:
        return None
    value, count = Counter(values).most_common(1)[0]
    return value if count * 2 > len(values) else None


def outvoted(group: Group, indices: Sequence[int], values: Sequence[Hashable]) -> tuple[int, ...]:
    """Rank numbers that a strict majority of their peers contradicts; nobody among two."""
    common = majority(values)
    if common is None:
        return ()
    return group.numbers([i for i, value in zip(indices, values, strict=True) if value != common])
