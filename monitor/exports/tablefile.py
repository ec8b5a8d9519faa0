"""One Parquet file, and how its columns are made from numpy's."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from types import NoneType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from stagewatch.monitor.exports.columns import SCHEMA_VERSION, Column, Table
from stagewatch.monitor.exports.exporter import PRIVATE, ExportError, needed

GROUP_ROWS: Final = 1 << 16
"""Rows of a row group; with 30 columns some 10 MB of memory a table."""


class TableFile:
    """One table's file."""

    def __init__(self, directory: Path, table: Table) -> None:
        self._arrow: Final = needed("pyarrow", "a Parquet export")
        parquet = needed("pyarrow.parquet", "a Parquet export")
        self.path: Final = directory / f"{table.name}.parquet"
        self.rows = 0
        self._schema: Final = self._arrow.schema(
            [(column.name, self._type(column)) for column in table.columns],
            metadata={"stagewatch.schema": SCHEMA_VERSION, "stagewatch.table": table.name},
        )
        self._forget()
        try:
            self.path.touch(PRIVATE)
            self.path.chmod(PRIVATE)
            self._writer: Any = parquet.ParquetWriter(self.path, self._schema, compression="zstd")
        except OSError as error:
            raise ExportError(f"{self.path}: cannot be written: {error}") from None

    def add(self, count: int, columns: dict[str, Any]) -> None:
        """Add rows: by column an array, `Lists`, `Texts`, a list of values, or one value for all of them.

        Columns that are not given, or None, are null.
        """
        if not count:
            return
        for name in self._schema.names:
            self._waiting[name].append((count, columns.get(name)))
        self._waiting_rows += count
        self.rows += count
        if self._waiting_rows >= GROUP_ROWS:
            self._write()

    def close(self) -> None:
        """Write what waits and the file's end."""
        if self._writer is not None:
            writer = self._writer
            self._write()
            self._writer = None
            writer.close()

    def _write(self) -> None:
        if not self._waiting_rows:
            return
        columns = [self._column(field, self._waiting[field.name]) for field in self._schema]
        self._forget()
        try:
            table = self._arrow.Table.from_arrays(columns, schema=self._schema)
            self._writer.write_table(table, row_group_size=GROUP_ROWS)
        except OSError as error:
            raise ExportError(f"{self.path}: cannot be written: {error}") from None

    def _forget(self) -> None:
        self._waiting: dict[str, list[tuple[int, Any]]] = {name: [] for name in self._schema.names}
        self._waiting_rows = 0

    def _column(self, field: Any, pieces: list[tuple[int, Any]]) -> Any:
        """One column of what waits; what is of one kind is turned into Arrow in one go."""
        chunks = []
        for kind, run in groupby(pieces, lambda piece: type(piece[1])):
            counts, values = zip(*run, strict=True)
            chunks.append(self._array(field, kind, sum(counts), counts, values))
        return self._arrow.chunked_array(chunks, field.type)

    def _array(self, field: Any, kind: type, count: int, counts: Sequence[int], values: Sequence[Any]) -> Any:
        arrow = self._arrow
        if kind is NoneType:
            return arrow.nulls(count, field.type)
        if kind is Lists:
            joined = Lists.joined(values)
            return arrow.ListArray.from_arrays(joined.offsets, joined.values).cast(field.type)
        if kind is Texts:
            return Texts.joined(values).array(arrow)
        if kind is list:
            return arrow.array([each for value in values for each in value], field.type)
        if not issubclass(kind, np.ndarray):  # one value for all rows
            known, index = np.unique(values, return_inverse=True)
            return arrow.array(known.tolist(), field.type).take(arrow.array(np.repeat(index, counts)))
        mask = np.concatenate([np.ma.getmaskarray(value) for value in values])
        numbers = np.concatenate([np.ma.getdata(value) for value in values])
        if arrow.types.is_timestamp(field.type):
            return arrow.array(numbers, arrow.int64(), mask=mask | (numbers == 0)).cast(field.type)
        return arrow.array(numbers, field.type, mask=mask if mask.any() else None)

    def _type(self, column: Column) -> Any:
        arrow = self._arrow
        if column.type == "time":
            return arrow.timestamp("ns", "UTC")
        if column.type == "bool":
            return arrow.bool_()
        if column.type.endswith(" list"):
            return arrow.list_(getattr(arrow, column.type.removesuffix(" list"))())
        if column.type == "links":
            return arrow.list_(arrow.struct([("step", arrow.int64()), ("text", arrow.string())]))
        if column.type == "values":
            parts = [("rank", arrow.int32()), ("field", arrow.string()), ("text", arrow.string())]
            return arrow.list_(arrow.struct(parts))
        return getattr(arrow, column.type)()


@dataclass(frozen=True, slots=True)
class Lists:
    """A list per row: ``values`` laid end to end, int32 ``lengths`` [rows]."""

    values: NDArray[np.int32]
    lengths: NDArray[np.int32]

    @property
    def offsets(self) -> NDArray[np.int32]:
        """Where each row begins, and where the last one ends."""
        return np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int32)

    @staticmethod
    def joined(parts: "Sequence[Lists]") -> "Lists":
        """The rows of all parts."""
        return Lists(
            np.concatenate([part.values for part in parts]), np.concatenate([part.lengths for part in parts])
        )


@dataclass(frozen=True, slots=True)
class Texts:
    """A text per row, by the key that stands for it; null where ``text_of`` knows none."""

    keys: NDArray[np.uint64]
    text_of: Callable[[int], str | None]

    @staticmethod
    def joined(parts: "Sequence[Texts]") -> "Texts":
        """The rows of all parts, which have the same ``text_of``."""
        return Texts(np.concatenate([part.keys for part in parts]), parts[0].text_of)

    def array(self, arrow: Any) -> Any:
        """As Arrow has it."""
        known, index = np.unique(self.keys, return_inverse=True)
        texts = arrow.array([self.text_of(int(key)) for key in known], arrow.string())
        return texts.take(arrow.array(index))


def lists(
    values: NDArray[np.int32], lengths: NDArray[np.int32], used: NDArray[np.int32] | None = None
) -> Lists | None:
    """Rows of the given lengths, the first ``used`` of each; None where no values were recorded."""
    if not len(values):
        return None
    if used is not None and not np.array_equal(used, lengths):
        starts = np.cumsum(lengths, dtype=np.int64) - lengths
        place = np.arange(len(values)) - np.repeat(starts, lengths)
        values, lengths = values[place < np.repeat(used, lengths)], used
    return Lists(values, lengths)


def masked(values: Any, none: NDArray[np.bool_]) -> Any:
    """Values of which the marked ones are null."""
    return np.ma.MaskedArray(values, mask=none)


def known(values: Any) -> Any:
    """Numbers, of which those below zero stand for unknown."""
    return masked(values, values < 0)
