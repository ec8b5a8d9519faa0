"""Settings of the collector, as its command gathers them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stagewatch.agents.wire import Limits
from stagewatch.monitor.retention import Policy

OpenTo = Literal["", "loopback", "everyone"]
"""Who needs no token: nobody, those on this machine, or everyone."""


@dataclass(frozen=True, slots=True)
class CollectorSettings:
    """What a collector is told at start, checked."""

    host: str
    port: int
    """0 for any free port."""
    data_dir: Path
    token: str | Path
    """The token itself, or the file of tokens."""
    segment_bytes: int
    keep_bytes: int
    """Bytes of journal kept; the oldest segments beyond go."""
    queue_bytes: int
    """Bytes of memory that frames waiting for the journal may take before sidecars are made to wait."""
    ranks_max: int
    open_metrics: OpenTo
    """Who may read `/metrics`, and whether an engine is well, without a token."""
    limits: Limits
    readers_max: int = 256
    """Event streams open at the same time."""
    engines_max: int = 256
    """Lives of engines of one deployment known at the same time; each may have many ranks."""
    segment_s: float = 3600.0
    """Age at which the journal begins a new segment."""
    keep_s: float = 0.0
    """Age beyond which segments go; 0 for any."""
    pin_bytes: int = 2 << 30
    """Bytes of older segments kept because they hold incidents' evidence."""
    keep_incidents: int = 100_000
    """Incidents kept in the store."""
    keep_incidents_s: float = 0.0
    """Age beyond which they go; 0 for any."""

    @property
    def policy(self) -> Policy:
        """How much of the journal is kept."""
        return Policy(self.segment_bytes, self.segment_s, self.keep_bytes, self.keep_s, self.pin_bytes)
