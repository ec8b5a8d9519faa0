"""Requests: a seeded stream of them, with everything benign that can happen to a request."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from stagewatch.agents.lab.messages import I32


@dataclass(frozen=True, slots=True)
class Request:
    """One request as a client sends it, and what will befall it."""

    request_id: str
    prompt: I32
    max_tokens: int
    arrives: int = 0
    """Iteration at which it reaches the scheduler."""
    abort_after: int = -1
    """Iterations after its admission at which the client goes away; -1: never."""
    cached: int = 0
    """Prompt tokens found in the prefix cache; less than the prompt's length."""
    remote_prefill: bool = False
    """Its prompt was computed elsewhere: it arrives with all of it cached and its first token sampled."""
    more_input: tuple[I32, ...] = ()
    """Streaming input: after each turn ends, one of these is appended and the request goes on."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Shape of a seeded stream of requests. Probabilities are per request."""

    requests: int = 64
    prompt_len: tuple[int, int] = (4, 120)
    """Least and most prompt tokens, drawn uniformly."""
    max_tokens: tuple[int, int] = (4, 80)
    arrivals_per_iteration: float = 1.0
    """Mean of a Poisson distribution."""
    burst_every: int = 0
    """Iterations between bursts, in which twenty times the mean arrives at once; 0: none."""
    abort_probability: float = 0.0
    cached_probability: float = 0.0
    remote_probability: float = 0.0
    streaming_probability: float = 0.0

    def draw(self, seed: int, vocab_size: int, prefix: str = "") -> Iterator[Request]:
        """The requests of ``seed``, in order of arrival; the same for the same arguments. Ids begin with ``prefix``."""
        rng = np.random.default_rng([seed, 0x10AD])
        arrives = 0
        drawn = 0
        while drawn < self.requests:
            burst = self.burst_every and arrives % self.burst_every == self.burst_every - 1
            count = int(rng.poisson(self.arrivals_per_iteration * (20 if burst else 1)))
            for _ in range(min(count, self.requests - drawn)):
                yield self._one(rng, f"{prefix}r{drawn}", arrives, vocab_size)
                drawn += 1
            arrives += 1

    def _one(self, rng: np.random.Generator, name: str, arrives: int, vocab_size: int) -> Request:
        length = int(rng.integers(self.prompt_len[0], self.prompt_len[1] + 1))
        low, high = self.max_tokens
        chance = rng.random(4)
        max_tokens = int(rng.integers(low, high + 1))
        remote = bool(chance[2] < self.remote_probability) and max_tokens > 1
        cached = int(rng.integers(0, length)) if chance[1] < self.cached_probability else 0
        more: tuple[I32, ...] = ()
        if chance[3] < self.streaming_probability:
            more = tuple(_tokens(rng, int(rng.integers(1, 12)), vocab_size) for _ in range(int(rng.integers(1, 3))))
        return Request(
            request_id=name,
            prompt=_tokens(rng, length, vocab_size),
            max_tokens=max_tokens,
            arrives=arrives,
            abort_after=int(rng.integers(1, 30)) if chance[0] < self.abort_probability else -1,
            cached=0 if remote else cached,
            remote_prefill=remote,
            more_input=more,
        )


FIRST_TOKEN = 8
"""Smallest token a prompt holds: those below are kept for stops and for the zeros of empty tables."""


def _tokens(rng: np.random.Generator, count: int, vocab_size: int) -> I32:
    return rng.integers(FIRST_TOKEN, vocab_size, count, dtype=np.int32)
