"""What an expression means, on one row, in plain Python: the oracle's half that knows operators.

It shares nothing with what it checks: types, calendar and hash are worked out here once more.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any

from flexstream.query import expr as e

I64_MIN, I64_MAX = -(2**63), 2**63 - 1
UNITS = {"timestamp[s]": 1, "timestamp[ms]": 10**3, "timestamp[us]": 10**6, "timestamp[ns]": 10**9}
CYCLE_S = 146_097 * 86_400  # the calendar repeats itself after 400 years
BASE, BASE_S = datetime(2000, 1, 1), 946_684_800


class RowError(Exception):
    """This row cannot be computed: the query rejects it. The argument is the reason that is counted."""


class Row(dict[str, Any]):
    """A row's values by name, with the types that its fields have."""

    def __init__(self, values: Mapping[str, Any] | Iterable[tuple[str, Any]], types: Mapping[str, str]) -> None:
        super().__init__(values)
        self.types = types


def type_of(tree: e.Expr, types: Mapping[str, str]) -> str:
    """The type of an expression's values, as a field's would be."""
    if isinstance(tree, e.Column):
        return types[tree.name]
    if isinstance(tree, e.Literal):
        return {bool: "bool", int: "i64", float: "f64", bytes: "bytes"}[type(tree.value)]
    if isinstance(tree, e.Cast):
        return tree.to
    if isinstance(tree, e.Hash):
        return "i32"
    if isinstance(tree, e.Case):
        found = {type_of(value, types) for value in (*(value for _, value in tree.cases), tree.default)}
        return found.pop() if len(found) == 1 else "f64" if found & {"f32", "f64"} else "i64"
    if isinstance(tree, e.Unary):
        return "bool" if tree.op == "not" else "f64" if _is_real(tree.arg, types) else "i64"
    assert isinstance(tree, e.Binary)
    if tree.op in (*e.COMPARISON, *e.BOOLEAN, "startswith"):
        return "bool"
    return "f64" if tree.op == "div" or _is_real(tree.left, types) or _is_real(tree.right, types) else "i64"


def _is_real(tree: e.Expr, types: Mapping[str, str]) -> bool:
    return type_of(tree, types) in ("f32", "f64")


def evaluate(tree: e.Expr, row: Row) -> Any:
    """The value of an expression on a row. Raises RowError."""
    if isinstance(tree, e.Column):
        value = row[tree.name]
        return _integer(value) if isinstance(value, int) else value  # a u64 may not fit
    if isinstance(tree, e.Literal):
        return tree.value.rstrip(b"\0") if isinstance(tree.value, bytes) else tree.value
    if isinstance(tree, e.Cast):
        return _cast(evaluate(tree.arg, row), type_of(tree.arg, row.types), tree.to)
    if isinstance(tree, e.Unary):
        value = evaluate(tree.arg, row)
        return _part(tree.op, value, type_of(tree.arg, row.types)) if tree.op in e.PARTS else _unary(tree.op, value)
    if isinstance(tree, e.Binary):
        left = evaluate(tree.left, row)
        if tree.op == "and":  # the right side is not computed when the left decides
            return left and evaluate(tree.right, row)
        if tree.op == "or":
            return left or evaluate(tree.right, row)
        return _binary(tree.op, left, evaluate(tree.right, row))
    if isinstance(tree, e.Case):
        chosen = next((value for condition, value in tree.cases if evaluate(condition, row)), tree.default)
        value = evaluate(chosen, row)
        return float(value) if _is_real(tree, row.types) else value
    if isinstance(tree, e.Hash):
        found = 42
        for arg in tree.args:
            found = _hash(evaluate(arg, row), type_of(arg, row.types), found)
        return found
    raise TypeError(f"{tree!r} is not an expression")


def _integer(value: int, bits: int = 64, signed: bool = True, why: str = "overflow") -> int:
    least, most = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    if not least <= value <= most or value > I64_MAX:
        raise RowError(why)
    return value


def _cast(value: Any, source: str, to: str) -> Any:
    if to == "f64":
        return float(value)
    if to == "f32":
        return _nearest_f32(value)
    if to in UNITS and source in UNITS:
        return _integer(value * UNITS[to] // UNITS[source])  # down, also before 1970
    if isinstance(value, float) and not -(2.0**63) <= value < 2.0**63:  # NaN is in no range
        raise RowError("cast")
    whole = int(value)  # towards zero
    return whole if to in UNITS else _integer(whole, int(to[1:]), to[0] == "i", "cast")


def _nearest_f32(value: float) -> float:
    if isinstance(value, int) and value.bit_length() > 24:  # to 24 bits, half to even, in one step
        shift = value.bit_length() - 24
        low, rest = value >> shift, value & ((1 << shift) - 1)
        half = 1 << (shift - 1)
        return float(low + (rest > half or (rest == half and low & 1 == 1)) << shift)
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def _part(op: str, time: int, unit: str) -> int:
    cycles, second = divmod(time // UNITS[unit] - BASE_S, CYCLE_S)
    at = BASE + timedelta(seconds=second)
    if op == "year":
        return at.year + 400 * cycles
    if op == "day_of_week":
        return at.isoweekday() % 7 + 1
    return at.timetuple().tm_yday if op == "day_of_year" else int(getattr(at, op))


def _unary(op: str, value: Any) -> Any:
    if op == "not":
        return not value
    negated = -value if op == "neg" else abs(value)
    return _integer(negated) if isinstance(value, int) else negated


def _binary(op: str, left: Any, right: Any) -> Any:
    if op == "startswith":
        return left.startswith(right)
    if op in ("eq", "ne", "lt", "le", "gt", "ge"):
        return _compare(op, left, right)
    if op == "div" or isinstance(left, float) or isinstance(right, float):
        left, right = float(left), float(right)
    if op in ("div", "floordiv", "mod") and right == 0:
        raise RowError("division_by_zero")
    if op in ("floordiv", "mod"):
        quotient = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)
        return _integer(quotient) if op == "floordiv" else left - quotient * right
    if op == "div":
        return left / right
    value = left + right if op == "add" else left - right if op == "sub" else left * right
    return value if isinstance(value, float) else _integer(value)


def _compare(op: str, left: Any, right: Any) -> bool:
    """NaN equals itself and is greater than any number, as in Spark."""
    if isinstance(left, float) or isinstance(right, float):
        left, right = orderable(float(left)), orderable(float(right))
    return {
        "eq": left == right,
        "ne": left != right,
        "lt": op == "lt" and left < right,
        "le": op == "le" and left <= right,
        "gt": op == "gt" and left > right,
        "ge": op == "ge" and left >= right,
    }[op]


def orderable(value: float) -> tuple[bool, float]:
    return (True, 0.0) if value != value else (False, value)


# -- Spark's hash, as its source has it: whole words, then the bytes of a tail as words of their own


def _hash(value: Any, kind: str, seed: int) -> int:
    if kind in UNITS:
        data = struct.pack("<q", _cast(value, kind, "timestamp[us]"))
    elif kind in ("f32", "f64"):
        known = math.nan if value != value else value if value else 0.0
        data = struct.pack("<f" if kind == "f32" else "<d", known)
    elif isinstance(value, bytes):
        whole = value[: len(value) & ~3]
        words = [
            *struct.unpack(f"<{len(whole) // 4}I", whole),
            *struct.unpack(f"{len(value) & 3}b", value[len(whole) :]),
        ]
        return _finish(_mix(words, seed), len(value))
    else:
        data = struct.pack("<q" if kind in ("i64", "u32") else "<i", value)
    return _finish(_mix(list(struct.unpack(f"<{len(data) // 4}I", data)), seed), len(data))


def _rotate(word: int, by: int) -> int:
    return (word << by | (word % 2**32) >> (32 - by)) % 2**32


def _mix(words: list[int], seed: int) -> int:
    for word in words:
        seed = _rotate(seed % 2**32 ^ _rotate(word * 0xCC9E2D51 % 2**32, 15) * 0x1B873593 % 2**32, 13)
        seed = (seed * 5 + 0xE6546B64) % 2**32
    return seed % 2**32


def _finish(mixed: int, length: int) -> int:
    mixed ^= length
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        mixed = (mixed ^ mixed >> shift) * factor % 2**32
    return mixed - 2**32 if mixed >= 2**31 else mixed
