"""Plain doubles of what the watch does cleverly: each looks at everything it remembers, row by row or bind by bind.

`plainly` puts them in the place of the clever parts, so that a test can ask whether both say the same.
"""

import numpy as np
import pytest

from stagewatch.agents.evidence import I64
from stagewatch.agents.record import U64
from stagewatch.monitor import alignment, history
from stagewatch.monitor.binds import Binds
from stagewatch.monitor.checks import slot_generation
from stagewatch.monitor.links import LINK_STEPS, SENT_COLUMNS, UNKNOWN, Links, keys_of
from stagewatch.monitor.windows import InputsWindow, PayloadWindow, Window


class PlainRows:
    """`stagewatch.monitor.links.Rows`, one Python object per row."""

    def __init__(self) -> None:
        self._rows: list[dict[str, int]] = []
        self._fresh: list[dict[str, int]] = []

    def add(self, window: InputsWindow) -> None:
        block, self._fresh = window.blocks[-1], []
        keys, steps = keys_of(block).tolist(), window.row_steps.tolist()
        ticks = np.repeat(block.tick, block.rows).tolist()
        for row, (key, step, tick) in enumerate(zip(keys, steps, ticks, strict=True)):
            computed = {int(each.computed[row]) for each in window.blocks}
            self._fresh.append(
                {
                    "row": row,
                    "key": key,
                    "step": step,
                    "tick": tick,
                    "computed": computed.pop() if len(computed) == 1 else UNKNOWN,
                    "scheduled": int(block.scheduled[row]),
                    "samples": int(block.mirror[row]) + int(block.scheduled[row])
                    >= int(block.prefill_len[row]),
                    "sampled": UNKNOWN,
                    "rejected": UNKNOWN,
                    "digest": 0,
                    "prior": 0,
                }
            )
        self._rows += self._fresh

    def note_sent(self, window: PayloadWindow) -> None:
        steps, recorded = window.row_steps.tolist(), {row["step"] for row in self._rows}
        mine = [row for row in self._rows if row["step"] in set(steps)]
        theirs = [place for place, step in enumerate(steps) if step in recorded]
        if [row["step"] for row in mine] != [steps[place] for place in theirs]:
            return
        block = window.blocks[0]
        for row, place in zip(mine, theirs, strict=True):
            agree = all(len(set(window.values(column, place).tolist())) == 1 for column in SENT_COLUMNS)
            row["sampled"] = int(block.num_sampled[place]) if agree else UNKNOWN
            row["rejected"] = int(block.num_rejected[place]) if agree else UNKNOWN
            row["digest"] = int(block.tokens_digest[place])

    def forget(self, upto: int) -> None:
        self._rows = [row for row in self._rows if row["step"] > upto]

    def link(self) -> Links:
        place = {step: at for at, step in enumerate(sorted({row["step"] for row in self._rows}))}
        last: dict[int, dict[str, int]] = {}
        linked: list[tuple[dict[str, int], dict[str, int]]] = []
        fresh = {id(row) for row in self._fresh}
        for row in self._rows:
            before = last.get(row["key"])
            if before is not None and id(row) in fresh and row["step"] - before["step"] <= LINK_STEPS:
                row["prior"] = before["digest"]
                linked.append((row, before))
            last[row["key"]] = row
        linked.sort(key=lambda pair: pair[0]["key"])

        def column(name: str) -> I64:
            return np.array([before[name] for _, before in linked], np.int64)

        return Links(
            row=np.array([row["row"] for row, _ in linked], np.int64),
            step=column("step"),
            tick=column("tick"),
            computed=column("computed"),
            scheduled=column("scheduled"),
            samples=column("samples").astype(np.bool_),
            sampled=column("sampled"),
            rejected=column("rejected"),
            repeats=np.array(
                [before["digest"] == before["prior"] and before["sampled"] > 0 for _, before in linked],
                np.bool_,
            ),
            complete=np.array(
                [
                    place[row["step"]] - place[before["step"]] == row["step"] - before["step"]
                    for row, before in linked
                ],
                np.bool_,
            ),
        )


class PlainOwners:
    """The owners of a rank's slots, one bind after the other."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[int, int]] = {}

    def at(self, slot: int) -> tuple[int, int]:
        return self._of.get(slot, (0, 0))

    def bind(self, binds: Binds) -> list[int]:
        found = []
        for place in range(len(binds)):
            slot, generation = int(binds.slot[place]), int(binds.generation[place])
            request = int(binds.request[place])
            owner, owned = self.at(slot)
            if owner and owned == generation and owner != request:
                found.append(place)
            self._of[slot] = (request, generation)
        return found


def _compared(self: Window, column: str) -> U64 | None:  # type: ignore[type-arg]  # of any block
    found = None
    for block in self.blocks[1:]:
        unequal = getattr(self.blocks[0], column) != getattr(block, column)
        if unequal.any():
            found = unequal if found is None else found | unequal
    return found


def plainly(patch: pytest.MonkeyPatch) -> None:
    """From now on watches are made of the plain doubles."""
    patch.setattr(history, "Rows", PlainRows)
    patch.setattr(slot_generation, "_Owners", PlainOwners)
    patch.setattr(alignment, "among", np.isin)
    patch.setattr(Window, "differing", _compared)
