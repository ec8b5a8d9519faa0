"""Keyed digests of token sequences, so that ranks can be compared without their tokens leaving the node.

A digest is 64 bits, depends on order and length, and needs a key that only the ranks' nodes hold: a
plain hash of one token is undone by hashing the vocabulary. Short rows go through SipHash-1-3 (Aumasson and
Bernstein 2012), computed for all rows at once; rows longer than `VECTOR_MAX` tokens
through keyed BLAKE2b, one by one. The length alone decides, so equal rows have equal digests everywhere.
Integer arithmetic only: the same on every machine.
"""

from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import Final

import numpy as np
from numpy.typing import NDArray

from stagewatch.agents.errors import SettingsError
from stagewatch.agents.record import I32, U64

I64 = NDArray[np.int64]

KEY_SIZE: Final = 16
VECTOR_MAX: Final = 64
"""Longest row, in tokens, that is digested together with others."""

_ROUNDS: Final = (1, 3)
"""Of compression, for each word, and at the end."""
_HALF: Final = np.uint64(32)
_INITIAL: Final = (0x736F6D6570736575, 0x646F72616E646F6D, 0x6C7967656E657261, 0x7465646279746573)


class Digester:
    """Digests rows of int32 tokens under one key of `KEY_SIZE` bytes; SettingsError for another size."""

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_SIZE:
            raise SettingsError(
                f"digest key has {len(key)} bytes, not {KEY_SIZE}: give {2 * KEY_SIZE} hex digits"
            )
        self._key: Final = key
        k0, k1 = (int.from_bytes(key[i : i + 8], "little") for i in (0, 8))
        self._start: Final = tuple(
            np.uint64(word ^ half) for word, half in zip(_INITIAL, (k0, k1, k0, k1), strict=True)
        )

    def rows(self, tokens: I32, starts: I64, lengths: I32) -> U64:
        """Digest ``tokens[starts[row] : starts[row] + lengths[row]]`` for each row -> uint64 [rows].

        Rows may overlap and leave gaps, but lie within ``tokens``, int32 [any].
        """
        digests = np.empty(len(lengths), np.uint64)
        if not len(lengths):
            return digests
        short = lengths <= VECTOR_MAX
        if short.all():
            return self._short_rows(tokens, starts, lengths)
        for row in np.flatnonzero(~short).tolist():
            digests[row] = self._one(tokens[starts[row] : starts[row] + lengths[row]])
        digests[short] = self._short_rows(tokens, starts[short], lengths[short])
        return digests

    def ragged(self, tokens: I32, lengths: I32) -> U64:
        """Digest each row of rows laid end to end: tokens int32 [sum of lengths] -> uint64 [rows]."""
        return self.rows(tokens, np.cumsum(lengths, dtype=np.int64) - lengths, lengths)

    def prefixes(self, table: I32, lengths: I32) -> U64:
        """Digest the first ``lengths[row]`` columns of each row: table int32 [rows, width] -> uint64 [rows]."""
        rows, width = table.shape
        return self.rows(table.reshape(-1), np.arange(rows, dtype=np.int64) * width, lengths)

    def single(self, tokens: I32) -> U64:
        """Digest each token as a row of its own: int32 [rows] -> uint64 [rows]."""
        rows = len(tokens)
        return self.rows(tokens, np.arange(rows, dtype=np.int64), np.ones(rows, np.int32))

    def _one(self, tokens: I32) -> int:
        digest = blake2b(tokens.astype("<i4").tobytes(), key=self._key, digest_size=8).digest()
        return int.from_bytes(digest, "little")

    def _short_rows(self, tokens: I32, starts: I64, lengths: I32) -> U64:
        """SipHash-1-3 of each row, taken as little-endian bytes, all rows word by word and longest first."""
        if not len(lengths):
            return np.empty(0, np.uint64)
        order = None
        if lengths.min() != lengths.max():
            order = np.argsort(-lengths.astype(np.int8), kind="stable")
            starts, lengths = starts[order], lengths[order]
        digests = siphash(_words(tokens, starts, lengths), len(lengths), self._start, *_ROUNDS)
        if order is None:
            return digests
        result = np.empty_like(digests)
        result[order] = digests
        return result


def _words(tokens: I32, starts: I64, lengths: I32) -> Iterator[U64]:
    """The words of all rows, the first of each, then the second, and so on; shorter rows, which come last, end.

    A word is two tokens; a row's last is what is left of it, with its length in bytes in the top byte.
    """
    halves = tokens.view(np.uint32) if tokens.flags.c_contiguous else tokens.astype(np.uint32)
    length_words = ((lengths.astype(np.int64) * 4 % 256) << 56).astype(np.uint64)
    descending = -lengths
    for at in range(0, int(lengths[0]) + 1, 2):
        # Rows that have two tokens left, at least one, and at least the word with their length.
        pairs, some, all_rows = np.searchsorted(descending, (-at - 2, -at - 1, -at), side="right").tolist()
        word = np.empty(all_rows, np.uint64)
        word[:some] = halves[starts[:some] + at]
        word[:pairs] |= halves[starts[:pairs] + (at + 1)].astype(np.uint64) << _HALF
        word[some:] = 0
        word[pairs:] |= length_words[pairs:all_rows]
        yield word


def siphash(
    words: Iterable[U64],
    messages: int,
    start: tuple[np.uint64, ...],
    compression_rounds: int,
    final_rounds: int,
) -> U64:
    """SipHash of ``messages`` messages at once -> uint64 [messages].

    ``words`` gives their first words, then the second, and so on: uint64 [messages that have one], of which
    the longest messages come first. A message's last word is that with its length.
    """
    state = [np.full(messages, word, np.uint64) for word in start]
    scratch = np.empty(messages, np.uint64)
    for word in words:
        active = [part[: len(word)] for part in state]
        active[3] ^= word
        for _ in range(compression_rounds):
            _sip_round(active, scratch[: len(word)])
        active[0] ^= word
    state[2] ^= np.uint64(0xFF)
    for _ in range(final_rounds):
        _sip_round(state, scratch)
    result: U64 = state[0] ^ state[1] ^ state[2] ^ state[3]
    return result


_SHIFTS: Final = {bits: (np.uint64(bits), np.uint64(64 - bits)) for bits in (13, 16, 17, 21, 32)}


def _rotate(value: U64, bits: int, scratch: U64) -> None:
    left, right = _SHIFTS[bits]
    np.right_shift(value, right, out=scratch)
    np.left_shift(value, left, out=value)
    np.bitwise_or(value, scratch, out=value)


def _sip_round(state: list[U64], scratch: U64) -> None:
    v0, v1, v2, v3 = state
    v0 += v1
    v2 += v3
    _rotate(v1, 13, scratch)
    _rotate(v3, 16, scratch)
    v1 ^= v0
    v3 ^= v2
    _rotate(v0, 32, scratch)
    v2 += v1
    v0 += v3
    _rotate(v1, 17, scratch)
    _rotate(v3, 21, scratch)
    v1 ^= v2
    v3 ^= v0
    _rotate(v2, 32, scratch)
