"""What the lab's tests share: how records of ranks are lined up and compared."""

import numpy as np
from msgspec.structs import fields

from stagewatch.agents.identity import Rank
from stagewatch.agents.record import Inputs, Kind, Record

AGREED = tuple(field.name for field in fields(Inputs) if field.name not in ("slot", "generation"))
"""Fields in which all ranks of a sound pipeline agree; slots and their generations are each rank's own affair."""


def inputs_by_step(records: dict[Rank, list[Record]]) -> dict[tuple[int, int], dict[Rank, Inputs]]:
    """Inputs of every rank, by (replica, step)."""
    found: dict[tuple[int, int], dict[Rank, Inputs]] = {}
    for rank, own in records.items():
        for record in own:
            if record.kind is Kind.INPUTS:
                assert isinstance(record.body, Inputs)
                found.setdefault((rank.dp, record.step), {})[rank] = record.body
    return found


def disagreements(records: dict[Rank, list[Record]]) -> list[tuple[int, Rank, str]]:
    """(step, rank, field) wherever a rank's inputs differ from the last stage's, in order."""
    found = []
    for (_, step), ranks in sorted(inputs_by_step(records).items()):
        authority = ranks[max(ranks)]
        for rank, body in sorted(ranks.items()):
            for name in AGREED:
                if not np.array_equal(getattr(body, name), getattr(authority, name)):
                    found.append((step, rank, name))
    return found
