"""Runs to export, recorded once."""

from pathlib import Path

import pytest
from commands import Command, command
from recorded import Recorded, record
from simulated import Run, plan

from stagewatch.monitor.cli import main


@pytest.fixture
def export(capsys: pytest.CaptureFixture[str]) -> Command:
    return command(main, "export", capsys)


@pytest.fixture(scope="session")
def faulty_run() -> Run:
    """A run with the founding fault."""
    return Run(plan("old-mask", from_step=3, requests=30))


@pytest.fixture(scope="session")
def faulty(faulty_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return record(faulty_run, tmp_path_factory.mktemp("faulty"))


TRACES = Path(__file__).parents[1] / "data" / "traces"
