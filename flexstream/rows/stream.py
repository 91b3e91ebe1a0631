"""A stream: a name, a row layout, the key that places its rows, and the event time that orders them."""

from __future__ import annotations

import contextlib
import json
import operator
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flexstream import durations, missing_build
from flexstream.durations import Duration
from flexstream.errors import SchemaError
from flexstream.rows.layout import RowLayout
from flexstream.rows.schema import Field, Schema, near_names

if TYPE_CHECKING:
    import pyarrow as pa

    from flexstream.query.query import Query

MAX_KEY_FIELDS = 16
MAX_GROUPS = 65_535
TIME_LIMIT = 1 << 62  # of event times, as in window_times.h: rows beyond are rejected, so no watermark goes further
RESULT_NAMES = ("window_start", "window_end", "group", "revision", "complete")
LATE_NAME = "watermark"
OFF = "off"
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}", re.ASCII)


def check_name(what: str, name: object) -> str:
    """`name`, or a SchemaError. Names become file and metric names, hence the rules."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise SchemaError(
            f"{name!r} cannot be the name of a {what}",
            code="bad_name",
            hint="begin with a letter, go on with letters, digits, '_', '-', '.'; 64 characters at most",
        )
    return name


def event_time(what: str, value: object) -> int:
    """A whole number of the time field's units, or a SchemaError: nothing is cut off silently."""
    if not isinstance(value, bool | np.bool_):
        with contextlib.suppress(TypeError):
            return operator.index(value)  # type: ignore[arg-type]
    raise SchemaError(
        f"{what} must be an event time, a whole number in the time field's unit, not {value!r}",
        code="bad_watermark",
        hint="round it up or down yourself",
    )


class Stream:
    """A named, typed sequence of rows.

    `fields` is a mapping of name to type string, or a Schema. `key` names one field or several: rows of equal
    keys meet in one group. `time` names the timestamp field that windows go by. `max_disorder` is how far
    behind the newest row a row may come and still be in time, for producers that make their own watermarks.
    `max_future` is how far ahead of the wall clock a row may be: later ones are rejected and counted, because one of
    them would make everybody else's rows late. "off": as far as it likes; None: as the engine or daemon is set.

    Immutable. Raises SchemaError.
    """

    def __init__(
        self,
        name: str,
        fields: Mapping[str, str] | Schema,
        *,
        key: str | Sequence[str],
        time: str,
        max_disorder: Duration = "0ms",
        max_future: Duration | None = None,
    ) -> None:
        self.name = check_name("stream", name)
        self.schema = fields if isinstance(fields, Schema) else Schema.from_dict(fields)
        self.key: tuple[str, ...] = (key,) if isinstance(key, str) else tuple(key)
        self.time = time
        self.max_disorder_ns = durations.parse(max_disorder)
        self.max_future = max_future if max_future in (None, OFF) else durations.format(durations.parse(max_future))
        self._check_key()
        self._check_time()
        self.layout = RowLayout(self.name, self.schema, self.time, self.key)
        if why := self.too_long(self.max_disorder_ns):
            raise SchemaError(
                f"max_disorder of {durations.format(self.max_disorder_ns)} is too long: {why}",
                code="bad_disorder",
                hint="use a shorter one, or a time field with a coarser unit",
            )
        if LATE_NAME in self.schema:
            raise SchemaError(
                f"a field cannot be called {LATE_NAME!r}: the late output adds a column of that name",
                code="bad_name",
                hint="rename the field",
            )

    def _check_key(self) -> None:
        if not 1 <= len(self.key) <= MAX_KEY_FIELDS:
            raise SchemaError(f"a key must have 1 to {MAX_KEY_FIELDS} fields, not {len(self.key)}", code="bad_key")
        if len(set(self.key)) != len(self.key):
            raise SchemaError(f"the key {self.key} names a field twice", code="bad_key")
        for name in self.key:
            kind = self._known(name, "key").kind
            if kind == "u64":
                raise SchemaError(
                    f"field {name!r} is u64 and cannot be a key: Spark has no u64 and could not hash it alike",
                    code="bad_key",
                    hint="declare it i64 or bytes[8]",
                )
            if name in RESULT_NAMES:
                raise SchemaError(
                    f"a key field cannot be called {name!r}: results have a column of that name",
                    code="bad_name",
                    hint="rename the field",
                )

    def _check_time(self) -> None:
        field = self._known(self.time, "time")
        if field.kind != "timestamp":
            raise SchemaError(
                f"the time field {self.time!r} is {field.type}, not a timestamp",
                code="bad_time",
                hint="declare it timestamp[ms] (or s, us, ns); the bytes are the same as an i64's",
            )

    def _known(self, name: object, role: str) -> Field:
        if not isinstance(name, str) or name not in self.schema:
            raise SchemaError(
                f"stream {self.name!r} has no field {name!r}, which is to be its {role}",
                code="unknown_field",
                hint=near_names(str(name), list(self.schema.names)),
            )
        return self.schema.field(name)

    @property
    def key_fields(self) -> tuple[Field, ...]:
        return self.layout.key_fields

    @property
    def time_field(self) -> Field:
        return self.layout.time_field

    @property
    def time_unit(self) -> str:
        """The unit of event time, of watermarks and of window bounds: s, ms, us or ns."""
        return self.layout.time_unit

    @property
    def unit_ns(self) -> int:
        return self.layout.unit_ns

    def too_long(self, nanoseconds: int) -> str | None:
        """Why a span of time is too long for the arithmetic of windows over this stream; None: it is not."""
        return self.layout.too_long(nanoseconds)

    @property
    def max_disorder(self) -> int:
        """`max_disorder_ns` in units of the time field, rounded up."""
        return -(-self.max_disorder_ns // self.unit_ns)

    def future_ns(self, default_ns: int | None) -> int | None:
        """How far ahead of the clock rows may be, by default `default_ns`; None: as far as they like."""
        if self.max_future is None:
            return default_ns
        return None if self.max_future == OFF else durations.parse(self.max_future)

    @cached_property
    def key_hasher(self) -> Any:
        """The key compiled for hashing: a `flexstream.cython_ext.wire.murmur3.KeyHasher`."""
        return missing_build.load("wire.murmur3").KeyHasher(self)

    def group_of(self, rows: Any, groups: int) -> np.ndarray[Any, np.dtype[np.uint16]]:
        """The group of each row: `pmod(hash(key), groups)` as Spark has it. `rows` as for `Schema.pack`."""
        if (
            isinstance(groups, bool)
            or not isinstance(groups, int | np.integer)
            or not 1 <= groups <= MAX_GROUPS
        ):
            raise SchemaError(
                f"groups must be a number from 1 to {MAX_GROUPS}, not {groups!r}", code="bad_groups"
            )
        packed = self.schema.pack(rows)
        ids: np.ndarray[Any, np.dtype[np.uint16]] = missing_build.load("wire.murmur3").group_ids(
            packed.view(np.uint8), len(packed), self.schema.row_bytes, self.key_hasher, int(groups)
        )
        return ids

    def query(self, name: str) -> Query:
        """Begin a query over this stream."""
        from flexstream.query.query import Query

        return Query.over(self, name)

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "fields": self.schema.to_dict(),
            "key": list(self.key),
            "time": self.time,
            "max_disorder": durations.format(self.max_disorder_ns),
            **({} if self.max_future is None else {"max_future": self.max_future}),
        }

    @classmethod
    def from_dict(cls, body: Any) -> Stream:
        """From `to_dict`'s form, which is that of TOML and JSON files too."""
        if not isinstance(body, Mapping):
            raise SchemaError(f"a stream must be an object, not {body!r}", code="bad_stream")
        unknown = set(map(str, body)) - {"name", "fields", "key", "time", "max_disorder", "max_future"}
        missing = {"name", "fields", "key", "time"} - set(body)
        if unknown or missing:
            wrong = [f"has unknown keys {sorted(unknown)}"] * bool(unknown) + [f"lacks {sorted(missing)}"] * bool(
                missing
            )
            raise SchemaError(
                f"the stream's definition {' and '.join(wrong)}",
                code="bad_stream",
                hint="a stream needs name, fields, key and time; max_disorder and max_future are optional",
            )
        key = body["key"]
        if not isinstance(key, str) and not (
            isinstance(key, list | tuple) and all(isinstance(k, str) for k in key)
        ):
            raise SchemaError(f"key must be a field name or a list of them, not {key!r}", code="bad_key")
        return cls(
            body["name"],
            body["fields"],
            key=key,
            time=body["time"],
            max_disorder=body.get("max_disorder", "0ms"),
            max_future=body.get("max_future"),
        )

    @classmethod
    def from_file(cls, path: str | Path) -> Stream:
        """From a .toml or .json file in the form of `to_dict`."""
        path = Path(path)
        if path.suffix not in (".toml", ".json"):
            raise SchemaError(f"{path}: the name of a stream file must end in .toml or .json", code="bad_stream")
        try:
            body = _load(path)
        except OSError as error:
            raise SchemaError(f"cannot read {path}: {error.strerror or error}", code="bad_stream") from error
        except (ValueError, RecursionError) as error:
            raise SchemaError(
                f"{path} is not valid {path.suffix[1:].upper()}: {error}", code="bad_stream"
            ) from error
        return cls.from_dict(body)

    @classmethod
    def from_numpy(
        cls, name: str, dtype: Any, *, key: str | Sequence[str], time: str, max_disorder: Duration = "0ms",
        max_future: Duration | None = None,
    ) -> Stream:  # fmt: skip
        return cls(
            name, Schema.from_numpy(dtype), key=key, time=time, max_disorder=max_disorder, max_future=max_future
        )

    @classmethod
    def from_arrow(
        cls,
        name: str,
        schema: pa.Schema,
        *,
        key: str | Sequence[str],
        time: str,
        max_disorder: Duration = "0ms",
        max_future: Duration | None = None,
    ) -> Stream:
        return cls(
            name, Schema.from_arrow(schema), key=key, time=time, max_disorder=max_disorder, max_future=max_future
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self.to_dict() == other.to_dict() and self.schema == other.schema

    def __hash__(self) -> int:
        return hash((self.name, self.schema.hash, self.key, self.time))

    def __repr__(self) -> str:
        return (
            f"Stream({self.name!r}, {len(self.schema)} fields, {self.schema.row_bytes} bytes, "
            f"key={', '.join(self.key)}, time={self.time} [{self.time_unit}])"
        )


def _load(path: Path) -> Any:
    if path.suffix == ".json":
        return json.loads(path.read_bytes())
    import tomllib

    return tomllib.loads(path.read_text("utf-8"))
