"""Copies of device tensors that never make the engine wait.

On the CPU a copy is complete when it returns, so it is published at once. On CUDA the values are first
gathered into a device buffer on the engine's own stream, which orders the read before whatever
overwrites them later; a side stream then copies that buffer to pinned memory and records an event. The
values are published when the event is done: at a later step or by a timer. Buffers rotate; where none is
free the copy is given up and counted.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

Values = NDArray[Any]
"""Integers of whatever width the engine has; the record takes the low 32 bits."""
Publish = Callable[[list[Values]], None]
"""Takes one array per piece staged. They may be views that the engine overwrites later: use or copy them at once."""

BUFFERS: Final = 16
"""Copies in flight per rank: pp_size + 1 steps of four copies each, with room."""


TABLES_MAX: Final = 8
"""Tables of which `HostStaging` keeps an array; an engine has three."""


class Gather(msgspec.Struct, frozen=True, gc=False):
    """Rows of a table: ``table[rows]``, with the row numbers on the table's device and on the host."""

    table: "torch.Tensor"
    rows: "torch.Tensor"
    rows_np: NDArray[np.integer]


class Head(msgspec.Struct, frozen=True, gc=False):
    """The first rows of a buffer: ``buffer[:rows]``."""

    buffer: "torch.Tensor"
    rows: int


class Staging(Protocol):
    """Brings device values to the host without waiting for them."""

    def take(
        self, pieces: "Sequence[torch.Tensor | Gather | Head]", publish: Publish, after: Any = None
    ) -> None:
        """Copy ``pieces`` as they are at this point of the engine's stream, then call ``publish``.

        ``after`` is an event that must be done before the values are there, or None. Calls are
        published in the order of `take`.
        """

    def poll(self) -> None:
        """Publish what has arrived."""

    def forget(self) -> None:
        """Let go of tensors of the engine's."""


class HostStaging:
    """For tensors in host memory: publishes before it returns."""

    def __init__(self) -> None:
        # Tables live as long as the engine: each is seen as an array once, and again where its memory has moved.
        self._tables: dict[int, tuple[torch.Tensor, int, Values]] = {}

    def take(
        self, pieces: "Sequence[torch.Tensor | Gather | Head]", publish: Publish, after: Any = None
    ) -> None:
        """Publish what is there."""
        values: list[Values] = []
        for piece in pieces:
            # Slicing and indexing an array costs a fraction of what it costs on a tensor.
            if type(piece) is Gather:
                values.append(self._table(piece.table).take(piece.rows_np, 0))
            elif type(piece) is Head:
                values.append(piece.buffer.numpy()[: piece.rows])
            else:
                values.append(cast("torch.Tensor", piece).numpy())
        publish(values)

    def poll(self) -> None:
        """Do nothing: there is never anything left."""

    def forget(self) -> None:
        """Let go of the tables."""
        self._tables.clear()

    def _table(self, tensor: "torch.Tensor") -> Values:
        known = self._tables.get(id(tensor))
        if known is not None and known[0] is tensor and known[1] == tensor.data_ptr():
            return known[2]
        if len(self._tables) >= TABLES_MAX:
            self._tables.clear()  # an engine that makes new ones as it goes
        array: Values = tensor.numpy()
        self._tables[id(tensor)] = (tensor, tensor.data_ptr(), array)
        return array


def _on_device(piece: "torch.Tensor | Gather | Head") -> "torch.Tensor":
    if isinstance(piece, Gather):
        return piece.table[piece.rows]
    if isinstance(piece, Head):
        return piece.buffer[: piece.rows]
    return piece


@dataclass
class _Flight:
    buffer: "_Buffer"
    shapes: list[tuple[int, ...]]
    publish: Publish


class _Buffer:
    """A device buffer, its pinned twin, and the event that says the twin is filled."""

    def __init__(self, torch: Any, size: int, device: "torch.device") -> None:
        self.device = torch.empty(size, dtype=torch.int32, device=device)
        self.pinned = torch.empty(size, dtype=torch.int32, pin_memory=True)
        self.done = torch.cuda.Event()


class CudaStaging:
    """For tensors on a CUDA device. ``size`` is the most int32 values of one copy.

    ``dropped`` is called with a count where a copy had to be given up.
    """

    def __init__(
        self, device: "torch.device", size: int, dropped: Callable[[int], None], buffers: int = BUFFERS
    ) -> None:
        import torch

        self._torch: Any = torch
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._device = device
        self._free = deque(_Buffer(torch, size, device) for _ in range(buffers))
        self._size = size
        self._dropped = dropped
        self._flights: deque[_Flight] = deque()
        self._publishing = threading.Lock()

    def take(
        self, pieces: "Sequence[torch.Tensor | Gather | Head]", publish: Publish, after: Any = None
    ) -> None:
        """Launch the copies; returns before they are done."""
        self.poll()
        tensors = [_on_device(piece) for piece in pieces]
        shapes = [tuple(tensor.shape) for tensor in tensors]
        sizes = [tensor.numel() for tensor in tensors]
        if not self._free or sum(sizes) > self._size:
            self._dropped(1)
            return
        buffer = self._free.popleft()
        engine_stream = self._torch.cuda.current_stream(self._device)
        if after is not None:
            # The values arrive on another stream. Waiting for them on the engine's stream would hold
            # the engine up, so they are gathered on ours; nothing overwrites them before they are consumed.
            self._stream.wait_event(after)
            with self._torch.cuda.stream(self._stream):
                self._gather(buffer, tensors, sizes)
            for tensor in tensors:
                tensor.record_stream(self._stream)
        else:
            self._gather(buffer, tensors, sizes)
            self._stream.wait_stream(engine_stream)
        with self._torch.cuda.stream(self._stream):
            total = sum(sizes)
            buffer.pinned[:total].copy_(buffer.device[:total], non_blocking=True)
            buffer.done.record(self._stream)
        self._flights.append(_Flight(buffer, shapes, publish))

    def poll(self) -> None:
        """Publish, in order, the copies whose event is done. Leaves it to another thread that is at it already."""
        if not self._publishing.acquire(blocking=False):
            return
        try:
            self._publish_done()
        finally:
            self._publishing.release()

    def forget(self) -> None:
        """Do nothing: tensors are kept by the copies in flight only, and go with them."""

    def _publish_done(self) -> None:
        while self._flights and self._flights[0].buffer.done.query():
            flight = self._flights.popleft()
            flat = flight.buffer.pinned.numpy()
            arrays: list[Values] = []
            at = 0
            for shape in flight.shapes:
                count = int(np.prod(shape, dtype=np.int64))
                arrays.append(flat[at : at + count].reshape(shape).copy())
                at += count
            self._free.append(flight.buffer)
            flight.publish(arrays)

    def _gather(self, buffer: _Buffer, tensors: "Sequence[torch.Tensor]", sizes: list[int]) -> None:
        at = 0
        for tensor, size in zip(tensors, sizes, strict=True):
            buffer.device[at : at + size].copy_(tensor.reshape(-1), non_blocking=True)
            at += size


def staging_for(device: "torch.device", size: int, dropped: Callable[[int], None]) -> Staging:
    """The staging for an engine's device. Raises ValueError for a device whose copies it cannot order."""
    if device.type == "cpu":
        return HostStaging()
    if device.type == "cuda":
        return CudaStaging(device, size, dropped)
    raise ValueError(f"device type {device.type} is not supported: cpu and cuda are")
