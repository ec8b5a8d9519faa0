"""Fixtures of the security tests: processes that cannot outlive their test."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from house import House


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    made = House(tmp_path)
    with contextlib.closing(made):
        yield made
