"""What the checks of one field have in common: compare, look back, blame, put into words."""

from collections.abc import Sequence
from typing import Final

from stagewatch.agents.evidence import InputsBlock, PayloadBlock
from stagewatch.monitor.blame import blame
from stagewatch.monitor.checks.base import Finding, Phase
from stagewatch.monitor.history import History, Seen, SentRow
from stagewatch.monitor.incidents import Severity, Value
from stagewatch.monitor.windows import InputsWindow, life_of, raw_tokens


def previous_broadcast(window: InputsWindow, row: int, history: History) -> tuple[Seen, SentRow] | None:
    """The row's previous step and what the last stage sent then, where both are known."""
    block = window.blocks[-1]
    step = int(window.steps[window.locate(row)[0]])
    request = int(block.request[row])
    seen = history.previous(request, life_of(block, row), step)
    if seen is None or not history.complete(seen.step, step):
        return None  # a step in between is unknown: what was sent at it would be the row's last broadcast
    sent = history.sent(seen.step, request)
    return (seen, sent) if sent is not None and sent.num_sampled > 0 else None


def sampled_before(window: InputsWindow, row: int, history: History) -> bool:
    """Whether the last stage is known to have run the row's request before, with every step since on record.

    Else its tokens may come from elsewhere, or a step that would explain the difference may be missing.
    """
    block = window.blocks[-1]
    step = int(window.steps[window.locate(row)[0]])
    seen = history.previous(int(block.request[row]), life_of(block, row), step)
    return seen is not None and history.complete(seen.step, step)


def difference(
    check: str,
    remedy: str,
    window: InputsWindow,
    row: int,
    fields: Sequence[tuple[str, str]],
    *,
    expected: int | None,
    sampled: bool,
    relayed: bool = False,
    text: str,
) -> Finding:
    """A critical finding on one row. ``fields`` are (name for people, column); the first decides blame."""
    block = window.blocks[-1]
    at, _ = window.locate(row)
    differing = [
        (name, column) for name, column in fields if len(set(window.values(column, row).tolist())) > 1
    ]
    decisive = [int(value) for value in window.values(differing[0][1], row)]
    blamed = blame(
        window.group, window.indices, decisive, expected=expected, sampled=sampled, relayed=relayed
    )
    return Finding(
        check=check,
        severity=Severity.CRITICAL,
        step=int(window.steps[at]),
        phase=Phase.INPUTS,
        text=text,
        remedy=remedy,
        request=int(block.request[row]),
        life=life_of(block, row),
        row=row,
        ranks=blamed or window.group.numbers(window.indices),
        blamed=blamed,
        fields=tuple(name for name, _ in differing),
        values=tuple(
            Value(window.group.number(index), name, shown(block_, row, column))
            for name, column in differing
            for index, block_ in zip(window.indices, window.blocks, strict=True)
        ),
        t_ns=min(int(each.t_ns[at]) for each in window.blocks),
    )


PAYLOAD_FIELDS: Final = (
    ("num_sampled", "num_sampled"),
    ("num_rejected", "num_rejected"),
    ("sampled_token_ids", "tokens_digest"),
    ("draft_tokens", "draft_digest"),
)
"""What a payload carries for a row: (name for people, column)."""

_RAW = {"ids_digest": "ids", "last_digest": "last", "draft_digest": "drafts"}


def shown(block: InputsBlock, row: int, column: str) -> str:
    """A value for people: raw tokens where the operator opted in, else a digest in hex or a count."""
    if column in _RAW:
        return raw_tokens(block, row, _RAW[column]) or digest_or_count(block, row, column)
    return digest_or_count(block, row, column)


def digest_or_count(block: InputsBlock | PayloadBlock, row: int, column: str) -> str:
    """A column's value for people, which tells no token: a digest in hex, or a count."""
    value = int(getattr(block, column)[row])
    return f"{value:016x}" if column.endswith("digest") else str(value)
