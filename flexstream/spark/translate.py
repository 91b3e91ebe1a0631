"""A FlexStream query as Spark DataFrame operations: the way out of one machine, and a second opinion on results.

A row whose expression fails (overflow, division by zero) is rejected by a FlexStream query, not fatal to it. Here
such a value is null, and rows with a null in a filter or in an aggregate's argument are dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F

from flexstream.errors import QueryError
from flexstream.query.plan import nodes
from flexstream.query.plan.bind import BoundAggregate
from flexstream.query.plan.stages import BoundQuery
from flexstream.rows.schema import FieldType
from flexstream.spark import types
from flexstream.spark.expressions import Columns

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from flexstream.query.query import Query

PARAMETERS = {
    "approx_count_distinct": (0.0325,),  # relative standard deviation: about the error of ours
    "mode": (True,),  # of the most frequent values the smallest, not any
}
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
    context = Context({query.stream.name: df}, groups)
    made: dict[int, Relation] = {}
    for node in nodes.walk(bound.root):
        made[id(node)] = NODES[node.op](node, [made[id(before)] for before in node.inputs], context)
    return made[id(bound.root)].rows


@dataclass(frozen=True)
class Context:
    """`frames`: the rows of the plan's streams, by name."""

    frames: dict[str, DataFrame]
    groups: int


@dataclass(frozen=True)
class Relation:
    """The rows of a node, and which of Spark's columns have the values of which of the node's."""

    rows: DataFrame
    columns: Columns


def _refuse(query: Query, operator: str, why: str, hint: str | None = None) -> QueryError:
    return QueryError(
        f"query {query.name!r} cannot be translated to Spark: {operator}: {why}", code="not_in_spark", hint=hint
    )


def _check_translatable(bound: BoundQuery, df: DataFrame) -> None:
    query, spec = bound.query, bound.window.spec
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


# -- nodes: each over what its inputs have become


def _scan(node: nodes.Scan, inputs: list[Relation], context: Context) -> Relation:
    """The stream's fields as values that expressions can use, under names that Spark cannot confuse by case."""
    stream, df = node.stream, context.frames[node.stream.name]
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
    return Relation(rows, Columns(names, fallible))


def _filter(node: nodes.Filter, inputs: list[Relation], context: Context) -> Relation:
    (before,) = inputs
    return replace(before, rows=_keep(before.rows, before.columns.translate(node.typed)))


def _map(node: nodes.Map, inputs: list[Relation], context: Context) -> Relation:
    rows, columns, trees = inputs[0].rows, inputs[0].columns, node.typed
    made = {f"_{len(rows.columns) + i}": columns.translate(tree) for i, tree in enumerate(trees.values())}
    fallible = (columns.fallible - trees.keys()) | {name for name, tree in trees.items() if columns.can_fail(tree)}
    names = {**columns.names, **dict(zip(trees, made, strict=True))}
    return Relation(rows.withColumns(made), Columns(names, fallible))


def _same(node: nodes.Node, inputs: list[Relation], context: Context) -> Relation:
    """A projection: Spark reads no column that nothing needs. A window: what consumes the rows groups them by it."""
    return inputs[0]


def _aggregate(node: nodes.Aggregate, inputs: list[Relation], context: Context) -> Relation:
    window, columns = node.input, inputs[0].columns
    assert isinstance(window, nodes.Window)
    rows, arguments = _arguments(inputs[0].rows, columns, node.bound)
    keys = {key: columns.names[key] for key in node.keys}
    results = {a.name: f"_r{i}" for i, a in enumerate(node.bound)}
    grouped = rows.groupBy(_window(window), *map(F.col, keys.values()))
    aggregated = grouped.agg(*(_function(a, arguments).alias(results[a.name]) for a in node.bound))
    return Relation(aggregated, Columns({**keys, **results}, set()))


def _sink(node: nodes.Sink, inputs: list[Relation], context: Context) -> Relation:
    """The columns of results, in their types."""
    (before,) = inputs
    values = {
        name: _of_type(F.col(before.columns.names[name]), column.arrow)
        for name, column in node.schema.items()
        if name in before.columns.names
    }
    keys = [values[name] for name in node.traits.dist]
    made = {
        "window_start": F.col(f"{WINDOW}.start"),
        "window_end": F.col(f"{WINDOW}.end"),
        **values,
        "group": F.pmod(F.hash(*keys), F.lit(context.groups)).cast("int"),
        "revision": F.lit(0).cast("int"),
        "complete": F.lit(True),
    }
    return replace(before, rows=before.rows.select(*(made[name].alias(name) for name in node.schema)))


NODES: dict[str, Callable[[Any, list[Relation], Context], Relation]] = {
    "scan": _scan,
    "filter": _filter,
    "map": _map,
    "project": _same,
    "window": _same,
    "aggregate": _aggregate,
    "sink": _sink,
}


def _microseconds(nanoseconds: int) -> str:
    return f"{-(-nanoseconds // 1000)} microseconds"


def _keep(rows: DataFrame, condition: Column) -> DataFrame:
    """A filter. Rows that it drops move the watermark too, as in FlexStream: Spark would filter before it looks at the
    time, unless the condition has to do with the time.
    """
    if rows.isStreaming:
        condition = F.when(F.col(EVENT_TIME) > F.timestamp_micros(F.lit(BEGINNING)), condition)
    return rows.filter(condition)


def _arguments(
    rows: DataFrame, columns: Columns, aggregates: tuple[BoundAggregate, ...]
) -> tuple[DataFrame, Arguments]:
    """Adds the aggregates' arguments as columns, and drops the rows where one cannot be computed."""
    trees = {(a.name, which): tree for a in aggregates for which, tree in enumerate(a.args)}
    made = {name: f"_a{i}" for i, name in enumerate(trees)}
    if made:
        rows = rows.withColumns({made[name]: columns.translate(tree) for name, tree in trees.items()})
    for name, tree in trees.items():
        if columns.can_fail(tree):
            rows = _keep(rows, F.col(made[name]).isNotNull())
    return rows, made


def _window(node: nodes.Window) -> Column:
    size, slide = _microseconds(node.spec.size_ns), _microseconds(node.spec.slide_ns)
    return F.window(EVENT_TIME, size, slide).alias(WINDOW)


def _function(aggregate: BoundAggregate, arguments: Arguments) -> Column:
    name = aggregate.function.spark
    assert name is not None, f"{aggregate.fn} was refused"
    argument = F.lit(1) if aggregate.arg is None else F.col(arguments[aggregate.name, 0])
    function: Callable[..., Column] = getattr(F, name)
    if aggregate.by is not None:  # of rows that are equal in what decides, the value decides
        return function(argument, F.struct(F.col(arguments[aggregate.name, 1]).alias("by"), argument.alias("value")))
    if name == "mode" and aggregate.arg is not None and aggregate.arg.type == "f64":
        argument = argument + F.lit(0.0)  # Spark counts -0.0 and 0.0 apart; this makes one of them
    return function(argument, *PARAMETERS.get(name, ()))


def _of_type(value: Column, arrow: str) -> Column:
    """From how expressions see a value to the type that it has in results."""
    if arrow.startswith("fixed_size_binary"):
        return value
    kind = FieldType.parse(arrow)
    return types.instant(value, kind.unit) if kind.unit else value.cast(types.natural_type(kind.kind))
