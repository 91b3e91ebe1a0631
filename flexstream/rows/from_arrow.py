"""Arrow -> packed rows. What needs no conversion goes from Arrow's buffers to the rows by native code, all columns at
once; the rest is converted column by column (packing.convert), which also says what is wrong with a value.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from flexstream.cython_ext.produce.columns import pack_columns
from flexstream.rows.missing import Given, nulls
from flexstream.rows.packing import Rows, check_names, convert, pack_given
from flexstream.rows.schema import Field, Schema

_UNITS = ("s", "ms", "us", "ns")
MOST_ENTRIES = 1 << 16  # of a dictionary that is laid out as fixed bytes


def pack_arrow(schema: Schema, data: Any, missing: Any = None) -> Rows:
    """A record batch, a table, or what can become one; `missing` as in `packing.pack`. Raises SchemaError."""
    import pyarrow as pa

    table = data if isinstance(data, pa.Table | pa.RecordBatch) else pa.table(data)
    check_names(schema, table.schema.names)
    if any(table.column(name).null_count for name in schema.names):
        return pack_given(schema, {name: given_arrow(table.column(name)) for name in schema.names}, missing)
    rows = np.empty(table.num_rows, dtype=schema.dtype)
    at = 0
    for batch in table.to_batches() if isinstance(table, pa.Table) else [table]:
        _pack_batch(schema, batch, rows[at : at + batch.num_rows])
        at += batch.num_rows
    return rows


def packed_pieces(schema: Schema, batch: Any, memory: Rows) -> Iterator[Rows]:
    """The rows of a record batch, as many at a time as `memory` holds: each piece lies there until the next is asked
    for. With a memory that fits the cache, whoever copies the rows on finds them there. Raises SchemaError.
    """
    _check(schema, batch)
    columns = _columns(schema, batch)
    for start in range(0, batch.num_rows, len(memory)):
        piece = memory[: batch.num_rows - start]
        _fill(schema, batch, columns, piece, start)
        yield piece


def _check(schema: Schema, table: Any) -> None:
    check_names(schema, table.schema.names)
    lacking = [(field, table.column(field.name).null_count) for field in schema]
    if any(count for _, count in lacking):
        raise nulls((field, count) for field, count in lacking if count)


def given_arrow(column: Any) -> Given:
    """An Arrow or polars column."""
    import pyarrow as pa

    if not isinstance(column, pa.Array | pa.ChunkedArray):
        column = pa.chunked_array(column) if hasattr(column, "__arrow_c_stream__") else pa.array(column)
    if not column.null_count:
        return Given(_to_numpy(column))
    missing = column.is_null().to_numpy(zero_copy_only=False)
    return Given(_to_numpy(_without_views(column).drop_null()), missing)


def _without_views(column: Any) -> Any:
    """Arrow cannot filter the views that polars has for text."""
    import pyarrow as pa

    plain = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}.get(column.type)
    return column if plain is None else column.cast(plain)


def _columns(schema: Schema, batch: Any) -> list[tuple[Any, ...]]:
    return [_native(field, batch.column(field.name)) or _converted(field, batch) for field in schema]


def _pack_batch(schema: Schema, batch: Any, rows: Rows) -> None:
    if len(rows) == 0:
        for field in schema:  # the types may still not fit
            convert(field, _to_numpy(batch.column(field.name)))
        return
    _fill(schema, batch, _columns(schema, batch), rows, 0)


def _fill(schema: Schema, batch: Any, columns: list[tuple[Any, ...]], rows: Rows, first: int) -> None:
    while (wrong := pack_columns(rows.view(np.uint8), schema.row_bytes, columns, first)) >= 0:
        field = schema.fields[wrong]
        if columns[wrong][0] == "copy":
            raise AssertionError(f"field {field.name!r} was converted and does not fit")
        columns[wrong] = _converted(field, batch)  # which says what is wrong


def _converted(field: Field, batch: Any) -> tuple[Any, ...]:
    values = np.ascontiguousarray(convert(field, _to_numpy(batch.column(field.name))), dtype=None)
    if field.kind != "bytes":
        values = values.astype(field.numpy, copy=False)
    return "copy", field.offset, field.size, values.view(np.uint8), 0, min(values.dtype.itemsize, field.size)


def _native(field: Field, array: Any) -> tuple[Any, ...] | None:
    """Where the values lie, for `pack_columns`; None when they must be converted."""
    import pyarrow as pa

    kind = array.type
    if pa.types.is_dictionary(kind):
        return _picked(field, array)
    if field.kind == "bytes":
        if pa.types.is_fixed_size_binary(kind) and kind.byte_width <= field.size:
            width = kind.byte_width
            return "copy", field.offset, field.size, array.buffers()[1], array.offset * width, width
        if pa.types.is_string(kind) or pa.types.is_binary(kind):
            _, ends, values = array.buffers()
            return "text", field.offset, field.size, ends, array.offset * 4, b"" if values is None else values
        return None
    if field.kind == "bool":  # bits
        return None
    start = array.offset * field.size
    if pa.types.is_timestamp(kind) and field.kind == "timestamp":
        finer = _UNITS.index(kind.unit) - _UNITS.index(field.unit or "")
        if finer < 0:
            return None
        if finer > 0:
            return "divide", field.offset, array.buffers()[1], start, 1000**finer
    elif str(kind) != ("int64" if field.kind == "timestamp" else field.arrow):
        return None
    return "copy", field.offset, field.size, array.buffers()[1], start, field.size


def _picked(field: Field, array: Any) -> tuple[Any, ...] | None:
    """A dictionary of text: its entries as fixed bytes, picked by index."""
    import pyarrow as pa

    if field.kind != "bytes" or array.type.index_type != pa.int32() or len(array.dictionary) > MOST_ENTRIES:
        return None
    if array.dictionary.null_count:
        return None
    entries = np.zeros(len(array.dictionary), f"S{field.size}")
    native = _native(field, array.dictionary)
    if native is None or native[0] not in ("text", "copy"):
        return None
    field_only = (native[0], 0, *native[2:])
    if len(entries) and pack_columns(entries.view(np.uint8), field.size, [field_only]) >= 0:
        return None
    indices = array.indices
    return "pick", field.offset, field.size, indices.buffers()[1], indices.offset * 4, entries.view(np.uint8)


def _to_numpy(column: Any) -> Any:
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if pa.types.is_timestamp(column.type):  # drop the zone: the instant is what counts
        column = column.cast(pa.timestamp(column.type.unit))
    return column.to_numpy(zero_copy_only=False)
