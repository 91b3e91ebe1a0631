"""Other people's tables -> packed rows. Column by column, and never by losing anything.

A value is cast only when the row holds exactly the same value afterwards; anything else is a SchemaError that
names the field, the first bad value and the fix. (One exception: a Python float in a dict is rounded to f32,
because Python has no smaller one.) Rows have no nulls: missing.py says what counts as one.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from flexstream.errors import SchemaError
from flexstream.rows.missing import DROP, Column, Given, choose, given_numpy, given_pandas, is_missing, nulls
from flexstream.rows.schema import Field, Schema, near_names

Rows = np.ndarray[Any, np.dtype[Any]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]

_UNIT_NS = {"s": 1_000_000_000, "ms": 1_000_000, "us": 1_000, "ns": 1}
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


def pack(schema: Schema, data: Any, missing: Any = None) -> Rows:
    """`data` as a C-contiguous array of `schema.dtype`; the very same array when it is one already.

    Takes numpy structured arrays, Arrow batches and tables, pandas and polars frames, mappings of name to
    column, and (slowly) sequences of dicts. Columns may come in any order, but all must be
    there, and no others.

    `missing` says what becomes of values that are missing (null, None, NA, NaT; NaN in pandas): None refuses them
    with field and count, "drop" leaves their rows out, any other value takes their place, and a mapping chooses by
    field.
    """
    if isinstance(data, np.ndarray):
        return _pack_numpy(schema, data, missing)
    if isinstance(data, Mapping):
        return pack_given(schema, {name: _given(column) for name, column in data.items()}, missing)
    if _is_from(data, "pandas"):  # not through Arrow, which would make nulls of NaNs that missing= may want
        return pack_given(schema, {name: given_pandas(data[name]) for name in data.columns}, missing)
    if _is_arrow(data):
        from flexstream.rows.from_arrow import pack_arrow

        return pack_arrow(schema, data, missing)
    if isinstance(data, Sequence) and not isinstance(data, str | bytes):
        return _pack_dicts(schema, data, missing)
    raise SchemaError(
        f"cannot turn {type(data).__name__} into rows",
        code="bad_rows",
        hint="send a numpy structured array, an Arrow batch, a pandas or polars frame, or a list of dicts",
    )


def _is_arrow(data: Any) -> bool:
    return (
        hasattr(data, "__arrow_c_stream__")
        or hasattr(data, "__arrow_c_array__")
        or _is_from(data, "pyarrow", "polars")
    )


def _is_from(data: Any, *packages: str) -> bool:
    return type(data).__module__.split(".")[0] in packages


def _pack_numpy(schema: Schema, data: Rows, missing: Any) -> Rows:
    if data.dtype == schema.dtype and data.ndim == 1 and not isinstance(data, np.ma.MaskedArray):
        return np.ascontiguousarray(data)
    if data.dtype.names is None:
        raise SchemaError(
            f"an array of {data.dtype} has no field names",
            code="bad_rows",
            hint="fill np.zeros(n, dtype=stream.schema.dtype), which has the names and types",
        )
    if data.ndim != 1:
        raise SchemaError(
            f"rows must have one dimension, not {data.ndim}", code="bad_rows", hint="use .ravel()"
        )
    return pack_given(schema, {name: given_numpy(data[name]) for name in data.dtype.names}, missing)


def pack_given(schema: Schema, columns: dict[str, Given], missing: Any) -> Rows:
    """Columns with what they lack -> rows, as `missing` says (see `pack`)."""
    check_names(schema, list(columns))
    lengths = {column.rows for column in columns.values()}
    if len(lengths) > 1:
        shown = ", ".join(f"{name}: {column.rows}" for name, column in columns.items())
        raise SchemaError(f"columns have different lengths ({shown})", code="bad_rows")
    masks = {name: columns[name].missing for name in schema.names}
    lacking = {name: int(mask.sum()) for name, mask in masks.items() if mask is not None}
    chosen = choose(schema, missing, lacking)
    rows = np.zeros(lengths.pop(), dtype=schema.dtype)
    dropped = np.zeros(len(rows) if lacking else 0, np.bool_)
    for field in schema:
        values, mask = convert(field, columns[field.name].values), masks[field.name]
        if mask is None:
            rows[field.name] = values
            continue
        rows[field.name][~mask] = values
        if isinstance(chosen[field.name], str) and chosen[field.name] == DROP:
            dropped |= mask
        else:
            rows[field.name][mask] = convert(field, np.array([chosen[field.name]], dtype=object))[0]
    return rows[~dropped] if dropped.any() else rows


def check_names(schema: Schema, names: list[Any]) -> None:
    missing = [name for name in schema.names if name not in names]
    extra = [str(name) for name in names if name not in schema]
    if missing:
        raise SchemaError(
            f"rows lack {', '.join(missing)}",
            code="unknown_field",
            hint=near_names(missing[0], list(map(str, names))),
        )
    if extra:
        raise SchemaError(
            f"rows have fields that the stream does not have: {', '.join(extra)}",
            code="unknown_field",
            hint="drop them before sending",
        )


def _given(values: Any) -> Given:
    """One column, from whatever library it is."""
    if isinstance(values, np.ndarray):
        return given_numpy(values)
    if _is_from(values, "pandas"):
        return given_pandas(values)
    if _is_arrow(values):
        from flexstream.rows.from_arrow import given_arrow

        return given_arrow(values)
    if hasattr(values, "__array__"):
        return given_numpy(np.asarray(values))
    out = np.empty(len(values), dtype=object)
    out[:] = list(values)
    return given_numpy(out)


def _pack_dicts(schema: Schema, data: Sequence[Any], missing: Any) -> Rows:
    for i, row in enumerate(data):
        if not isinstance(row, Mapping):
            raise SchemaError(f"row {i} is {type(row).__name__}, not a dict", code="bad_rows")
        if row.keys() != schema.to_dict().keys():
            check_names(schema, list(row))
    return pack_given(schema, {name: _given([row[name] for row in data]) for name in schema.names}, missing)


def convert(field: Field, column: Column) -> Column:
    """One column in the row's own type. Raises SchemaError when that would change a value."""
    if column.ndim != 1:
        raise SchemaError(f"field {field.name!r}: a column of {column.ndim} dimensions", code="bad_rows")
    if column.dtype == np.dtype(field.numpy) and field.kind != "bytes":
        return column
    if field.kind == "bytes":
        return _to_bytes(field, column)
    if column.dtype.kind == "O":
        column = _from_objects(field, column)
    if field.kind == "timestamp" and column.dtype.kind == "M":
        return _to_units(field, column)
    if column.dtype.kind not in "iufb":
        raise _wrong_type(field, column)
    return _to_number(field, column)


def _to_number(field: Field, column: Column) -> Column:
    target = np.dtype(field.numpy)
    if (target.kind == "b") != (column.dtype.kind == "b"):
        raise _wrong_type(field, column)
    if target == column.dtype or len(column) == 0:
        return column.astype(target)
    with np.errstate(all="ignore"):
        cast = column.astype(target)
        changed = _changed(column, cast)
    if changed.any():
        raise _lossy(field, column[changed][0])
    return cast


def _changed(column: Column, cast: Column) -> Bools:
    changed: Bools
    if column.dtype.kind == "f" and cast.dtype.kind == "f":
        changed = (cast != column) & ~np.isnan(column)
    elif column.dtype.kind == "f":  # float -> integer: undefined outside the range, so look at the range first
        info = np.iinfo(cast.dtype)
        changed = ~(
            (column >= float(info.min)) & (column < float(info.max) + 1.0) & (np.trunc(column) == column)
        )
    elif cast.dtype.kind == "f":  # integer -> float: 2**63 as a float does not fit back
        limit = float(np.iinfo(column.dtype).max) + 1.0
        fits = cast.astype(np.float64) < limit
        changed = ~fits | (np.where(fits, cast, 0).astype(column.dtype) != column)
    else:
        changed = (cast.astype(column.dtype) != column) | ((cast < 0) != (column < 0))
    return changed


def _to_units(field: Field, column: Column) -> Column:
    """datetime64 of any unit -> int64 in the field's."""
    if np.isnat(column).any():
        raise nulls([(field, int(np.isnat(column).sum()))])
    target = f"M8[{field.unit}]"
    with np.errstate(all="ignore"):
        try:
            cast = column.astype(target)
        except OverflowError:
            raise _lossy(field, column[0]) from None
        changed = cast.astype(column.dtype) != column
    if changed.any():
        raise _lossy(field, column[changed][0])
    return cast.view("<i8")


def _to_bytes(field: Field, column: Column) -> Column:
    if column.dtype.kind == "O":
        values = [_one_bytes(field, value) for value in column]
        longest = max(values, key=len, default=b"")
        if len(longest) > field.size:  # also when what is too much is NULs, which numpy would not count
            raise _lossy(field, longest)
        column = np.array(values, dtype=f"S{max(map(len, values), default=1) or 1}")
    elif column.dtype.kind == "U":
        column = np.char.encode(column, "utf-8")
    elif column.dtype.kind == "V" and column.dtype.names is None:
        column = np.ascontiguousarray(column).view(f"S{column.dtype.itemsize}")
    if column.dtype.kind != "S":
        raise _wrong_type(field, column)
    if column.dtype.itemsize > field.size:
        too_long = np.char.str_len(column) > field.size
        if too_long.any():
            raise _lossy(field, column[too_long][0])
    return column


def _one_bytes(field: Field, value: Any) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise _bad_value(field, value)


def _from_objects(field: Field, column: Column) -> Column:
    """Python objects -> a numeric column, each value checked: the slow path."""
    if field.kind == "timestamp":
        return np.fromiter((_one_time(field, value) for value in column), dtype=np.int64, count=len(column))
    wanted: tuple[type, ...] = (bool, np.bool_)
    if field.kind in ("f32", "f64"):
        wanted = (int, float, np.integer, np.floating)
    elif field.kind != "bool":
        wanted = (int, np.integer)
    for value in column:
        if not isinstance(value, wanted) or (isinstance(value, bool) and field.kind != "bool"):
            raise _bad_value(field, value)
    target = np.dtype(field.numpy)
    if target.kind in "iu":
        info = np.iinfo(target)
        for value in column:
            if not int(info.min) <= int(value) <= int(info.max):
                raise _lossy(field, value)
    if field.kind == "f32":
        with np.errstate(over="ignore"):
            rounded = column.astype(target)
        overflowed = np.isinf(rounded) & ~np.isinf(column.astype(np.float64))
        if overflowed.any():
            raise _lossy(field, column[overflowed][0])
        return rounded
    if field.kind == "f64":
        for value in column:
            if (
                isinstance(value, int)
                and abs(value) > 2**53
                and (abs(value) >= 2**1023 or int(float(value)) != value)
            ):
                raise _lossy(field, value)
    return column.astype(target)


def _one_time(field: Field, value: Any) -> int:
    unit_ns = _UNIT_NS[field.unit or "ns"]
    if isinstance(value, np.datetime64):
        return int(_to_units(field, np.array([value]))[0])
    if isinstance(value, datetime.datetime):
        aware = value if value.tzinfo is not None else value.replace(tzinfo=datetime.UTC)
        delta = aware - _EPOCH
        ns = (delta.days * 86_400 + delta.seconds) * _UNIT_NS["s"] + delta.microseconds * 1_000
        ns += getattr(value, "nanosecond", 0)  # pandas.Timestamp
        if ns % unit_ns:
            raise _lossy(field, value)
        count = ns // unit_ns
    elif isinstance(value, int | np.integer) and not isinstance(value, bool):
        count = int(value)
    else:
        raise _bad_value(field, value)
    if not -(2**63) <= count < 2**63:
        raise _lossy(field, value)
    return count


def _bad_value(field: Field, value: Any) -> SchemaError:
    if is_missing(value):
        return nulls([(field, 1)])
    return SchemaError(
        f"field {field.name!r} is {field.type} and cannot hold {str(value)[:80]!r} "
        f"of type {type(value).__name__}",
        code="bad_value",
        hint=f"send {_wants(field)}",
    )


def _wrong_type(field: Field, column: Column) -> SchemaError:
    return SchemaError(
        f"field {field.name!r} is {field.type}, but the column is {column.dtype}",
        code="bad_value",
        hint=f"send {_wants(field)}",
    )


def _lossy(field: Field, value: Any) -> SchemaError:
    fix = {
        "f32": "declare the field f64, or round the column yourself: .astype('f4')",
        "timestamp": f"round the column to {field.unit}, or declare a finer unit",
        "bytes": f"cut the value to {field.size} bytes, or declare a larger field",
    }.get(field.kind, "declare a wider type, or convert the column yourself")
    return SchemaError(
        f"field {field.name!r} is {field.type} and cannot hold {str(value)[:80]} without changing it",
        code="lossy_cast",
        hint=fix,
    )


def _wants(field: Field) -> str:
    if field.kind == "bytes":
        return f"bytes or text of at most {field.size} bytes"
    if field.kind == "timestamp":
        return f"datetime64, datetime, or integers in {field.unit} since 1970"
    return {"f": "numbers", "b": "booleans"}.get(field.kind[0], "integers")
