"""The confusion matrix of the docs lists every fault, and blames nobody wrongly."""

from pathlib import Path

from simulated import REGISTRY

PAGE = Path(__file__).parents[2] / "docs" / "confusion-matrix.md"


def rows() -> list[list[str]]:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def test_every_fault_of_the_registry_has_its_row() -> None:
    """Out of date: `python tests/checks/matrix.py > docs/confusion-matrix.md`."""
    assert [row[0] for row in rows()] == [*REGISTRY]


def test_nothing_is_missed_blamed_wrongly_or_made_up() -> None:
    assert {row[0]: (row[3], row[8], row[9]) for row in rows()} == {
        name: ("100 %" if fault.INVARIANTS else "none to find", "0", "0") for name, fault in REGISTRY.items()
    }
