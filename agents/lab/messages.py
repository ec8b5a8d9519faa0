"""What the scheduler and the ranks tell each other. Plain frozen data, so that it can be pickled to a process.

A *handle* is the small number under which the scheduler and all ranks speak of a running request; it is free for
the next request once the request has finished. Slots are each rank's own affair.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
Bool = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request that starts, resumes after a preemption, or goes on with more input."""

    handle: int
    request_id: str
    tokens: I32
    """All tokens known so far, prompt first; shape [prefill_len]."""
    cap: int
    """Length in tokens at which the request must stop, its first prompt included."""
    computed: int
    """Tokens whose state already exists: a prefix cache hit, or all of them after a remote prefill."""
    anchor: int = -1
    """The token sampled by a remote prefill, to be fed first; -1 where there was none."""


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One iteration's orders, the same for every rank of a pipeline. Carries no step number: ranks count."""

    finished: I32
    """Handles to release before anything is added: finished, aborted or preempted; shape [released]."""
    new: tuple[NewRequest, ...]
    handles: I32
    """The batch, one request per row; shape [rows]. Empty: an iteration without a batch."""
    scheduled: I32
    """Tokens to compute per row; shape [rows]."""
    draft_count: I32
    """Draft tokens among them; shape [rows]."""
    mirror: I32
    """The host's optimistic count of computed tokens, all drafts in flight accepted; shape [rows]."""
    spec_tokens: int
    """Draft tokens to propose in this step, K at most."""
    stop: bool = False
    """Leave the loop instead of executing."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the last stage returns of one iteration."""

    tokens: I32
    """Shape [rows, K + 1]; only ``tokens[row, :num_sampled[row]]`` is defined."""
    num_sampled: I32
    num_rejected: I32


@dataclass(frozen=True, slots=True)
class Output:
    """A request's tokens so far, for whoever reads the engine's answers."""

    request_id: str
    tokens: tuple[int, ...]
    """Output tokens, prompt excluded."""
    finished: bool
    reason: str
    """``length``, ``stop``, ``abort``, or empty while it runs."""
