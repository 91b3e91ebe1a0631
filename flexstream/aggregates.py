"""What a window says about each key: count, sum, min, max, avg, stddev."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flexstream import expr as expressions
from flexstream.errors import QueryError
from flexstream.expr import Expr

FUNCTIONS = ("count", "sum", "min", "max", "avg", "stddev")


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


def _make(fn: str, arg: Any) -> Aggregate:
    return Aggregate(fn, expressions.col(arg) if isinstance(arg, str) else expressions.lit(arg))


def count() -> Aggregate:
    """The number of rows: int64."""
    return Aggregate("count")


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
