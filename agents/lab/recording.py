"""Recording without a ring: a probe that keeps its records, and traces written from records."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from stagewatch.agents.lab.fault import Call
from stagewatch.agents.record import (
    U64,
    UNKNOWN,
    Bind,
    Body,
    Collective,
    Free,
    Inputs,
    Kind,
    Mask,
    Note,
    Payload,
    Record,
    request_key,
)

_KEYS_MAX = 1 << 20


class MemoryProbe:
    """Has the recording methods of `stagewatch.agents.probe.Probe` and keeps the records in ``records``.

    Its clock is the record's own number, in nanoseconds, so that a run is the same every time. Arrays are
    kept, not copied: whoever hands one over leaves it alone from then on. ``keys`` may be shared between ranks.
    """

    def __init__(self, slots: int, keys: dict[str, int]) -> None:
        self.records: list[Record] = []
        self.step = 0
        self._seq = 0
        self._collectives = 0
        self._keys = keys
        self._slot_keys: U64 = np.zeros(slots, np.uint64)

    def take(self) -> list[Record]:
        """The records kept since the last call."""
        taken, self.records = self.records, []
        return taken

    def bind(self, request_id: str, slot: int, generation: int, prompt_len: int, cap: int = UNKNOWN) -> None:
        """See `Probe.bind`."""
        key = self._keys.get(request_id)
        if key is None:
            if len(self._keys) >= _KEYS_MAX:
                self._keys.clear()
            key = self._keys[request_id] = request_key(request_id)
        self._slot_keys[slot] = key
        self._keep(Kind.BIND, self.step, Bind(slot, generation, prompt_len, cap, key, request_id))

    def free(self, slot: int, generation: int) -> None:
        """See `Probe.free`."""
        self._keep(Kind.FREE, self.step, Free(slot, generation, int(self._slot_keys[slot])))

    def inputs(self, body: Inputs) -> None:
        """See `Probe.inputs`."""
        self.step += 1
        self._keep(Kind.INPUTS, self.step, body)

    def mask(self, engine: NDArray[np.bool_] | None, fixed: NDArray[np.bool_] | None, rows: int) -> None:
        """See `Probe.mask`."""
        body = Mask(
            int(engine is None),
            int(fixed is None),
            np.zeros(rows, np.uint8) if engine is None else engine.view(np.uint8),
            np.zeros(rows, np.uint8) if fixed is None else fixed.view(np.uint8),
        )
        self._keep(Kind.MASK, self.step, body)

    def payload(self, kind: Kind, step: int, body: Payload) -> None:
        """See `Probe.payload`."""
        self._keep(kind, step, body)

    def collective(self, group: str, op: str, dtype: str, numel: int, group_size: int = UNKNOWN) -> None:
        """See `Probe.collective`."""
        self._collectives += 1
        body = Collective(self._collectives, numel, group_size, f"{group} {op} {dtype}")
        self._keep(Kind.COLLECTIVE, self.step, body)

    def note(self, text: str) -> None:
        """See `Probe.note`."""
        self._keep(Kind.NOTE, self.step, Note(text))

    def keys_of(self, slots: NDArray[np.integer]) -> U64:
        """See `Probe.keys_of`."""
        keys: U64 = self._slot_keys[slots]
        return keys

    def spent(self, ns: int) -> None:
        """Nothing to account: there is no step time to compare with."""

    def _keep(self, kind: Kind, step: int, body: Body) -> None:
        self.records.append(Record(kind, self._seq, step, self._seq, body))
        self._seq += 1


def record_calls(probes: Sequence[MemoryProbe], calls: Sequence[Sequence[Call]]) -> None:
    """Record each probe's calls, as `MemoryProbe.collective` would one by one.

    Ranks that have recorded equally much and hold the same list of calls share the records: frozen, and in a large
    pipeline the most numerous.
    """
    made: dict[tuple[int, int, int, int], list[Record]] = {}
    for probe, own in zip(probes, calls, strict=True):
        seq, number = probe._seq, probe._collectives
        key = seq, number, probe.step, id(own)
        records = made.get(key)
        if records is None:
            records = made[key] = [
                Record(
                    Kind.COLLECTIVE,
                    seq + place,
                    probe.step,
                    seq + place,
                    Collective(number + place + 1, call.numel, call.group_size, call.what),
                )
                for place, call in enumerate(own)
            ]
        probe.records += records
        probe._seq += len(records)
        probe._collectives += len(records)


class TraceWriter:
    """Writes one rank's records as the JSON lines that ``stagewatch replay`` reads: ``NAME.rankN.jsonl``."""

    def __init__(self, path: Path) -> None:
        self._file: IO[str] = path.open("w")
        self._names: dict[int, str] = {}
        self._mask: list[bool] | None = None

    def write(self, records: Iterable[Record]) -> None:
        """Append ``records``, in their order; kinds that a trace does not hold are left out."""
        for record in records:
            for line in self._lines(record):
                self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        """Finish the file."""
        self._file.close()

    def _lines(self, record: Record) -> list[dict[str, object]]:
        body = record.body
        match body:
            case Bind():
                self._names[body.request] = body.request_id
            case Inputs():
                return [{"kind": "inputs", "step": record.step, "rows": self._rows(body)}]
            case Mask():
                self._mask = None if body.engine_none else body.engine.astype(bool).tolist()
            case Payload() if record.kind is Kind.SENT:
                sent = {"kind": "sent", "step": record.step, **self._counts(body)}
                return [sent, {"kind": "drafts", "step": record.step, "drafts": body.draft_tokens.tolist()}]
            case Payload() if record.kind is Kind.RECEIVED:
                received = {"kind": "received", "step": record.step, **self._counts(body)}
                return [{**received, "drafts": None if body.skipped else body.draft_tokens.tolist()}]
            case _:
                pass
        return []

    def _counts(self, body: Payload) -> dict[str, object]:
        if body.skipped:
            return dict.fromkeys(("mask", "tokens", "num_sampled", "num_rejected"))
        return {
            "mask": self._mask,
            "tokens": body.tokens.tolist(),
            "num_sampled": body.num_sampled.tolist(),
            "num_rejected": body.num_rejected.tolist(),
        }

    def _rows(self, body: Inputs) -> list[dict[str, object]]:
        ends = np.cumsum(body.scheduled)
        rows: list[dict[str, object]] = []
        for row in range(len(body.request)):
            fed = slice(int(ends[row] - body.scheduled[row]), int(ends[row]))
            rows.append(
                {
                    "req": self._names.get(int(body.request[row]), str(body.request[row])),
                    "slot": int(body.slot[row]),
                    "gen": int(body.generation[row]),
                    "mirror": int(body.mirror[row]),
                    "computed": int(body.computed[row]),
                    "prefill": int(body.prefill_len[row]),
                    "prefilling": bool(body.prefilling[row]),
                    "sched": int(body.scheduled[row]),
                    "cap": int(body.cap[row]),
                    "ids": body.input_ids[fed].tolist(),
                    "pos": body.positions[fed].tolist(),
                    "last": [int(body.last_sampled[row])],
                    "drafts": body.draft_tokens[row].tolist(),
                }
            )
        return rows
