"""What a window says about each key: counts, sums, extremes, means, middles, the first and last row, different values.

FUNCTIONS has one record for each aggregate function. Whoever binds, runs, checks or translates one asks its record;
what its fold keeps and does is in cython_ext/includes/folds.h, under the name that the record gives.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from flexstream.errors import QueryError
from flexstream.query import expr as expressions
from flexstream.query.expr import Expr, Typed
from flexstream.query.windows import MOST_WINDOWS_COUNTED_ANEW, WindowSpec
from flexstream.rows.schema import FieldType

SAME = "the argument's"  # the result is one of the values, in their type


@dataclass(frozen=True, slots=True)
class NotInSpark:
    """Why `to_spark` refuses the function, and what to do instead."""

    why: str
    hint: str | None = None
    streaming_only: bool = False


@dataclass(frozen=True, slots=True)
class Function:
    """What there is to know of an aggregate function. The oracle (flexstream.testing) knows it by its name."""

    name: str
    of: dict[str | None, tuple[str, str]]  # what the argument is (None: there is none) -> its fold, the result's type
    by: dict[str, str] = field(default_factory=dict)  # what decides -> what the fold's name ends with; empty: nothing
    cast: str | None = None  # what the fold is over, where it is not the argument as it is
    times: bool = False  # also of timestamps
    nullable: bool = False
    beside: bool = False  # keeps a table of its own beside the entries
    ordered: bool = False  # needs rows in the order of arrival
    overflows: bool = False  # an integer result that passes int64 fails the query
    spark: str | None = None  # the function of pyspark.sql.functions
    not_in_spark: NotInSpark | None = None

    def fold(self, kind: str | None, by: str | None) -> str:
        """The name of its fold over an argument of that kind, where one of the kind `by` decides."""
        return self.of[kind][0] + ("" if by is None else self.by[by])


def _numbers(whole: str, real: str) -> dict[str | None, tuple[str, str]]:
    """The fold of integers and of reals; the result is one of the values."""
    return {"i64": (whole, SAME), "f64": (real, SAME)}


def _any(whole: str, real: str, result: str) -> dict[str | None, tuple[str, str]]:
    return {"i64": (whole, result), "bool": (whole, result), "f64": (real, result)}


def _real(fold: str) -> dict[str | None, tuple[str, str]]:
    return {"i64": (fold, "double"), "f64": (fold, "double")}


_NO_ORDER = NotInSpark(
    "session and row sequence decide between rows of the same event time, and Spark has neither",
    "use min_by or max_by over a column that orders your rows",
)
_BY = {"i64": "i", "f64": "f"}
FUNCTIONS = {
    record.name: record
    for record in (
        Function("count", {None: ("count", "int64")}, spark="count"),
        Function("count_if", {"bool": ("sum_i", "int64")}, cast="i64", spark="count_if"),
        Function("sum", {"i64": ("sum_i", "int64"), "f64": ("sum_f", "double")}, overflows=True, spark="sum"),
        Function("min", _numbers("min_i", "min_f"), times=True, spark="min"),
        Function("max", _numbers("max_i", "max_f"), times=True, spark="max"),
        Function("avg", _real("avg"), cast="f64", spark="avg"),
        Function("stddev", _real("stddev"), cast="f64", nullable=True, spark="stddev_samp"),
        Function("variance", _real("variance"), cast="f64", nullable=True, spark="var_samp"),
        Function("bool_and", {"bool": ("min_i", "bool")}, spark="bool_and"),
        Function("bool_or", {"bool": ("max_i", "bool")}, spark="bool_or"),
        Function("min_by", _any("min_by_i", "min_by_f", SAME), by=_BY, times=True, spark="min_by"),
        Function("max_by", _any("max_by_i", "max_by_f", SAME), by=_BY, times=True, spark="max_by"),
        Function("first", _any("first", "first", SAME), times=True, not_in_spark=_NO_ORDER),
        Function("last", _any("last", "last", SAME), times=True, not_in_spark=_NO_ORDER),
        Function(
            "distinct",
            _any("distinct_i", "distinct_f", "int64"),
            times=True,
            beside=True,
            spark="count_distinct",
            not_in_spark=NotInSpark(
                "Spark counts different values exactly in batches only", "use approx_distinct", streaming_only=True
            ),
        ),
        Function("mode", _any("mode_i", "mode_f", SAME), times=True, beside=True, spark="mode"),
        Function("median", {"i64": ("median_i", "double"), "f64": ("median_f", "double")}, beside=True, spark="median"),
        Function(
            "approx_distinct", _any("approx_i", "approx_f", "int64"), times=True, spark="approx_count_distinct"
        ),
        Function(
            "order_hash",
            _any("order_i", "order_f", "int64"),
            times=True,
            beside=True,
            ordered=True,
            not_in_spark=NotInSpark("rows of a DataFrame have no order of arrival"),
        ),
    )
}


def function(name: str) -> Function:
    """The function's record. Raises QueryError: there is none of that name."""
    if name not in FUNCTIONS:
        raise QueryError(
            f"there is no aggregate {name!r}", code="bad_aggregate", hint=f"aggregates are {', '.join(FUNCTIONS)}"
        )
    return FUNCTIONS[name]


@dataclass(frozen=True, eq=False, slots=True)
class Aggregate:
    """A function over the rows of one key in one window. count has no `arg`; `by` decides of which row it is."""

    fn: str
    arg: Expr | None = None
    by: Expr | None = None

    @property
    def args(self) -> list[Expr]:
        return [arg for arg in (self.arg, self.by) if arg is not None]

    def to_json(self) -> list[Any]:
        return [self.fn, *(expressions.to_json(arg) for arg in self.args)]

    @classmethod
    def from_json(cls, body: Any) -> Aggregate:
        match body:
            case [str(fn)] if None in _kinds(fn):
                return cls(fn)
            case [str(fn), arg] if _kinds(fn) - {None} and not FUNCTIONS[fn].by:
                return cls(fn, expressions.from_json(arg))
            case [str(fn), arg, by] if _kinds(fn) and FUNCTIONS[fn].by:
                return cls(fn, expressions.from_json(arg), expressions.from_json(by))
        raise QueryError(
            f"not an aggregate: {str(body)[:200]}",
            code="bad_aggregate",
            hint=f'write a list such as ["sum", ["col", "price"]]; aggregates are {", ".join(FUNCTIONS)}',
        )

    def __str__(self) -> str:
        return f"{self.fn}({', '.join(map(str, self.args))})"


def _kinds(fn: str) -> set[str | None]:
    """What the function takes; nothing, if there is none of that name."""
    return set(FUNCTIONS[fn].of) if fn in FUNCTIONS else set()


def result_type(aggregate: Aggregate, argument: Typed | None, declared: str, by: Typed | None = None) -> str:
    """The Arrow type of the result, as text. `declared` is the argument's type as a schema has it.

    Raises QueryError: the function is not for such an argument.
    """
    _check_by(aggregate, by)
    record, kind = function(aggregate.fn), None if argument is None else argument.type
    if kind not in record.of or (declared.startswith("timestamp") and not record.times):
        raise _refused(aggregate, declared, _takes(record, kind))
    result = record.of[kind][1]
    return FieldType.parse(declared).arrow if result == SAME else result


def _check_by(aggregate: Aggregate, by: Typed | None) -> None:
    record = function(aggregate.fn)
    if (by is None) == bool(record.by):
        takes = "two arguments: the value, and the column that chooses its row" if record.by else "one argument"
        raise QueryError(f"{record.name} takes {takes}", code="bad_aggregate", hint=f"this one is {aggregate}")
    if by is not None and by.type not in record.by:
        raise QueryError(
            f"{record.name} cannot choose a row by {aggregate.by}, which is {by.type}",
            code="bad_types",
            hint="choose by a number or a time; cast('i64') turns a bool into a number",
        )


def _takes(record: Function, kind: str | None) -> str:
    if None in record.of:
        return "it takes no argument"
    if "i64" not in record.of:
        return "it needs a condition, which is true or false: compare it with something"
    if "bool" in record.of:
        return "it takes numbers, times and bool; bytes do not work yet"
    return "it takes numbers" + ("" if kind == "bytes" else ": cast('i64')")


def check_window(aggregate: Aggregate, window: WindowSpec | None) -> None:
    """Raises QueryError: the function cannot work over such a window."""
    record = function(aggregate.fn)
    if record.ordered and window is not None and window.kind != "tumbling":
        raise QueryError(
            f"{record.name} needs a tumbling window, not {window}: panes do not keep the order of rows between them",
            code="bad_window",
            hint="use fs.tumbling(...)",
        )
    if record.beside and window is not None and window.windows_per_row > MOST_WINDOWS_COUNTED_ANEW:
        raise QueryError(
            f"{record.name} counts a row once in each of its windows: {window.windows_per_row} times with "
            f"{window}; the limit is {MOST_WINDOWS_COUNTED_ANEW}",
            code="too_costly",
            hint="use a longer slide; approx_distinct, whose panes are merged, has no such limit",
        )


def _refused(aggregate: Aggregate, declared: str, hint: str) -> QueryError:
    return QueryError(
        f"{aggregate.fn} does not work on {aggregate.arg}, which is {declared}", code="bad_types", hint=hint
    )


def _expr(arg: Any) -> Expr:
    return expressions.col(arg) if isinstance(arg, str) else expressions.lit(arg)


def _make(fn: str, arg: Any) -> Aggregate:
    return Aggregate(fn, _expr(arg))


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


def variance(arg: str | Expr) -> Aggregate:
    """The sample variance (n - 1): float64, null for a single row."""
    return _make("variance", arg)


def bool_and(condition: str | Expr) -> Aggregate:
    """Whether the condition is true for all rows: bool."""
    return _make("bool_and", condition)


def bool_or(condition: str | Expr) -> Aggregate:
    """Whether the condition is true for some row: bool."""
    return _make("bool_or", condition)


def min_by(arg: str | Expr, by: str | Expr) -> Aggregate:
    """The value of `arg` in the row with the smallest `by`, in its own type; the smallest of them, if several rows have
    that. NaN is greater than any number."""
    return Aggregate("min_by", _expr(arg), _expr(by))


def max_by(arg: str | Expr, by: str | Expr) -> Aggregate:
    """The value of `arg` in the row with the greatest `by`, in its own type; the greatest of them, if several rows have
    that. NaN is greater than any number."""
    return Aggregate("max_by", _expr(arg), _expr(by))


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


def mode(arg: str | Expr) -> Aggregate:
    """The most frequent value, in the argument's type; the smallest, if several are. It keeps all different values.

    -0.0 and 0.0 are one value, and so are all NaNs, which are greater than any number.
    """
    return _make("mode", arg)


def median(arg: str | Expr) -> Aggregate:
    """The value in the middle, exactly: float64, half-way between the two middle ones of an even number of rows.

    NaN is greater than any number. It keeps all different values.
    """
    return _make("median", arg)


def approx_distinct(arg: str | Expr) -> Aggregate:
    """About how many different values there are: int64, with a standard error of 3.3%, in 1024 bytes for each key."""
    return _make("approx_distinct", arg)


def order_hash(arg: str | Expr) -> Aggregate:
    """A hash of the values in the order in which they arrived on each connection: int64. For tumbling windows.

    It is for checking that no row was lost, repeated or overtaken on its way; it keeps a group on one worker at a time.
    """
    return _make("order_hash", arg)
