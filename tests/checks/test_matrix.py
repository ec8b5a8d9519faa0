"""The confusion matrix of the docs lists every fault, and blames nobody wrongly."""

from pathlib import Path

import matrix
import pytest
from processes import process_plan
from simulated import REGISTRY, plan

from stagewatch.agents.lab.faults_process import PROCESS_REGISTRY
from stagewatch.agents.lab.simconfig import SimConfig

PAGE = Path(__file__).parents[2] / "docs" / "confusion-matrix.md"


def table(number: int) -> list[list[str]]:
    """The rows of one of the page's tables."""
    lines = PAGE.read_text().split("\n|---")[number + 1].splitlines()[1:]
    rows = lines[: lines.index("")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in rows]


def test_every_fault_of_the_registries_has_its_row() -> None:
    """Out of date: `python tests/checks/matrix.py > docs/confusion-matrix.md`."""
    assert [row[0] for row in table(0)] == [*REGISTRY]
    assert [row[0] for row in table(1)] == [*PROCESS_REGISTRY]


def test_nothing_is_missed_blamed_wrongly_or_made_up() -> None:
    assert {row[0]: (row[3], row[8], row[9]) for row in table(0)} == {
        name: ("100 %" if fault.INVARIANTS else "none to find", "0", "0") for name, fault in REGISTRY.items()
    }


def test_of_struck_processes_all_is_told_that_must_be_and_nobody_blamed() -> None:
    assert {row[0]: (row[2], row[3], row[6], row[7]) for row in table(1)} == {
        name: (
            ", ".join(sorted(fault.OUTCOME.checks)) or "none",
            "100 %" if fault.OUTCOME.checks else "none to find",
            "0",
            "0",
        )
        for name, fault in PROCESS_REGISTRY.items()
    }


def test_rows_without_a_verdict_have_the_reasons_of_their_fault() -> None:
    for name, _, _, _, _, reasons, *_ in table(1):
        told = {reason.split()[0] for reason in reasons.split(" of ")[0].split(", ")} - {"none"}
        assert bool(told) == bool(PROCESS_REGISTRY[name].OUTCOME.reasons), name
        assert told <= {*PROCESS_REGISTRY[name].OUTCOME.reasons}, name


@pytest.mark.parametrize(
    "config", [plan("payload-altered", from_step=20, times=1, requests=20), process_plan("rank-killed")]
)
def test_a_run_is_repeated_from_its_line(config: SimConfig) -> None:
    """THEN it says the same of what was expected and of what was found."""
    text = matrix.again(config).split("'")[1]
    expected, found = "".join(matrix.one_run(SimConfig.decode(text, benign=True))).split("found")
    assert not expected.startswith("expected: 0")
    assert found.removeprefix(": ") == expected.removeprefix("expected: ")
