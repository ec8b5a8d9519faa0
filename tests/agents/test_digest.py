"""Digests: keyed, order-sensitive, and the same whatever the company."""

from hashlib import blake2b

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagewatch.agents.digest import _INITIAL, KEY_SIZE, VECTOR_MAX, Digester, siphash
from stagewatch.agents.errors import SettingsError

KEY = bytes(range(KEY_SIZE))
MASK = 2**64 - 1

# First words of the table `vectors_sip64` of the SipHash reference: key 00 01 .. 0f, message 00 01 .. of
# each length. The one of length 15 is the worked example of Aumasson and Bernstein (2012), appendix A.
SIPHASH_2_4 = {
    0: 0x726FDB47DD0E0E31,
    1: 0x74F839C593DC67FD,
    2: 0x0D6C8009D9A94F5A,
    3: 0x85676696D7FB7E2D,
    4: 0xCF2794E0277187B7,
    5: 0x18765564CD99A68D,
    6: 0xCBC9466E58FEE3CE,
    7: 0xAB0200F58B01D137,
    8: 0x93F5F5799A932462,
    9: 0x9E0082DF0BA9E4B0,
    15: 0xA129CA6149BE45E5,
}


def words_of(message: bytes) -> list[int]:
    """A message as SipHash reads it: its words, the last filled up and with its length on top."""
    whole = message + bytes(7 - len(message) % 8) + bytes([len(message) % 256])
    return [int.from_bytes(whole[i : i + 8], "little") for i in range(0, len(whole), 8)]


def scalar_siphash(key: bytes, message: bytes, compression: int, final: int) -> int:
    """SipHash after its paper, one message at a time and in plain integers."""

    def rotl(value: int, bits: int) -> int:
        return (value << bits | value >> 64 - bits) & MASK

    def rounds(count: int) -> None:
        nonlocal v0, v1, v2, v3
        for _ in range(count):
            v0, v2 = (v0 + v1) & MASK, (v2 + v3) & MASK
            v1, v3 = rotl(v1, 13) ^ v0, rotl(v3, 16) ^ v2
            v0 = rotl(v0, 32)
            v2, v0 = (v2 + v1) & MASK, (v0 + v3) & MASK
            v1, v3 = rotl(v1, 17) ^ v2, rotl(v3, 21) ^ v0
            v2 = rotl(v2, 32)

    k0, k1 = (int.from_bytes(key[i : i + 8], "little") for i in (0, 8))
    v0, v1, v2, v3 = k0 ^ _INITIAL[0], k1 ^ _INITIAL[1], k0 ^ _INITIAL[2], k1 ^ _INITIAL[3]
    for word in words_of(message):
        v3 ^= word
        rounds(compression)
        v0 ^= word
    v2 ^= 0xFF
    rounds(final)
    return v0 ^ v1 ^ v2 ^ v3


def start_of(key: bytes) -> tuple[np.uint64, ...]:
    halves = [int.from_bytes(key[i : i + 8], "little") for i in (0, 8)] * 2
    return tuple(np.uint64(word ^ half) for word, half in zip(_INITIAL, halves, strict=True))


def rows_of(*rows: list[int]) -> tuple[np.ndarray, np.ndarray]:
    return (
        np.array([token for row in rows for token in row], np.int32),
        np.array([len(row) for row in rows], np.int32),
    )


tokens = st.integers(-(2**31), 2**31 - 1)
row = st.lists(tokens, max_size=9) | st.lists(tokens, min_size=60, max_size=70)
batch = st.lists(row, min_size=1, max_size=9)


class TestSipHash:
    @pytest.mark.parametrize("length", SIPHASH_2_4)
    def test_published_vectors(self, length: int) -> None:
        message = bytes(range(length))
        words = [np.array([word], np.uint64) for word in words_of(message)]
        assert siphash(words, 1, start_of(KEY), 2, 4).tolist() == [SIPHASH_2_4[length]]
        assert scalar_siphash(KEY, message, 2, 4) == SIPHASH_2_4[length]

    def test_messages_of_different_lengths_at_once(self) -> None:
        lengths = (15, 9, 8, 7, 0)
        messages = [words_of(bytes(range(length))) for length in lengths]
        words = [
            np.array([message[at] for message in messages if len(message) > at], np.uint64) for at in (0, 1)
        ]
        found = siphash(words, len(lengths), start_of(KEY), 2, 4).tolist()
        assert found == [SIPHASH_2_4[length] for length in lengths]

    @settings(deadline=None)
    @given(st.binary(min_size=KEY_SIZE, max_size=KEY_SIZE), batch)
    def test_rows_are_siphash_1_3_of_their_bytes_and_long_ones_keyed_blake2b(
        self, key: bytes, rows: list[list[int]]
    ) -> None:
        def expected(row: list[int]) -> int:
            message = np.array(row, "<i4").tobytes()
            if len(row) > VECTOR_MAX:
                return int.from_bytes(blake2b(message, key=key, digest_size=8).digest(), "little")
            return scalar_siphash(key, message, 1, 3)

        assert Digester(key).ragged(*rows_of(*rows)).tolist() == [expected(row) for row in rows]

    def test_the_longest_row_digested_with_others_and_the_next(self) -> None:
        row = list(range(VECTOR_MAX + 1))
        [short, long] = Digester(KEY).ragged(*rows_of(row[:-1], row)).tolist()
        assert short == scalar_siphash(KEY, np.array(row[:-1], "<i4").tobytes(), 1, 3)
        message = np.array(row, "<i4").tobytes()
        assert long == int.from_bytes(blake2b(message, key=KEY, digest_size=8).digest(), "little")


class TestCompany:
    """A row's digest depends on the row and the key, and on nothing else."""

    @settings(deadline=None)
    @given(batch)
    def test_alone_or_among_others(self, rows: list[list[int]]) -> None:
        digester = Digester(KEY)
        together = digester.ragged(*rows_of(*rows)).tolist()
        assert together == [int(digester.ragged(*rows_of(row))[0]) for row in rows]

    @settings(deadline=None)
    @given(batch, st.randoms(use_true_random=False))
    def test_in_any_order(self, rows: list[list[int]], random: object) -> None:
        order = list(range(len(rows)))
        random.shuffle(order)  # type: ignore[attr-defined]
        digester = Digester(KEY)
        moved = digester.ragged(*rows_of(*[rows[i] for i in order])).tolist()
        assert moved == digester.ragged(*rows_of(*rows))[order].tolist()

    @settings(deadline=None)
    @given(batch, st.integers(0, 3))
    def test_ragged_prefixes_and_rows_agree(self, rows: list[list[int]], spare: int) -> None:
        flat, lengths = rows_of(*rows)
        table = np.full((len(rows), int(lengths.max()) + spare), 77, np.int32)
        for index, row in enumerate(rows):
            table[index, : len(row)] = row
        digester = Digester(KEY)
        expected = digester.ragged(flat, lengths).tolist()
        assert digester.prefixes(table, lengths).tolist() == expected
        assert digester.prefixes(np.asfortranarray(table), lengths).tolist() == expected
        starts = np.arange(len(rows), dtype=np.int64)[::-1] * table.shape[1]
        assert digester.rows(table[::-1].reshape(-1), starts, lengths).tolist() == expected

    @settings(deadline=None)
    @given(st.lists(tokens, min_size=1, max_size=20))
    def test_single_tokens_are_rows_of_one(self, row: list[int]) -> None:
        digester = Digester(KEY)
        column = np.array(row, np.int32)
        expected = digester.ragged(column, np.ones(len(row), np.int32)).tolist()
        assert digester.single(column).tolist() == expected
        assert digester.single(np.repeat(column, 2)[::2]).tolist() == expected

    def test_no_rows_and_empty_rows(self) -> None:
        digester = Digester(KEY)
        nothing = np.zeros(0, np.int32)
        assert digester.ragged(nothing, nothing).shape == (0,)
        assert digester.single(nothing).shape == (0,)
        assert digester.prefixes(np.zeros((0, 7), np.int32), nothing).shape == (0,)
        empty = scalar_siphash(KEY, b"", 1, 3)
        assert digester.prefixes(np.zeros((2, 0), np.int32), np.zeros(2, np.int32)).tolist() == [empty] * 2
        assert digester.ragged(*rows_of([], [1], []))[[0, 2]].tolist() == [empty] * 2


class TestSensitivity:
    @settings(deadline=None)
    @given(st.lists(tokens, min_size=1, max_size=80), st.data())
    def test_every_token_and_every_bit_of_it_counts(self, row: list[int], data: st.DataObject) -> None:
        at, bit = data.draw(st.integers(0, len(row) - 1)), data.draw(st.integers(0, 31))
        changed = np.array(row, np.int32)
        changed.view(np.uint32)[at] ^= np.uint32(1 << bit)
        digester = Digester(KEY)
        lengths = np.array([len(row)], np.int32)
        assert digester.ragged(changed, lengths) != digester.ragged(np.array(row, np.int32), lengths)

    @settings(deadline=None)
    @given(st.lists(tokens, min_size=2, max_size=80, unique=True), st.data())
    def test_order_counts(self, row: list[int], data: st.DataObject) -> None:
        a, b = data.draw(st.lists(st.integers(0, len(row) - 1), min_size=2, max_size=2, unique=True))
        swapped = list(row)
        swapped[a], swapped[b] = row[b], row[a]
        [one, other] = Digester(KEY).ragged(*rows_of(row, swapped)).tolist()
        assert one != other

    def test_length_counts_where_what_is_added_is_zero(self) -> None:
        rows = [[0] * length for length in range(VECTOR_MAX + 10)]
        assert len(set(Digester(KEY).ragged(*rows_of(*rows)).tolist())) == len(rows)

    def test_equal_changes_do_not_cancel(self) -> None:
        # As they do where the tokens of a row are folded with XOR.
        [one, other] = Digester(KEY).ragged(*rows_of([1, 2, 1, 2], [1, 3, 1, 3])).tolist()
        assert one != other

    def test_every_bit_of_the_key_counts(self) -> None:
        flat, lengths = rows_of([1, 2, 3], list(range(80)))
        seen = {tuple(Digester(KEY).ragged(flat, lengths).tolist())}
        for bit in range(8 * KEY_SIZE):
            key = bytearray(KEY)
            key[bit // 8] ^= 1 << bit % 8
            seen.add(tuple(Digester(bytes(key)).ragged(flat, lengths).tolist()))
        assert len(seen) == 8 * KEY_SIZE + 1
        assert len({each for pair in seen for each in pair}) == 2 * len(seen)

    @pytest.mark.parametrize("size", [0, 15, 17, 32])
    def test_a_key_of_another_size_is_refused_without_being_shown(self, size: int) -> None:
        with pytest.raises(SettingsError, match=f"{size} bytes, not 16") as caught:
            Digester(b"\x5e" * size)
        assert "5e" not in str(caught.value)


class TestSecrecy:
    def test_a_dictionary_of_the_vocabulary_does_not_reverse_a_digest_without_the_key(self) -> None:
        # GIVEN digests of single tokens, and whoever sees them: knows the vocabulary and the method, not the key
        vocabulary = np.arange(32_000, dtype=np.int32)
        seen = Digester(b"the rank's key..").single(np.array([42, 31_999, 7], np.int32)).tolist()
        # THEN with the key the dictionary gives the tokens back
        known = Digester(b"the rank's key..").single(vocabulary)
        assert [int(np.flatnonzero(known == each)[0]) for each in seen] == [42, 31_999, 7]
        # AND without it, with no key or a guessed one, none
        for guess in (bytes(16), b"the rank's key.,", KEY):
            assert not set(seen) & set(Digester(guess).single(vocabulary).tolist())
        plain = {
            int.from_bytes(blake2b(token.tobytes(), digest_size=8).digest(), "little") for token in vocabulary
        }
        assert not set(seen) & plain

    def test_a_vocabulary_has_no_collisions(self) -> None:
        digests = Digester(KEY).single(np.arange(1 << 18, dtype=np.int32))
        assert len(np.unique(digests)) == 1 << 18
