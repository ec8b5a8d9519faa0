"""The demo's stage: a collector and a sidecar as processes of their own, and what the collector says."""

import contextlib
import http.client
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import msgspec

from stagewatch.agents.errors import StagewatchError
from stagewatch.monitor.store import Told

START_S: Final = 30.0
END_S: Final = 10.0


class DemoError(StagewatchError):
    """A part of the demo did not do what it should."""


class DemoStage:
    """Starts collector and sidecar in a directory of its own; ends and removes everything on exit.

    ``held`` keeps signals from ending us between a process's start and the note of it; without ``raw_tokens`` tokens
    stay on the node, as they do by default in production.
    """

    def __init__(
        self, held: Callable[[], AbstractContextManager[None]] = nullcontext, *, raw_tokens: bool = True
    ) -> None:
        self._held = held
        self._raw_tokens = raw_tokens
        self.directory: Final = Path(tempfile.mkdtemp(prefix="stagewatch-demo-"))
        """Data directory and logs; gone when the demo ends, so what a log says must be told before."""
        shm = Path("/dev/shm")  # noqa: S108  # where rings belong: memory, shared between processes
        in_memory = shm if os.access(shm, os.W_OK) else None
        self.ring_dir: Final = Path(tempfile.mkdtemp(prefix="stagewatch-demo-", dir=in_memory))
        self.told: Final[queue.SimpleQueue[Told]] = queue.SimpleQueue()
        """Events of the collector's stream, as they come."""
        self._processes: list[subprocess.Popen[bytes]] = []
        self._address = ("", 0)
        self._token = ""

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def token(self) -> str:
        """What opens the collector's doors."""
        return self._token

    @property
    def ingest_url(self) -> str:
        """Where the collector takes frames."""
        return f"ws://{self._address[0]}:{self._address[1]}/v1/ingest"

    def pid(self, command: str) -> int:
        """The process of ``collect`` or ``ship``."""
        return next(process.pid for process in self._processes if command in process.args)  # type: ignore[operator]

    def engine(self, instance: str) -> dict[str, Any]:
        """What the collector knows of an engine; empty before it has heard of it."""
        try:
            found = self._get(f"/v1/engines/{instance}")["engines"]
        except urllib.error.HTTPError:
            return {}
        return dict(found[0]) if found else {}

    def wait_for(self, instance: str, steps: int) -> dict[str, Any]:
        """The engine's state once it is compared up to ``steps``. Raises DemoError if that takes too long."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            state = self.engine(instance)
            if state and int(state["compared_to"]) >= steps:
                return state
            time.sleep(0.05)
        raise DemoError(
            f"the collector did not come to step {steps} within {START_S:g} s; its last words, and the sidecar's: "
            f"{self._last_words('collect')} | {self._last_words('ship')}"
        )

    def incidents(self, instance: str) -> list[dict[str, Any]]:
        """Every incident of an engine, newest first."""
        return list(self._get(f"/v1/incidents?instance={instance}&limit=500")["incidents"])

    def start(self) -> None:
        """Start the processes and wait until the collector is ready. Raises DemoError if one does not start."""
        data = self.directory / "data"
        collector = self._run("collect", "monitor", "--port", "0", "--data-dir", str(data))
        url = self._ready_url(collector)
        host, _, port = url.removeprefix("http://").rpartition(":")
        self._address = (host, int(port))
        self._token = (data / "token").read_text().strip()
        self._wait_ready()
        threading.Thread(target=self._listen, daemon=True).start()
        self._run(
            *("ship", "agents", "--ring-dir", str(self.ring_dir), "--collector", f"ws://{host}:{port}"),
            *("--token-file", str(data / "token")),
            *(("--raw-tokens",) if self._raw_tokens else ()),
        )

    def _run(self, command: str, package: str, *options: str) -> subprocess.Popen[bytes]:
        quiet = {name: value for name, value in os.environ.items() if not name.startswith("STAGEWATCH_")}
        with self._held(), self._log(command).open("wb") as log:
            process = subprocess.Popen(  # noqa: S603  # our own commands, with our own options
                [sys.executable, "-m", f"stagewatch.{package}", command, *options],
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=quiet,
            )
            self._processes.append(process)
        return process

    def _last_words(self, command: str) -> str:
        """The last line of a process's log."""
        return (self._log(command).read_text().strip().splitlines() or ["nothing"])[-1]

    def _log(self, command: str) -> Path:
        return self.directory / f"{command}.log"

    def _ready_url(self, process: subprocess.Popen[bytes]) -> str:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and process.poll() is None:
            for line in self._log("collect").read_text().splitlines():
                if "listening on " in line:
                    return line.rpartition(" ")[2]
            time.sleep(0.02)
        raise DemoError(f"the collector did not start: {self._last_words('collect')}")

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                self._get("/readyz")
                return
            time.sleep(0.02)
        raise DemoError(f"the collector is not ready after {START_S:g} s")

    def _get(self, path: str) -> Any:
        url = f"http://{self._address[0]}:{self._address[1]}{path}"
        request = urllib.request.Request(
            url, headers={"Authorization": f"Bearer {self._token}"}
        )  # http, to ourselves
        with urllib.request.urlopen(request, timeout=START_S) as answer:  # noqa: S310
            return json.load(answer)

    def _listen(self) -> None:
        """Put the collector's events into `told` until it ends."""
        connection = http.client.HTTPConnection(*self._address)
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection.request("GET", "/v1/events", headers={"Authorization": f"Bearer {self._token}"})
            for line in connection.getresponse():
                if line.startswith(b"data:"):
                    self.told.put(msgspec.json.decode(line[5:], type=Told))

    def stop(self) -> None:
        """End every process, and remove every file."""
        for process in reversed(self._processes):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in self._processes:
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        shutil.rmtree(self.ring_dir, ignore_errors=True)
        shutil.rmtree(self.directory, ignore_errors=True)
