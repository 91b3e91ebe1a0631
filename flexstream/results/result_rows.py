"""Result and late rows as workers write them -> Arrow batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from flexstream.cython_ext.operators.table import null_bits
from flexstream.query.query import BoundQuery
from flexstream.results.cut import Cut
from flexstream.rows.schema import Schema
from flexstream.rows.stream import Stream
from flexstream.state.results.already_logged import column

REALS = ("float", "double")  # the others are integers in result rows
_NULL_BITS = np.int64(null_bits())
_NUMPY_OF = {
    "int8": np.int8, "int16": np.int16, "int32": np.int32, "int64": np.int64, "uint8": np.uint8,
    "uint16": np.uint16, "uint32": np.uint32, "uint64": np.uint64, "float": np.float32, "double": np.float64,
}  # fmt: skip


class ResultRows:
    """Turns the result rows of one query into record batches of its result schema."""

    def __init__(self, bound: BoundQuery, cut: Cut | None = None) -> None:
        stream = bound.query.stream
        self.schema = bound.query.result_schema()
        reals = {a.name for a in bound.aggregates if a.result_type in REALS}
        self._nullable = {a.name for a in bound.aggregates if a.function.nullable}
        self._reals = sorted(reals)
        self.cut = Cut(bound.query.name) if cut is None else cut
        self.nan_results = 0  # rows of batches made so far that have an aggregate that is NaN
        self.dtype = np.dtype(
            [
                ("window_start", "<i8"),
                ("window_end", "<i8"),
                *((field.name, field.numpy) for field in stream.key_fields),
                *((a.name, "<f8" if a.name in reals else "<i8") for a in bound.aggregates),
                ("group", "<i4"),
                ("revision", "<i4"),
            ]
        )

    def batch(self, rows: bytes) -> pa.RecordBatch:
        table = np.frombuffer(rows, self.dtype)
        self._count_nan(table)
        columns = [self._column(table, field) for field in self.schema if field.name != "complete"]
        complete = self.cut.complete(table["window_start"], table["window_end"])
        columns.append(_to_arrow(complete, pa.bool_()))
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def _count_nan(self, table: np.ndarray[Any, Any]) -> None:
        found = np.zeros(len(table), np.bool_)
        for name in self._reals:
            values = np.ascontiguousarray(table[name])
            found |= np.isnan(values) & (values.view(np.int64) != _NULL_BITS)
        self.nan_results += int(found.sum())

    def _column(self, table: np.ndarray[Any, Any], field: pa.Field) -> pa.Array:
        values = np.ascontiguousarray(table[field.name])
        valid = values.view(np.int64) != _NULL_BITS if field.name in self._nullable else None
        return _to_arrow(values, field.type, valid)


class LateRows:
    """Turns late rows of a stream into batches: its fields, the watermark that they came after, for whom they are.

    `dtype`: as workers write them, `mask` by their slots; `stored`: as the log keeps them, by its bits; `schema`: as a
    query's late rows are read.
    """

    MARKS = pa.schema(
        [
            pa.field("_late_word", pa.uint32(), nullable=False),  # no field of a stream begins like that
            pa.field("_late_mask", pa.uint64(), nullable=False),
        ]
    )

    def __init__(self, stream: Stream) -> None:
        row = stream.schema.dtype
        time_type = pa.timestamp(stream.time_unit)
        self.schema = pa.schema([*_arrow_fields(stream.schema), pa.field("watermark", time_type, nullable=False)])
        self.stored = pa.schema([*self.schema, *self.MARKS])
        self.of_query = np.dtype([("row", row), ("watermark", "<i8")])
        self.dtype = np.dtype([("row", row), ("watermark", "<i8"), ("mask", "<u8"), ("word", "<u4"), ("group", "<u4")])

    def one_query(self, table: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The rows without what tells for whom they are."""
        rows = np.zeros(len(table), self.of_query)
        rows["row"], rows["watermark"] = table["row"], table["watermark"]
        return rows

    def batch(self, table: np.ndarray[Any, Any], word: int, masks: np.ndarray[Any, Any]) -> pa.RecordBatch:
        """To be stored."""
        row = table["row"]
        columns = [_to_arrow(np.ascontiguousarray(row[field.name]), field.type) for field in list(self.schema)[:-1]]
        columns.append(_to_arrow(np.ascontiguousarray(table["watermark"]), self.schema.field("watermark").type))
        columns.append(_to_arrow(np.full(len(table), word, np.uint32), pa.uint32()))
        columns.append(_to_arrow(masks, pa.uint64()))
        return pa.RecordBatch.from_arrays(columns, schema=self.stored)

    def public(self, batch: pa.RecordBatch, places: np.ndarray[Any, Any]) -> pa.RecordBatch:
        """Of stored rows those at the places, as a query's."""
        columns = [batch.column(field.name) for field in self.schema]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema).take(_to_arrow(places, pa.int64()))

    @staticmethod
    def marks(batch: pa.RecordBatch) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """(words, masks) of stored rows."""
        return column(batch.column("_late_word"), np.dtype("<u4")), column(batch.column("_late_mask"), np.dtype("<u8"))

    @staticmethod
    def marked(batch: pa.RecordBatch, masks: np.ndarray[Any, Any]) -> pa.RecordBatch:
        """Stored rows with other masks; those that are for nobody are gone."""
        columns = [
            _to_arrow(masks, field.type) if field.name == "_late_mask" else batch.column(field.name)
            for field in batch.schema
        ]
        whole = pa.RecordBatch.from_arrays(columns, schema=batch.schema)
        return whole.filter(_to_arrow(masks != 0, pa.bool_()))


def _arrow_fields(schema: Schema) -> list[pa.Field]:
    return [field.with_nullable(False) for field in schema.to_arrow()]


def _to_arrow(values: np.ndarray[Any, Any], kind: pa.DataType, valid: np.ndarray[Any, Any] | None = None) -> pa.Array:
    """Buffers, not pa.array(): that would import pandas where it is installed."""
    if pa.types.is_boolean(kind):
        bytes_ = values if values.itemsize == 8 else values.view(np.uint8)  # an aggregate's, or a field's
        packed = np.packbits(bytes_ != 0, bitorder="little")
        return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(packed)])
    if not (pa.types.is_timestamp(kind) or pa.types.is_fixed_size_binary(kind)):
        values = values.astype(_NUMPY_OF[str(kind)], copy=False)
    validity = None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little"))
    return pa.Array.from_buffers(kind, len(values), [validity, pa.py_buffer(values.tobytes())])
