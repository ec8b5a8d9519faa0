"""Ranks that fall silent, against ranks of an engine that ended."""

from stagewatch.agents.digest import Digester
from stagewatch.agents.evidence import digest_records
from stagewatch.agents.identity import Fingerprint, Identity
from stagewatch.agents.lab.simulator import SimConfig, Simulator
from stagewatch.monitor.watch import Watch

SECOND = 10**9


def watch_of(heard_s: tuple[float, float]) -> Watch:
    """A watch that heard a sound run's ranks, all they recorded, at the given seconds."""
    run = Simulator(SimConfig.benign(3, pp=2, requests=12))
    records = run.run().records
    watch = Watch()
    for identity in run.identities().values():
        watch.hello(identity, 1 * SECOND)
    for identity, at_s in zip(run.identities().values(), heard_s, strict=True):
        evidence = digest_records(records[identity.rank], identity, Digester(bytes(16)))
        watch.take(identity.instance, identity.rank, evidence, -1.0, int(at_s * SECOND))
    return watch


def told(watch: Watch) -> list[tuple[str, tuple[int, ...]]]:
    return [(incident.check, incident.ranks) for incident in watch.incidents()]


class TestSilence:
    def test_ranks_of_an_engine_that_ended_were_not_heard_at_the_same_instant(self) -> None:
        """GIVEN two ranks last heard of half a second apart WHEN a tick falls 30 s after one of them THEN no alarm."""
        watch = watch_of((2.0, 2.5))
        for at_s in (31.9, 32.2, 32.6, 100.0):
            watch.tick(int(at_s * SECOND))
        assert told(watch) == []

    def test_a_rank_that_others_outlive_by_half_a_minute_is_named(self) -> None:
        watch = watch_of((2.0, 33.0))
        watch.tick(33 * SECOND)
        assert told(watch) == [("rank-silent", (0,))]


def test_steps_are_known_even_of_ranks_that_cannot_be_compared() -> None:
    """GIVEN ranks whose sidecars use different keys THEN each one's newest step is still told."""
    run = Simulator(SimConfig.benign(3, pp=2, requests=12))
    records = run.run().records
    watch = Watch()

    def with_key(identity: Identity, name: str) -> Identity:
        values = {field: getattr(identity, field) for field in identity.__struct_fields__}
        return Identity(**values | {"config": (*identity.config, Fingerprint("digest_key", name))})

    ranks = [with_key(identity, str(number)) for number, identity in enumerate(run.identities().values())]
    for identity in ranks:
        watch.hello(identity)
    for identity in ranks:
        evidence = digest_records(records[identity.rank], identity, Digester(bytes(16)))
        watch.take(identity.instance, identity.rank, evidence, -1.0, 0)
    steps = [rank.last_step for rank in watch.states()[0].ranks]
    assert steps == [max(record.step for record in records[identity.rank]) for identity in ranks]
