"""Where the parts of a record lie. `stagewatch.agents.record` writes and reads by it; nothing else needs it.

A record is a fixed head, then the columns of its kind in the order of their fields, then text; the kinds
and their columns are declared in `stagewatch.agents.bodies`. Little-endian, eight-byte aligned. Eight-byte
columns come first, one-byte columns last, so that every column is aligned by construction.
"""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from operator import attrgetter
from typing import Any, Final

import numpy as np
from msgspec.structs import fields

from stagewatch.agents.bodies import BODIES, Body, Extent, Inputs, Mask, Payload

MAGIC: Final = 0x5357
SIZE_MAX: Final = 1 << 26
"""Longest record in bytes, both written and believed."""
COLUMNS_MAX: Final = 1 << 16
"""Most columns of a table, both written and believed: without rows they cost a forger nothing."""
PLANS_MAX: Final = 512
"""Plans kept per kind. An engine sees few shapes of batches; a forger must not fill the memory with others."""

# magic, kind, scalar count, size, crc, rows, width, drafts, ragged, text bytes, seq, step, t_ns, scalars
HEAD: Final = struct.Struct("<HBBIIIIIIIQQQ5q")
# The head in its parts: the checksum lies between two and covers everything else, the kind included.
LEAD: Final = struct.Struct("<HBBI")
CRC: Final = struct.Struct("<I")
REST: Final = struct.Struct("<IIIIIQQQ5q")
REST_AT: Final = LEAD.size + CRC.size
SCALARS_MAX: Final = 5

Counts = tuple[int, int, int, int]
"""(rows, width, drafts, ragged): what the extents of a record's columns follow from."""

NOTHING: Final[Counts] = (0, 0, 0, 0)

ITEM_SIZES: Final = {"u8": 8, "i4": 4, "u1": 1}
DTYPES: Final[dict[str, np.dtype[Any]]] = {
    "u8": np.dtype("<u8"),
    "i4": np.dtype("<i4"),
    "u1": np.dtype("u1"),
}


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """The columns of one item size, which lie next to each other. Places count items from the record's start."""

    item: str
    item_size: int
    places: tuple[slice, ...]
    """Where each column lies."""


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Where the columns of one body type lie for given counts, worked out once and kept."""

    sizes: list[int]
    """Elements of each column."""
    groups: tuple[Group, ...]
    tables: tuple[tuple[int, tuple[int, int]], ...]
    """Index and shape of each two-dimensional column."""
    text_at: int
    """Bytes from the start of the record to its text."""
    possible: bool
    """Whether a body of the type can have these counts."""


class Schema:
    """What the class variables of a body type say, in the form that writing and reading want."""

    def __init__(self, body_type: type[Body]) -> None:
        self.body_type = body_type
        self.scalar_count = len(body_type.SCALARS)
        self.scalars = _getter(body_type.SCALARS)
        """Fetches a body's scalars."""
        self.padding = (0,) * (SCALARS_MAX - self.scalar_count)
        """What fills the head's room for scalars."""
        self.has_key = "request" in body_type.SCALARS
        """Whether the last scalar is a request's key, which is unsigned where the head's scalars are signed."""
        self.text: str | None = body_type.TEXT
        names = [name for name, _, _ in body_type.COLUMNS]
        self.columns = _getter(names)
        """Fetches a body's columns."""
        self.counts = _COUNTS.get(body_type)
        """Finds the counts of a body; None where it has no columns."""
        self.dtypes = [DTYPES[item] for _, item, _ in body_type.COLUMNS]
        self.items: list[str] = [item for _, item, _ in body_type.COLUMNS]
        self.extents: list[Extent] = [extent for _, _, extent in body_type.COLUMNS]
        self.scheduled_at = names.index("scheduled") if "scheduled" in names else None
        if self.items != sorted(self.items, key=ITEM_SIZES.__getitem__, reverse=True):
            raise TypeError(f"{body_type.__name__}: columns are not in order of item size, widest first")
        declared = [*body_type.SCALARS, *names, *((self.text,) if self.text else ())]
        if [field.name for field in fields(body_type)] != declared:
            raise TypeError(f"{body_type.__name__}: fields do not follow SCALARS, COLUMNS, TEXT")
        self.plans: dict[Counts, Plan] = {}
        """Plans worked out so far; `plan` works out the others."""

    def plan(self, counts: Counts) -> Plan:
        """Where the columns of a body with these counts lie."""
        found = self.plans.get(counts)
        if found is None:
            if len(self.plans) >= PLANS_MAX:
                self.plans.clear()
            found = self.plans[counts] = self._worked_out(counts)
        return found

    def _worked_out(self, counts: Counts) -> Plan:
        rows, width, drafts, ragged = counts
        shapes = {
            Extent.ROW: (rows, 1),
            Extent.WIDTH: (rows, width),
            Extent.DRAFT: (rows, drafts),
            Extent.RAGGED: (ragged, 1),
        }
        sizes = [prod(shapes[extent]) for extent in self.extents]
        tables = {Extent.WIDTH, Extent.DRAFT}
        groups: list[Group] = []
        at, first = HEAD.size, 0
        for item, item_size in ITEM_SIZES.items():
            end = first + self.items.count(item)
            if first == end:
                continue
            edges = [*accumulate(sizes[first:end], initial=at // item_size)]
            places = tuple(slice(a, b) for a, b in pairwise(edges))
            groups.append(Group(item, item_size, places))
            at += item_size * (edges[-1] - edges[0])
            first = end
        # Any extent but the ragged one has rows in it.
        extents = self.extents
        used = (bool(extents), *(e in extents for e in (Extent.WIDTH, Extent.DRAFT, Extent.RAGGED)))
        return Plan(
            sizes=sizes,
            groups=tuple(groups),
            tables=tuple((i, shapes[e]) for i, e in enumerate(extents) if e in tables),
            text_at=at,
            possible=max(width, drafts) <= COLUMNS_MAX
            and all(needed or not count for needed, count in zip(used, counts, strict=True)),
        )


def _getter(names: Sequence[str]) -> Callable[[Body], tuple[Any, ...]]:
    """One call that fetches the named attributes as a tuple."""
    if len(names) > 1:
        return attrgetter(*names)
    if names:
        single = attrgetter(names[0])
        return lambda body: (single(body),)
    return lambda body: ()


def _counts_of_inputs(body: Inputs) -> Counts:
    return len(body.request), 0, body.draft_tokens.shape[1], len(body.input_ids)


def _counts_of_payload(body: Payload) -> Counts:
    return len(body.request), body.tokens.shape[1], body.draft_tokens.shape[1], 0


def _counts_of_mask(body: Mask) -> Counts:
    return len(body.engine), 0, 0, 0


_COUNTS: Final[dict[type[Body], Callable[[Any], Counts]]] = {
    Inputs: _counts_of_inputs,
    Payload: _counts_of_payload,
    Mask: _counts_of_mask,
}

SCHEMAS: Final[dict[type[Body], Schema]] = {
    body_type: Schema(body_type) for body_type in set(BODIES.values())
}
