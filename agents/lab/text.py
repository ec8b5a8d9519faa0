"""Words for the lab's tokens, so that people can see a text repeat itself."""

from collections.abc import Iterable
from typing import Final

_ONSETS: Final = ("b", "d", "f", "g", "k", "l", "m", "n", "p", "r", "s", "t", "v", "z", "sh", "th")
_RIMES: Final = ("a", "e", "i", "o", "u", "an", "en", "il", "or", "us", "ai", "el", "ir", "on", "ul", "ash")


def word(token: int) -> str:
    """The word of ``token``; distinct for tokens of one vocabulary of up to 65,536."""
    syllable = _ONSETS[token % 16] + _RIMES[token // 16 % 16]
    rest = token // 256
    return syllable if not rest else syllable + _ONSETS[rest % 16] + _RIMES[rest // 16 % 16]


def text(tokens: Iterable[int]) -> str:
    """``tokens`` as words, separated by spaces."""
    return " ".join(word(token) for token in tokens)
