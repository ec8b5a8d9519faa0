"""Requests: a seeded stream of them, with everything benign that can happen to a request."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

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
        arrivals = np.random.default_rng([seed, 0xA771])
        bodies = self._bodies(np.random.default_rng([seed, 0x10AD]), vocab_size, prefix)
        arrives = 0
        drawn = 0
        while drawn < self.requests:
            burst = self.burst_every and arrives % self.burst_every == self.burst_every - 1
            count = int(arrivals.poisson(self.arrivals_per_iteration * (20 if burst else 1)))
            for _ in range(min(count, self.requests - drawn)):
                yield next(bodies)(arrives)
                drawn += 1
            arrives += 1

    def _bodies(
        self, rng: np.random.Generator, vocab_size: int, prefix: str
    ) -> Iterator[Callable[[int], Request]]:
        # Drawn many at a time: one call of the generator costs as much as a whole row of a step.
        number = 0
        while True:
            lengths = rng.integers(self.prompt_len[0], self.prompt_len[1] + 1, _AT_ONCE).tolist()
            max_tokens = rng.integers(self.max_tokens[0], self.max_tokens[1] + 1, _AT_ONCE).tolist()
            tokens = rng.integers(FIRST_TOKEN, vocab_size, sum(lengths) + 24 * _AT_ONCE, dtype=np.int32)
            shares = rng.random((_AT_ONCE, 5)).tolist()
            first = 0
            for length, most, share in zip(lengths, max_tokens, shares, strict=True):
                prompt, more = tokens[first : first + length], tokens[first + length : first + length + 24]
                first += length + 24
                yield partial(self._one, f"{prefix}r{number}", prompt, most, share, more)
                number += 1

    def _one(
        self, name: str, prompt: I32, max_tokens: int, share: list[float], more: I32, arrives: int
    ) -> Request:
        aborts, caches, remote, streams, which = share
        is_remote = remote < self.remote_probability and max_tokens > 1
        turns: tuple[I32, ...] = ()
        if streams < self.streaming_probability:
            turns = (
                (more[: 1 + int(which * 11)],) if which < 0.5 else (more[:7], more[7 : 8 + int(which * 11)])
            )
        return Request(
            request_id=name,
            prompt=prompt,
            max_tokens=max_tokens,
            arrives=arrives,
            abort_after=1 + int(which * 29) if aborts < self.abort_probability else -1,
            cached=int(which * len(prompt)) if caches < self.cached_probability and not is_remote else 0,
            remote_prefill=is_remote,
            more_input=turns,
        )


_AT_ONCE = 256

FIRST_TOKEN = 8
"""Smallest token a prompt holds: those below are kept for stops and for the zeros of empty tables."""
