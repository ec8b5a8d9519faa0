"""Ranks whose sidecars made digests or request keys differently cannot be compared, and are not."""

from dataclasses import dataclass

import msgspec
import pytest

from stagewatch.agents.digest import Digester
from stagewatch.agents.evidence import digest_records
from stagewatch.agents.identity import Fingerprint, Identity
from stagewatch.agents.lab.simulator import SimConfig, Simulator
from stagewatch.monitor.watch import Watch


@dataclass(frozen=True)
class Seen:
    verdicts: dict[str, int]
    incidents: list[tuple[str, str, tuple[str, ...]]]


def watched(name: str, values: tuple[str, str], keys: tuple[bytes, bytes]) -> Seen:
    """A sound two-stage run whose ranks' sidecars report ``values`` under ``name`` and digest with ``keys``."""
    simulator = Simulator(SimConfig.benign(3, pp=2, requests=20))
    records = simulator.run().records
    watch = Watch()
    told = [
        msgspec.structs.replace(identity, config=(*identity.config, Fingerprint(name, value)))
        for identity, value in zip(simulator.identities().values(), values, strict=True)
    ]
    for identity in told:
        watch.hello(identity)
    for identity, key in zip(told, keys, strict=True):
        evidence = digest_records(records[identity.rank], identity, Digester(key))
        watch.take(identity.instance, identity.rank, evidence, -1.0, 0)
    watch.finish()
    state = watch.states()[0]
    return Seen(
        {verdict: rows for verdict, rows in state.verdicts.items() if rows},
        [(found.check, found.severity.word, found.fields) for found in watch.incidents()],
    )


@pytest.mark.parametrize("name", ["digest_key", "request_ids"])
def test_ranks_that_digest_differently_are_indeterminate_and_the_operator_is_told(name: str) -> None:
    """GIVEN two sidecars set up differently WHEN a sound engine runs THEN no row is compared, one warning says why."""
    seen = watched(name, ("one", "other"), (bytes(16), bytes(15) + b"\1"))
    assert seen.incidents == [("configuration", "warning", (name,))]
    assert set(seen.verdicts) == {"digests_differ"}


def test_ranks_that_digest_alike_are_compared() -> None:
    seen = watched("digest_key", ("same", "same"), (bytes(16), bytes(16)))
    assert seen.incidents == []
    assert set(seen.verdicts) == {"CONSISTENT"}


def test_a_key_that_is_changed_in_mid_run_accuses_nobody() -> None:
    """Rotation, one node after the other.

    GIVEN two sidecars that are restarted in turn with a new key, and send again what was not acknowledged
    WHEN the steps in between were digested with the old key on one rank and the new one on the other
    THEN they are not compared, and what follows is.
    """
    simulator = Simulator(SimConfig.benign(5, pp=2, requests=60))
    records = simulator.run().records
    first, last = simulator.identities().values()
    watch = Watch()

    def send(identity: Identity, key: bytes, begin: int, end: int) -> None:
        named = msgspec.structs.replace(
            identity, config=(*identity.config, Fingerprint("digest_key", key.hex()))
        )
        watch.hello(named)
        part = records[identity.rank][begin:end]
        watch.take(named.instance, named.rank, digest_records(part, named, Digester(key)), -1.0, 0)

    old, new = bytes(16), bytes(15) + b"\1"
    send(first, old, 0, 400)
    send(last, old, 0, 300)
    send(last, new, 300, 600)
    send(first, new, 400, 700)
    send(last, new, 600, len(records[last.rank]))
    send(first, new, 700, len(records[first.rank]))
    watch.finish()
    verdicts = watch.states()[0].verdicts
    assert [found.check for found in watch.incidents()] == []
    assert verdicts.get("DIVERGED", 0) == 0
    assert verdicts["digests_differ"] > 0
    assert verdicts["CONSISTENT"] > verdicts["digests_differ"]
