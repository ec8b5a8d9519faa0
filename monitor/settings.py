"""Settings of the collector, as its command gathers them."""

from dataclasses import dataclass
from pathlib import Path

from stagewatch.agents.wire import Limits


@dataclass(frozen=True, slots=True)
class CollectorSettings:
    """What a collector is told at start, checked."""

    host: str
    port: int
    """0 for any free port."""
    data_dir: Path
    token: str | Path
    """The token itself, or the file that holds it."""
    segment_bytes: int
    keep_bytes: int
    """Bytes of journal kept; the oldest segments beyond go."""
    queue_bytes: int
    """Bytes of memory that frames waiting for the journal may take before sidecars are made to wait."""
    ranks_max: int
    open_metrics: bool
    """Whether `/metrics` may be read without the token."""
    limits: Limits
