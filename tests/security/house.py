"""Processes of one test, which cannot outlive it."""

from pathlib import Path

from service_processes import SidecarProcess, Stage


class House(Stage):
    """A stage whose sidecars are told where to go and with which token, right or wrong."""

    def ship(self, url: str, token: str, *options: str | Path, **environment: str) -> SidecarProcess:
        return self._keep(SidecarProcess(self.ring_dir, url, *map(str, options), token=token, **environment))
