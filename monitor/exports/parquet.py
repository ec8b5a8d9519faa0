"""Parquet: a directory of tables, written row group by row group as the evidence goes by."""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from stagewatch.agents.bodies import Kind
from stagewatch.agents.evidence import (
    EventBlock,
    Evidence,
    InputsBlock,
    MaskBlock,
    PayloadBlock,
    list_offsets,
)
from stagewatch.agents.identity import Identity, Rank
from stagewatch.monitor.exports.columns import (
    INCIDENTS,
    INPUTS,
    MASKS,
    PAYLOADS,
    RANKS,
    RECORDS,
    TABLES,
    Table,
)
from stagewatch.monitor.exports.exporter import ExportError, Found
from stagewatch.monitor.exports.tablefile import TableFile, Texts, known, lists, masked
from stagewatch.monitor.story.names import Names
from stagewatch.monitor.story.picker import number_of

_AS_THEY_ARE: Final = (
    *("id", "deployment", "instance", "dp", "check", "first_bad_step", "last_bad_step"),
    *("ranks", "blamed", "fields", "remedy"),
)
"""Columns of incidents that are the incident's own."""
_PAYLOADS: Final = ("sent", "received", "consumed")


class ParquetExporter:
    """Writes `columns.TABLES` into a directory. Used as a context manager, so that files are closed."""

    def __init__(self, directory: Path, names: Names) -> None:
        self._names: Final = names
        try:
            directory.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise ExportError(f"{directory}: cannot be made: {error.strerror}") from None
        self._directory: Final = directory
        self._files: Final = {table.name: TableFile(directory, table) for table in TABLES}
        self._ranks: dict[tuple[str, Rank], tuple[Identity, int]] = {}

    def see(self, identity: Identity, evidence: Evidence) -> None:
        """Write one batch of a rank."""
        key = identity.instance, identity.rank
        _, lost = self._ranks.get(key, (identity, 0))
        self._ranks[key] = identity, lost + evidence.lost
        if evidence.inputs is not None:
            self._inputs(identity, evidence.inputs)
        if evidence.mask is not None:
            self._masks(identity, evidence.mask)
        for kind in _PAYLOADS:
            block = getattr(evidence, kind)
            if block is not None:
                self._payloads(identity, kind, block)
        if evidence.events is not None:
            self._events(identity, evidence.events)

    def finish(self, found: Found) -> list[str]:
        """Write ranks and incidents, and the ends of the files."""
        for identity, lost in self._ranks.values():
            self._add(RANKS, 1, {**_who(identity), **_of_rank(identity, lost)})
        if found.incidents:
            self._add(INCIDENTS, len(found.incidents), _of_incidents(found))
        self.close()
        return [f"{file.path}: {file.rows} rows" for file in self._files.values()]

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files.values():
            file.close()
            if kind is not None:
                file.path.unlink(missing_ok=True)
        if kind is not None:
            with suppress(OSError):
                self._directory.rmdir()

    # ---- by kind of record

    def _inputs(self, identity: Identity, block: InputsBlock) -> None:
        columns = self._rows(identity, block) | {
            "prefilling": block.prefilling != 0,
            "num_computed": block.computed,
            "num_computed_mirror": block.mirror,
            "cap": known(block.cap),
            "input_ids_digest": block.ids_digest,
            "last_sampled_digest": block.last_digest,
            "draft_tokens_digest": block.draft_digest,
            "input_ids": lists(block.raw_ids, block.scheduled),
            "last_sampled": block.raw_last if len(block.raw_last) else None,
            "draft_tokens": lists(block.raw_drafts, np.repeat(block.drafts, block.rows)),
        }
        for name in ("prefill_len", "scheduled", "draft_count", "position", "position_shape", "flags"):
            columns[name] = getattr(block, name)
        self._add(INPUTS, len(block.request), columns)
        self._records(identity, block, "inputs")

    def _masks(self, identity: Identity, block: MaskBlock) -> None:
        count = int(block.rows.sum())
        columns = _who(identity) | _when(block) | {"row": _row(block)}
        for name in ("engine", "fixed"):
            none = np.repeat(getattr(block, f"{name}_none"), block.rows) != 0
            columns[name] = (getattr(block, name) != 0) & ~none
        self._add(MASKS, count, columns)
        self._records(identity, block, "mask")

    def _payloads(self, identity: Identity, kind: str, block: PayloadBlock) -> None:
        count = len(block.request)
        widths, drafts = np.repeat(block.width, block.rows), np.repeat(block.drafts, block.rows)
        sampled = np.clip(block.num_sampled, 0, widths)
        columns = self._rows(identity, block) | {
            "kind": kind,
            "at": np.repeat(known(block.at), block.rows),
            "applied": block.applied != 0,
            "draft_tokens_digest": block.draft_digest,
            "tokens": lists(block.raw_tokens, widths, sampled),
            "draft_tokens": lists(block.raw_drafts, drafts),
        }
        for name in (
            "generation_now",
            "num_sampled",
            "num_rejected",
            "tokens_digest",
            "last_digest",
            "flags",
        ):
            columns[name] = getattr(block, name)
        self._add(PAYLOADS, count, columns)
        skipped = {"at": known(block.at), "skipped": block.skipped != 0}
        self._records(identity, block, kind, skipped)

    def _events(self, identity: Identity, block: EventBlock) -> None:
        count = len(block.seq)
        bound = np.isin(block.kind, (Kind.BIND, Kind.FREE))
        columns = _who(identity) | {
            "step": block.step,
            "time": block.t_ns,
            "seq": block.seq,
            "kind": [Kind(kind).name.lower() for kind in block.kind.tolist()],
            "prompt_len": masked(block.prompt_len, block.kind != Kind.BIND),
            "cap": masked(block.cap, (block.kind != Kind.BIND) | (block.cap < 0)),
            "numel": masked(block.numel, block.kind != Kind.COLLECTIVE),
            "text": [text or None for text in block.text],
        }
        for name, source in (("slot", "slot"), ("generation", "generation"), ("request_key", "request")):
            columns[name] = masked(getattr(block, source), ~bound)
        self._add(RECORDS, count, columns)

    # ---- columns that several kinds share

    def _records(self, identity: Identity, block: Any, kind: str, more: dict[str, Any] | None = None) -> None:
        count = len(block.seq)
        head = {"step": block.step, "time": block.t_ns, "seq": block.seq, "rows": block.rows}
        self._add(RECORDS, count, _who(identity) | head | {"kind": kind} | (more or {}))

    def _rows(self, identity: Identity, block: InputsBlock | PayloadBlock) -> dict[str, Any]:
        return (
            _who(identity)
            | _when(block)
            | {
                "row": _row(block),
                "request": Texts(block.request, self._names.known),
                "request_key": block.request,
                "slot": block.slot,
                "generation": block.generation,
            }
        )

    def _add(self, table: Table, count: int, columns: dict[str, Any]) -> None:
        self._files[table.name].add(count, columns)


def _who(identity: Identity) -> dict[str, Any]:
    rank = identity.rank
    return {
        "instance": identity.instance,
        "dp": rank.dp,
        "pp": rank.pp,
        "tp": rank.tp,
        "rank": number_of(identity),
    }


def _when(block: InputsBlock | MaskBlock | PayloadBlock) -> dict[str, Any]:
    return {"step": np.repeat(block.step, block.rows), "time": np.repeat(block.t_ns, block.rows)}


def _row(block: InputsBlock | MaskBlock | PayloadBlock) -> NDArray[np.int32]:
    starts = list_offsets(block, "")[:-1]
    row: NDArray[np.int32] = (np.arange(int(block.rows.sum())) - np.repeat(starts, block.rows)).astype(
        np.int32
    )
    return row


def _of_rank(identity: Identity, lost: int) -> dict[str, list[Any]]:
    return {
        "deployment": [identity.deployment],
        "host": [identity.host],
        "pid": [identity.pid],
        "engine": [identity.engine],
        "engine_version": [identity.engine_version],
        "spec_tokens": [identity.spec_tokens if identity.spec_tokens >= 0 else None],
        "started": [identity.started_ns],
        "lost_records": [lost],
    }


def _of_incidents(found: Found) -> dict[str, list[Any]]:
    incidents = found.incidents

    def column(name: str) -> list[Any]:
        return [getattr(incident, name) for incident in incidents]

    def dicts(parts: Iterable[Any]) -> list[dict[str, Any]]:
        return [{name: getattr(part, name) for name in part.__struct_fields__} for part in parts]

    return {name: column(name) for name in _AS_THEY_ARE} | {
        "severity": [incident.severity.word for incident in incidents],
        "request": [incident.request or None for incident in incidents],
        "first_bad_time": column("first_bad_ns"),
        "last_good_step": [incident.last_good_step or None for incident in incidents],
        "chain": [dicts(incident.chain) for incident in incidents],
        "values": [dicts(incident.values) for incident in incidents],
    }
