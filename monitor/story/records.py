"""What is told of single rows: the records of one request or step, taken out of the columns, values as text.

A value is a count, or tokens as a digest in hex, or as they are where the recording holds them.
"""

import msgspec


class Fed(msgspec.Struct, frozen=True):
    """What one rank fed for one request at one step. Steps are ordinals; ranks are numbers in engine order."""

    step: int
    rank: int
    request: int
    """Key of the request."""
    tick: int
    slot: int
    generation: int
    prefilling: bool
    prefill_len: int
    cap: int
    scheduled: int
    draft_count: int
    computed: str
    mirror: str
    position: str
    """The first one fed."""
    position_shape: str
    last_sampled: str
    draft_tokens: str
    input_ids: str
    t_ns: int


class Masked(msgspec.Struct, frozen=True):
    """Whether a step's broadcast holds the row, by the engine's mask and by the fixed one, on one rank."""

    step: int
    rank: int
    request: int
    engine: bool
    fixed: bool


class Sent(msgspec.Struct, frozen=True):
    """One row of a broadcast, as one rank sent, received or consumed it. ``step`` is the step that sent it."""

    step: int
    rank: int
    request: int
    kind: str
    """``sent``, ``received`` or ``consumed``."""
    at: int
    """Step before which it was consumed; -1 where it was not."""
    generation: int
    generation_now: int
    num_sampled: int
    num_rejected: int
    tokens: str
    """The tokens sampled."""
    last: str
    """The last of them; empty where none was."""
    draft_tokens: str
    drafts: int
    """Draft tokens in the block; a step may use fewer."""
    applied: bool
    """In the mask when sent or received, written to its slot when consumed."""
    t_ns: int


class Bound(msgspec.Struct, frozen=True):
    """A request took a slot, after ``step``."""

    step: int
    rank: int
    request: int
    slot: int
    generation: int
    prompt_len: int
    cap: int
    request_id: str


class Freed(msgspec.Struct, frozen=True):
    """A slot was given back, after ``step``."""

    step: int
    rank: int
    request: int
    slot: int
    generation: int


class Called(msgspec.Struct, frozen=True):
    """A collective or point-to-point call that one rank entered during a step."""

    step: int
    rank: int
    what: str
    """Group, operation and dtype."""
    numel: int
