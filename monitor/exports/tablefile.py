"""One Parquet file, and how its columns are made from numpy's."""

from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from stagewatch.monitor.exports.columns import SCHEMA_VERSION, Column, Table
from stagewatch.monitor.exports.exporter import PRIVATE, ExportError, needed

GROUP_ROWS: Final = 1 << 17
"""Rows of a row group; with 30 columns some 20 MB of memory a table."""


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
        self._waiting: list[Any] = []
        self._waiting_rows = 0
        try:
            self.path.touch(PRIVATE)
            self._writer: Any = parquet.ParquetWriter(self.path, self._schema, compression="zstd")
        except OSError as error:
            raise ExportError(f"{self.path}: cannot be written: {error}") from None

    def add(self, count: int, columns: dict[str, Any]) -> None:
        """Add rows; columns that are not given, or None, are null."""
        if not count:
            return
        arrays = [self._array(field, columns.get(field.name), count) for field in self._schema]
        self._waiting.append(self._arrow.Table.from_arrays(arrays, schema=self._schema))
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
        if self._waiting:
            table = self._arrow.concat_tables(self._waiting)
            self._waiting, self._waiting_rows = [], 0
            try:
                self._writer.write_table(table, row_group_size=GROUP_ROWS)
            except OSError as error:
                raise ExportError(f"{self.path}: cannot be written: {error}") from None

    def _array(self, field: Any, values: Any, count: int) -> Any:
        arrow = self._arrow
        if values is None:
            return arrow.nulls(count, field.type)
        if isinstance(values, Lists):
            return arrow.ListArray.from_arrays(values.offsets, values.values).cast(field.type)
        if arrow.types.is_timestamp(field.type):
            values = np.ma.masked_equal(np.asarray(values, np.int64), 0)
            return self._numbers(values, arrow.int64()).cast(field.type)
        if isinstance(values, np.ndarray):
            return self._numbers(values, field.type)
        return arrow.array(values, field.type)

    def _numbers(self, values: Any, kind: Any) -> Any:
        mask = np.ma.getmaskarray(values) if isinstance(values, np.ma.MaskedArray) else None
        return self._arrow.array(np.ma.getdata(values), kind, mask=mask)

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


class Lists:
    """A list per row: ``values`` laid end to end, int32 ``offsets`` [rows + 1]."""

    def __init__(self, values: NDArray[np.int32], offsets: NDArray[np.int32]) -> None:
        self.values = values
        self.offsets = offsets


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
    return Lists(values, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))


def masked(values: Any, none: NDArray[np.bool_]) -> Any:
    """Values of which the marked ones are null."""
    return np.ma.MaskedArray(values, mask=none)


def known(values: Any) -> Any:
    """Numbers, of which those below zero stand for unknown."""
    return masked(values, values < 0)
