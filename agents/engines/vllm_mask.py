"""The published mask cases, and the verdict on an engine's mask that running it on them gives.

The numbers are those of vLLM's own tests at the fix (PR 54436, release 0.30) and its refinement
(release 0.31), kept as facts. A faulty mask drops decoding rows that it predicts to finish.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from stagewatch.agents.errors import one_line
from stagewatch.agents.mask import BoolArray, fixed_mask

NO_CAP: Final = 1 << 30
"""Length cap of the rows for which none was published: far from any number in them."""


@dataclass(frozen=True, slots=True)
class Row:
    """One batch row of a published case, all in tokens."""

    num_computed: int
    prefill_len: int
    num_scheduled: int
    max_seq_len: int = NO_CAP
    prefilling: bool | None = None
    """None where not published: a row is prefilling while num_computed is below prefill_len."""

    @property
    def is_prefilling(self) -> bool:
        """As the engine has it."""
        return self.num_computed < self.prefill_len if self.prefilling is None else self.prefilling


@dataclass(frozen=True, slots=True)
class Case:
    """Rows and the mask a sound release returns for them; None: nothing is broadcast."""

    number: int
    since: str
    """Release that published it. Cases of 0.31 test the refinement and do not bind older variants."""
    rows: tuple[Row, ...]
    sound: tuple[bool, ...] | None


CASES: Final = (
    Case(1, "0.30", (Row(512, 4096, 448), Row(1000, 1004, 4)), (False, True)),
    Case(2, "0.30", (Row(0, 4096, 448), Row(512, 4096, 448)), None),
    Case(3, "0.30", (Row(14176, 12175, 8, 14175),), (True,)),
    Case(4, "0.30", (Row(10, 8, 1), Row(512, 4096, 448)), (True, False)),
    Case(5, "0.31", (Row(1000, 1004, 4, 1005, True),), None),
    Case(6, "0.31", (Row(1000, 1004, 4, 1260, True),), (True,)),
    Case(7, "0.31", (Row(14176, 12175, 8, 12176, False),), (True,)),
    Case(8, "0.31", (Row(1000, 1004, 4, 1005, True), Row(10, 8, 1, 1024, False)), (False, True)),
)


class StandInBatch:
    """What a mask function reads of an input batch, filled from a case. Arrays as the engine has them: int32, bool."""

    def __init__(self, rows: tuple[Row, ...]) -> None:
        def column(name: str) -> NDArray[np.int32]:
            return np.array([getattr(row, name) for row in rows], np.int32)

        self.num_reqs = len(rows)
        self.req_ids = [f"case-{index}" for index in range(len(rows))]
        self.idx_mapping_np = np.arange(len(rows), dtype=np.intp)
        self.num_computed_tokens_np = column("num_computed")
        self.num_scheduled_tokens = column("num_scheduled")
        self.prefill_len_np = column("prefill_len")
        self.max_seq_len_np = column("max_seq_len")
        self.is_prefilling_np = np.array([row.is_prefilling for row in rows], np.bool_)
        self.has_prefill = bool(self.is_prefilling_np.any())
        self.num_computed_prefill_tokens_np = np.minimum(self.num_computed_tokens_np, self.prefill_len_np)
        self.num_draft_tokens_per_req = None
        self.num_draft_tokens = 0


MaskFunction = Callable[[Any], BoolArray | None]


@dataclass(frozen=True, slots=True)
class CaseResult:
    """What an engine's mask answered to one case."""

    number: int
    expected: tuple[bool, ...] | None
    found: tuple[bool, ...] | None
    error: str = ""

    @property
    def passed(self) -> bool:
        """Whether the answer is the sound one for the engine's variant."""
        return not self.error and self.found == self.expected


@dataclass(frozen=True, slots=True)
class MaskVerdict:
    """The verdict on an engine's mask, with its evidence."""

    verdict: Literal["sound", "faulty", "unknown"]
    why: str
    results: tuple[CaseResult, ...]


def judge_mask(mask: MaskFunction, *, refined: bool) -> MaskVerdict:
    """Run ``mask`` on the published cases.

    ``refined`` says whether the variant leaves out final prefill chunks at the cap; where it does not,
    those rows belong in its mask. Faulty only where a row is missing that is not prefilling, or is one the
    variant must keep; any other difference is unknown, because no published fault explains it.
    """
    results = tuple(_run(mask, case, refined) for case in CASES)
    failed = [result for result in results if not result.passed]
    if not failed:
        return MaskVerdict("sound", f"right on all {len(results)} published cases", results)
    numbers = ", ".join(str(result.number) for result in failed)
    if any(result.error for result in failed):
        error = next(result.error for result in failed if result.error)
        return MaskVerdict("unknown", f"cannot be run on case {numbers}: {error}", results)
    if all(_drops_only(result) for result in failed) and any(_drops_decoding(result) for result in failed):
        return MaskVerdict("faulty", f"drops rows that go on decoding (published case {numbers})", results)
    return MaskVerdict(
        "unknown", f"differs on published case {numbers} in a way no known fault explains", results
    )


def sound_mask(batch: Any, *, refined: bool, max_seq_len: NDArray[np.integer] | None) -> BoolArray | None:
    """The mask a sound engine of the variant computes for ``batch``."""
    if not refined or max_seq_len is None:
        return fixed_mask(batch.num_computed_tokens_np, batch.num_scheduled_tokens, batch.prefill_len_np)
    return fixed_mask(
        batch.num_computed_tokens_np,
        batch.num_scheduled_tokens,
        batch.prefill_len_np,
        is_prefilling=batch.is_prefilling_np,
        max_seq_len=max_seq_len,
    )


def _run(mask: MaskFunction, case: Case, refined: bool) -> CaseResult:
    batch = StandInBatch(case.rows)
    expected = case.sound
    if not refined:
        expected = _as_tuple(sound_mask(batch, refined=False, max_seq_len=None))
    try:
        return CaseResult(case.number, expected, _as_tuple(mask(batch)))
    except Exception as error:  # noqa: BLE001  # whatever a stranger's code raises is the finding
        return CaseResult(case.number, expected, None, one_line(error))


def _as_tuple(mask: BoolArray | None) -> tuple[bool, ...] | None:
    return None if mask is None else tuple(bool(value) for value in mask)


def _pairs(result: CaseResult) -> list[tuple[Row, bool, bool]]:
    rows = CASES[result.number - 1].rows
    nothing = (False,) * len(rows)
    return list(zip(rows, result.expected or nothing, result.found or nothing, strict=True))


def _drops_only(result: CaseResult) -> bool:
    return all(expected or not found for _, expected, found in _pairs(result))


def _drops_decoding(result: CaseResult) -> bool:
    return any(expected and not found and not row.is_prefilling for row, expected, found in _pairs(result))
