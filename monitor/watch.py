"""The watch: evidence in, incidents out. Everything between the collector's door and its outputs.

Single-threaded and deterministic: what it says depends only on the evidence and on the times it is told.
"""

from typing import Final

from stagewatch.agents.evidence import Evidence
from stagewatch.agents.identity import Identity, Rank
from stagewatch.monitor.checks.stall import across_replicas
from stagewatch.monitor.engine import Engine
from stagewatch.monitor.incidents import Incident
from stagewatch.monitor.states import Change, EngineState, RankState
from stagewatch.monitor.windows import Group

SILENT_AFTER_S: Final = 30.0
"""A rank not heard of for so long, while others are, is no longer waited for."""
REST_AFTER_NS: Final = 600 * 10**9
"""An engine not heard of for so long has ended, or its rings were overrun long ago: its evidence is let go."""
ENGINES_MAX: Final = 1024
"""Groups of ranks watched; every restart of an engine is a new one. Past it the longest silent is forgotten."""

__all__ = ["Change", "EngineState", "RankState", "Watch"]


class Watch:
    """All engines of one collector."""

    def __init__(self, *, silent_after_s: float = SILENT_AFTER_S) -> None:
        self._engines: dict[tuple[str, int], Engine] = {}
        self._silent_after_ns = int(silent_after_s * 1e9)

    def hello(self, identity: Identity, now_ns: int = 0) -> None:
        """A rank's stream begins, or begins again."""
        rank = identity.rank
        key = (identity.instance, rank.dp)
        if key not in self._engines:
            group = Group(identity.deployment, identity.instance, rank.dp, identity.sizes)
            self._engines[key] = Engine(group)
            while len(self._engines) > ENGINES_MAX:
                self._engines.pop(min(self._engines, key=lambda key: self._engines[key].heard_ns))
        self._engines[key].hello(identity, now_ns)

    def take(
        self, instance: str, rank: Rank, evidence: Evidence, margin_s: float, now_ns: int
    ) -> list[Change]:
        """Take one batch of a rank that said hello, and judge whatever became comparable.

        Raises KeyError for a rank that did not.
        """
        return self._engines[instance, rank.dp].take(rank, evidence, margin_s, now_ns)

    def tick(self, now_ns: int) -> list[Change]:
        """Judge what only the passing of time can tell: ranks missing or silent, stalls. Call about once a second."""
        changes: list[Change] = []
        for engine in self._engines.values():
            absent = engine.silent(self._silent_after_ns)
            if absent:
                changes += engine.give_up(absent, now_ns)
            changes += engine.look(now_ns)
            changes += engine.rest(REST_AFTER_NS, now_ns)
        for replicas in self._replicas():
            owing = dict(across_replicas([engine.progress(now_ns) for engine in replicas]))
            why = next((finding.text for finding in owing.values()), "")
            for place, engine in enumerate(replicas):
                if owing:
                    changes += engine.wedge(owing.get(place), why, now_ns)
        return changes

    def _replicas(self) -> list[list[Engine]]:
        """Engines that are data-parallel replicas of one another, by instance."""
        by_instance: dict[str, list[Engine]] = {}
        for (instance, _), engine in sorted(self._engines.items()):
            by_instance.setdefault(instance, []).append(engine)
        return [replicas for replicas in by_instance.values() if len(replicas) > 1]

    def finish(self, now_ns: int = 0) -> list[Change]:
        """The evidence has ended (a replay): judge what is left without waiting for anybody."""
        return [change for engine in self._engines.values() for change in engine.finish(now_ns)]

    def incidents(self) -> list[Incident]:
        """Every incident of every engine."""
        return [incident for engine in self._engines.values() for incident in engine.incidents()]

    def steps(self) -> int:
        """Steps of all engines that have a verdict."""
        return sum(engine.steps for engine in self._engines.values())

    def keys(self) -> list[tuple[str, int]]:
        """Instance and replica of every engine."""
        return list(self._engines)

    def engine(self, key: tuple[str, int]) -> Engine | None:
        """One engine; None if it was forgotten meanwhile."""
        return self._engines.get(key)

    def put_back(self, engine: Engine) -> None:
        """Watch an engine from where it was saved."""
        self._engines[engine.group.instance, engine.group.dp] = engine

    def states(self) -> list[EngineState]:
        """Every engine, oldest first."""
        return [engine.state() for engine in self._engines.values()]
