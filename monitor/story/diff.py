"""Two ranks of a replica: every row compared as the checks compare it, and where each request parts first."""

from collections import deque
from dataclasses import dataclass, field
from typing import Final

import msgspec
import numpy as np

from stagewatch.agents.evidence import Evidence, InputsBlock, join, slice_steps
from stagewatch.agents.identity import Identity
from stagewatch.monitor.checks import registry
from stagewatch.monitor.checks.fields import shown
from stagewatch.monitor.story.picker import EngineKey, number_of
from stagewatch.monitor.windows import Group, InputsWindow, life_of

COLUMNS: Final = (
    ("num_computed", "computed"),
    ("num_computed_mirror", "mirror"),
    ("draft_tokens", "draft_digest"),
    ("last_sampled_tokens", "last_digest"),
    ("input_ids", "ids_digest"),
    ("positions", "position"),
    ("position_shape", "position_shape"),
)
REQUESTS_MAX: Final = 1000
"""Requests whose first difference is kept; more are counted."""
LAST_SEEN_MAX: Final = 100_000
"""Requests whose last equal values are remembered."""


class Pair(msgspec.Struct, frozen=True):
    """One field of a request on the two ranks."""

    field: str
    one: str
    other: str
    one_before: str
    """At the last equal step; empty where none is on record."""
    other_before: str


class FirstDifference(msgspec.Struct, frozen=True):
    """Where the two ranks part on one request."""

    request: int
    step: int
    last_equal_step: int
    """0 where none is on record."""
    pairs: tuple[Pair, ...]


class DiffStory(msgspec.Struct, frozen=True):
    """Two ranks of one replica, over all that both recorded."""

    instance: str
    dp: int
    one: int
    other: int
    steps: int
    """Steps that both recorded."""
    rows: int
    rows_different: int
    by_check: dict[str, int]
    """Rows to which each check of values objects."""
    steps_of_one_alone: int
    """Steps that only one of them recorded."""
    batches_different: int
    """Steps at which they recorded different batches, whose rows cannot be compared."""
    first: tuple[FirstDifference, ...]
    """Of each request, in the order of steps."""
    requests_left_out: int
    """Further requests that differ, beyond the most that are kept."""


@dataclass(slots=True)
class _Engine:
    group: Group
    waiting: tuple[deque[InputsBlock], deque[InputsBlock]] = field(default_factory=lambda: (deque(), deque()))
    steps: int = 0
    rows: int = 0
    rows_different: int = 0
    alone: int = 0
    batches: int = 0
    by_check: dict[str, int] = field(default_factory=dict)
    first: dict[tuple[int, int], FirstDifference] = field(default_factory=dict)
    left_out: set[int] = field(default_factory=set)
    equal: dict[tuple[int, int], tuple[int, dict[str, tuple[str, str]]]] = field(default_factory=dict)


class Differ:
    """A tap that compares two ranks, by number. Memory holds what one of them recorded and the other has not yet."""

    def __init__(
        self, one: int, other: int, engine: str = "", first_step: int = 0, last_step: int = 1 << 62
    ) -> None:
        self._numbers: Final = (min(one, other), max(one, other))
        self._engine = engine
        self._steps = first_step, last_step
        self._engines: dict[EngineKey, _Engine] = {}
        self._checks = [check() for check in registry.ROW_CHECKS]
        self.seen: set[int] = set()
        """Numbers of all ranks that were heard."""

    def see(self, identity: Identity, evidence: Evidence) -> None:
        """Take one batch of a rank."""
        number = number_of(identity)
        if self._engine not in ("", identity.instance):
            return
        self.seen.add(number)
        if number not in self._numbers or evidence.inputs is None:
            return
        key = identity.instance, identity.rank.dp
        engine = self._engines.get(key)
        if engine is None:
            group = Group(identity.deployment, identity.instance, identity.rank.dp, identity.sizes)
            engine = self._engines[key] = _Engine(group)
        block = evidence.inputs
        a, b = np.searchsorted(block.step, [self._steps[0], self._steps[1] + 1]).tolist()
        if a < b:
            engine.waiting[self._numbers.index(number)].append(slice_steps(block, a, b))
        self._compare(engine)

    def stories(self) -> list[DiffStory]:
        """What was found, engine by engine."""
        one, other = self._numbers
        found = []
        for (instance, dp), engine in self._engines.items():
            engine.alone += sum(len(block.step) for side in engine.waiting for block in side)
            found.append(
                DiffStory(
                    instance,
                    dp,
                    one,
                    other,
                    engine.steps,
                    engine.rows,
                    engine.rows_different,
                    engine.by_check,
                    engine.alone,
                    engine.batches,
                    tuple(engine.first.values()),
                    len(engine.left_out),
                )
            )
        return found

    def _compare(self, engine: _Engine) -> None:
        mine, theirs = engine.waiting
        while mine and theirs:
            one, other = join([*mine]), join([*theirs])
            newest = min(int(one.step[-1]), int(other.step[-1]))
            parts = []
            for side, block in ((mine, one), (theirs, other)):
                end = int(np.searchsorted(block.step, newest, side="right"))
                side.clear()
                if end < len(block.step):
                    side.append(slice_steps(block, end, len(block.step)))
                parts.append(slice_steps(block, 0, end))
            self._pair(engine, *parts)

    def _pair(self, engine: _Engine, one: InputsBlock, other: InputsBlock) -> None:
        common = np.intersect1d(one.step, other.step)
        engine.alone += len(one.step) + len(other.step) - 2 * len(common)
        one, other = _kept(one, common), _kept(other, common)
        same = np.array(
            [np.array_equal(a, b) for a, b in zip(_batches(one), _batches(other), strict=True)],
            np.bool_,
        )
        engine.batches += int((~same).sum())
        if not same.any():
            return
        one, other = _kept(one, common[same]), _kept(other, common[same])
        base = engine.group.number(0)
        indices = self._numbers[0] - base, self._numbers[1] - base
        window: InputsWindow = InputsWindow(engine.group, indices, (one, other))
        engine.steps += len(window.steps)
        engine.rows += len(one.request)
        bad = np.zeros(len(one.request), np.bool_)
        for check in self._checks:
            rows = check.differs(window)
            if rows is not None and rows.any():
                bad |= rows
                engine.by_check[check.NAME] = engine.by_check.get(check.NAME, 0) + int(rows.sum())
        engine.rows_different += int(bad.sum())
        self._remember(engine, window, bad)

    def _remember(self, engine: _Engine, window: InputsWindow, bad: np.ndarray) -> None:
        """Note each request's first difference, and what it held at its last equal step before."""
        block = window.blocks[1]
        if bad.any():
            first: dict[tuple[int, int], int] = {}
            for row in np.flatnonzero(bad).tolist():
                first.setdefault((int(block.request[row]), life_of(block, row)), row)
            for key, row in first.items():
                if key not in engine.first:
                    self._note(engine, window, bad, key, row)
        # The newest row of each request: what the next window will call the last equal step.
        _, newest = np.unique(block.request[::-1], return_index=True)
        for row in (len(block.request) - 1 - newest).tolist():
            key = int(block.request[row]), life_of(block, row)
            if not bad[row] and key not in engine.first:
                engine.equal.pop(key, None)
                engine.equal[key] = int(window.row_steps[row]), _values(window, row)
        while len(engine.equal) > LAST_SEEN_MAX:
            engine.equal.pop(next(iter(engine.equal)))

    def _note(
        self, engine: _Engine, window: InputsWindow, bad: np.ndarray, key: tuple[int, int], row: int
    ) -> None:
        if len(engine.first) >= REQUESTS_MAX:
            engine.left_out.add(key[0])
            return
        block = window.blocks[1]
        before = np.flatnonzero((block.request[:row] == np.uint64(key[0])) & ~bad[:row])
        step, held = engine.equal.get(key, (0, {}))
        if len(before) and life_of(block, int(before[-1])) == key[1]:
            step, held = int(window.row_steps[before[-1]]), _values(window, int(before[-1]))
        now = _values(window, row)
        pairs = tuple(
            Pair(name, *now[name], *held.get(name, ("", ""))) for name in now if now[name][0] != now[name][1]
        )
        engine.first[key] = FirstDifference(key[0], int(window.row_steps[row]), step, pairs)


def _values(window: InputsWindow, row: int) -> dict[str, tuple[str, str]]:
    one, other = window.blocks
    return {name: (shown(one, row, column), shown(other, row, column)) for name, column in COLUMNS}


def _kept(block: InputsBlock, steps: np.ndarray) -> InputsBlock:
    if np.array_equal(block.step, steps):
        return block
    places = np.searchsorted(block.step, steps).tolist()
    parts = [slice_steps(block, place, place + 1) for place in places]
    return join(parts) if parts else slice_steps(block, 0, 0)


def _batches(block: InputsBlock) -> list[np.ndarray]:
    """Each step's requests, in the order of its batch."""
    return np.split(block.request, np.cumsum(block.rows, dtype=np.int64)[:-1]) if len(block.step) else []
