"""Expressions over the columns of a row: `col("price") * 2 > lit(10)`. A tree, not a computation.

Python's `and`, `or`, `not` cannot be overloaded; write `&`, `|`, `~` and mind the parentheses.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from flexstream.errors import QueryError
from flexstream.schema import FieldType, near_names

ARITHMETIC = {"add": "+", "sub": "-", "mul": "*", "div": "/", "floordiv": "//", "mod": "%"}
COMPARISON = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
BOOLEAN = {"and": "&", "or": "|"}
BINARY = {**ARITHMETIC, **COMPARISON, **BOOLEAN}
UNARY = {"not": "~", "neg": "-", "abs": "abs"}
CASTS = ("i64", "f64")
MAX_DEPTH = 300
I64_MIN, I64_MAX = -(2**63), 2**63 - 1


class Expr:
    """A node of an expression. Operators make bigger ones; `==` does too, so compare trees with `same`."""

    __slots__ = ()

    # fmt: off
    def __add__(self, other: Any) -> Expr: return Binary("add", self, lit(other))
    def __radd__(self, other: Any) -> Expr: return Binary("add", lit(other), self)
    def __sub__(self, other: Any) -> Expr: return Binary("sub", self, lit(other))
    def __rsub__(self, other: Any) -> Expr: return Binary("sub", lit(other), self)
    def __mul__(self, other: Any) -> Expr: return Binary("mul", self, lit(other))
    def __rmul__(self, other: Any) -> Expr: return Binary("mul", lit(other), self)
    def __truediv__(self, other: Any) -> Expr: return Binary("div", self, lit(other))
    def __rtruediv__(self, other: Any) -> Expr: return Binary("div", lit(other), self)
    def __floordiv__(self, other: Any) -> Expr: return Binary("floordiv", self, lit(other))
    def __rfloordiv__(self, other: Any) -> Expr: return Binary("floordiv", lit(other), self)
    def __mod__(self, other: Any) -> Expr: return Binary("mod", self, lit(other))
    def __rmod__(self, other: Any) -> Expr: return Binary("mod", lit(other), self)
    def __eq__(self, other: Any) -> Expr: return Binary("eq", self, lit(other))  # type: ignore[override]
    def __ne__(self, other: Any) -> Expr: return Binary("ne", self, lit(other))  # type: ignore[override]
    def __lt__(self, other: Any) -> Expr: return Binary("lt", self, lit(other))
    def __le__(self, other: Any) -> Expr: return Binary("le", self, lit(other))
    def __gt__(self, other: Any) -> Expr: return Binary("gt", self, lit(other))
    def __ge__(self, other: Any) -> Expr: return Binary("ge", self, lit(other))
    def __and__(self, other: Any) -> Expr: return Binary("and", self, lit(other))
    def __rand__(self, other: Any) -> Expr: return Binary("and", lit(other), self)
    def __or__(self, other: Any) -> Expr: return Binary("or", self, lit(other))
    def __ror__(self, other: Any) -> Expr: return Binary("or", lit(other), self)
    def __invert__(self) -> Expr: return Unary("not", self)
    def __neg__(self) -> Expr: return Unary("neg", self)
    def __abs__(self) -> Expr: return Unary("abs", self)
    __hash__ = object.__hash__
    # fmt: on

    def cast(self, to: str) -> Expr:
        """To "i64" (a float is cut towards zero) or "f64"."""
        if to not in CASTS:
            raise QueryError(
                f"cannot cast to {to!r}", code="bad_expression", hint=f"cast to {' or '.join(CASTS)}"
            )
        return Cast(self, to)

    def __bool__(self) -> bool:
        raise TypeError(
            f"the expression {self} has no truth value before it meets a row: write & for and, | for or, "
            "~ for not, with each comparison in parentheses (and no chained comparisons)"
        )

    def __iter__(self) -> Iterator[Any]:
        raise TypeError(f"the expression {self} is one value per row, not a sequence")


@dataclass(frozen=True, eq=False, slots=True)
class Column(Expr):
    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, eq=False, slots=True)
class Literal(Expr):
    value: int | float | bool | bytes

    def __str__(self) -> str:
        return repr(self.value)


@dataclass(frozen=True, eq=False, slots=True)
class Binary(Expr):
    op: str
    left: Expr
    right: Expr

    def __str__(self) -> str:
        return f"({self.left} {BINARY[self.op]} {self.right})"


@dataclass(frozen=True, eq=False, slots=True)
class Unary(Expr):
    op: str
    arg: Expr

    def __str__(self) -> str:
        return f"abs({self.arg})" if self.op == "abs" else f"{UNARY[self.op]}{self.arg}"


@dataclass(frozen=True, eq=False, slots=True)
class Cast(Expr):
    arg: Expr
    to: str

    def __str__(self) -> str:
        return f"cast({self.arg} as {self.to})"


def col(name: str) -> Column:
    """The column of that name: a field of the stream, or what a `map` step made."""
    if not isinstance(name, str):
        raise TypeError(f"col() takes a column's name, not {name!r}")
    return Column(name)


def lit(value: Any) -> Expr:
    """A constant: int (64 bits), float, bool, bytes, or str (its UTF-8 bytes). An expression stays as is."""
    if isinstance(value, Expr):
        return value
    if hasattr(value, "item") and not isinstance(value, bytes | str):  # numpy scalars
        value = value.item()
    if isinstance(value, str):
        value = value.encode()
    if isinstance(value, bytearray):
        value = bytes(value)
    if not isinstance(value, int | float | bytes):
        raise QueryError(
            f"{value!r} cannot be a constant in a query",
            code="bad_literal",
            hint="use an int, float, bool, bytes or str; a time is an int in the unit of its field",
        )
    if isinstance(value, int) and not isinstance(value, bool) and not I64_MIN <= value <= I64_MAX:
        raise QueryError(f"{value} does not fit 64 bits", code="bad_literal", hint="use a float")
    return Literal(value)


def same(left: Expr, right: Expr) -> bool:
    """Whether two trees are equal, node by node."""
    return to_json(left) == to_json(right)


# JSON: ["col", name], ["lit", value], ["bytes", base64], ["float", "nan" | "inf" | "-inf"],
#       [op, left, right], [op, arg], ["cast", arg, to]


def to_json(expr: Expr) -> list[Any]:
    if isinstance(expr, Column):
        return ["col", expr.name]
    if isinstance(expr, Literal):
        return _literal_to_json(expr.value)
    if isinstance(expr, Binary):
        return [expr.op, to_json(expr.left), to_json(expr.right)]
    if isinstance(expr, Unary):
        return [expr.op, to_json(expr.arg)]
    if isinstance(expr, Cast):
        return ["cast", to_json(expr.arg), expr.to]
    raise QueryError(f"{expr!r} is not an expression", code="bad_expression", hint="begin with col('name')")


def _literal_to_json(value: int | float | bool | bytes) -> list[Any]:
    if isinstance(value, bytes):
        return ["bytes", base64.b64encode(value).decode()]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return ["float", repr(value)]  # JSON has no NaN and no infinities
    return ["lit", value]


def from_json(body: Any, depth: int = 0) -> Expr:
    """The tree of a JSON form. Raises QueryError (`bad_expression`) for anything that is not one."""
    if depth > MAX_DEPTH:
        raise QueryError(f"an expression is nested more than {MAX_DEPTH} deep", code="bad_expression")
    match body:
        case ["col", str(name)]:
            return Column(name)
        case ["lit", bool() | int() | float() as value]:
            return lit(value)
        case ["bytes", str(text)]:
            try:
                return Literal(base64.b64decode(text, validate=True))
            except (binascii.Error, ValueError) as error:
                raise QueryError(f"bad base64 {text!r}: {error}", code="bad_expression") from None
        case ["float", "nan" | "inf" | "-inf" as text]:
            return Literal(float(text))
        case ["cast", arg, str(to)] if to in CASTS:
            return Cast(from_json(arg, depth + 1), to)
        case [str(op), left, right] if op in BINARY:
            return Binary(op, from_json(left, depth + 1), from_json(right, depth + 1))
        case [str(op), arg] if op in UNARY:
            return Unary(op, from_json(arg, depth + 1))
    raise QueryError(
        f"not an expression: {str(body)[:200]}",
        code="bad_expression",
        hint='expressions are lists such as ["gt", ["col", "price"], ["lit", 10]]',
    )


@dataclass(frozen=True, slots=True)
class Typed:
    """A bound node: what runs. `type` is i64, f64, bool or bytes; `op` "col", "lit", "cast" or an operator.

    For bytes `size` is the width; a literal's value is NUL padded to the width of the other side. A `cast`
    goes from `args[0].type` to `type`. In the arguments of an operator both types are equal.
    """

    op: str
    type: str
    args: tuple[Typed, ...] = ()
    value: int | float | bool | bytes | None = None
    name: str | None = None
    size: int = 0


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


def bind(expr: Expr, fields: Mapping[str, str]) -> Typed:
    """`expr` with types, over columns of the given types (`{"price": "f32"}`; kinds will do).

    Raises QueryError: unknown columns (with near names), operators that do not fit their operands.
    """
    try:
        return _bind(expr, fields, 0)
    except QueryError as error:
        if error.code in ("unknown_field", "bad_expression"):
            raise
        raise QueryError(f"in {str(expr)[:200]}: {error.message}", code=error.code, hint=error.hint) from None


def _bind(expr: Expr, fields: Mapping[str, str], depth: int) -> Typed:
    if depth > MAX_DEPTH:
        raise QueryError(f"an expression is nested more than {MAX_DEPTH} deep", code="bad_expression")
    if isinstance(expr, Column):
        if expr.name not in fields:
            raise QueryError(
                f"no column {expr.name!r}", code="unknown_field", hint=near_names(expr.name, list(fields))
            )
        kind, size = value_type(fields[expr.name])
        return Typed("col", kind, name=expr.name, size=size)
    if isinstance(expr, Literal):
        return _bind_literal(expr.value)
    if isinstance(expr, Cast):
        return _bind_cast(_bind(expr.arg, fields, depth + 1), expr.to)
    if isinstance(expr, Unary):
        return _bind_unary(expr.op, _bind(expr.arg, fields, depth + 1))
    if isinstance(expr, Binary):
        left, right = _bind(expr.left, fields, depth + 1), _bind(expr.right, fields, depth + 1)
        return _bind_binary(expr.op, left, right)
    raise QueryError(f"{expr!r} is not an expression", code="bad_expression", hint="begin with col('name')")


def _bind_literal(value: int | float | bool | bytes) -> Typed:
    if isinstance(value, bool):
        return Typed("lit", "bool", value=value)
    if isinstance(value, bytes):
        trimmed = value.rstrip(b"\0")
        return Typed("lit", "bytes", value=trimmed, size=len(trimmed))
    return Typed("lit", "i64" if isinstance(value, int) else "f64", value=value)


def _bind_cast(arg: Typed, to: str) -> Typed:
    if arg.type == "bytes":
        raise _mismatch(f"cast to {to}", arg)
    return arg if arg.type == to else Typed("cast", to, (arg,))


def _bind_unary(op: str, arg: Typed) -> Typed:
    if (arg.type == "bool") != (op == "not") or arg.type == "bytes":
        raise _mismatch(UNARY[op], arg)
    return Typed(op, arg.type, (arg,))


def _bind_binary(op: str, left: Typed, right: Typed) -> Typed:
    kinds = {left.type, right.type}
    if op in BOOLEAN and kinds == {"bool"}:
        return Typed(op, "bool", (left, right))
    if op in ("eq", "ne") and kinds == {"bytes"}:
        return Typed(op, "bool", _pad(left, right))
    if op in ("eq", "ne") and kinds == {"bool"}:
        return Typed(op, "bool", (left, right))
    if op in BOOLEAN or not kinds <= {"i64", "f64"}:
        raise _mismatch(BINARY[op], left, right)
    if op in ("floordiv", "mod") and "f64" in kinds:
        raise _mismatch(BINARY[op], left, right, hint="it is for integers: cast('i64') first")
    if op == "div" or kinds == {"i64", "f64"}:
        left, right = _to_f64(left), _to_f64(right)
    return Typed(op, "bool" if op in COMPARISON else left.type, (left, right))


def _to_f64(arg: Typed) -> Typed:
    if arg.op == "lit" and isinstance(arg.value, int):
        return Typed("lit", "f64", value=float(arg.value))
    return _bind_cast(arg, "f64")


def _pad(left: Typed, right: Typed) -> tuple[Typed, Typed]:
    for literal, other in ((left, right), (right, left)):
        if literal.op == "lit" and other.op != "lit" and 0 < other.size < literal.size:
            raise QueryError(
                f"the constant {literal.value!r} has {literal.size} bytes, but {other.name} holds "
                f"{other.size}: they can never be equal",
                code="bad_literal",
            )
    size = max(left.size, right.size)
    return _padded(left, size), _padded(right, size)


def _padded(arg: Typed, size: int) -> Typed:
    if arg.op == "lit" and isinstance(arg.value, bytes):
        return Typed("lit", "bytes", value=arg.value.ljust(size, b"\0"), size=size)
    return arg


def _mismatch(operator: str, *args: Typed, hint: str | None = None) -> QueryError:
    kinds = " and ".join(arg.type for arg in args)
    if hint is None and any(arg.type == "bytes" for arg in args):
        hint = "bytes know only == and != with bytes"
    elif hint is None and any(arg.type == "bool" for arg in args):
        hint = "a bool knows only == != & | ~; for arithmetic cast('i64')"
    elif hint is None:
        hint = "& | ~ need comparisons on both sides: mind the parentheses"
    return QueryError(f"{operator} does not work on {kinds}", code="bad_types", hint=hint)
