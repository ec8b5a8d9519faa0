"""Runs to export, recorded once."""

import pytest
from commands import Command, command
from recorded import Recorded, founding_fault, record
from simulated import Run

from stagewatch.monitor.cli import main


@pytest.fixture
def export(capsys: pytest.CaptureFixture[str]) -> Command:
    return command(main, "export", capsys)


@pytest.fixture(scope="session")
def faulty_run() -> Run:
    """A run with the founding fault."""
    return founding_fault()


@pytest.fixture(scope="session")
def faulty(faulty_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return record(faulty_run, tmp_path_factory.mktemp("faulty"))
