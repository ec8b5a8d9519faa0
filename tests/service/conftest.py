"""Fixtures of the service tests: processes that cannot outlive their test."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from service_processes import Stage


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path)
    with contextlib.closing(made):
        yield made
