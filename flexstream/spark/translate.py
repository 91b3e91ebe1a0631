"""A FlexStream query as Spark DataFrame operations: the way out of one machine, and a second opinion on results.

A row whose expression fails (overflow, division by zero) is rejected by a FlexStream query, not fatal to it. Here
such a value is null, and rows with a null in a filter or in an aggregate's argument are dropped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F

from flexstream.errors import QueryError
from flexstream.expr import Typed
from flexstream.plan import BoundAggregate, BoundFilter, BoundMap, BoundQuery
from flexstream.schema import FieldType
from flexstream.spark import types

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from flexstream.query import Query

I64_MIN = -(2**63)
APPROX_ERROR = 0.0325  # relative standard deviation
BEGINNING = -(2**62)  # microseconds: before any timestamp
EVENT_TIME, WINDOW = "__event_time", "__window"  # no field begins with an underscore
_FAIL_ON_INTEGERS = {"add", "sub", "mul", "neg", "abs"}


def to_spark(query: Query, df: DataFrame, *, groups: int = 128) -> DataFrame:
    """The results of `query` over the rows of `df`, a batch or a streaming frame, with the columns and types of
    the results that FlexStream gives (`flexstream.spark.result_schema`). `groups` is the engine's.

    Raises QueryError that names the operator which Spark has no equal for, SchemaError when `df` does not have
    the stream's columns.
    """
    bound = query.bound()
    types.check_columns(query.stream, df.schema, extra_allowed=True)
    _check_translatable(bound, df)
    rows, columns = _take_rows(query, df)
    for step in bound.steps:
        if isinstance(step, BoundFilter):
            rows = _keep(rows, columns.translate(step.expr))
        elif isinstance(step, BoundMap):
            rows, columns = _map(rows, columns, step.columns)
    rows, arguments = _arguments(rows, columns, bound)
    keys = {key: columns.names[key] for key in query.stream.key}
    grouped = rows.groupBy(_window(bound), *map(F.col, keys.values()))
    aggregated = grouped.agg(*(_aggregate(a, arguments).alias(f"_r{i}") for i, a in enumerate(bound.aggregates)))
    return _results(bound, aggregated, keys, groups)


def _refuse(query: Query, operator: str, why: str, hint: str | None = None) -> QueryError:
    return QueryError(
        f"query {query.name!r} cannot be translated to Spark: {operator}: {why}", code="not_in_spark", hint=hint
    )


def _check_translatable(bound: BoundQuery, df: DataFrame) -> None:
    query, spec = bound.query, bound.query.window_spec
    assert spec is not None, "bound() checked it"
    if spec.size_ns % 1000 or spec.slide_ns % 1000:
        raise _refuse(query, f"window {spec}", "Spark's time is in microseconds", "use windows of whole microseconds")
    if bound.allowed_lateness and df.isStreaming:
        raise _refuse(
            query,
            "allowed_lateness",
            "Spark fires a window once, it has no revisions of results",
            "give the stream a larger max_disorder, which becomes Spark's watermark delay",
        )
    for key in query.stream.key_fields:
        if key.unit == "ns" and not df.schema[key.name].dataType.typeName().startswith("timestamp"):
            raise _refuse(query, f"key {key.name}", "it is in nanoseconds, Spark's timestamps are in microseconds")
    for aggregate in bound.aggregates:
        if aggregate.result_type == "timestamp[ns]":
            raise _refuse(
                query,
                f"aggregate {aggregate.name} = {query.aggregates[aggregate.name]}",
                "it is in nanoseconds, Spark's timestamps are in microseconds",
                "aggregate cast('i64') of the column",
            )
        if aggregate.fn in ("first", "last"):
            raise _refuse(
                query,
                f"aggregate {aggregate.name} = {query.aggregates[aggregate.name]}",
                "rows of the same event time come in the order of session and row sequence, which Spark does not have",
                "use min_by or max_by over a column that orders your rows",
            )
        if aggregate.fn == "order_hash":
            raise _refuse(
                query,
                f"aggregate {aggregate.name} = {query.aggregates[aggregate.name]}",
                "rows of a DataFrame have no order of arrival",
            )
        if aggregate.fn == "distinct" and df.isStreaming:
            raise _refuse(
                query,
                f"aggregate {aggregate.name} = {query.aggregates[aggregate.name]}",
                "Spark counts different values exactly in batches only",
                "use approx_distinct",
            )
        if aggregate.fn == "sum" and aggregate.result_type == "int64" and not _ansi(df):
            raise _refuse(
                query,
                f"aggregate {aggregate.name} = {query.aggregates[aggregate.name]}",
                "an overflow must fail the query, and Spark would wrap around",
                "set spark.sql.ansi.enabled to true",
            )


def _ansi(df: DataFrame) -> bool:
    return str(df.sparkSession.conf.get("spark.sql.ansi.enabled", "true")).lower() == "true"


def _take_rows(query: Query, df: DataFrame) -> tuple[DataFrame, Columns]:
    """The stream's fields as values that expressions can use, under names that Spark cannot confuse by case."""
    stream = query.stream
    names = {field.name: f"_{i}" for i, field in enumerate(stream.schema)}
    made, fallible = {}, set()
    for field in stream.schema:
        given = df.schema[field.name]
        column = types.not_null(df[field.name], given, stream)
        value = types.field_value(column, given.dataType, field)
        made[names[field.name]] = value
        if field.kind == "u64" or field.unit == "ns":
            fallible.add(field.name)
        if field.name == stream.time:
            is_instant = given.dataType.typeName() == "timestamp"
            made[EVENT_TIME] = column if is_instant else types.instant(value, stream.time_unit)
    rows = df.select(*(column.alias(name) for name, column in made.items()))
    if df.isStreaming:
        rows = rows.withWatermark(EVENT_TIME, _microseconds(stream.max_disorder_ns))
    return rows, Columns(names, fallible)


def _microseconds(nanoseconds: int) -> str:
    return f"{-(-nanoseconds // 1000)} microseconds"


def _keep(rows: DataFrame, condition: Column) -> DataFrame:
    """A filter. Rows that it drops move the watermark too, as in FlexStream: Spark would filter before it looks at the
    time, unless the condition has to do with the time.
    """
    if rows.isStreaming:
        condition = F.when(F.col(EVENT_TIME) > F.timestamp_micros(F.lit(BEGINNING)), condition)
    return rows.filter(condition)


def _map(rows: DataFrame, columns: Columns, trees: dict[str, Typed]) -> tuple[DataFrame, Columns]:
    made = {f"_{len(rows.columns) + i}": columns.translate(tree) for i, tree in enumerate(trees.values())}
    fallible = (columns.fallible - trees.keys()) | {name for name, tree in trees.items() if columns.can_fail(tree)}
    return rows.withColumns(made), Columns({**columns.names, **dict(zip(trees, made, strict=True))}, fallible)


def _arguments(rows: DataFrame, columns: Columns, bound: BoundQuery) -> tuple[DataFrame, dict[str, str]]:
    """Adds the aggregates' arguments as columns, and drops the rows where one cannot be computed."""
    trees = {a.name: a.arg for a in bound.aggregates if a.arg is not None}
    made = {name: f"_a{i}" for i, name in enumerate(trees)}
    if made:
        rows = rows.withColumns({made[name]: columns.translate(tree) for name, tree in trees.items()})
    for name, tree in trees.items():
        if columns.can_fail(tree):
            rows = _keep(rows, F.col(made[name]).isNotNull())
    return rows, made


def _window(bound: BoundQuery) -> Column:
    spec = bound.query.window_spec
    assert spec is not None, "bound() checked it"
    size, slide = _microseconds(spec.size_ns), _microseconds(spec.slide_ns)
    return F.window(EVENT_TIME, size, slide).alias(WINDOW)


def _aggregate(aggregate: BoundAggregate, arguments: dict[str, str]) -> Column:
    if aggregate.arg is None:
        return F.count(F.lit(1))
    argument = F.col(arguments[aggregate.name])
    if aggregate.fn == "count_if":
        return F.count_if(argument)
    if aggregate.fn == "distinct":
        return F.count_distinct(argument)
    if aggregate.fn == "approx_distinct":  # Spark's own estimate, with about the same error
        return F.approx_count_distinct(argument, APPROX_ERROR)
    function = {"sum": F.sum, "min": F.min, "max": F.max, "avg": F.avg, "stddev": F.stddev_samp}[aggregate.fn]
    return function(argument)


def _results(bound: BoundQuery, aggregated: DataFrame, key_names: dict[str, str], groups: int) -> DataFrame:
    keys = {key.name: _of_type(F.col(key_names[key.name]), key.arrow) for key in bound.query.stream.key_fields}
    made = {
        "window_start": F.col(f"{WINDOW}.start"),
        "window_end": F.col(f"{WINDOW}.end"),
        **keys,
        **{a.name: _of_type(F.col(f"_r{i}"), a.result_type) for i, a in enumerate(bound.aggregates)},
        "group": F.pmod(F.hash(*keys.values()), F.lit(groups)).cast("int"),
        "revision": F.lit(0).cast("int"),
    }
    return aggregated.select(*(made[name].alias(name) for name, _ in bound.result_fields))


def _of_type(value: Column, arrow: str) -> Column:
    """From how expressions see a value to the type that it has in results."""
    if arrow.startswith("fixed_size_binary"):
        return value
    kind = FieldType.parse(arrow)
    return types.instant(value, kind.unit) if kind.unit else value.cast(types.natural_type(kind.kind))


class Columns:
    """The columns that a step sees: field or mapped column -> Spark column; those in `fallible` may be null."""

    def __init__(self, names: dict[str, str], fallible: set[str]) -> None:
        self.names = names
        self.fallible = fallible

    def can_fail(self, tree: Typed) -> bool:
        """Whether a row can make this expression impossible to compute, so that its column may be null."""
        if tree.op == "col":
            return tree.name in self.fallible
        if tree.op in ("div", "floordiv", "mod") or (tree.op in _FAIL_ON_INTEGERS and tree.type == "i64"):
            return True
        if tree.op == "cast" and tree.type == "i64" and tree.args[0].type == "f64":
            return True
        return any(self.can_fail(arg) for arg in tree.args)

    def translate(self, tree: Typed) -> Column:
        if tree.op == "col":
            assert tree.name is not None
            return F.col(self.names[tree.name])
        if tree.op == "lit":
            return _literal(tree)
        if tree.op in ("and", "or"):
            return self._connective(tree)
        arguments = [self.translate(arg) for arg in tree.args]
        if tree.op in ("cast", "not", "neg", "abs"):
            return _unary(tree, arguments[0])
        return _binary(tree, *arguments)

    def _connective(self, tree: Typed) -> Column:
        """The right side counts only when the left does not decide; a left side that fails, fails the whole."""
        left, right = self.translate(tree.args[0]), self.translate(tree.args[1])
        if not self.can_fail(tree.args[0]):
            return left & right if tree.op == "and" else left | right
        if tree.op == "and":
            return F.when(left, right).otherwise(left)
        return F.when(~left, right).otherwise(left)


def _literal(tree: Typed) -> Column:
    if isinstance(tree.value, bytes):
        return F.lit(tree.value.rstrip(b"\0"))
    if tree.type == "i64":
        return F.lit(tree.value).cast("bigint")
    return F.lit(float(tree.value) if tree.type == "f64" else tree.value)  # type: ignore[arg-type]


def _unary(tree: Typed, argument: Column) -> Column:
    source = tree.args[0].type
    if tree.op == "not":
        return ~argument
    if tree.op == "cast":
        if tree.type == "i64" and source == "f64":
            fits = (argument >= F.lit(-(2.0**63))) & (argument < F.lit(2.0**63))
            return F.when(fits, argument).cast("bigint")
        return argument.cast("int").cast("double") if source == "bool" else argument.cast(_CASTS[tree.type])
    made: Any = -argument if tree.op == "neg" else F.abs(argument)
    if tree.type == "i64":
        return F.when(argument != F.lit(I64_MIN), made)
    return made


_CASTS = {"i64": "bigint", "f64": "double"}
_PLAIN: dict[str, Any] = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b,
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
}  # fmt: skip
_CHECKED: dict[str, Any] = {"add": F.try_add, "sub": F.try_subtract, "mul": F.try_multiply}


def _binary(tree: Typed, left: Column, right: Column) -> Column:
    if tree.op == "div":
        return F.try_divide(left, right)
    if tree.op == "mod":
        return F.when(right != 0, left % right)
    if tree.op == "floordiv":  # towards zero, as Spark's div
        fits = (right != 0) & ~((left == F.lit(I64_MIN)) & (right == -1))
        return F.when(fits, F.call_function("div", left, right))
    if tree.type == "i64" and tree.op in _CHECKED:
        return _CHECKED[tree.op](left, right)
    return _PLAIN[tree.op](left, right)
