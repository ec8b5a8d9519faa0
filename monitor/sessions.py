"""One connection of a sidecar: what is still to be said to it, and for what it is given up."""

import asyncio
from typing import Final

from stagewatch.agents import wire
from stagewatch.agents.errors import FrameError
from stagewatch.agents.identity import Rank
from stagewatch.agents.wire import Ack, Downward, Freeze, Refusal, Welcome

StreamKey = tuple[str, Rank]
"""Instance and rank."""

BAD_FRAMES_MAX: Final = 3
"""Refused frames after which a connection is closed. Refused hellos do not count: the other ranks go on."""
HELLO_CODES: Final = ("protocol", "identity", "forbidden", "too_many")
"""Reasons for which a hello is refused."""


class FrameRefusedError(FrameError):
    """A frame that is not taken; ``code`` is the reason as a label, a key of `instruments.REFUSALS`."""

    def __init__(self, code: str, message: str, answer: Refusal) -> None:
        super().__init__(message)
        self.code: Final = code
        self.answer: Final = answer


class Session:
    """One connection of a sidecar: what is still to be said to it.

    ``deployments`` are those that its token is good for; None for all.
    """

    def __init__(self, deployments: frozenset[str] | None = None) -> None:
        self.deployments: Final = deployments
        self.bad_frames = 0
        """Frames refused on this connection that no sound sidecar sends."""
        self.refused_hellos = 0
        self.freezes = False
        """Whether the sidecar said that it freezes windows."""
        self._acks: dict[StreamKey, int] = {}
        self._welcomes: dict[StreamKey, Welcome] = {}
        self._refusals: list[Refusal] = []
        self._freezes: dict[tuple[StreamKey, str], Freeze] = {}
        self._wake = asyncio.Event()

    def ack(self, key: StreamKey, next_seq: int) -> None:
        """Acknowledge a stream; a newer acknowledgement replaces one not yet sent."""
        self._acks[key] = next_seq
        self._wake.set()

    def freeze(self, frame: Freeze) -> None:
        """Ask for a window; whoever asks sees to it that there are not too many."""
        self._freezes[(frame.instance, frame.rank), frame.incident] = frame
        self._wake.set()

    def answer(self, frame: Welcome | Refusal) -> None:
        """Send a frame.

        One welcome a stream, however often it says hello, and refusals are limited: a peer that does not read
        costs no more than that.
        """
        if isinstance(frame, Welcome):
            self._welcomes[frame.instance, frame.rank] = frame
        else:
            self._refusals.append(frame)
        self._wake.set()

    def refuse(self, refused: FrameRefusedError, hellos_max: int) -> bool:
        """Answer a refused frame; whether the peer has sent so many that it is given up."""
        self.answer(refused.answer)
        if refused.code in HELLO_CODES:
            self.refused_hellos += 1
        else:
            self.bad_frames += 1
        return self.bad_frames >= BAD_FRAMES_MAX or self.refused_hellos > hellos_max

    async def outgoing(self) -> list[bytes]:
        """What to send next; waits until there is something."""
        await self._wake.wait()
        return self.pending()

    def pending(self) -> list[bytes]:
        """What to send now."""
        self._wake.clear()
        frames: list[Downward] = [*self._welcomes.values(), *self._refusals]
        frames += [Ack(instance, rank, seq) for (instance, rank), seq in self._acks.items()]
        frames += self._freezes.values()
        self._welcomes, self._refusals, self._acks, self._freezes = {}, [], {}, {}
        return [wire.encode_frame(frame) for frame in frames]
