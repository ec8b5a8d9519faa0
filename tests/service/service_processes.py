"""The real commands as real processes, and conditions to wait for."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

BIN = Path(sys.executable).parent
WAIT_S = 60.0


def wait_until(condition: Callable[[], Any], what: str) -> Any:
    """The first true value of ``condition``; fails after `WAIT_S`."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError):
            if value := condition():
                return value
        time.sleep(0.02)
    raise AssertionError(f"never came true: {what}")


def interruptible() -> None:
    """Undo what a shell does to those it starts in the background: they ignore SIGINT, and so would our processes."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Process:
    """One command in a process group of its own, its output in a file."""

    def __init__(self, arguments: list[str | Path], log: Path, **environment: str) -> None:
        self.log = log
        self.arguments = arguments
        cleared = {name: value for name, value in os.environ.items() if not name.startswith("STAGEWATCH_")}
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [str(argument) for argument in arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**cleared, **environment},
                preexec_fn=interruptible,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def output(self) -> str:
        return self.log.read_text()

    def signal(self, number: signal.Signals) -> None:
        os.killpg(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, and wait."""
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        self._process.wait()

    def end(self) -> int:
        """SIGTERM, and the exit status."""
        self.signal(signal.SIGTERM)
        return self.status()

    def status(self) -> int:
        return self._process.wait(WAIT_S)


class CollectorProcess(Process):
    """`stagewatch collect` on a free port of loopback, or on ``port`` again; ``verify`` is httpx's."""

    def __init__(
        self, data_dir: Path, *options: str | Path, port: int = 0, token: str = "", verify: Any = True
    ) -> None:
        self.data_dir = data_dir
        log = data_dir.parent / f"{data_dir.name}.log"
        before = log.stat().st_size if log.exists() else 0
        super().__init__(
            [BIN / "stagewatch", "collect", "--port", str(port), "--data-dir", data_dir, *options],
            log,
        )
        try:
            self._wait_until_ready(before, token, verify)
        except BaseException:
            self.kill()  # nobody else knows of it yet
            raise

    def _wait_until_ready(self, before: int, token: str, verify: Any) -> None:
        self.url = wait_until(lambda: self._ready_line(before), "the collector listens")
        self.port = int(self.url.rsplit(":", 1)[1])
        self.token_file = self.data_dir / "token"
        self.token = token or self.token_file.read_text().strip()
        headers = {"Authorization": f"Bearer {self.token}"}
        self.http = httpx.Client(base_url=self.url, headers=headers, verify=verify)
        wait_until(lambda: self.http.get("/readyz").status_code == 200, "the collector is ready")

    def _ready_line(self, before: int) -> str:
        lines = self.log.read_bytes()[before:].decode().splitlines()
        return next((line.split()[-1] for line in lines if "listening on" in line), "")

    def get(self, path: str) -> Any:
        return self.http.get(path).raise_for_status().json()

    def ranks(self) -> dict[str, Any]:
        """Each rank's state by ``instance.stage``."""
        return {
            f"{engine['instance']}.{rank['identity']['rank']['pp']}": rank
            for engine in self.get("/v1/engines")["engines"]
            for rank in engine["ranks"]
        }

    def last_step(self, rank: str) -> int:
        return int(self.ranks().get(rank, {"last_step": -1})["last_step"])

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the series of ``name`` that carry ``labels``."""
        total = 0.0
        for line in self.http.get("/metrics").text.splitlines():
            is_ours = line.startswith((name + "{", name + " "))
            if is_ours and all(f'{label}="{value}"' in line for label, value in labels.items()):
                total += float(line.rsplit(" ", 1)[1])
        return total


class SidecarProcess(Process):
    """`stagewatch-agent ship`."""

    def __init__(self, ring_dir: Path, url: str, *options: str, token: str, **environment: str) -> None:
        super().__init__(
            [BIN / "stagewatch-agent", "ship", "--ring-dir", ring_dir, "--collector", url, *options],
            ring_dir.parent / "sidecar.log",
            STAGEWATCH_TOKEN=token,
            **environment,
        )


class Stage:
    """Where a test starts processes."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.data_dir = directory / "data"
        self.ring_dir = directory / "rings"
        self._processes: list[Process] = []

    def collector(
        self, *options: str | Path, data_dir: Path | None = None, **keywords: Any
    ) -> CollectorProcess:
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


@contextlib.contextmanager
def killed_at_exit(*processes: Process) -> Iterator[None]:
    """Whatever happens inside, no process survives."""
    try:
        yield
    finally:
        for process in processes:
            process.kill()
