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
from flexstream.query import typed
from flexstream.query.typed import (
    ARITHMETIC,
    BINARY,
    BOOLEAN,
    CASTS,
    COMPARISON,
    I64_MAX,
    I64_MIN,
    MAX_DEPTH,
    PARTS,
    UNARY,
    Typed,
    value_type,
)
from flexstream.rows.schema import near_names

__all__ = [
    "ARITHMETIC", "BINARY", "BOOLEAN", "CASTS", "COMPARISON", "I64_MAX", "I64_MIN", "MAX_DEPTH", "PARTS", "UNARY",
    "Binary", "Case", "Cases", "Cast", "Column", "Expr", "Hash", "Literal", "Typed", "Unary", "bind", "col",
    "from_json", "hash", "lit", "same", "to_json", "value_type", "when",
]  # fmt: skip


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
        """As a number of another type, or a timestamp of another unit: "i8" to "u64", "f32", "f64", "timestamp[ms]".

        A float is cut towards zero, a time to the unit before it; an integer becomes a timestamp as a count of its
        unit. A value that the type cannot hold is no value: the row is rejected.
        """
        if to not in CASTS:
            hint = f"cast to {', '.join(CASTS[:-1])} or {CASTS[-1]}" + ("; write x != 0" if to == "bool" else "")
            raise QueryError(f"cannot cast {str(self)[:200]} to {to!r}", code="bad_expression", hint=hint)
        return Cast(self, to)

    def startswith(self, prefix: bytes | str) -> Expr:
        """Whether a field of bytes begins with the constant. NULs at the constant's end do not count, as in `==`."""
        return Binary("startswith", self, lit(prefix))

    # fmt: off
    def year(self) -> Expr: return Unary("year", self)
    def month(self) -> Expr: return Unary("month", self)
    def day(self) -> Expr: return Unary("day", self)
    def day_of_week(self) -> Expr: return Unary("day_of_week", self)
    def day_of_year(self) -> Expr: return Unary("day_of_year", self)
    def hour(self) -> Expr: return Unary("hour", self)
    def minute(self) -> Expr: return Unary("minute", self)
    def second(self) -> Expr: return Unary("second", self)
    # fmt: on

    def __bool__(self) -> bool:
        raise TypeError(
            f"the expression {self} has no truth value before it meets a row: write & for and, | for or, "
            "~ for not, with each comparison in parentheses (and no chained comparisons)"
        )

    def __iter__(self) -> Iterator[Any]:
        raise TypeError(f"the expression {self} stands for one value per row, not a sequence")


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
        if self.op == "startswith":
            return f"startswith({self.left}, {self.right})"
        return f"({self.left} {BINARY[self.op]} {self.right})"


@dataclass(frozen=True, eq=False, slots=True)
class Unary(Expr):
    op: str
    arg: Expr

    def __str__(self) -> str:
        return f"{UNARY[self.op]}{self.arg}" if self.op in ("not", "neg") else f"{self.op}({self.arg})"


@dataclass(frozen=True, eq=False, slots=True)
class Cast(Expr):
    arg: Expr
    to: str

    def __str__(self) -> str:
        return f"cast({self.arg} as {self.to})"


@dataclass(frozen=True, eq=False, slots=True)
class Hash(Expr):
    args: tuple[Expr, ...]

    def __str__(self) -> str:
        return f"hash({', '.join(map(str, self.args))})"


@dataclass(frozen=True, eq=False, slots=True)
class Case(Expr):
    cases: tuple[tuple[Expr, Expr], ...]
    default: Expr

    def __str__(self) -> str:
        return f"{_cases_text(self.cases)}.otherwise({self.default})"


@dataclass(frozen=True, eq=False, slots=True)
class Cases:
    """Conditions and values so far; `otherwise` makes an expression of them."""

    cases: tuple[tuple[Expr, Expr], ...]

    def when(self, condition: Any, value: Any) -> Cases:
        """`value` where `condition` holds and none before it did."""
        return Cases((*self.cases, (lit(condition), lit(value))))

    def otherwise(self, value: Any) -> Expr:
        """The value of the rows for which no condition holds."""
        return Case(self.cases, lit(value))

    def __str__(self) -> str:
        return _cases_text(self.cases)


def _cases_text(cases: tuple[tuple[Expr, Expr], ...]) -> str:
    return ".".join(f"when({condition}, {value})" for condition, value in cases)


def when(condition: Any, value: Any) -> Cases:
    """`when(c, a).otherwise(b)`, with any number of `.when(d, e)` between: the value of the first condition that holds.

    What was not chosen does not count: `when(x != 0, 100 // x).otherwise(0)` rejects no row.
    """
    return Cases(()).when(condition, value)


def hash(*values: Any) -> Expr:
    """The hash of one or several columns (by name) or expressions, as Spark's `hash`: a 32-bit integer."""
    if not values:
        raise QueryError("hash() needs at least one argument", code="bad_expression", hint="hash('user', col('day'))")
    return Hash(tuple(Column(value) if isinstance(value, str) else lit(value) for value in values))


def col(name: str) -> Column:
    """The column of that name: a field of the stream, or what a `map` step made."""
    if not isinstance(name, str):
        raise TypeError(f"col() takes a column's name, not {name!r}")
    return Column(name)


def lit(value: Any) -> Expr:
    """A constant: int (64 bits), float, bool, bytes, or str (its UTF-8 bytes). An expression stays as is."""
    if isinstance(value, Expr):
        return value
    if isinstance(value, Cases):
        raise QueryError(
            f"{str(value)[:200]} has no value for the other rows", code="bad_expression", hint="add .otherwise(value)"
        )
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
        raise QueryError(f"the constant {value} does not fit 64 bits", code="bad_literal", hint="use a float")
    return Literal(value)


def same(left: Expr, right: Expr) -> bool:
    """Whether two trees are equal, node by node."""
    return to_json(left) == to_json(right)


# JSON: ["col", name], ["lit", value], ["bytes", base64], ["float", "nan" | "inf" | "-inf"],
#       [op, left, right], [op, arg], ["cast", arg, to], ["hash", arg, ...], ["when", condition, value, ..., otherwise]


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
    if isinstance(expr, Hash):
        return ["hash", *map(to_json, expr.args)]
    if isinstance(expr, Case):
        return ["when", *(to_json(tree) for case in expr.cases for tree in case), to_json(expr.default)]
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
        raise _too_deep()
    match body:
        case ["col", str(name)]:
            return Column(name)
        case ["lit", bool() | int() | float() as value]:
            return lit(value)
        case ["bytes", str(text)]:
            try:
                return Literal(base64.b64decode(text, validate=True))
            except (binascii.Error, ValueError) as error:
                raise QueryError(f"{text!r} is not base64: {error}", code="bad_expression") from None
        case ["float", "nan" | "inf" | "-inf" as text]:
            return Literal(float(text))
        case ["cast", arg, str(to)]:
            return from_json(arg, depth + 1).cast(to)
        case ["hash", _, *_]:
            return Hash(tuple(from_json(arg, depth + 1) for arg in body[1:]))
        case ["when", _, _, _, *_] if len(body) % 2 == 0:
            trees = [from_json(tree, depth + 1) for tree in body[1:]]
            return Case(tuple(zip(trees[:-1:2], trees[1::2], strict=True)), trees[-1])
        case [str(op), left, right] if op in BINARY or op == "startswith":
            return Binary(op, from_json(left, depth + 1), from_json(right, depth + 1))
        case [str(op), arg] if op in UNARY or op in PARTS:
            return Unary(op, from_json(arg, depth + 1))
    raise QueryError(
        f"this is not an expression: {str(body)[:200]}",
        code="bad_expression",
        hint='write a list such as ["gt", ["col", "price"], ["lit", 10]]',
    )


def _too_deep() -> QueryError:
    hint = "put parentheses around pairs in long sums and conditions, or split the query"
    return QueryError(f"an expression is nested more than {MAX_DEPTH} deep", code="bad_expression", hint=hint)


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
        raise _too_deep()
    if isinstance(expr, Column):
        if expr.name not in fields:
            raise QueryError(f"no column {expr.name!r}", code="unknown_field", hint=near_names(expr.name, list(fields)))
        return typed.column(expr.name, fields[expr.name])
    if isinstance(expr, Literal):
        return typed.literal(expr.value)
    if isinstance(expr, Cast):  # two bound nodes, and so for parts of times
        return typed.cast(_bind(expr.arg, fields, depth + 2), expr.to)
    if isinstance(expr, Unary):
        return typed.unary(expr.op, _bind(expr.arg, fields, depth + (2 if expr.op in PARTS else 1)))
    if isinstance(expr, Binary):
        left, right = _bind(expr.left, fields, depth + 1), _bind(expr.right, fields, depth + 1)
        return typed.binary(expr.op, left, right)
    if isinstance(expr, Hash):  # its values are nested when bound, and so are the conditions of a when()
        return typed.hashed([_bind(arg, fields, depth + 1 + len(expr.args)) for arg in expr.args])
    if isinstance(expr, Case):
        last = depth + len(expr.cases)
        found = _bind(expr.default, fields, last)
        for i, (condition, value) in reversed(list(enumerate(expr.cases, depth + 1))):
            found = typed.conditional(_bind(condition, fields, i), _bind(value, fields, i), found)
        return found
    raise QueryError(f"{expr!r} is not an expression", code="bad_expression", hint="begin with col('name')")
