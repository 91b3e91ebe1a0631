"""Row layouts: named, fixed-size fields, packed, little-endian. Equal to a numpy structured dtype."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from flexstream.errors import SchemaError

if TYPE_CHECKING:
    import pyarrow as pa

MAX_NAME_CHARS = 64
MAX_FIELDS = 1024
MAX_ROW_BYTES = 16_384  # two rows fit the default receive block of 32 KiB
TIME_UNITS = ("s", "ms", "us", "ns")

_NUMBERS: dict[str, tuple[str, str]] = {  # kind -> numpy, Arrow
    "i8": ("<i1", "int8"), "i16": ("<i2", "int16"), "i32": ("<i4", "int32"), "i64": ("<i8", "int64"),
    "u8": ("<u1", "uint8"), "u16": ("<u2", "uint16"), "u32": ("<u4", "uint32"), "u64": ("<u8", "uint64"),
    "f32": ("<f4", "float"), "f64": ("<f8", "double"), "bool": ("?", "bool"),
}  # fmt: skip
_ALIASES = {
    "int8": "i8", "int16": "i16", "int32": "i32", "int64": "i64", "uint8": "u8", "uint16": "u16",
    "uint32": "u32", "uint64": "u64", "float32": "f32", "float": "f32", "float64": "f64", "double": "f64",
    "boolean": "bool",
}  # fmt: skip
_PARAMETRIC = re.compile(r"(timestamp|bytes)\[([a-z0-9]{1,8})\]")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*", re.ASCII)
_TYPE_HINT = "use i8 i16 i32 i64 u8 u16 u32 u64 f32 f64 bool, timestamp[s|ms|us|ns] or bytes[N]"


@dataclass(frozen=True, slots=True)
class FieldType:
    """One of the types that a field can have, with its layout. `FieldType.parse("timestamp[ms]")`."""

    text: str
    kind: str
    size: int
    unit: str | None
    numpy: str
    arrow: str

    @classmethod
    def parse(cls, text: object) -> FieldType:
        if not isinstance(text, str):
            raise SchemaError(f"a field type must be a string, not {text!r}", code="bad_type", hint=_TYPE_HINT)
        word = text.strip().lower()
        word = _ALIASES.get(word, word)
        if word in _NUMBERS:
            numpy, arrow = _NUMBERS[word]
            return cls(word, word, np.dtype(numpy).itemsize, None, numpy, arrow)
        match = _PARAMETRIC.fullmatch(word)
        if match and match[1] == "timestamp" and match[2] in TIME_UNITS:
            return cls(word, "timestamp", 8, match[2], "<i8", word)
        if match and match[1] == "bytes" and match[2].isdecimal() and 1 <= int(match[2]) <= MAX_ROW_BYTES:
            size = int(match[2])
            return cls(f"bytes[{size}]", "bytes", size, None, f"S{size}", f"fixed_size_binary[{size}]")
        near = get_close_matches(word, [*_NUMBERS, *_ALIASES, "timestamp[ms]", "bytes[8]"], 1)
        hint = f"did you mean {near[0]!r}? {_TYPE_HINT}" if near else _TYPE_HINT
        raise SchemaError(f"unknown field type {text!r}", code="bad_type", hint=hint)


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a row: `size` bytes at `offset`. `unit` is a timestamp's, else None."""

    name: str
    type: str
    kind: str
    offset: int
    size: int
    unit: str | None = None

    @property
    def numpy(self) -> str:
        return FieldType.parse(self.type).numpy

    @property
    def arrow(self) -> str:
        """The Arrow type as pyarrow spells it."""
        return FieldType.parse(self.type).arrow


def check_field_name(name: object) -> str:
    """`name`, or a SchemaError: a letter, then letters, digits, underscores; at most 64 in all."""
    if not isinstance(name, str) or len(name) > MAX_NAME_CHARS or not _NAME.fullmatch(name):
        raise SchemaError(
            f"{name!r} cannot be a field name",
            code="bad_name",
            hint=f"begin with a letter, go on with letters, digits, '_'; {MAX_NAME_CHARS} characters at most",
        )
    return name


def near_names(name: str, known: list[str]) -> str:
    """The hint for an unknown name: the nearest known ones, else all of them."""
    near = get_close_matches(name, known, 3)
    if near:
        return f"did you mean {' or '.join(near)}?"
    shown = ", ".join(known[:20]) + (", ..." if len(known) > 20 else "")
    return f"use one of: {shown}" if shown else "there are no fields"


@dataclass(frozen=True)
class Schema:
    """The layout of a stream's rows. Make one with `of`, `from_numpy`, `from_arrow` or `from_dict`."""

    fields: tuple[Field, ...]

    @classmethod
    def of(cls, types: Mapping[str, str] | list[tuple[str, str]]) -> Schema:
        """From names and type strings, in row order. Raises SchemaError."""
        pairs = list(types.items()) if isinstance(types, Mapping) else [tuple(pair) for pair in types]
        if not 1 <= len(pairs) <= MAX_FIELDS:
            raise SchemaError(f"a row must have 1 to {MAX_FIELDS} fields, not {len(pairs)}", code="bad_schema")
        fields: list[Field] = []
        seen: set[str] = set()
        offset = 0
        for name, text in pairs:
            check_field_name(name)
            if name in seen:
                raise SchemaError(
                    f"field {name!r} is defined twice", code="bad_name", hint="rename one of them"
                )
            seen.add(name)
            try:
                kind = FieldType.parse(text)
            except SchemaError as error:
                raise SchemaError(
                    f"field {name!r}: {error.message}", code=error.code, hint=error.hint
                ) from None
            fields.append(Field(name, kind.text, kind.kind, offset, kind.size, kind.unit))
            offset += kind.size
        if offset > MAX_ROW_BYTES:
            raise SchemaError(
                f"a row takes {offset} bytes; the limit is {MAX_ROW_BYTES}",
                code="row_too_large",
                hint="rows are for keys and numbers: keep large values elsewhere and send a reference",
            )
        return cls(tuple(fields))

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """The packed numpy dtype. Timestamps are plain int64 in it, counted in their unit since 1970."""
        return np.dtype([(field.name, field.numpy) for field in self.fields])

    @cached_property
    def row_bytes(self) -> int:
        return sum(field.size for field in self.fields)

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(field.name for field in self.fields)

    @cached_property
    def hash(self) -> str:
        """16 hex digits over names, types and order: equal hashes mean equal layouts."""
        canonical = json.dumps([[field.name, field.type] for field in self.fields], separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]

    @cached_property
    def _by_name(self) -> dict[str, Field]:
        return {field.name: field for field in self.fields}

    def field(self, name: str) -> Field:
        """The field of that name; SchemaError (`unknown_field`) names near ones."""
        found = self._by_name.get(name)
        if found is None:
            raise SchemaError(
                f"no field {name!r}", code="unknown_field", hint=near_names(str(name), list(self.names))
            )
        return found

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def __iter__(self) -> Iterator[Field]:
        return iter(self.fields)

    def __len__(self) -> int:
        return len(self.fields)

    def to_dict(self) -> dict[str, str]:
        return {field.name: field.type for field in self.fields}

    @classmethod
    def from_dict(cls, body: Any) -> Schema:
        if not isinstance(body, Mapping):
            raise SchemaError(f"fields must be an object that maps names to types, not {body!r}", code="bad_schema")
        return cls.of(body)

    @classmethod
    def from_numpy(cls, dtype: Any) -> Schema:
        """From a structured dtype. Its padding is dropped; datetime64 becomes timestamp; S becomes bytes."""
        dtype = np.dtype(dtype)
        if dtype.names is None or dtype.fields is None:
            raise SchemaError(f"{dtype} is not a structured dtype", code="bad_schema", hint="give its fields names")
        return cls.of([(name, _type_of_numpy(name, dtype.fields[name][0])) for name in dtype.names])

    @classmethod
    def from_arrow(cls, schema: pa.Schema) -> Schema:
        """From an Arrow schema. Variable-size strings and binaries have no size: give them one by hand."""
        return cls.of([(field.name, _type_of_arrow(field.name, str(field.type))) for field in schema])

    def to_arrow(self) -> pa.Schema:
        import pyarrow as pa

        return pa.schema(
            [pa.field(field.name, arrow_type(field.arrow), nullable=False) for field in self.fields]
        )

    def pack(self, data: Any, missing: Any = None) -> np.ndarray[Any, np.dtype[Any]]:
        """`data` as packed rows: see `flexstream.rows.packing.pack`."""
        from flexstream.rows.packing import pack

        return pack(self, data, missing)


def arrow_type(text: str) -> pa.DataType:
    """The pyarrow type that a `Field.arrow` string spells."""
    import pyarrow as pa

    match = re.fullmatch(r"(timestamp|fixed_size_binary)\[(\w+)\]", text)
    if match is None:
        return pa.type_for_alias(text)
    return pa.timestamp(match[2]) if match[1] == "timestamp" else pa.binary(int(match[2]))


def _type_of_numpy(name: str, dtype: np.dtype[Any]) -> str:
    if dtype.kind in "iuf" and f"{dtype.kind}{dtype.itemsize * 8}" in _NUMBERS:
        return f"{dtype.kind}{dtype.itemsize * 8}"
    if dtype.kind == "b":
        return "bool"
    if dtype.kind == "M":
        unit, step = np.datetime_data(dtype)
        if unit in TIME_UNITS and step == 1:
            return f"timestamp[{unit}]"
    if dtype.kind == "S" and dtype.itemsize > 0:
        return f"bytes[{dtype.itemsize}]"
    raise SchemaError(f"field {name!r}: no field type matches numpy's {dtype}", code="bad_type", hint=_TYPE_HINT)


def _type_of_arrow(name: str, text: str) -> str:
    timestamp = re.fullmatch(r"timestamp\[(\w+)(?:, tz=.*)?\]", text)
    if timestamp:
        return f"timestamp[{timestamp[1]}]"
    fixed = re.fullmatch(r"fixed_size_binary\[(\d+)\]", text)
    if fixed:
        return f"bytes[{fixed[1]}]"
    if text in _ALIASES:
        return _ALIASES[text]
    if text in _NUMBERS:
        return text
    hint = (
        "strings have no fixed size: declare bytes[N]" if "string" in text or "binary" in text else _TYPE_HINT
    )
    raise SchemaError(f"field {name!r}: no field type matches Arrow's {text}", code="bad_type", hint=hint)
