"""Processes of one test, which cannot outlive it."""

from pathlib import Path
from typing import Any

from service_processes import CollectorProcess, Process, SidecarProcess


class House:
    """Where a test starts processes."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.data_dir = directory / "data"
        self.ring_dir = directory / "rings"
        self._processes: list[Process] = []

    def collector(self, *options: str | Path, **keywords: Any) -> CollectorProcess:
        return self._keep(CollectorProcess(self.data_dir, *options, **keywords))

    def sidecar(self, url: str, token: str, *options: str | Path, **environment: str) -> SidecarProcess:
        return self._keep(SidecarProcess(self.ring_dir, url, *map(str, options), token=token, **environment))

    def process(self, *arguments: str | Path, **environment: str) -> Process:
        log = self.directory / f"process-{len(self._processes)}.log"
        return self._keep(Process(list(arguments), log, **environment))

    def close(self) -> None:
        for process in self._processes:
            process.kill()

    def _keep(self, process: Any) -> Any:
        self._processes.append(process)
        return process
