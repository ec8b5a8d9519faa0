"""Ranks of stand-in engines, armed as workers would be."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from watched import Watched


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Callable[..., Watched]]:
    """Make a watched pipeline: ``watch(variant, drafts=3)``."""
    made: list[Watched] = []

    def make(variant: str, drafts: int = 3, budget_share: float = 0.0) -> Watched:
        directory = tmp_path / f"rings{len(made)}"
        directory.mkdir(mode=0o700)
        made.append(Watched(variant, directory, drafts, budget_share))
        return made[-1]

    yield make
    for watched in made:
        for hooks in watched.hooks:
            hooks.remove()
