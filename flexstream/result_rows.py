"""Result and late rows as workers write them -> Arrow batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from flexstream.cython_ext.partial import null_bits
from flexstream.query import BoundQuery
from flexstream.schema import Schema
from flexstream.stream import Stream

_NULL_BITS = np.int64(null_bits())


class ResultRows:
    """Turns the result rows of one query into record batches of its result schema."""

    def __init__(self, bound: BoundQuery) -> None:
        stream = bound.query.stream
        self.schema = bound.query.result_schema()
        reals = {a.name for a in bound.aggregates if _is_real(a.fn, a.arg)}
        self._nullable = {a.name for a in bound.aggregates if a.fn == "stddev"}
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
        columns = [self._column(table, field) for field in self.schema]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def _column(self, table: np.ndarray[Any, Any], field: pa.Field) -> pa.Array:
        values = np.ascontiguousarray(table[field.name])
        if field.name in self._nullable:
            return pa.array(values, field.type, mask=values.view(np.int64) == _NULL_BITS)
        return _to_arrow(values, field.type)


class LateRows:
    """Turns late rows into record batches: the stream's fields, and the watermark that they came after."""

    def __init__(self, stream: Stream) -> None:
        self._row = stream.schema.dtype
        time_type = pa.timestamp(stream.time_unit)
        self.schema = pa.schema([*_arrow_fields(stream.schema), pa.field("watermark", time_type, nullable=False)])
        self.dtype = np.dtype([("row", self._row), ("watermark", "<i8")])

    def batch(self, rows: bytes) -> pa.RecordBatch:
        table = np.frombuffer(rows, self.dtype)
        row = table["row"]
        columns = [
            _to_arrow(np.ascontiguousarray(row[field.name]), field.type) for field in self.schema if field.name != "watermark"
        ]
        columns.append(_to_arrow(np.ascontiguousarray(table["watermark"]), self.schema.field("watermark").type))
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)


def _arrow_fields(schema: Schema) -> list[pa.Field]:
    return [field.with_nullable(False) for field in schema.to_arrow()]


def _is_real(fn: str, arg: Any) -> bool:
    return fn in ("avg", "stddev") or (arg is not None and arg.type == "f64")


def _to_arrow(values: np.ndarray[Any, Any], kind: pa.DataType) -> pa.Array:
    if pa.types.is_timestamp(kind):
        return pa.array(values.view(f"datetime64[{kind.unit}]"), kind)
    if pa.types.is_fixed_size_binary(kind):
        # numpy drops trailing NULs when it makes bytes objects; the fixed width brings them back
        return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values.tobytes())])
    if pa.types.is_boolean(kind):
        return pa.array(values.view(np.uint8) != 0, kind)
    return pa.array(values).cast(kind)
