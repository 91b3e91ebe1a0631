"""Bound expressions: nodes with types, and what each operator makes of its arguments' types.

What is richer than the workers' operators is put together from simple ones here: a part of a time is a calendar
function of a count of days, a change of unit a product or a floor, a hash of several values a chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from flexstream.errors import QueryError
from flexstream.rows.schema import TIME_UNITS, FieldType

ARITHMETIC = {"add": "+", "sub": "-", "mul": "*", "div": "/", "floordiv": "//", "mod": "%"}
COMPARISON = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
BOOLEAN = {"and": "&", "or": "|"}
BINARY = {**ARITHMETIC, **COMPARISON, **BOOLEAN}
UNARY = {"not": "~", "neg": "-", "abs": "abs"}
CALENDAR = ("year", "month", "day", "day_of_week", "day_of_year")  # of days since 1970
CLOCK = {"hour": (86_400, 3_600), "minute": (3_600, 60), "second": (60, 1)}  # of seconds: within what, of what length
PARTS = (*CALENDAR, *CLOCK)
I64_MIN, I64_MAX = -(2**63), 2**63 - 1
RANGES = {
    "bool": (0, 1), "i8": (-(2**7), 2**7 - 1), "i16": (-(2**15), 2**15 - 1), "i32": (-(2**31), 2**31 - 1),
    "i64": (I64_MIN, I64_MAX), "u8": (0, 2**8 - 1), "u16": (0, 2**16 - 1), "u32": (0, 2**32 - 1),
    "u64": (0, I64_MAX),  # values are int64 inside: a u64 past that has none
}  # fmt: skip
CASTS = (*(kind for kind in RANGES if kind != "bool"), "f32", "f64", *(f"timestamp[{unit}]" for unit in TIME_UNITS))
PER_SECOND = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}
HASH_SEED = 42
MAX_DEPTH = 200  # of a tree: passes over one need up to four Python frames a level
_HASHED_AS = {
    **dict.fromkeys(("bool", "i8", "i16", "i32", "u8", "u16"), "hash_int"),
    **dict.fromkeys(("u32", "i64"), "hash_long"),
    "f32": "hash_f32",
    "f64": "hash_f64",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Typed:
    """A bound node: what runs. `type` is i64, f64, bool or bytes; `op` "col", "lit", "cast" or an operator.

    For bytes `size` is the width; a literal's value is NUL padded to the width of the other side. A `cast`
    goes from `args[0].type` to `type`. In the arguments of an operator both types are equal. `declared` is the
    type that a field of these values would have, where it says more than `type`: i32, timestamp[ms].
    """

    op: str
    type: str
    args: tuple[Typed, ...] = ()
    value: int | float | bool | bytes | None = None
    name: str | None = None
    size: int = 0
    declared: str = field(default="", compare=False)

    @property
    def field_type(self) -> str:
        return self.declared or self.type


def value_type(text: str) -> tuple[str, int]:
    """How expressions see a field of that type (or kind): (i64 | f64 | bool | bytes, width of bytes or 0)."""
    if text == "bytes":
        return "bytes", 0
    if text == "timestamp":
        return "i64", 0
    field = FieldType.parse(text)
    if field.kind in ("f32", "f64"):
        return "f64", 0
    if field.kind in ("bool", "bytes"):
        return field.kind, field.size if field.kind == "bytes" else 0
    return "i64", 0


def column(name: str, declared: str) -> Typed:
    kind, size = value_type(declared)
    return Typed("col", kind, name=name, size=size, declared=declared)


def literal(value: int | float | bool | bytes) -> Typed:
    if isinstance(value, bool):
        return Typed("lit", "bool", value=value)
    if isinstance(value, bytes):
        trimmed = value.rstrip(b"\0")
        return Typed("lit", "bytes", value=trimmed, size=len(trimmed))
    return Typed("lit", "i64" if isinstance(value, int) else "f64", value=value)


def unary(op: str, arg: Typed) -> Typed:
    if op in PARTS:
        return part(op, arg)
    if (arg.type == "bool") != (op == "not") or arg.type == "bytes":
        raise mismatch(UNARY[op], arg)
    return Typed(op, arg.type, (arg,))


def binary(op: str, left: Typed, right: Typed) -> Typed:
    kinds = {left.type, right.type}
    if op == "startswith":
        return starts_with(left, right)
    if op in BOOLEAN and kinds == {"bool"}:
        return Typed(op, "bool", (left, right))
    if op in ("eq", "ne") and kinds == {"bytes"}:
        return Typed(op, "bool", _pad(left, right))
    if op in ("eq", "ne") and kinds == {"bool"}:
        return Typed(op, "bool", (left, right))
    if op in BOOLEAN or not kinds <= {"i64", "f64"}:
        raise mismatch(BINARY[op], left, right)
    if op in ("floordiv", "mod") and "f64" in kinds:
        raise mismatch(BINARY[op], left, right, hint="it takes integers: cast('i64') first")
    if op == "div" or kinds == {"i64", "f64"}:
        left, right = _to_f64(left), _to_f64(right)
    return Typed(op, "bool" if op in COMPARISON else left.type, (left, right))


def _to_f64(arg: Typed) -> Typed:
    if arg.op == "lit" and isinstance(arg.value, int):
        return Typed("lit", "f64", value=float(arg.value))
    return cast(arg, "f64")


# -- casts


def cast(arg: Typed, to: str) -> Typed:
    """Nothing wraps and nothing saturates: a value that the type cannot hold is no value, and the row is rejected."""
    if arg.type == "bytes":
        raise mismatch(f"cast to {to}", arg)
    if to.startswith("timestamp"):
        return _to_timestamp(arg, to)
    if to == "f64":
        return replace(arg, declared="") if arg.type == "f64" else Typed("cast", "f64", (arg,))
    if to == "f32":
        return arg if arg.field_type == "f32" else Typed("round_f32", "f64", (_number(arg),), declared="f32")
    whole = arg if arg.type == "i64" else Typed("cast", "i64", (arg,))
    least, most = RANGES.get(arg.field_type, RANGES["i64"])  # of a timestamp or a float: any
    if RANGES[to][0] <= least and most <= RANGES[to][1]:
        return replace(whole, declared="" if to == "i64" else to)
    return Typed(f"fit_{to}", "i64", (whole,), declared=to)


def _number(arg: Typed) -> Typed:
    return Typed("cast", "i64", (arg,)) if arg.type == "bool" else arg


def _to_timestamp(arg: Typed, to: str) -> Typed:
    """An integer is a count of the unit. From a finer unit down to the one before, also before 1970."""
    if arg.type != "i64":
        raise mismatch(f"cast to {to}", arg, hint="only an integer becomes a timestamp: cast('i64') first")
    if not arg.field_type.startswith("timestamp"):
        return replace(arg, declared=to)
    per_second, wanted = PER_SECOND[unit_of(arg)], PER_SECOND[to[10:-1]]
    if per_second == wanted:
        return arg
    if per_second < wanted:
        return Typed("mul", "i64", (arg, literal(wanted // per_second)), declared=to)
    return Typed("floor", "i64", (arg, literal(per_second // wanted)), declared=to)


def unit_of(arg: Typed) -> str:
    return arg.field_type[10:-1]


# -- parts of times, conditions, bytes, hashes


def part(op: str, arg: Typed) -> Typed:
    """A part of a timestamp in UTC, in the Gregorian calendar of all times."""
    if not arg.field_type.startswith("timestamp"):
        raise mismatch(f"{op}()", arg, hint="it takes a timestamp: cast('timestamp[ms]') makes one of an integer")
    second = PER_SECOND[unit_of(arg)]
    if op in CALENDAR:
        return Typed(op, "i64", (Typed("floor", "i64", (arg, literal(86_400 * second))),))
    within, length = CLOCK[op]
    rest = Typed("floormod", "i64", (arg, literal(within * second)))
    return rest if length * second == 1 else Typed("floor", "i64", (rest, literal(length * second)))


def conditional(condition: Typed, then: Typed, otherwise: Typed) -> Typed:
    """`then` where the condition holds, else `otherwise`. The other side does not count, fail as it may."""
    if condition.type != "bool":
        raise QueryError(
            f"the condition of when() must be true or false, but it is {condition.field_type}",
            code="bad_types",
            hint="compare it with something",
        )
    kinds = {then.type, otherwise.type}
    if "bytes" in kinds or (len(kinds) == 2 and "bool" in kinds):
        hint = "the values of when() must all be numbers, or all be true or false"
        raise mismatch("when()", then, otherwise, hint=hint)
    declared = {then.field_type, otherwise.field_type}
    if len(declared) == 2 and all(one.startswith("timestamp") for one in declared):
        raise QueryError(
            f"when() has values in {then.field_type} and in {otherwise.field_type}",
            code="bad_types",
            hint=f"cast one of them: .cast({then.field_type!r})",
        )
    if len(kinds) == 2:
        then, otherwise = _to_f64(then), _to_f64(otherwise)
    kept = then.declared if len(declared) == 1 else ""
    return Typed("if", then.type, (condition, then, otherwise), declared=kept)


def starts_with(arg: Typed, prefix: Typed) -> Typed:
    if arg.type != "bytes":
        raise mismatch("startswith()", arg, hint="it takes bytes")
    if prefix.op != "lit" or not isinstance(prefix.value, bytes):
        raise QueryError(
            f"startswith() takes a constant, not {prefix.name or prefix.value or prefix.op!r}",
            code="bad_literal",
            hint='bytes or str: startswith(b"ab")',
        )
    if arg.op != "lit" and 0 < arg.size < prefix.size:
        raise QueryError(
            f"the prefix {prefix.value!r} has {prefix.size} bytes, but {arg.name} holds {arg.size}: "
            "no value of it can start with that",
            code="bad_literal",
            hint=f"give at most {arg.size} bytes",
        )
    return Typed("startswith", "bool", (arg, prefix)) if prefix.value else literal(True)


def hashed(args: Sequence[Typed]) -> Typed:
    """Spark's hash(): each value's hash is the seed of the next one's."""
    found = literal(HASH_SEED)
    for arg in args:
        if arg.field_type == "u64":
            raise mismatch("hash()", arg, hint="Spark hashes a u64 as a decimal: cast('i64') first")
        if arg.field_type.startswith("timestamp"):
            arg = cast(arg, "timestamp[us]")
        op = "hash_bytes" if arg.type == "bytes" else _HASHED_AS.get(arg.field_type, "hash_long")
        found = Typed(op, "i64", (arg, found), declared="i32")
    return found


def _pad(left: Typed, right: Typed) -> tuple[Typed, Typed]:
    for constant, other in ((left, right), (right, left)):
        if constant.op == "lit" and other.op != "lit" and 0 < other.size < constant.size:
            raise QueryError(
                f"the constant {constant.value!r} has {constant.size} bytes, but {other.name} holds "
                f"{other.size}: they can never be equal",
                code="bad_literal",
            )
    size = max(left.size, right.size)
    return _padded(left, size), _padded(right, size)


def _padded(arg: Typed, size: int) -> Typed:
    if arg.op == "lit" and isinstance(arg.value, bytes):
        return Typed("lit", "bytes", value=arg.value.ljust(size, b"\0"), size=size)
    return arg


def mismatch(operator: str, *args: Typed, hint: str | None = None) -> QueryError:
    kinds = " and ".join(arg.type if hint is None else arg.field_type for arg in args)
    named = [arg.name for arg in args if arg.op == "col"]
    if hint is None and any(arg.type == "bytes" for arg in args):
        hint = "bytes have only == and != with bytes, startswith() and hash()"
    elif hint is None and any(arg.type == "bool" for arg in args):
        hint = "a bool has only == != & | ~; for arithmetic cast('i64')"
    elif hint is None:
        hint = "& | ~ need a comparison on each side: put each one in parentheses"
    which = f" ({', '.join(map(str, named))})" if named else ""
    return QueryError(f"{operator} does not work on {kinds}{which}", code="bad_types", hint=hint)
