"""Who a rank says it is."""

import sys
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed
from standins import Pipeline

from stagewatch.agents.engines.vllm_identity import (
    draft_facts,
    draft_layout,
    fingerprints,
    identity_of,
    instance_of,
)
from stagewatch.agents.engines.vllm_variants import inspect_engine
from stagewatch.agents.identity import Rank, Sizes


def config(instance_id: str = "life", nnodes: int = 1, **parallel: int) -> SimpleNamespace:
    """What a VllmConfig tells."""
    return SimpleNamespace(
        instance_id=instance_id,
        parallel_config=SimpleNamespace(
            **{"data_parallel_rank": 0, "data_parallel_size": 1, "nnodes": nnodes} | parallel
        ),
        model_config=SimpleNamespace(
            model="org/secret-name", revision=None, dtype="torch.float16", quantization=None
        ),
        cache_config=SimpleNamespace(cache_dtype="auto", block_size=16, enable_prefix_caching=True),
        scheduler_config=SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=64, async_scheduling=True),
        speculative_config=SimpleNamespace(
            method="eagle", draft_model_config=SimpleNamespace(model="org/secret-draft", revision="r1")
        ),
    )


def runner() -> SimpleNamespace:
    """What a runner tells."""
    return SimpleNamespace(num_speculative_steps=3, vocab_size=211, max_model_len=64)


def groups(pp: int, tp: int, tp_size: int, pcp: int = 0) -> SimpleNamespace:
    """VLLM's parallel state of one worker."""
    return SimpleNamespace(
        get_pp_group=lambda: SimpleNamespace(rank_in_group=pp, world_size=2),
        get_tp_group=lambda: SimpleNamespace(rank_in_group=tp, world_size=tp_size),
        get_pcp_group=lambda: SimpleNamespace(rank_in_group=pcp),
    )


class TestInstance:
    def test_is_the_engines_own_on_one_node(self) -> None:
        def no_store() -> None:
            raise AssertionError("asked for a store")

        assert instance_of(config("abc/1"), no_store) == "abc-1"

    def test_replicas_that_share_a_configuration_are_engines_of_their_own(self) -> None:
        """GIVEN data parallel replicas of a dense model, all rank 0 of 1 by what they are told THEN each has a name."""
        found = [instance_of(config("abc", data_parallel_index=index), lambda: None) for index in range(3)]
        assert found == ["abc", "abc-replica1", "abc-replica2"]

    def test_replicas_that_know_their_rank_share_their_engines_name(self) -> None:
        parallel = {"data_parallel_size": 2, "data_parallel_rank": 1, "data_parallel_index": 1}
        assert instance_of(config("abc", **parallel), lambda: None) == "abc"

    def test_is_the_first_ranks_on_all_nodes(self) -> None:
        store = torch.distributed.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10)
        )
        found = [instance_of(config(own, nnodes=2), lambda: store) for own in ("first", "second", "third")]
        assert found == ["first"] * 3


class TestIdentity:
    def test_every_rank_of_every_dimension_has_coordinates_of_its_own(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """GIVEN PP 2, TP 2, DP 2 and prefill context parallelism 2 THEN no two of the 16 ranks share a ring's name."""
        finding = inspect_engine(Pipeline("C").ranks[0].engine)
        names = set()
        for number in range(16):
            dp, pp, tp, pcp = (number >> shift & 1 for shift in range(4))
            parallel = {
                "data_parallel_rank": dp,
                "data_parallel_size": 2,
                "prefill_context_parallel_size": 2,
            }
            monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.0"))
            found = identity_of(
                config(**parallel), runner(), finding, groups(pp, tp, 2, pcp), deployment="d", instance="life"
            )
            assert found.sizes == Sizes(2, 2, 4)
            assert found.rank == Rank(dp, pp, pcp * 2 + tp)
            names.add(found.ring_name)
        assert len(names) == 16

    def test_fingerprints_hide_names_and_tell_differences(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.0"))
        mine, other = config(), config()
        other.model_config.model = "org/another"
        found, differs = fingerprints(mine, runner()), fingerprints(other, runner())
        assert not any("secret" in value for value in found.values())
        assert [name for name in found if found[name] != differs[name]] == ["model"]


class Drafter(torch.nn.Module):
    """A drafter with an embedding, and a head of its own or none."""

    def __init__(self, hidden: int = 8, tied: bool = False) -> None:
        super().__init__()
        self.model = torch.nn.Module()
        self.model.embed_tokens = torch.nn.Embedding(16, hidden)
        self.lm_head = torch.nn.Linear(hidden, 16, bias=False)
        if tied:
            self.lm_head.weight = self.model.embed_tokens.weight


def with_drafter(drafter: object) -> SimpleNamespace:
    """What a runner of the last stage tells."""
    return SimpleNamespace(**vars(runner()), get_draft_model=lambda: drafter)


class TestDraftLayout:
    """Peers of the last stage must have built the same drafter."""

    def test_is_equal_for_the_same_drafter(self) -> None:
        assert draft_layout(with_drafter(Drafter())) == draft_layout(with_drafter(Drafter())) != ""

    @pytest.mark.parametrize("other", [Drafter(tied=True), Drafter(hidden=9), Drafter().double()])
    def test_tells_tying_sizes_and_types_apart(self, other: Drafter) -> None:
        assert draft_layout(with_drafter(Drafter())) != draft_layout(with_drafter(other)) != ""

    @pytest.mark.parametrize("drafter", [None, object(), SimpleNamespace(named_parameters=3)])
    def test_a_rank_without_one_reports_none(self, monkeypatch: pytest.MonkeyPatch, drafter: object) -> None:
        monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.0"))
        assert draft_layout(runner()) == draft_layout(with_drafter(drafter)) == ""
        assert "draft_layout" not in fingerprints(config(), with_drafter(drafter))


def drafting(drafter: torch.nn.Module, target: torch.nn.Module | None = None) -> SimpleNamespace:
    """A runner whose target is ``target``."""
    return SimpleNamespace(model=target or torch.nn.Module(), get_draft_model=lambda: drafter)


def drafter_config(hidden: int = 8, tied: bool = False) -> SimpleNamespace:
    return SimpleNamespace(hf_config=SimpleNamespace(hidden_size=hidden, tie_word_embeddings=tied))


class TestDraftFacts:
    """A rank's drafter is held against that rank's own configuration."""

    @pytest.mark.parametrize("tied", [False, True])
    def test_a_drafter_as_configured_is_told_in_the_same_words(self, tied: bool) -> None:
        configured, loaded = draft_facts(drafting(Drafter(tied=tied)), drafter_config(tied=tied))
        assert configured == loaded != ""

    @pytest.mark.parametrize("drafter", [Drafter(tied=True), Drafter(hidden=9)])
    def test_another_one_is_told_apart(self, drafter: Drafter) -> None:
        configured, loaded = draft_facts(drafting(drafter), drafter_config())
        assert configured != loaded

    @pytest.mark.parametrize("part", ["model.embed_tokens", "lm_head"])
    def test_what_is_shared_with_the_target_is_not_held_against_it(self, part: str) -> None:
        drafter = Drafter()
        target = torch.nn.Module()
        target.shared = drafter.get_submodule(part)
        configured, loaded = draft_facts(drafting(drafter, target), drafter_config(tied=True))
        assert configured == loaded != ""

    @pytest.mark.parametrize("drafter", [None, object()])
    def test_without_a_drafter_there_is_nothing_to_tell(self, drafter: object) -> None:
        assert draft_facts(with_drafter(drafter), drafter_config()) == ("", "")
