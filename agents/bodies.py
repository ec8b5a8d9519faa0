"""What a record tells, kind by kind. `stagewatch.agents.record` makes bytes of it and hands these names on.

The class variables of a body type are its schema: numbers for the head, columns in the order in which they
lie in the record, and the field that holds text.
"""

from enum import IntEnum
from typing import ClassVar

import msgspec
import numpy as np
from numpy.typing import NDArray

UNKNOWN = -1
"""Stands in a scalar or an int32 column for what the engine does not tell."""

U64 = NDArray[np.uint64]
I32 = NDArray[np.int32]
U8 = NDArray[np.uint8]


class Kind(IntEnum):
    """What a record tells."""

    BIND = 1
    FREE = 2
    INPUTS = 3
    MASK = 4
    SENT = 5
    RECEIVED = 6
    CONSUMED = 7
    COLLECTIVE = 8
    HEARTBEAT = 9
    NOTE = 10


class Extent(IntEnum):
    """How many elements a column has, by the counts in the head."""

    ROW = 0
    """One per batch row: shape [rows]."""
    WIDTH = 1
    """One per batch row and token column of a payload: shape [rows, width]."""
    DRAFT = 2
    """One per batch row and draft position: shape [rows, drafts]."""
    RAGGED = 3
    """One per scheduled token, rows laid end to end: shape [sum of scheduled]."""


class Bind(msgspec.Struct, frozen=True, gc=False):
    """A request took a slot."""

    SCALARS: ClassVar = ("slot", "generation", "prompt_len", "cap", "request")
    COLUMNS: ClassVar = ()
    TEXT: ClassVar = "request_id"

    slot: int
    generation: int
    prompt_len: int
    cap: int
    """Length in tokens at which the request must stop, prompt included; UNKNOWN if the engine hides it."""
    request: int
    """`request_key` of the id."""
    request_id: str


class Free(msgspec.Struct, frozen=True, gc=False):
    """A slot was released. `generation` is the one that ended."""

    SCALARS: ClassVar = ("slot", "generation", "request")
    COLUMNS: ClassVar = ()
    TEXT: ClassVar = None

    slot: int
    generation: int
    request: int


class Inputs(msgspec.Struct, frozen=True, gc=False):
    """What a rank fed at one step: after deferred updates are consumed, before the forward pass."""

    SCALARS: ClassVar = ("tick", "graph_mode", "spec_tokens", "padded_tokens")
    COLUMNS: ClassVar = (
        ("request", "u8", Extent.ROW),
        ("slot", "i4", Extent.ROW),
        ("generation", "i4", Extent.ROW),
        ("mirror", "i4", Extent.ROW),
        ("computed", "i4", Extent.ROW),
        ("prefill_len", "i4", Extent.ROW),
        ("scheduled", "i4", Extent.ROW),
        ("draft_count", "i4", Extent.ROW),
        ("cap", "i4", Extent.ROW),
        ("last_sampled", "i4", Extent.ROW),
        ("draft_tokens", "i4", Extent.DRAFT),
        ("input_ids", "i4", Extent.RAGGED),
        ("positions", "i4", Extent.RAGGED),
        ("prefilling", "u1", Extent.ROW),
    )
    TEXT: ClassVar = None

    tick: int
    """Engine iterations so far on this rank, empty ones included; the unit of the decode cadence."""
    graph_mode: int
    spec_tokens: int
    """Draft tokens the scheduler planned for this step."""
    padded_tokens: int
    request: U64
    slot: I32
    generation: I32
    mirror: I32
    """The host's optimistic count of computed tokens."""
    computed: I32
    """The device's count of computed tokens."""
    prefill_len: I32
    scheduled: I32
    draft_count: I32
    cap: I32
    last_sampled: I32
    draft_tokens: I32
    input_ids: I32
    positions: I32
    prefilling: U8


class Mask(msgspec.Struct, frozen=True, gc=False):
    """The mask the engine computed beside the mask a sound engine computes."""

    SCALARS: ClassVar = ("engine_none", "fixed_none")
    COLUMNS: ClassVar = (("engine", "u1", Extent.ROW), ("fixed", "u1", Extent.ROW))
    TEXT: ClassVar = None

    engine_none: int
    """1 if the engine's mask was None: it broadcasts nothing this step."""
    fixed_none: int
    engine: U8
    fixed: U8


class Payload(msgspec.Struct, frozen=True, gc=False):
    """One broadcast of sampled tokens and draft blocks, as sent, as received, or as consumed.

    Recorded under the ordinal of the step that sent it. Only ``tokens[row, :num_sampled[row]]`` is defined.
    """

    SCALARS: ClassVar = ("at", "skipped")
    COLUMNS: ClassVar = (
        ("request", "u8", Extent.ROW),
        ("slot", "i4", Extent.ROW),
        ("generation", "i4", Extent.ROW),
        ("generation_now", "i4", Extent.ROW),
        ("num_sampled", "i4", Extent.ROW),
        ("num_rejected", "i4", Extent.ROW),
        ("tokens", "i4", Extent.WIDTH),
        ("draft_tokens", "i4", Extent.DRAFT),
        ("applied", "u1", Extent.ROW),
    )
    TEXT: ClassVar = None

    at: int
    """Ordinal of the step before which it was consumed; UNKNOWN for sent and received."""
    skipped: int
    """1 if nothing was broadcast, because the mask was None."""
    request: U64
    slot: I32
    generation: I32
    """The slot's generation when the payload was sent or received."""
    generation_now: I32
    """The slot's generation when the payload was consumed; equal to `generation` for sent and received."""
    num_sampled: I32
    num_rejected: I32
    tokens: I32
    draft_tokens: I32
    """Shape [rows, drafts]; drafts is 0 where the engine relays no draft block."""
    applied: U8
    """1 for a row that takes part: in the mask when sent or received, written to its slot when consumed."""


class Collective(msgspec.Struct, frozen=True, gc=False):
    """A collective or point-to-point call, recorded before the call, so that a hang leaves its cause."""

    SCALARS: ClassVar = ("index", "numel", "group_size")
    COLUMNS: ClassVar = ()
    TEXT: ClassVar = "what"

    index: int
    """Position among this rank's collectives since the engine started."""
    numel: int
    group_size: int
    what: str
    """Group, operation and dtype, separated by single spaces: ``pp_broadcast broadcast int64``."""


class Heartbeat(msgspec.Struct, frozen=True, gc=False):
    """A JSON-encoded `stagewatch.agents.probe.Health`."""

    SCALARS: ClassVar = ()
    COLUMNS: ClassVar = ()
    TEXT: ClassVar = "health"

    health: str


class Note(msgspec.Struct, frozen=True, gc=False):
    """A sentence for the operator: armed, disarmed and why, a hotfix in force."""

    SCALARS: ClassVar = ()
    COLUMNS: ClassVar = ()
    TEXT: ClassVar = "text"

    text: str


Body = Bind | Free | Inputs | Mask | Payload | Collective | Heartbeat | Note

BODIES: dict[Kind, type[Body]] = {
    Kind.BIND: Bind,
    Kind.FREE: Free,
    Kind.INPUTS: Inputs,
    Kind.MASK: Mask,
    Kind.SENT: Payload,
    Kind.RECEIVED: Payload,
    Kind.CONSUMED: Payload,
    Kind.COLLECTIVE: Collective,
    Kind.HEARTBEAT: Heartbeat,
    Kind.NOTE: Note,
}
