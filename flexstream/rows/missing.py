"""What is missing in somebody's table, and what becomes of it: rows have no nulls.

Missing is what the table's own library calls so: null in Arrow and polars; NaN, NaT, NA and None in pandas, which does
not tell a NaN from a gap; what numpy masks, and NaT; None, NA and NaT among Python values. A NaN anywhere else was put
there: it is a value like any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from flexstream.errors import SchemaError
from flexstream.rows.schema import Field, Schema

Column = np.ndarray[Any, np.dtype[Any]]
Mask = np.ndarray[Any, np.dtype[np.bool_]]

DROP = "drop"
_NAMES = ("NaTType", "NAType")  # of pandas, which need not be installed


class Given(NamedTuple):
    """A column as it came: the values that are there, and where others are missing (None: nowhere)."""

    values: Column
    missing: Mask | None = None

    @property
    def rows(self) -> int:
        return len(self.values) if self.missing is None else len(self.missing)


def given_numpy(column: Column) -> Given:
    if column.ndim != 1:
        return Given(column)  # convert() has a word on it
    mask: Mask | None = None
    if isinstance(column, np.ma.MaskedArray):
        mask, column = np.ma.getmaskarray(column), column.data
    if column.dtype.kind == "M":
        nat = np.isnat(column)
        mask = nat if mask is None else mask | nat
    elif column.dtype.kind == "O":
        none = np.fromiter((is_missing(value) for value in column), np.bool_, len(column))
        mask = none if mask is None else mask | none
    return _given(column, mask)


def given_pandas(series: Any) -> Given:
    if getattr(series, "ndim", 1) != 1:
        return Given(np.asarray(series))
    mask = np.asarray(series.isna(), np.bool_)
    there = series[~mask] if mask.any() else series
    if getattr(there.dtype, "tz", None) is not None:  # the instant is what counts, not the zone
        return Given(there.to_numpy(dtype=f"M8[{there.dtype.unit}]"), _if_any(mask))
    return Given(np.asarray(there), _if_any(mask))


def _given(column: Column, mask: Mask | None) -> Given:
    mask = _if_any(mask)
    return Given(column if mask is None else column[~mask], mask)


def _if_any(mask: Mask | None) -> Mask | None:
    return mask if mask is not None and mask.any() else None


def is_missing(value: Any) -> bool:
    """Whether one Python value stands for none."""
    if value is None or type(value).__name__ in _NAMES:
        return True
    return isinstance(value, np.datetime64) and bool(np.isnat(value))


def choose(schema: Schema, missing: Any, counts: Mapping[str, int]) -> dict[str, Any]:
    """{field: DROP or the value to put there} for the fields that lack some. Raises SchemaError: not chosen."""
    if isinstance(missing, Mapping):
        unknown = [name for name in missing if name not in schema]
        if unknown:
            raise SchemaError(
                f"missing= names {', '.join(map(repr, unknown))}, which the stream does not have",
                code="unknown_field",
                hint=f"its fields are {', '.join(schema.names)}",
            )
        chosen = {name: missing[name] for name in counts if name in missing and missing[name] is not None}
    else:
        chosen = {} if missing is None else dict.fromkeys(counts, missing)
    refused = [(schema.field(name), count) for name, count in counts.items() if name not in chosen]
    if refused:
        raise nulls(refused)
    return chosen


def nulls(found: Iterable[tuple[Field, int]]) -> SchemaError:
    each = [f"field {field.name!r} has {count} null{'s' if count > 1 else ''}" for field, count in found]
    return SchemaError(
        f"{', '.join(each)}, and rows have no nulls",
        code="null_value",
        hint='pass missing="drop" to leave those rows out, or missing=VALUE or missing={field: VALUE} to replace '
        "the nulls, or remove them yourself (fillna, fill_null, dropna)",
    )
