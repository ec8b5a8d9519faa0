"""The verdict on a mask comes from running it on the published cases."""

from typing import Any

import numpy as np
import pytest
from standins import faulty, plain, refined

from stagewatch.agents.engines.vllm_mask import CASES, StandInBatch, judge_mask, sound_mask


def cases_wrong(mask: Any, is_refined: bool) -> list[int]:
    """Numbers of the published cases that ``mask`` gets wrong."""
    return [result.number for result in judge_mask(mask, refined=is_refined).results if not result.passed]


class TestPublishedCases:
    @pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.number))
    def test_the_sound_mask_answers_as_published(self, case: Any) -> None:
        batch = StandInBatch(case.rows)
        found = sound_mask(batch, refined=True, max_seq_len=batch.max_seq_len_np)
        assert (None if found is None else tuple(found.tolist())) == case.sound


class TestVerdict:
    def test_the_refined_mask_is_sound_for_its_variant(self) -> None:
        assert judge_mask(refined, refined=True).verdict == "sound"
        assert cases_wrong(refined, True) == []

    def test_the_plain_mask_is_sound_for_its_variant(self) -> None:
        assert judge_mask(plain, refined=False).verdict == "sound"
        assert cases_wrong(plain, False) == []

    @pytest.mark.parametrize("is_refined", [False, True])
    def test_the_old_mask_is_faulty_whatever_the_variant(self, is_refined: bool) -> None:
        found = judge_mask(faulty, refined=is_refined)
        assert found.verdict == "faulty"
        assert {3, 7} <= set(cases_wrong(faulty, is_refined))

    def test_a_mask_that_lets_unfinished_chunks_through_is_no_known_fault(self) -> None:
        everything = lambda batch: np.ones(batch.num_reqs, np.bool_)  # noqa: E731
        found = judge_mask(everything, refined=True)
        assert found.verdict == "unknown"
        assert "no known fault explains" in found.why

    def test_a_mask_that_drops_only_prefilling_rows_is_no_known_fault(self) -> None:
        """GIVEN B's shape with C's refinement THEN nothing that decodes is lost, and nothing is claimed."""
        assert judge_mask(refined, refined=False).verdict == "unknown"

    def test_a_mask_that_cannot_be_run_is_unknown_with_its_error(self) -> None:
        def needs_more(batch: Any) -> None:
            raise AttributeError("no field canvas")

        found = judge_mask(needs_more, refined=True)
        assert found.verdict == "unknown"
        assert "AttributeError: no field canvas" in found.why
