"""A FlexStream query as Spark DataFrame operations: the way out of one machine, and a second opinion on results.

A row whose expression fails (overflow, division by zero) is rejected by a FlexStream query, not fatal to it. Here
such a value is null, and rows with a null in a filter or in an aggregate's argument are dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from flexstream.errors import QueryError
from flexstream.query.plan import BoundAggregate, BoundFilter, BoundMap, BoundQuery
from flexstream.query.typed import Typed
from flexstream.rows.schema import FieldType
from flexstream.spark import types
from flexstream.spark.expressions import Columns

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from flexstream.query.query import Query

PARAMETERS = {"approx_count_distinct": (0.0325,)}  # relative standard deviation: about the error of ours
BEGINNING = -(2**62)  # microseconds: before any timestamp
Arguments = dict[tuple[str, int], str]  # (aggregate's name, its argument's number) -> column
EVENT_TIME, WINDOW = "__event_time", "__window"  # no field begins with an underscore


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
        raise _refuse(query, f"window {spec}", "Spark's times are in microseconds", "use windows of whole microseconds")
    if bound.windower.lateness and df.isStreaming:
        raise _refuse(
            query,
            "allowed_lateness",
            "Spark fires a window once and has no revisions of results",
            "give the stream a larger max_disorder, which becomes Spark's watermark delay",
        )
    for key in query.stream.key_fields:
        if key.unit == "ns" and not df.schema[key.name].dataType.typeName().startswith("timestamp"):
            raise _refuse(query, f"key {key.name}", "it is in nanoseconds, but Spark's timestamps are in microseconds")
    for aggregate in bound.aggregates:
        if aggregate.result_type == "timestamp[ns]":
            raise _refuse(
                query,
                f"aggregate {aggregate.name} = {query.aggregates[aggregate.name]}",
                "it is in nanoseconds, but Spark's timestamps are in microseconds",
                "aggregate cast('i64') of the column",
            )
        refused = aggregate.function.not_in_spark
        if refused is not None and (df.isStreaming or not refused.streaming_only):
            raise _refuse(
                query,
                f"aggregate {aggregate.name} = {query.aggregates[aggregate.name]}",
                refused.why,
                refused.hint,
            )
        if aggregate.function.overflows and aggregate.result_type == "int64" and not _ansi(df):
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


def _arguments(rows: DataFrame, columns: Columns, bound: BoundQuery) -> tuple[DataFrame, Arguments]:
    """Adds the aggregates' arguments as columns, and drops the rows where one cannot be computed."""
    trees = {(a.name, which): tree for a in bound.aggregates for which, tree in enumerate(a.args)}
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


def _aggregate(aggregate: BoundAggregate, arguments: Arguments) -> Column:
    name = aggregate.function.spark
    assert name is not None, f"{aggregate.fn} was refused"
    argument = F.lit(1) if aggregate.arg is None else F.col(arguments[aggregate.name, 0])
    function: Callable[..., Column] = getattr(F, name)
    if aggregate.by is not None:  # of rows that are equal in what decides, the value decides
        return function(argument, F.struct(F.col(arguments[aggregate.name, 1]).alias("by"), argument.alias("value")))
    return function(argument, *PARAMETERS.get(name, ()))


def _results(bound: BoundQuery, aggregated: DataFrame, key_names: dict[str, str], groups: int) -> DataFrame:
    keys = {key.name: _of_type(F.col(key_names[key.name]), key.arrow) for key in bound.query.stream.key_fields}
    made = {
        "window_start": F.col(f"{WINDOW}.start"),
        "window_end": F.col(f"{WINDOW}.end"),
        **keys,
        **{a.name: _of_type(F.col(f"_r{i}"), a.result_type) for i, a in enumerate(bound.aggregates)},
        "group": F.pmod(F.hash(*keys.values()), F.lit(groups)).cast("int"),
        "revision": F.lit(0).cast("int"),
        "complete": F.lit(True),
    }
    return aggregated.select(*(made[name].alias(name) for name, _ in bound.result_fields))


def _of_type(value: Column, arrow: str) -> Column:
    """From how expressions see a value to the type that it has in results."""
    if arrow.startswith("fixed_size_binary"):
        return value
    kind = FieldType.parse(arrow)
    return types.instant(value, kind.unit) if kind.unit else value.cast(types.natural_type(kind.kind))
