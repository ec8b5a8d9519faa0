"""What sidecars tell of themselves: the records they gave up, and the files they cannot read as rings."""

from collections import OrderedDict
from typing import Final

from stagewatch.agents.wire import Node

SIDECARS_MAX: Final = 4096
"""Sidecars remembered; every start of one is a new one. What older ones gave up stays in the sums."""
PRESENT_S: Final = 60.0
"""A sidecar not heard of for so long no longer counts for what is so now."""


class Nodes:
    """Sums over all sidecars. Each tells what it counted since its start, again with every batch.

    Batches are journalled, so the sums are the same after a restart, as far as the journal reaches back.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[str, tuple[Node, int]] = OrderedDict()
        self._removed = 0
        self._unreadable = 0

    def note(self, node: Node | None, now_ns: int) -> None:
        """A batch of a sidecar was taken."""
        if node is None:
            return
        before, _ = self._known.get(node.sidecar, (Node(node.sidecar), 0))
        self._removed += max(node.ring_removed - before.ring_removed, 0)
        self._unreadable += max(node.ring_unreadable - before.ring_unreadable, 0)
        self._known[node.sidecar] = (node, now_ns)
        self._known.move_to_end(node.sidecar)
        if len(self._known) > SIDECARS_MAX:
            self._known.popitem(last=False)

    @property
    def drops(self) -> dict[tuple[str, str], int]:
        """Records given up, by (place, reason)."""
        return {("sidecar", "ring_removed"): self._removed, ("sidecar", "ring_unreadable"): self._unreadable}

    def rings_refused(self, now_ns: int) -> int:
        """Files that the present sidecars cannot read as rings."""
        return sum(
            node.rings_refused
            for node, heard_ns in list(self._known.values())
            if now_ns - heard_ns <= PRESENT_S * 1e9
        )
