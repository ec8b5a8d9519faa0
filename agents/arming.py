"""Arming a rank: from settings and an identity to a probe that records into a ring of its own."""

import contextlib
import os
from pathlib import Path

from stagewatch.agents.errors import RingError
from stagewatch.agents.identity import Identity
from stagewatch.agents.probe import Probe
from stagewatch.agents.ring import RingReader, RingWriter, check_directory, is_held
from stagewatch.agents.settings import ProbeSettings


def arm(identity: Identity, settings: ProbeSettings) -> Probe:
    """Make the rank's ring and its probe. Raises RingError where the ring cannot be made."""
    check_directory(settings.ring_dir)
    remove_old_rings(settings.ring_dir, identity, settings.rings_kept)
    ring = RingWriter(settings.ring_dir, identity, settings.ring_bytes)
    probe = Probe(ring, identity, heartbeat_s=settings.heartbeat_s, budget_share=settings.budget_share)
    probe.note(f"armed: {identity.engine} {identity.engine_version}, variant {identity.variant}")
    return probe


def remove_old_rings(directory: Path, identity: Identity, kept: int) -> int:
    """Remove rings that ended engines of the same deployment and rank left behind, but the newest ``kept``.

    An engine that crashes in a loop would otherwise fill the memory the rings live in. Returns how many went.
    """
    ended: list[tuple[int, Path]] = []
    for path in directory.glob(f"*.{identity.rank}.ring"):
        try:
            reader = RingReader(path)
            found = reader.identity
            reader.close()
            held = is_held(path)
        except RingError:
            continue  # not ours to judge: another schema, or one being made
        ours = (found.deployment, found.host, found.rank) == (
            identity.deployment,
            identity.host,
            identity.rank,
        )
        # The lock tells, because process ids come again: a container's worker has the same one in each life.
        if ours and not (is_alive(found.pid) if held is None else held):
            ended.append((found.started_ns, path))
    surplus = sorted(ended)[: max(len(ended) - kept, 0)]
    removed = 0
    for _, path in surplus:
        with contextlib.suppress(OSError):  # it stays, and the ring to be made says what is wrong here
            path.unlink()
            removed += 1
    return removed


def is_alive(pid: int) -> bool:
    """Whether a process of that number exists on this host."""
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True
