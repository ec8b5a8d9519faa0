"""Fixtures of the service tests: processes that cannot outlive their test."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from service_processes import CollectorProcess, Process, SidecarProcess


class Stage:
    """Where a test starts processes."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.data_dir = directory / "data"
        self.ring_dir = directory / "rings"
        self._processes: list[Process] = []

    def collector(self, *options: str, data_dir: Path | None = None, **keywords: Any) -> CollectorProcess:
        return self._keep(CollectorProcess(data_dir or self.data_dir, *options, **keywords))

    def sidecar(self, collector: CollectorProcess, *options: str, **keywords: Any) -> SidecarProcess:
        keywords.setdefault("token", collector.token)
        return self._keep(SidecarProcess(self.ring_dir, collector.url, *options, **keywords))

    def process(self, *arguments: str | Path, **environment: str) -> Process:
        log = self.directory / f"process-{len(self._processes)}.log"
        return self._keep(Process(list(arguments), log, **environment))

    def close(self) -> None:
        for process in self._processes:
            process.kill()

    def _keep(self, process: Any) -> Any:
        self._processes.append(process)
        return process


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path)
    with contextlib.closing(made):
        yield made
