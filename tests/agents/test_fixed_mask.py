"""The mask: which rows a step broadcasts.

The cases are those published with vLLM's fix (PR 54436) and its successor.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagewatch.agents.mask import faulty_mask, finished_prefill_rows, fixed_mask, fixed_rows

T, F = True, False


def columns(*rows: tuple[int, ...]) -> list[np.ndarray]:
    return [np.array(column, np.int32) for column in zip(*rows, strict=True)]


def shown(mask: np.ndarray | None) -> list[bool] | None:
    return None if mask is None else mask.tolist()


class TestPublishedCases:
    """The eight cases, with their numbers."""

    @pytest.mark.parametrize(
        ("rows", "mask"),
        [
            pytest.param([(512, 4096, 448), (1000, 1004, 4)], [F, T], id="1-middle-chunk-and-final-chunk"),
            pytest.param([(0, 4096, 448), (512, 4096, 448)], None, id="2-middle-chunks-only"),
            pytest.param([(14176, 12175, 8)], [T], id="3-decoding-past-its-own-cap"),
            pytest.param([(10, 8, 1), (512, 4096, 448)], [T, F], id="4-decoding-and-middle-chunk"),
        ],
    )
    def test_of_release_0_30(self, rows: list[tuple[int, ...]], mask: list[bool] | None) -> None:
        computed, prefill, scheduled = columns(*rows)
        assert shown(fixed_mask(computed, scheduled, prefill)) == mask

    @pytest.mark.parametrize(
        ("rows", "mask"),
        [
            pytest.param([(1000, 1004, 4, 1005, 1)], None, id="5-final-chunk-whose-one-token-ends-it"),
            pytest.param([(1000, 1004, 4, 1260, 1)], [T], id="6-final-chunk-of-a-long-request"),
            pytest.param([(14176, 12175, 8, 12176, 0)], [T], id="7-decoding-past-a-cap-of-one-token"),
            pytest.param(
                [(1000, 1004, 4, 1005, 1), (10, 8, 1, 1024, 0)], [F, T], id="8-finished-prefill-and-decoding"
            ),
        ],
    )
    def test_of_release_0_31(self, rows: list[tuple[int, ...]], mask: list[bool] | None) -> None:
        computed, prefill, scheduled, cap, prefilling = columns(*rows)
        found = fixed_mask(
            computed, scheduled, prefill, is_prefilling=prefilling.astype(np.bool_), max_seq_len=cap
        )
        assert shown(found) == mask


class TestFaultyMask:
    """The predicate of vLLM 0.23 to 0.29: it drops what it predicts to finish."""

    def test_drops_the_published_row_that_goes_on_decoding(self) -> None:
        # GIVEN the row of case 3 with its own cap: the mirror is one block of 8 ahead of the truth, 14168
        computed, prefill, scheduled, cap = columns((14176, 12175, 8, 14175))
        # THEN the faulty mask drops it and the fixed mask keeps it
        assert shown(faulty_mask(computed, scheduled, prefill, cap)) is None
        assert shown(fixed_mask(computed, scheduled, prefill)) == [T]

    @pytest.mark.parametrize("k", [1, 3, 7])
    def test_excludes_k_true_lengths_below_the_cap_that_run_again(self, k: int) -> None:
        # GIVEN a decode row per true length, its mirror ahead by the one block of k + 1 in flight
        cap = 14175
        true_lengths = np.arange(cap - 40, cap - 2)
        prefill = np.full_like(true_lengths, 12175)
        found = faulty_mask(
            true_lengths + k + 1, np.full_like(prefill, k + 1), prefill, np.full_like(prefill, cap)
        )
        # THEN those from cap - (k + 2) to the last that is schedulable are dropped
        assert found is not None
        assert true_lengths[~found].tolist() == list(range(cap - (k + 2), cap - 2))

    def test_excludes_every_decode_step_of_a_short_answer(self) -> None:
        # Prompt 100, 8 tokens, k = 7: the mirror is 108, the cap, at the second decode step.
        computed, prefill, scheduled, cap = columns((108, 100, 8, 108))
        assert shown(faulty_mask(computed, scheduled, prefill, cap)) is None

    def test_keeps_a_row_far_from_its_cap(self) -> None:
        computed, prefill, scheduled, cap = columns((10, 8, 1, 1024), (512, 4096, 448, 8192))
        assert shown(faulty_mask(computed, scheduled, prefill, cap)) == [T, F]

    def test_counts_a_final_chunk_from_its_end(self) -> None:
        # The row of case 5, whose one token ends it; and one that has more to come.
        computed, prefill, scheduled, cap = columns((1000, 1004, 4, 1005), (1000, 1004, 4, 1006))
        assert shown(faulty_mask(computed, scheduled, prefill, cap)) == [F, T]

    def test_boundary_is_one_token_before_the_cap(self) -> None:
        computed, prefill, scheduled, cap = columns((98, 8, 1, 100), (99, 8, 1, 100))
        assert shown(faulty_mask(computed, scheduled, prefill, cap)) == [T, F]


def batches() -> st.SearchStrategy[list[np.ndarray]]:
    """(num_computed, num_scheduled, prefill_len, max_seq_len, is_prefilling) of a batch."""
    count = st.integers(0, 20_000)
    row = st.tuples(count, st.integers(1, 600), st.integers(1, 20_000), st.integers(1, 20_000), st.booleans())
    return st.lists(row, min_size=1, max_size=8).map(lambda rows: columns(*rows))


def refined(batch: list[np.ndarray]) -> np.ndarray:
    computed, scheduled, prefill, cap, prefilling = batch
    found = fixed_mask(
        computed, scheduled, prefill, is_prefilling=prefilling.astype(np.bool_), max_seq_len=cap
    )
    return np.zeros(len(computed), np.bool_) if found is None else found


class TestProperties:
    @settings(deadline=None)
    @given(batches())
    def test_only_a_chunk_that_is_not_the_last_is_excluded(self, batch: list[np.ndarray]) -> None:
        computed, scheduled, prefill, _, _ = batch
        assert fixed_rows(computed, scheduled, prefill).tolist() == [
            not c + s < p for c, s, p in zip(computed, scheduled, prefill, strict=True)
        ]

    @settings(deadline=None)
    @given(batches())
    def test_the_refinement_excludes_finished_prefills_besides_and_nothing_else(
        self, batch: list[np.ndarray]
    ) -> None:
        computed, scheduled, prefill, cap, prefilling = batch
        not_last = computed + scheduled < prefill
        finished = (prefilling == 1) & (prefill + 1 >= cap)
        assert (~refined(batch)).tolist() == (not_last | finished).tolist()

    @settings(deadline=None)
    @given(batches())
    def test_a_decoding_row_is_never_excluded(self, batch: list[np.ndarray]) -> None:
        computed, _, prefill, _, _ = batch
        batch[4] = np.zeros_like(computed)
        decoding = computed >= prefill
        assert refined(batch)[decoding].all()

    @settings(deadline=None)
    @given(batches(), st.randoms(use_true_random=False))
    def test_row_order_never_matters(self, batch: list[np.ndarray], random: object) -> None:
        order = list(range(len(batch[0])))
        random.shuffle(order)  # type: ignore[attr-defined]
        assert refined([column[order] for column in batch]).tolist() == refined(batch)[order].tolist()
        faulty = faulty_mask(*batch[:4])
        moved = faulty_mask(*[column[order] for column in batch[:4]])
        assert shown(moved) == (None if faulty is None else faulty[order].tolist())

    @settings(deadline=None)
    @given(batches())
    def test_all_prefill_gives_none(self, batch: list[np.ndarray]) -> None:
        computed, scheduled, _, _, _ = batch
        assert fixed_mask(computed, scheduled, computed + scheduled + 1) is None

    @settings(deadline=None)
    @given(batches())
    def test_none_and_a_mask_without_rows_are_one_thing(self, batch: list[np.ndarray]) -> None:
        computed, scheduled, prefill, cap, _ = batch
        for found in (
            fixed_mask(computed, scheduled, prefill),
            faulty_mask(computed, scheduled, prefill, cap),
        ):
            assert found is None or found.any()

    @settings(deadline=None)
    @given(batches())
    def test_the_faulty_mask_keeps_nothing_the_fixed_one_drops(self, batch: list[np.ndarray]) -> None:
        computed, scheduled, prefill, cap, _ = batch
        faulty = faulty_mask(computed, scheduled, prefill, cap)
        assert faulty is None or not (faulty & ~fixed_rows(computed, scheduled, prefill)).any()

    def test_inputs_are_left_alone(self) -> None:
        computed, prefill, scheduled, cap, prefilling = columns((1000, 1004, 4, 1005, 1))
        before = [column.copy() for column in (computed, prefill, scheduled, cap)]
        fixed_mask(computed, scheduled, prefill, is_prefilling=prefilling.astype(np.bool_), max_seq_len=cap)
        faulty_mask(computed, scheduled, prefill, cap)
        assert all(map(np.array_equal, before, (computed, prefill, scheduled, cap)))

    def test_half_a_refinement_is_refused(self) -> None:
        computed, prefill, scheduled, cap = columns((1000, 1004, 4, 1005))
        with pytest.raises(ValueError, match="give both or neither"):
            fixed_mask(computed, scheduled, prefill, max_seq_len=cap)
        with pytest.raises(ValueError, match="give both or neither"):
            fixed_mask(computed, scheduled, prefill, is_prefilling=np.ones(1, np.bool_))

    def test_finished_prefill_needs_both_the_prefill_and_the_cap(self) -> None:
        _, prefill, _, cap, prefilling = columns(
            (1000, 1004, 4, 1005, 1), (1000, 1004, 4, 1006, 1), (1000, 1004, 4, 1005, 0)
        )
        assert finished_prefill_rows(prefilling.astype(np.bool_), prefill, cap).tolist() == [T, F, F]
