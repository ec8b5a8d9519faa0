"""Evidence: what leaves the node says the same whatever the batching, and holds no token."""

import pickle
import tracemalloc
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from foundation_records import bodies, body_of, decoding, identity
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from stagewatch.agents.digest import Digester
from stagewatch.agents.evidence import (
    DRAFTS_ALL_ZERO,
    FEED_IS_STATE,
    SUSPECT_COUNTS,
    SUSPECT_ID_BEYOND_VOCAB,
    SUSPECT_ID_NEGATIVE,
    SUSPECT_POSITION,
    Block,
    Evidence,
    digest_records,
    join,
    slice_steps,
)
from stagewatch.agents.record import (
    COLUMNS_MAX,
    Bind,
    Body,
    Collective,
    Free,
    Heartbeat,
    Inputs,
    Kind,
    Mask,
    Note,
    Payload,
    Record,
)

WHO = identity(spec_tokens=3, vocab_size=1000, max_model_len=500)
DIGESTER = Digester(bytes(range(16)))
PARTS = [field.name for field in fields(Evidence) if "Block" in str(field.type)]
any_body = st.sampled_from(list(Kind)).flatmap(lambda kind: st.tuples(st.just(kind), bodies(kind)))


def numbered(made: Sequence[tuple[Kind, Body]], first: int = 0) -> list[Record]:
    return [Record(kind, first + at, 10 * (first + at), 3 * at, body) for at, (kind, body) in enumerate(made)]


def digested(records: Sequence[Record], **options: Any) -> Evidence:
    return digest_records(records, WHO, DIGESTER, **options)


def equal(one: Block | None, other: Block | None) -> bool:
    """Whether two blocks hold the same in columns of the same dtype."""
    if one is None or other is None:
        return one is other
    for field in fields(one):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if isinstance(a, list):
            if a != b:
                return False
        elif a.dtype != b.dtype or a.shape != b.shape or not np.array_equal(a, b):
            return False
    return True


def inputs(body: Inputs) -> Any:
    found = digested(numbered([(Kind.INPUTS, body)])).inputs
    assert found is not None
    return found


def sent(body: Payload) -> Any:
    found = digested(numbered([(Kind.SENT, body)])).sent
    assert found is not None
    return found


class TestBatching:
    @settings(deadline=None)
    @given(st.lists(any_body, min_size=1, max_size=12), st.booleans())
    def test_together_or_one_by_one(self, made: list[tuple[Kind, Body]], raw: bool) -> None:
        # Steps of different K and width among them, zero rows included
        records = numbered(made)
        together = digested(records, raw=raw)
        alone = [digested([each], raw=raw) for each in records]
        for part in PARTS:
            blocks = [getattr(each, part) for each in alone if getattr(each, part) is not None]
            assert equal(getattr(together, part), join(blocks) if blocks else None)

    @settings(deadline=None)
    @given(st.lists(any_body, min_size=1, max_size=12), st.booleans(), st.data())
    def test_what_is_sliced_joins_again(
        self, made: list[tuple[Kind, Body]], raw: bool, data: st.DataObject
    ) -> None:
        evidence = digested(numbered(made), raw=raw)
        for part in PARTS:
            block = getattr(evidence, part)
            if block is None:
                continue
            cut = data.draw(st.integers(0, len(block.seq)))
            pieces = [slice_steps(block, 0, cut), slice_steps(block, cut, len(block.seq))]
            assert equal(join(pieces), block)
            for at in range(len(block.seq)):
                one = digested([each for each in numbered(made) if each.seq == block.seq[at]], raw=raw)
                assert equal(slice_steps(block, at, at + 1), getattr(one, part))

    def test_numbers_covered_and_lost(self) -> None:
        found = digested(numbered([(Kind.NOTE, Note("a")), (Kind.MASK, body_of(Kind.MASK))], 41), lost=5)
        assert (found.first_seq, found.next_seq, found.lost) == (41, 43, 5)

    def test_an_empty_table_of_any_width_takes_no_memory(self) -> None:
        # GIVEN a step without rows whose tables claim all the columns there may be, beside many rows
        empty = body_of(Kind.SENT, rows=0)
        wide = np.zeros((0, COLUMNS_MAX), np.int32)
        assert isinstance(empty, Payload)
        records = numbered(
            [
                (Kind.SENT, replace(empty, tokens=wide, draft_tokens=wide)),
                (Kind.SENT, body_of(Kind.SENT, rows=10_000)),
            ]
        )
        # THEN it is told as it is, and the rows of the other step do not become as wide
        tracemalloc.start()
        found = digested(records).sent
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert found is not None
        assert (found.rows.tolist(), found.width.tolist()) == ([0, 10_000], [COLUMNS_MAX, 4])
        assert peak_bytes < 10_000 * 1000

    def test_a_draft_count_beyond_the_table_says_the_same_in_any_company(self) -> None:
        odd = replace(decoding(rows=2, drafts=1), draft_count=np.array([5, 1], np.int32))
        alone = inputs(odd)
        beside = digested(numbered([(Kind.INPUTS, odd), (Kind.INPUTS, decoding(rows=1, drafts=7))])).inputs
        assert beside is not None
        assert beside.draft_digest[:2].tolist() == alone.draft_digest.tolist()


class TestColumns:
    def test_inputs_say_what_the_record_says(self) -> None:
        body = decoding(5, rows=4, drafts=3)
        found = inputs(body)
        for name in (
            "request",
            "slot",
            "generation",
            "mirror",
            "computed",
            "prefill_len",
            "scheduled",
            "draft_count",
            "cap",
            "prefilling",
        ):
            assert getattr(found, name).tolist() == getattr(body, name).tolist()
        assert (found.rows.tolist(), found.drafts.tolist(), found.tick.tolist()) == ([4], [3], [5])
        assert found.position.tolist() == (np.arange(4) + 100).tolist()
        window = body.input_ids.reshape(4, 4)
        assert found.ids_digest.tolist() == DIGESTER.prefixes(window, np.full(4, 4, np.int32)).tolist()
        assert found.last_digest.tolist() == DIGESTER.single(body.last_sampled).tolist()
        assert (
            found.draft_digest.tolist()
            == DIGESTER.prefixes(body.draft_tokens, np.full(4, 3, np.int32)).tolist()
        )

    def test_only_the_used_part_of_a_draft_block_counts(self) -> None:
        body = replace(decoding(rows=2, drafts=3), draft_count=np.array([1, 3], np.int32))
        other = replace(body, draft_tokens=body.draft_tokens + np.array([[0, 1, 1], [0, 0, 0]], np.int32))
        assert inputs(body).draft_digest.tolist() == inputs(other).draft_digest.tolist()
        used = replace(body, draft_tokens=body.draft_tokens + np.array([[1, 0, 0], [0, 0, 1]], np.int32))
        assert not np.equal(inputs(body).draft_digest, inputs(used).draft_digest).any()

    @pytest.mark.parametrize("change", [[0, 1, 2, 4], [0, 2, 1, 3], [0, 0, 1, 2], [0, 1, 2, 3]])
    def test_the_shape_of_positions_is_told_from_where_they_start(self, change: list[int]) -> None:
        even = np.arange(4)
        body = replace(
            decoding(rows=2, drafts=3), positions=np.concatenate([100 + even, 7 + np.array(change)])
        )
        found = inputs(replace(body, positions=body.positions.astype(np.int32)))
        assert found.position.tolist() == [100, 7]
        same_shape = bool(found.position_shape[0] == found.position_shape[1])
        assert same_shape == (change == [0, 1, 2, 3])

    def test_a_row_that_is_fed_nothing(self) -> None:
        body = decoding(rows=2, drafts=1)
        found = inputs(
            replace(
                body,
                scheduled=np.array([0, 2], np.int32),
                input_ids=body.input_ids[2:],
                positions=body.positions[2:],
            )
        )
        assert found.position.tolist() == [0, 101]
        assert found.position_shape[0] == 0

    def test_what_a_payload_leaves_undefined_does_not_count(self) -> None:
        # Columns past num_sampled are uninitialised memory in the engine.
        body = body_of(Kind.SENT, rows=3, width=4)
        assert isinstance(body, Payload)
        body = replace(body, num_sampled=np.array([0, 2, 4], np.int32), tokens=body.tokens % 1000)
        noise = body.tokens.copy()
        noise[0], noise[1, 2:] = -7, 5000
        one, other = sent(body), sent(replace(body, tokens=noise))
        assert equal(one, other)
        # while the tokens before do, and the last of them has a digest of its own
        assert one.last_digest[0] == 0
        assert one.last_digest[1:].tolist() == DIGESTER.single(body.tokens[[1, 2], [1, 3]]).tolist()
        early, last = body.tokens.copy(), body.tokens.copy()
        early[1, 0] += 1
        last[1, 1] += 1
        assert sent(replace(body, tokens=early)).tokens_digest[1] != one.tokens_digest[1]
        assert sent(replace(body, tokens=early)).last_digest[1] == one.last_digest[1]
        assert sent(replace(body, tokens=last)).last_digest[1] != one.last_digest[1]

    def test_sent_and_fed_tokens_have_the_same_digest(self) -> None:
        # The checks follow a sampled token from the payload to the next step's inputs.
        feed = decoding(rows=4, drafts=3)
        payload = body_of(Kind.SENT, rows=4, width=2, drafts=3)
        assert isinstance(payload, Payload)
        payload = replace(
            payload,
            num_sampled=np.full(4, 2, np.int32),
            tokens=np.stack([feed.last_sampled + 1, feed.last_sampled], axis=1),
            draft_tokens=feed.draft_tokens,
        )
        assert sent(payload).last_digest.tolist() == inputs(feed).last_digest.tolist()
        assert sent(payload).draft_digest.tolist() == inputs(feed).draft_digest.tolist()

    def test_masks_and_their_absence(self) -> None:
        masks = [
            Mask(1, 0, np.array([0, 0], np.uint8), np.array([0, 1], np.uint8)),
            Mask(0, 0, np.array([1], np.uint8), np.array([1], np.uint8)),
        ]
        found = digested(numbered([(Kind.MASK, mask) for mask in masks])).mask
        assert found is not None
        assert (found.engine_none.tolist(), found.rows.tolist()) == ([1, 0], [2, 1])
        assert (found.engine.tolist(), found.fixed.tolist()) == ([0, 0, 1], [0, 1, 1])

    def test_events_keep_what_each_kind_has(self) -> None:
        made: list[tuple[Kind, Body]] = [
            (Kind.BIND, Bind(3, 4, 5, 6, 2**64 - 1, "request")),
            (Kind.FREE, Free(3, 4, 7)),
            (Kind.COLLECTIVE, Collective(1, 2**40, 2, "g op int64")),
            (Kind.HEARTBEAT, Heartbeat("{}")),
            (Kind.NOTE, Note("armed")),
        ]
        found = digested(numbered(made)).events
        assert found is not None
        assert found.kind.tolist() == [kind for kind, _ in made]
        assert found.slot.tolist() == [3, 3, 0, 0, 0]
        assert found.generation.tolist() == [4, 4, 0, 0, 0]
        assert found.request.tolist() == [2**64 - 1, 7, 0, 0, 0]
        assert (found.prompt_len.tolist(), found.cap.tolist()) == ([5, 0, 0, 0, 0], [6, 0, 0, 0, 0])
        assert found.numel.tolist() == [0, 0, 2**40, 0, 0]
        assert found.text == ["request", "", "g op int64", "{}", "armed"]

    def test_numbers_too_wide_for_a_column_wrap(self) -> None:
        # A ring may hold any; the sidecar must not stumble over it.
        found = digested(numbered([(Kind.BIND, Bind(2**40 + 1, -(2**63), 2**62, 2**31, 0, ""))])).events
        assert found is not None
        assert (found.slot.tolist(), found.generation.tolist(), found.cap.tolist()) == ([1], [0], [-(2**31)])
        assert inputs(replace(decoding(), graph_mode=2**40 + 3)).graph_mode.tolist() == [3]


def flags_of(flag: int, block: Any) -> list[bool]:
    return [bool(flags & flag) for flags in block.flags.tolist()]


class TestFlags:
    """Of three rows, the middle one is bad."""

    BODY = decoding(3, rows=3, drafts=3, vocab=900)

    def with_middle(self, column: str, index: int, value: int) -> Inputs:
        changed = getattr(self.BODY, column).copy()
        changed[4 + index] = value
        return replace(self.BODY, **{column: changed})

    def test_a_sound_step_has_none_but_that_it_feeds_its_state(self) -> None:
        assert inputs(self.BODY).flags.tolist() == [FEED_IS_STATE] * 3

    @pytest.mark.parametrize(
        ("column", "value", "flag"),
        [
            ("input_ids", -1, SUSPECT_ID_NEGATIVE),
            ("input_ids", 1000, SUSPECT_ID_BEYOND_VOCAB),
            ("positions", -1, SUSPECT_POSITION),
            ("positions", 500, SUSPECT_POSITION),
        ],
    )
    @pytest.mark.parametrize("index", [0, 3], ids=["first", "last"])
    def test_ids_and_positions_out_of_range(self, column: str, value: int, flag: int, index: int) -> None:
        assert flags_of(flag, inputs(self.with_middle(column, index, value))) == [False, True, False]

    @pytest.mark.parametrize(("column", "value"), [("input_ids", 999), ("positions", 499), ("positions", 0)])
    def test_the_last_that_are_in_range(self, column: str, value: int) -> None:
        suspects = SUSPECT_ID_NEGATIVE | SUSPECT_ID_BEYOND_VOCAB | SUSPECT_POSITION
        assert flags_of(suspects, inputs(self.with_middle(column, 1, value))) == [False] * 3

    def test_limits_that_the_engine_does_not_tell(self) -> None:
        body = self.with_middle("input_ids", 0, 2**31 - 1)
        untold = identity(vocab_size=-1, max_model_len=-1)
        found = digest_records(numbered([(Kind.INPUTS, body)]), untold, DIGESTER).inputs
        assert flags_of(SUSPECT_ID_BEYOND_VOCAB, found) == [False] * 3

    @pytest.mark.parametrize("index", range(4))
    def test_a_feed_that_is_not_the_state(self, index: int) -> None:
        found = inputs(self.with_middle("input_ids", index, 950))
        assert flags_of(FEED_IS_STATE, found) == [True, False, True]

    def test_a_feed_of_another_length_is_not_the_state(self) -> None:
        body = replace(self.BODY, draft_count=np.array([3, 2, 3], np.int32))
        assert flags_of(FEED_IS_STATE, inputs(body)) == [True, False, True]

    def test_without_drafts_the_state_is_the_last_token(self) -> None:
        body = decoding(rows=3, drafts=0)
        body.input_ids[1] += 1
        assert flags_of(FEED_IS_STATE, inputs(body)) == [True, False, True]

    def test_drafts_that_never_arrived(self) -> None:
        drafts = self.BODY.draft_tokens.copy()
        drafts[1] = 0
        drafts[2] = [0, 0, 5]
        body = replace(self.BODY, draft_tokens=drafts)
        assert flags_of(DRAFTS_ALL_ZERO, inputs(body)) == [False, True, False]
        fewer = replace(body, draft_count=np.array([0, 0, 2], np.int32))
        assert flags_of(DRAFTS_ALL_ZERO, inputs(fewer)) == [False, False, True]

    @pytest.mark.parametrize(
        ("sampled", "rejected", "suspect"),
        [
            (4, 0, False),
            (1, 3, False),
            (0, 0, False),
            (5, 0, True),
            (2, 3, True),
            (-1, 0, True),
            (1, -1, True),
        ],
    )
    def test_counts_of_a_payload(self, sampled: int, rejected: int, suspect: bool) -> None:
        body = replace(self.payload(), num_sampled=column(1, sampled, 1), num_rejected=column(0, rejected, 0))
        assert flags_of(SUSPECT_COUNTS, sent(body)) == [False, suspect, False]

    def test_counts_that_would_overflow(self) -> None:
        most = 2**31 - 1
        body = replace(self.payload(), num_sampled=column(1, most, 1), num_rejected=column(0, most, 0))
        assert flags_of(SUSPECT_COUNTS, sent(body)) == [False, True, False]

    @pytest.mark.parametrize(("value", "flag"), [(-1, SUSPECT_ID_NEGATIVE), (1000, SUSPECT_ID_BEYOND_VOCAB)])
    @pytest.mark.parametrize("at", range(4))
    def test_sampled_ids_where_they_are_defined(self, value: int, flag: int, at: int) -> None:
        tokens = np.ones((3, 4), np.int32)
        tokens[1, at] = value
        body = replace(self.payload(), num_sampled=column(2, 2, 2), tokens=tokens)
        assert flags_of(flag, sent(body)) == [False, at < 2, False]

    def payload(self) -> Payload:
        body = body_of(Kind.SENT, rows=3, width=4, drafts=3)
        assert isinstance(body, Payload)
        zeros = np.zeros(3, np.int32)
        return replace(body, num_sampled=zeros, num_rejected=zeros, tokens=np.ones((3, 4), np.int32))


def column(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


class TestPrivacy:
    """Tokens leave the node only if the operator opts in."""

    PLANTED = (0x1BADB002, 0x7EADBEE1, 0x5AFEC0DE)

    def records(self) -> list[Record]:
        """Every token column of every kind holds planted values and nothing else."""
        fed, held, drafted = self.PLANTED
        step = decoding(rows=3, drafts=3)
        step = replace(
            step,
            input_ids=np.full_like(step.input_ids, fed),
            last_sampled=np.full_like(step.last_sampled, held),
            draft_tokens=np.full_like(step.draft_tokens, drafted),
        )
        payload = body_of(Kind.SENT, rows=3, width=4, drafts=3)
        assert isinstance(payload, Payload)
        payload = replace(
            payload,
            num_sampled=column(0, 2, 4),
            tokens=np.full((3, 4), fed, np.int32),
            draft_tokens=np.full((3, 3), drafted, np.int32),
        )
        return numbered(
            [(Kind.INPUTS, step), *((kind, payload) for kind in (Kind.SENT, Kind.RECEIVED, Kind.CONSUMED))]
        )

    def found(self, evidence: Evidence) -> list[int]:
        """Planted values whose bytes are anywhere in the evidence, as an integer of any width or as text."""
        leaving = pickle.dumps(evidence)
        forms = {
            value: (value.to_bytes(4, "little"), value.to_bytes(4, "big"), str(value).encode())
            for value in self.PLANTED
        }
        return [value for value, spelt in forms.items() if any(form in leaving for form in spelt)]

    def test_no_token_leaves(self) -> None:
        assert self.found(digested(self.records())) == []

    def test_all_of_them_do_where_the_operator_opted_in(self) -> None:
        # Which shows, too, that the search above would find one.
        evidence = digested(self.records(), raw=True)
        assert self.found(evidence) == list(self.PLANTED)
        assert evidence.inputs is not None and evidence.sent is not None
        assert evidence.inputs.raw_ids.tolist() == [self.PLANTED[0]] * 12
        assert evidence.sent.raw_tokens.tolist() == [self.PLANTED[0]] * 12
