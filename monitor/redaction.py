"""Evidence without what only its display needs: token values that an operator may see and a file must not carry."""

from dataclasses import fields, replace
from typing import Any, Final

import numpy as np

from stagewatch.agents.evidence import Evidence, InputsBlock, PayloadBlock

_NO_TOKENS: Final = np.zeros(0, np.int32)


def without_tokens(evidence: Evidence) -> Evidence:
    """The same evidence with its digests alone. No check reads token values, so no verdict changes."""
    return replace(
        evidence,
        inputs=_bare(evidence.inputs),
        sent=_bare(evidence.sent),
        received=_bare(evidence.received),
        consumed=_bare(evidence.consumed),
    )


def _bare(block: InputsBlock | PayloadBlock | None) -> Any:
    if block is None:
        return None
    bare: dict[str, Any] = {f.name: _NO_TOKENS for f in fields(block) if f.name.startswith("raw_")}
    return replace(block, **bare)
