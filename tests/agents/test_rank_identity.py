"""Who a record comes from."""

from foundation_records import identity

from stagewatch.agents.identity import Rank


def test_a_rank_names_its_coordinates_and_its_ring() -> None:
    assert str(Rank(1, 2, 3)) == "dp1.pp2.tp3"
    assert identity(instance="abc", rank=Rank(1, 2, 3)).ring_name == "abc.dp1.pp2.tp3.ring"


def test_ranks_sort_by_replica_then_stage_then_peer() -> None:
    assert Rank(0, 0, 1) < Rank(0, 1, 0) < Rank(1, 0, 0)
