"""Ranks side by side: where a request's state differs first, and what each rank held then and before."""

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from stagewatch.monitor.story.records import Fed

COMPARED: Final = (
    ("num_computed", "computed"),
    ("num_computed_mirror", "mirror"),
    ("draft_tokens", "draft_tokens"),
    ("last_sampled_tokens", "last_sampled"),
    ("input_ids", "input_ids"),
    ("positions", "position"),
    ("position_shape", "position_shape"),
)
"""(name for people, attribute of `Fed`) of what ranks must agree in."""


class Side(msgspec.Struct, frozen=True):
    """One field of a request on one rank: at the last step at which all ranks agreed, and at the first they did not."""

    field: str
    rank: int
    last_equal: str
    """Empty where no equal step is on record."""
    first_different: str


class Divergence(msgspec.Struct, frozen=True):
    """Where the ranks' views of one request part."""

    last_equal_step: int
    """0 where no equal step is on record."""
    first_different_step: int
    fields: tuple[str, ...]
    """Those that differ, of `COMPARED`."""
    sides: tuple[Side, ...]
    """Field by field, rank by rank."""


def value_of(row: Fed, attribute: str) -> str:
    """A field of a row as ranks compare it: empty where no step uses it, so that it may be anything."""
    if attribute == "last_sampled" and row.prefilling:
        return ""
    return str(getattr(row, attribute))


def differing(rows: Mapping[int, Fed]) -> tuple[str, ...]:
    """Names of the fields in which the ranks' rows of one step differ."""
    return tuple(
        name for name, attribute in COMPARED if len({value_of(row, attribute) for row in rows.values()}) > 1
    )


def by_step(fed: Iterable[Fed]) -> dict[int, dict[int, Fed]]:
    """Rows of one request by step and rank, in the order of steps."""
    found: dict[int, dict[int, Fed]] = {}
    for row in fed:
        found.setdefault(row.step, {})[row.rank] = row
    return dict(sorted(found.items()))


def divergence(steps: Mapping[int, Mapping[int, Fed]], ranks: int) -> Divergence | None:
    """Where one life of a request diverges first; None where all ranks agree.

    ``steps`` are in order; those that not all of ``ranks`` ranks recorded are incomplete and decide nothing.
    """
    last: Mapping[int, Fed] | None = None
    for step, rows in steps.items():
        if len(rows) < ranks:
            continue
        fields = differing(rows)
        if not fields:
            last = rows
            continue
        attributes = dict(COMPARED)
        return Divergence(
            0 if last is None else next(iter(last.values())).step,
            step,
            fields,
            tuple(
                Side(
                    name,
                    rank,
                    value_of(last[rank], attributes[name]) if last else "",
                    value_of(rows[rank], attributes[name]),
                )
                for name in fields
                for rank in sorted(rows)
            ),
        )
    return None
