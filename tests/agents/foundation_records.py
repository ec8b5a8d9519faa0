"""Records of any shape, for the tests of what the probe writes and the sidecar reads."""

import struct
import zlib
from dataclasses import fields

import msgspec
import numpy as np
from hypothesis import strategies as st

from stagewatch.agents.identity import Identity, Rank, Sizes
from stagewatch.agents.record import (
    BODIES,
    Body,
    Extent,
    Inputs,
    Kind,
    Note,
    Record,
)

DTYPES = {"u8": np.uint64, "i4": np.int32, "u1": np.uint8}


def identity(**changes: object) -> Identity:
    described: dict[str, object] = {
        "deployment": "test",
        "instance": "life-1",
        "rank": Rank(0, 0, 0),
        "sizes": Sizes(1, 2, 1),
        "host": "node",
        "pid": 1,
        "engine": "none",
        "engine_version": "1",
        "variant": "C",
        "spec_tokens": 7,
        "vocab_size": 32_000,
        "max_model_len": 4096,
        "started_ns": 1,
    }
    return Identity(**{**described, **changes})


def body_of(kind: Kind, seed: int = 0, *, rows: int = 3, width: int = 4, drafts: int = 2) -> Body:
    """A body of ``kind`` with random contents; columns hold every value of their dtype."""
    random = np.random.default_rng(seed)
    body_type = BODIES[kind]
    scheduled = random.integers(0, 5, rows).astype(np.int32)
    shapes = {
        Extent.ROW: (rows,),
        Extent.WIDTH: (rows, width),
        Extent.DRAFT: (rows, drafts),
        Extent.RAGGED: (int(scheduled.sum()),),
    }
    values: dict[str, object] = {
        name: int(random.integers(-(2**63), 2**63 - 1)) for name in body_type.SCALARS
    }
    if "request" in body_type.SCALARS:
        values["request"] = int(random.integers(0, 2**64 - 1, dtype=np.uint64))
    for name, item, extent in body_type.COLUMNS:
        limits = np.iinfo(DTYPES[item])
        values[name] = random.integers(limits.min, limits.max, shapes[extent], DTYPES[item], endpoint=True)
    if body_type is Inputs:
        values["scheduled"] = scheduled
    if body_type.TEXT is not None:
        values[body_type.TEXT] = f"text {seed} ä 漢 🙂"
    return body_type(**values)


def decoding(seed: int = 0, *, rows: int = 4, drafts: int = 3, vocab: int = 1000) -> Inputs:
    """Rows that decode and feed their state, as a sound engine does."""
    random = np.random.default_rng(seed)
    last = random.integers(0, vocab, rows).astype(np.int32)
    block = random.integers(1, vocab, (rows, drafts)).astype(np.int32)
    column = np.arange(rows, dtype=np.int32)
    window = np.arange(drafts + 1, dtype=np.int32)
    return Inputs(
        tick=seed,
        graph_mode=0,
        spec_tokens=drafts,
        padded_tokens=0,
        request=column.astype(np.uint64) + 1,
        slot=column,
        generation=column + 1,
        mirror=column + 100,
        computed=column + 100,
        prefill_len=column + 10,
        scheduled=np.full(rows, drafts + 1, np.int32),
        draft_count=np.full(rows, drafts, np.int32),
        cap=column + 500,
        last_sampled=last,
        draft_tokens=block,
        input_ids=np.concatenate([last[:, None], block], axis=1).reshape(-1),
        positions=(column[:, None] + 100 + window).reshape(-1).astype(np.int32),
        prefilling=np.zeros(rows, np.uint8),
    )


def note(seq: int, size: int = 0) -> Note:
    """A note that says its own number, ``size`` characters longer than that takes."""
    return Note(f"{seq}:" + "x" * size)


@st.composite
def bodies(draw: st.DrawFn, kind: Kind) -> Body:
    """Bodies of one kind, of any small shape, zero rows and no drafts included."""
    small = st.integers(0, 5)
    return body_of(kind, draw(st.integers(0, 2**32)), rows=draw(small), width=draw(small), drafts=draw(small))


def field_names(of: Record | Body) -> list[str]:
    """Fields of a record or a body."""
    return [field.name for field in (fields(of) if isinstance(of, Record) else msgspec.structs.fields(of))]


def same(one: Record | Body, other: Record | Body) -> bool:
    """Whether two records or bodies are equal in every field, dtypes and shapes included."""
    if type(one) is not type(other):
        return False
    for name in field_names(one):
        a, b = getattr(one, name), getattr(other, name)
        if isinstance(a, np.ndarray):
            if a.dtype != b.dtype or a.shape != b.shape or not np.array_equal(a, b):
                return False
        elif not (same(a, b) if name == "body" else a == b):
            return False
    return True


def sealed(data: bytes | bytearray) -> bytes:
    """A record whose bytes were changed, with a checksum that fits them again."""
    changed = bytearray(data)
    struct.pack_into("<I", changed, 8, zlib.crc32(changed[12:], zlib.crc32(changed[:8])))
    return bytes(changed)
