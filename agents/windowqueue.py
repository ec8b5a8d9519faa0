"""The windows that were asked for, frozen one after the other on a thread, so that nothing of the sidecar's waits."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final

from stagewatch.agents.tail import Privacy, Tail
from stagewatch.agents.windows import Freezer
from stagewatch.agents.wire import Freeze, Frozen

WAITING_MAX: Final = 256
"""Windows asked for that may wait to be frozen."""


class Windows:
    """The requests for windows, one after the other: only the newest `WAITING_MAX` wait, and none makes others wait."""

    def __init__(self, freezer: Freezer) -> None:
        self.privacy: Privacy | None = None
        """How to digest; None before the ring directory was opened."""
        self._freezer = freezer
        self._waiting: deque[tuple[Path, Freeze]] = deque()
        self._overtaken = 0
        self._wake = asyncio.Event()

    @property
    def dropped(self) -> int:
        """Windows, and requests for some, that had to make room."""
        return self._freezer.dropped + self._overtaken

    def ask(self, tail: Tail, freeze: Freeze) -> None:
        """Take a request of the collector."""
        if any(freeze == waiting for _, waiting in self._waiting):
            return
        if len(self._waiting) >= WAITING_MAX:
            self._waiting.popleft()
            self._overtaken += 1
        self._waiting.append((tail.path, freeze))
        self._wake.set()

    async def run(self, say: Callable[[Frozen], None]) -> None:
        """Freeze what is asked for, until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting and self.privacy is not None:
                path, freeze = self._waiting[0]
                say(await asyncio.to_thread(self._freezer.freeze, path, self.privacy, freeze))
                with contextlib.suppress(ValueError):  # it may have been overtaken meanwhile
                    self._waiting.remove((path, freeze))

    def end(self) -> None:
        """Give up what is being frozen."""
        self._freezer.end()
