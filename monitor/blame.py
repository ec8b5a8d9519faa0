"""Who is wrong, when ranks differ. Blames only on evidence; an empty answer means undecided.

In this order:

1. Where the last stage's broadcast of the row's previous step is known, it says what every rank must hold
   now. Whoever holds something else is wrong, the last stage included.
2. Sampled tokens and draft blocks come from the last stage. If its TP ranks agree, it is the authority.
3. Among more than two ranks a strict majority blames the minority.
4. Otherwise the disagreement is named and nobody is blamed.
"""

from collections import Counter
from collections.abc import Sequence

from stagewatch.monitor.windows import Group


def blame(
    group: Group, indices: Sequence[int], values: Sequence[int], *, expected: int | None, sampled: bool
) -> tuple[int, ...]:
    """Rank numbers found wrong. ``values[i]`` is what rank index ``indices[i]`` holds.

    ``expected`` is the value that follows from the last stage's broadcast, if known. ``sampled`` is true for
    values that the last stage produces: tokens and drafts.
    """
    right = _right_value(group, indices, values, expected, sampled)
    if right is None:
        return ()
    return tuple(group.number(i) for i, value in zip(indices, values, strict=True) if value != right)


def _right_value(
    group: Group, indices: Sequence[int], values: Sequence[int], expected: int | None, sampled: bool
) -> int | None:
    if expected is not None and expected in values:
        return expected
    if sampled:
        authority = [v for i, v in zip(indices, values, strict=True) if i in group.last_stage]
        if len(set(authority)) == 1:
            return authority[0]
        return _majority(authority)
    return _majority(values)


def _majority(values: Sequence[int]) -> int | None:
    if len(values) <= 2:
        return None
    value, count = Counter(values).most_common(1)[0]
    return value if count * 2 > len(values) else None
