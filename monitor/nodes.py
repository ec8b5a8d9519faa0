"""What sidecars tell of themselves: the records they gave up, and the files they cannot read as rings."""

import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

from stagewatch.agents.identity import Node
from stagewatch.monitor.states import EngineState

SIDECARS_MAX: Final = 4096
"""Sidecars remembered; every start of one is a new one. What older ones gave up stays in the sums."""
PRESENT_S: Final = 60.0
"""A sidecar not heard of for so long no longer counts for what is so now."""


class Nodes:
    """Sums over all sidecars. Each tells what it counted since its start, again with every batch.

    Batches are journalled, and read back at a restart. Any thread may ask.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[str, tuple[Node, int]] = OrderedDict()
        self._removed = 0
        self._unreadable = 0
        self._windows = 0

    def note(self, node: Node | None, now_ns: int) -> None:
        """A batch of a sidecar was taken."""
        if node is None:
            return
        with self._lock:
            self._note(node, now_ns)

    def know(self, engines: Iterable[EngineState]) -> None:
        """Engines were put back as they once stood: what their sidecars had told by then is no news."""
        with self._lock:
            for engine in engines:
                for rank in engine.ranks:
                    if rank.node is not None:
                        self._known[rank.node.sidecar] = (rank.node, rank.last_heard_ns)

    def _note(self, node: Node, now_ns: int) -> None:
        before, _ = self._known.get(node.sidecar, (Node(node.sidecar), 0))
        self._removed += max(node.ring_removed - before.ring_removed, 0)
        self._unreadable += max(node.ring_unreadable - before.ring_unreadable, 0)
        self._windows += max(node.windows_dropped - before.windows_dropped, 0)
        self._known[node.sidecar] = (node, now_ns)
        self._known.move_to_end(node.sidecar)
        if len(self._known) > SIDECARS_MAX:
            self._known.popitem(last=False)

    @property
    def drops(self) -> dict[tuple[str, str], int]:
        """Records and frozen windows given up, by (place, reason)."""
        with self._lock:
            return {
                ("sidecar", "ring_removed"): self._removed,
                ("sidecar", "ring_unreadable"): self._unreadable,
                ("windows", "dropped"): self._windows,
            }

    def rings_refused(self, now_ns: int) -> int:
        """Files that the present sidecars cannot read as rings."""
        with self._lock:
            return sum(
                node.rings_refused
                for node, heard_ns in self._known.values()
                if now_ns - heard_ns <= PRESENT_S * 1e9
            )
