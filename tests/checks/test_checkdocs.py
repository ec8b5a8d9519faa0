"""The checks' page follows the registry, and every invariant of the field is accounted for."""

from pathlib import Path

from stagewatch.agents.lab.faults import REGISTRY
from stagewatch.monitor import checkdocs
from stagewatch.monitor.checks import registry

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_as_the_registry_has_it() -> None:
    """Out of date: `python -m stagewatch.monitor.checkdocs > docs/checks.md`."""
    assert (DOCS / "checks.md").read_text() == checkdocs.page()


def test_every_invariant_has_a_check_or_a_reason() -> None:
    assert [*checkdocs.INVARIANTS] == [f"I{number}" for number in range(1, 18)]
    unheld = {name for name in checkdocs.INVARIANTS if not checkdocs.holding(name)}
    assert unheld == {"I12", "I14"}
    assert unheld <= set(checkdocs.NOT_OBSERVABLE)


def test_every_invariant_that_has_a_check_has_a_fault_that_breaks_it() -> None:
    held = {name for name in checkdocs.INVARIANTS if checkdocs.holding(name)}
    assert {name for name in checkdocs.INVARIANTS if checkdocs.breaking(name)} == held


def test_every_fault_breaks_an_invariant_or_says_why_nothing_shows_it() -> None:
    page, known = checkdocs.page(), {*checkdocs.INVARIANTS}
    for name, fault in REGISTRY.items():
        assert {*fault.INVARIANTS} <= known, name
        assert fault.INVARIANTS or f"- **{name}** (case" in page, name


def test_every_check_of_the_registry_is_on_the_page() -> None:
    page = checkdocs.page()
    assert [name for name in registry.NAMES if f"### {name}\n" not in page] == []
