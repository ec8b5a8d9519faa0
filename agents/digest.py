"""Keyed digests of token sequences, so that ranks can be compared without their tokens leaving the node.

A digest is 64 bits, depends on order and length, and needs a key that only the ranks' nodes hold: a
plain hash of one token is undone by hashing the vocabulary. Short rows go through SipHash-1-3 (Aumasson and
Bernstein 2012), computed for all rows of one length at once; rows longer than `VECTOR_MAX` tokens
through keyed BLAKE2b, one by one. The length alone decides, so equal rows have equal digests everywhere.
Integer arithmetic only: the same on every machine.
"""

from hashlib import blake2b
from typing import Final

import numpy as np
from numpy.typing import NDArray

from stagewatch.agents.errors import SettingsError
from stagewatch.agents.record import I32, U64

KEY_SIZE: Final = 16
VECTOR_MAX: Final = 64
"""Longest row, in tokens, that is digested together with others of its length."""

_COMPRESSION_ROUNDS: Final = 1
_FINAL_ROUNDS: Final = 3
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

    def ragged(self, tokens: I32, lengths: I32) -> U64:
        """Digest each row of rows laid end to end: tokens int32 [sum of lengths] -> uint64 [rows]."""
        starts = np.cumsum(lengths, dtype=np.int64) - lengths
        digests = np.zeros(len(lengths), np.uint64)
        for length in np.unique(lengths):
            rows = np.flatnonzero(lengths == length)
            if length > VECTOR_MAX:
                for row in rows:
                    digests[row] = self._one(tokens[starts[row] : starts[row] + length])
            else:
                digests[rows] = self._equal_length(tokens[starts[rows, None] + np.arange(length)])
        return digests

    def prefixes(self, table: I32, lengths: I32) -> U64:
        """Digest the first ``lengths[row]`` columns of each row: table int32 [rows, width] -> uint64 [rows]."""
        digests = np.zeros(len(lengths), np.uint64)
        for length in np.unique(lengths):
            rows = np.flatnonzero(lengths == length)
            digests[rows] = self._equal_length(np.ascontiguousarray(table[rows, :length]))
        return digests

    def single(self, tokens: I32) -> U64:
        """Digest each token as a row of its own: int32 [rows] -> uint64 [rows]."""
        return self._equal_length(tokens.reshape(-1, 1))

    def _one(self, tokens: I32) -> int:
        digest = blake2b(tokens.astype("<i4").tobytes(), key=self._key, digest_size=8).digest()
        return int.from_bytes(digest, "little")

    def _equal_length(self, table: I32) -> U64:
        """SipHash-1-3 of each row of int32 [rows, length], taken as little-endian bytes."""
        rows, length = table.shape
        if length > VECTOR_MAX:
            return np.array([self._one(row) for row in table], np.uint64)
        words = np.zeros((length // 2 + 1, rows), np.uint64)
        halves = (
            table.view(np.uint32).astype(np.uint64)
            if table.flags.c_contiguous
            else table.astype(np.uint32).astype(np.uint64)
        )
        words[: length // 2] = (halves[:, 0 : length - 1 : 2] | halves[:, 1::2] << np.uint64(32)).T
        words[-1] = np.uint64((length * 4 % 256) << 56)
        if length % 2:
            words[-1] |= halves[:, -1]
        return siphash(words, self._start, _COMPRESSION_ROUNDS, _FINAL_ROUNDS)


def siphash(words: U64, start: tuple[np.uint64, ...], compression_rounds: int, final_rounds: int) -> U64:
    """SipHash of many messages at once: uint64 [words, messages], length word last -> uint64 [messages]."""
    messages = words.shape[1]
    state = [np.full(messages, word, np.uint64) for word in start]
    scratch = np.empty(messages, np.uint64)
    for word in words:
        state[3] ^= word
        for _ in range(compression_rounds):
            _sip_round(state, scratch)
        state[0] ^= word
    state[2] ^= np.uint64(0xFF)
    for _ in range(final_rounds):
        _sip_round(state, scratch)
    result: NDArray[np.uint64] = state[0] ^ state[1] ^ state[2] ^ state[3]
    return result


def _rotate(value: U64, bits: int, scratch: U64) -> None:
    np.right_shift(value, np.uint64(64 - bits), out=scratch)
    np.left_shift(value, np.uint64(bits), out=value)
    value |= scratch


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
