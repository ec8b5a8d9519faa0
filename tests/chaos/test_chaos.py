"""A few short runs of the chaos; `make chaos` has as many and as long ones as you like."""

from pathlib import Path

import pytest
from chaos import run


@pytest.mark.slow
@pytest.mark.parametrize("seed", [11, 12, 13])
def test_nothing_is_lost_or_told_twice_whoever_is_killed(seed: int, tmp_path: Path) -> None:
    print(run(seed, 12.0, tmp_path))
