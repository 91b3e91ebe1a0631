"""What a window says about each key: counts, sums, extremes, means, the first and last row, different values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flexstream.errors import QueryError
from flexstream.query import expr as expressions
from flexstream.query.expr import Expr, Typed
from flexstream.query.windows import MOST_WINDOWS_COUNTED_ANEW, WindowSpec
from flexstream.rows.schema import FieldType

FUNCTIONS = (
    "count", "count_if", "sum", "min", "max", "avg", "stddev", "first", "last", "distinct",
    "approx_distinct", "order_hash",
)  # fmt: skip
_OF_ARGUMENT = ("min", "max", "first", "last")  # the result is one of the values
_OF_ANY = ("first", "last", "distinct", "approx_distinct", "order_hash")  # bool too, and times


@dataclass(frozen=True, eq=False, slots=True)
class Aggregate:
    """A function over the rows of one key in one window. `arg` is None for count alone."""

    fn: str
    arg: Expr | None = None

    def to_json(self) -> list[Any]:
        return [self.fn] if self.arg is None else [self.fn, expressions.to_json(self.arg)]

    @classmethod
    def from_json(cls, body: Any) -> Aggregate:
        match body:
            case ["count"]:
                return cls("count")
            case [str(fn), arg] if fn in FUNCTIONS and fn != "count":
                return cls(fn, expressions.from_json(arg))
        raise QueryError(
            f"not an aggregate: {str(body)[:200]}",
            code="bad_aggregate",
            hint=f'aggregates are lists such as ["sum", ["col", "price"]]; there is {", ".join(FUNCTIONS)}',
        )

    def __str__(self) -> str:
        return f"{self.fn}({'' if self.arg is None else self.arg})"


def result_type(aggregate: Aggregate, argument: Typed, declared: str) -> str:
    """The Arrow type of the result, as text. `declared` is the argument's type as a schema has it.

    Raises QueryError: the function is not for such an argument.
    """
    fn, kind = aggregate.fn, argument.type
    if fn == "count_if":
        if kind != "bool":
            raise _refused(aggregate, declared, "it counts where a condition is true: compare it with something")
        return "int64"
    if fn in _OF_ANY:
        if kind == "bytes":
            raise _refused(aggregate, declared, "bytes do not work yet: it is for numbers, times and bool")
        return FieldType.parse(declared).arrow if fn in _OF_ARGUMENT else "int64"
    is_time = declared.startswith("timestamp") and fn not in _OF_ARGUMENT
    if kind not in ("i64", "f64") or is_time:
        raise _refused(aggregate, declared, "it is for numbers" + ("" if kind == "bytes" else ": cast('i64')"))
    if fn in _OF_ARGUMENT:
        return FieldType.parse(declared).arrow
    return "int64" if fn == "sum" and kind == "i64" else "double"


def check_window(aggregate: Aggregate, window: WindowSpec | None) -> None:
    """Raises QueryError: the function cannot work over such a window."""
    if aggregate.fn == "order_hash" and window is not None and window.kind != "tumbling":
        raise QueryError(
            f"order_hash needs a tumbling window, not {window}: panes do not keep the order of rows between them",
            code="bad_window",
            hint="use fs.tumbling(...)",
        )
    if aggregate.fn == "distinct" and window is not None and window.windows_per_row > MOST_WINDOWS_COUNTED_ANEW:
        raise QueryError(
            f"distinct counts a row's value anew in each of its windows: {window.windows_per_row} times with {window}; "
            f"the limit is {MOST_WINDOWS_COUNTED_ANEW}",
            code="too_costly",
            hint="use approx_distinct, whose panes are merged, or a longer slide",
        )


def _refused(aggregate: Aggregate, declared: str, hint: str) -> QueryError:
    return QueryError(
        f"{aggregate.fn} does not work on {aggregate.arg}, which is {declared}", code="bad_types", hint=hint
    )


def _make(fn: str, arg: Any) -> Aggregate:
    return Aggregate(fn, expressions.col(arg) if isinstance(arg, str) else expressions.lit(arg))


def count() -> Aggregate:
    """The number of rows: int64."""
    return Aggregate("count")


def count_if(condition: str | Expr) -> Aggregate:
    """The number of rows for which the condition is true: int64. Other rows still make a result, of 0."""
    return _make("count_if", condition)


def sum(arg: str | Expr) -> Aggregate:
    """The sum: int64 of integers (overflow fails the query, as in Spark's ANSI mode), else float64."""
    return _make("sum", arg)


def min(arg: str | Expr) -> Aggregate:
    """The smallest value, in the argument's type. NaN is greater than any number, as in Spark."""
    return _make("min", arg)


def max(arg: str | Expr) -> Aggregate:
    """The greatest value, in the argument's type. NaN is greater than any number, as in Spark."""
    return _make("max", arg)


def avg(arg: str | Expr) -> Aggregate:
    """The mean: float64."""
    return _make("avg", arg)


def stddev(arg: str | Expr) -> Aggregate:
    """The sample standard deviation (n - 1): float64, null for a single row."""
    return _make("stddev", arg)


def first(arg: str | Expr) -> Aggregate:
    """The value of the first row, in the argument's type: by event time, then session, then row sequence.

    Sessions of a stream count in the order in which they first registered. So the result does not depend on which
    row was received first, nor on moves of the group.
    """
    return _make("first", arg)


def last(arg: str | Expr) -> Aggregate:
    """The value of the last row, in the argument's type: by event time, then session, then row sequence."""
    return _make("last", arg)


def distinct(arg: str | Expr) -> Aggregate:
    """How many different values there are: int64. It keeps them all; `approx_distinct` does not."""
    return _make("distinct", arg)


def approx_distinct(arg: str | Expr) -> Aggregate:
    """About how many different values there are: int64, with a standard error of 3.3%, in 1024 bytes for each key."""
    return _make("approx_distinct", arg)


def order_hash(arg: str | Expr) -> Aggregate:
    """A hash of the values in the order in which they arrived on each connection: int64. For tumbling windows.

    It is for checking that no row was lost, repeated or overtaken on its way; it keeps a group on one worker at a time.
    """
    return _make("order_hash", arg)
