"""The fixed mask replaces a proven fault on all ranks or on none."""

import sys
from datetime import timedelta
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch.distributed
from standins import Pipeline, Request, expected_text

from stagewatch.agents.engines.vllm_hotfix import Ballot, Hotfix
from stagewatch.agents.engines.vllm_mask import CASES, StandInBatch
from stagewatch.agents.engines.vllm_variants import inspect_engine


class Prepared:
    """A stand-in pipeline whose ranks ask for the fixed mask."""

    def __init__(self, variant: str, store: torch.distributed.Store, ranks: tuple[int, ...] = (0, 1)) -> None:
        self.pipeline = Pipeline(variant)
        self.store = store
        self.notes: dict[int, list[str]] = {}
        self.hotfixes: dict[int, Hotfix] = {}
        for rank in ranks:
            self.prepare(rank)

    def prepare(self, rank: int) -> None:
        """Judge and vote on one rank."""
        found = self.pipeline.ranks[rank]
        notes = self.notes.setdefault(rank, [])
        hotfix = Hotfix(found.runner, found.pp_utils, inspect_engine(found.engine), notes.append)
        hotfix.prepare(lambda: Ballot(self.store, rank, 2))
        self.hotfixes[rank] = hotfix

    def in_force(self) -> list[bool]:
        """Per rank, whether the mask is replaced."""
        return [hotfix.in_force for hotfix in self.hotfixes.values()]


@pytest.fixture
def store(tmp_path: Path) -> torch.distributed.Store:
    """A store as torch.distributed makes it, on a port of its own."""
    return torch.distributed.TCPStore(
        "127.0.0.1", 0, world_size=1, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10)
    )


REQUEST = Request("r", [1, 2], 9)


class TestAgreement:
    def test_all_ranks_replace_a_faulty_mask_at_their_first_step(
        self, store: torch.distributed.Store
    ) -> None:
        prepared = Prepared("A+relay", store)
        assert prepared.in_force() == [False, False]
        served = prepared.pipeline.serve([REQUEST])
        assert prepared.in_force() == [True, True]
        assert served["r"][:9] == expected_text(REQUEST)
        decoding = StandInBatch(CASES[2].rows)
        for rank in prepared.pipeline.ranks:
            rank.runner.req_states.max_seq_len[0] = decoding.max_seq_len_np[0]
            assert rank.pp_utils.compute_need_sampled_mask(decoding).tolist() == [True]
        assert all(notes[-1].startswith("FIXED MASK IN FORCE") for notes in prepared.notes.values())

    def test_none_does_where_one_rank_did_not_ask(self, store: torch.distributed.Store) -> None:
        prepared = Prepared("A+relay", store, ranks=(0,))
        prepared.pipeline.serve([REQUEST])
        assert prepared.in_force() == [False]
        assert "not every rank asked for it" in prepared.notes[0][-1]

    def test_a_vote_that_comes_too_late_changes_nothing(self, store: torch.distributed.Store) -> None:
        """GIVEN a rank that took its first step alone WHEN the other votes THEN both keep their mask."""
        prepared = Prepared("A+relay", store, ranks=(0,))
        prepared.pipeline.ranks[0].runner.execute_model(None, None, True)
        prepared.prepare(1)
        prepared.pipeline.serve([REQUEST])
        assert prepared.in_force() == [False, False]

    def test_none_does_where_ranks_have_different_grounds(self, store: torch.distributed.Store) -> None:
        """GIVEN two nodes with different code WHEN both find a fault THEN neither replaces its mask."""
        prepared = Prepared("A+relay", store, ranks=(0,))
        store.set("stagewatch/fixed-mask/1", "another engine's results")
        prepared.pipeline.serve([REQUEST])
        assert prepared.in_force() == [False]

    def test_a_store_that_fails_leaves_the_engine_running_on_its_own_mask(
        self, store: torch.distributed.Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        prepared = Prepared("A+relay", store)

        def gone(*_: object) -> bool:
            raise RuntimeError("connection reset")

        monkeypatch.setattr(Ballot, "settle", gone)
        assert prepared.pipeline.serve([REQUEST])["r"][:9] == expected_text(REQUEST)
        assert prepared.in_force() == [False, False]
        assert "connection reset" in prepared.notes[0][-1]


class TestRefusal:
    @pytest.mark.parametrize("variant", ["B", "C", "D"])
    def test_a_sound_mask_is_kept(self, store: torch.distributed.Store, variant: str) -> None:
        prepared = Prepared(variant, store)
        assert prepared.notes[0] == prepared.notes[1]
        assert prepared.notes[0][0].startswith("fixed mask refused: the engine's own mask is sound")
        assert not store.check(["stagewatch/fixed-mask/0"])

    def test_a_mask_that_another_module_holds_too_is_kept(
        self, store: torch.distributed.Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """GIVEN a fork whose runner imported the mask by name THEN it is not replaced in one place of two."""
        prepared = Prepared("A+relay", store, ranks=())
        runner = ModuleType("vllm.v1.worker.gpu.model_runner")
        runner.need = prepared.pipeline.ranks[0].pp_utils.compute_need_sampled_mask  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, runner.__name__, runner)
        prepared.prepare(0)
        (note,) = prepared.notes[0]
        assert note.startswith("fixed mask refused: vllm.v1.worker.gpu.model_runner would go on using")
        assert not store.check(["stagewatch/fixed-mask/0"])

    def test_a_mask_that_no_known_fault_explains_is_kept(self, store: torch.distributed.Store) -> None:
        prepared = Prepared("A+relay", store, ranks=())
        for rank in prepared.pipeline.ranks:
            rank.pp_utils.compute_need_sampled_mask = lambda batch: np.ones(batch.num_reqs, np.bool_)
        prepared.prepare(0)
        assert "in a way no known fault explains" in prepared.notes[0][0]
        assert prepared.in_force() == [False]
