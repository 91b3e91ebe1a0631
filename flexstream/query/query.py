"""Queries: a plan over one stream, built step by step, checked as it is built, with one serial form."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from flexstream import durations
from flexstream.durations import Duration
from flexstream.errors import FlexStreamError, QueryError, SchemaError
from flexstream.query import expr as expressions
from flexstream.query.aggregates import Aggregate, check_window, result_type
from flexstream.query.analysis import why_generic
from flexstream.query.expr import Expr, Typed
from flexstream.query.plan import (
    BoundAggregate,
    BoundFilter,
    BoundMap,
    BoundQuery,
    Filter,
    Map,
    Project,
    Step,
)
from flexstream.query.windows import MOST_WINDOWS_COUNTED_ANEW, WindowSpec
from flexstream.rows.schema import arrow_type, check_field_name, near_names
from flexstream.rows.stream import RESULT_NAMES, Stream, check_name

if TYPE_CHECKING:
    import pyarrow as pa

PLAN_VERSION = 1
MAX_JSON_BYTES = 1 << 20
MAX_STEPS = 256
MAX_COLUMNS = 1024
MAX_AGGREGATES = 256


__all__ = [
    "BoundAggregate",
    "BoundFilter",
    "BoundMap",
    "BoundQuery",
    "Filter",
    "Map",
    "Project",
    "Query",
    "Step",
]


@dataclass(frozen=True, eq=False)
class Query:
    """A query over a stream. Immutable: each method returns a new one. Begin with `stream.query(name)`.

    Steps run in the order written. A row whose expression fails (integer overflow, division by zero, a float
    that is no integer) is rejected by this query alone, and counted. Raises QueryError as soon as a step
    cannot work.
    """

    name: str
    stream: Stream
    steps: tuple[Step, ...] = ()
    window_spec: WindowSpec | None = None
    allowed_lateness_ns: int = 0
    aggregates: dict[str, Aggregate] = field(default_factory=dict)

    def __post_init__(self) -> None:
        try:
            check_name("query", self.name)
        except SchemaError as error:
            raise QueryError(error.message, code=error.code, hint=error.hint) from None

    # -- building

    def filter(self, predicate: Expr) -> Query:
        """Keep the rows for which `predicate` is true."""
        self._before_window("filter")
        self._bind_filter(predicate, self.columns)
        return self._then(Filter(predicate))

    def map(self, /, **columns: Any) -> Query:
        """Add columns, or replace them. All are computed from the row as it was before this step."""
        self._before_window("map")
        if not columns:
            raise QueryError(
                "map() needs at least one column", code="bad_step", hint="map(total=col('a') + col('b'))"
            )
        trees = {name: expressions.lit(value) for name, value in columns.items()}
        if len({*self.columns, *trees}) > MAX_COLUMNS:
            raise QueryError(
                f"a query has at most {MAX_COLUMNS} columns", code="too_large", hint="project() first"
            )
        self._check_map(trees)
        return self._then(Map(trees))

    def project(self, *names: str) -> Query:
        """Keep only these columns for the steps that follow. Key and time stay in any case."""
        self._before_window("project")
        if not names:
            raise QueryError("project() needs at least one column", code="bad_step")
        for name in names:
            if not isinstance(name, str) or name not in self.columns:
                raise self._unknown(name)
        return self._then(Project(tuple(dict.fromkeys(names))))

    def _then(self, step: Step) -> Query:
        longer = replace(self, steps=(*self.steps, step))
        longer.__dict__["columns"] = self._after(step, self.columns)  # known: not from the first step on again
        return longer

    def window(self, spec: WindowSpec, *, allowed_lateness: Duration = "0s") -> Query:
        """Collect rows by event time. Rows that come after their window fired, but no later than
        `allowed_lateness` past its end, make a new revision of its results; later ones go to the late output.
        """
        if self.window_spec is not None:
            raise QueryError(f"query {self.name!r} has a window already: {self.window_spec}", code="bad_step")
        if not isinstance(spec, WindowSpec):
            raise QueryError(
                f"window() takes a window, not {spec!r}",
                code="bad_window",
                hint="fs.tumbling('10s') or fs.sliding(...)",
            )
        lateness_ns = durations.parse(allowed_lateness)
        for what, value in (
            ("size", spec.size_ns),
            ("slide", spec.slide_ns),
            ("allowed lateness", lateness_ns),
        ):
            if value % self.stream.unit_ns:
                raise QueryError(
                    f"the window's {what} of {durations.format(value)} is not a whole number of "
                    f"{self.stream.time_unit}, the unit of {self.stream.time!r}",
                    code="bad_window",
                    hint=f"use a multiple of 1{self.stream.time_unit}, or a finer time field",
                )
            if why := self.stream.too_long(value):
                raise QueryError(
                    f"the window's {what} of {durations.format(value)} is too long: {why}",
                    code="bad_window",
                    hint="use a shorter one, or a time field with a coarser unit",
                )
        if lateness_ns and spec.windows_per_row > MOST_WINDOWS_COUNTED_ANEW:
            raise QueryError(
                "with allowed lateness every pane keeps a count for each of its windows: "
                f"{spec.windows_per_row} of them with {spec}; the limit is {MOST_WINDOWS_COUNTED_ANEW}",
                code="too_costly",
                hint="use a longer slide, or no allowed lateness",
            )
        return replace(self, window_spec=spec, allowed_lateness_ns=lateness_ns)

    def agg(self, /, **aggregates: Aggregate) -> Query:
        """Say what each window tells about each key. Result columns get these names."""
        if self.window_spec is None:
            raise QueryError(
                f"query {self.name!r} has no window to aggregate over",
                code="bad_step",
                hint="call .window(fs.tumbling('10s')) before .agg()",
            )
        if self.aggregates:
            raise QueryError(
                f"query {self.name!r} has aggregates already", code="bad_step", hint="give all in one agg()"
            )
        if not aggregates:
            raise QueryError(
                "agg() needs at least one aggregate", code="bad_aggregate", hint="agg(n=fs.count())"
            )
        if len(aggregates) > MAX_AGGREGATES:
            raise QueryError(f"a query has at most {MAX_AGGREGATES} aggregates", code="too_large")
        for name, aggregate in aggregates.items():
            self._bind_aggregate(name, aggregate)
        return replace(self, aggregates=dict(aggregates))

    def key_by(self, *names: str) -> Query:
        """Refused, unless it names the stream's key: another key needs a re-shuffle."""
        if names == self.stream.key:
            return self
        raise QueryError(
            f"query {self.name!r} cannot be keyed by {', '.join(map(str, names)) or 'nothing'}: stream "
            f"{self.stream.name!r} is keyed by {', '.join(self.stream.key)}; another key needs a re-shuffle",
            code="needs_reshuffle",
            hint="define a stream with that key and send the rows to it",
        )

    # -- checking

    @cached_property
    def columns(self) -> dict[str, str]:
        """The columns after the steps so far: name -> type, as in a schema."""
        columns = self.stream.schema.to_dict()
        for step in self.steps:
            columns = self._after(step, columns)
        return columns

    def _after(self, step: Step, columns: dict[str, str]) -> dict[str, str]:
        if isinstance(step, Map):
            return {**columns, **{name: _column_type(tree, columns) for name, tree in step.columns.items()}}
        if isinstance(step, Project):
            kept = {*step.names, *self.stream.key, self.stream.time}
            return {name: kind for name, kind in columns.items() if name in kept}
        return columns

    def _before_window(self, step: str) -> None:
        if self.window_spec is not None:
            raise QueryError(
                f"{step}() comes before the window, not after it",
                code="bad_step",
                hint="queries over results are not there yet: filter the results where you read them",
            )
        if len(self.steps) >= MAX_STEPS:
            raise QueryError(
                f"a query has at most {MAX_STEPS} steps", code="too_large", hint="join some with &"
            )

    def _unknown(self, name: object) -> QueryError:
        hint = near_names(str(name), list(self.columns))
        return QueryError(f"no column {name!r} in query {self.name!r}", code="unknown_field", hint=hint)

    def _bind(self, tree: Expr, columns: dict[str, str]) -> Typed:
        if isinstance(tree, expressions.Cases):
            expressions.lit(tree)  # says what it lacks
        if not isinstance(tree, Expr):
            raise QueryError(
                f"{tree!r} is not an expression", code="bad_expression", hint="begin with col('name')"
            )
        try:
            return expressions.bind(tree, columns)
        except QueryError as error:
            raise QueryError(
                f"query {self.name!r}: {error.message}", code=error.code, hint=error.hint
            ) from None

    def _bind_filter(self, predicate: Expr, columns: dict[str, str]) -> Typed:
        typed = self._bind(predicate, columns)
        if typed.type != "bool":
            raise QueryError(
                f"query {self.name!r}: a filter must be true or false, but {predicate} is {typed.type}",
                code="bad_types",
                hint="compare it with something",
            )
        return typed

    def _check_map(self, trees: dict[str, Expr]) -> None:
        for name, tree in trees.items():
            try:
                check_field_name(name)
            except SchemaError as error:
                raise QueryError(error.message, code=error.code, hint=error.hint) from None
            if name in self.stream.key or name == self.stream.time:
                role = "a key" if name in self.stream.key else "the time"
                raise QueryError(
                    f"map() cannot replace {name!r}, {role} field of stream {self.stream.name!r}: rows "
                    "have their place already, another needs a re-shuffle",
                    code="needs_reshuffle",
                    hint="give the new column another name",
                )
            typed = self._bind(tree, self.columns)
            if typed.type == "bytes" and typed.op != "col":
                raise QueryError(f"map() cannot make a column of the constant {tree}", code="bad_types")

    def _bind_aggregate(self, name: str, aggregate: Aggregate) -> BoundAggregate:
        if name in RESULT_NAMES or name in self.stream.key:
            raise QueryError(
                f"an aggregate cannot be called {name!r}: results have a column of that name",
                code="bad_name",
                hint="choose another name",
            )
        try:
            check_field_name(name)
        except SchemaError as error:
            raise QueryError(error.message, code=error.code, hint=error.hint) from None
        if not isinstance(aggregate, Aggregate):
            raise QueryError(
                f"{name}={aggregate!r} is not an aggregate",
                code="bad_aggregate",
                hint="fs.sum('price'), fs.count()",
            )
        typed = None if aggregate.arg is None else self._bind(aggregate.arg, self.columns)
        declared = "nothing" if aggregate.arg is None else _column_type(aggregate.arg, self.columns)
        try:
            by = None if aggregate.by is None else self._bind(aggregate.by, self.columns)
            kind = result_type(aggregate, typed, declared, by)
            check_window(aggregate, self.window_spec)
        except QueryError as error:
            raise QueryError(f"query {self.name!r}: {error.message}", code=error.code, hint=error.hint) from None
        return BoundAggregate(name, aggregate.fn, typed, kind, by)

    # -- bound form

    def bound(self) -> BoundQuery:
        """The query with all types, ready to run. Raises QueryError when it is not complete."""
        spec = self.window_spec
        if spec is None or not self.aggregates:
            missing = "a window" if spec is None else "aggregates"
            raise QueryError(
                f"query {self.name!r} is not complete: it has no {missing.removeprefix('a ')}",
                code="incomplete",
                hint=".window(fs.tumbling('10s')).agg(n=fs.count())",
            )
        unit_ns = self.stream.unit_ns
        aggregates = tuple(self._bind_aggregate(*item) for item in self.aggregates.items())
        return BoundQuery(
            query=self,
            steps=self._bound_steps(),
            aggregates=aggregates,
            result_fields=self._result_fields(aggregates),
            windower=spec.windower(unit_ns, self.allowed_lateness_ns),
        )

    def _bound_steps(self) -> tuple[BoundFilter | BoundMap | Project, ...]:
        bound: list[BoundFilter | BoundMap | Project] = []
        columns = self.stream.schema.to_dict()
        for step in self.steps:
            if isinstance(step, Filter):
                bound.append(BoundFilter(self._bind_filter(step.expr, columns)))
            elif isinstance(step, Map):
                bound.append(
                    BoundMap({name: self._bind(tree, columns) for name, tree in step.columns.items()})
                )
            else:
                bound.append(step)
            columns = self._after(step, columns)
        return tuple(bound)

    def _result_fields(self, aggregates: tuple[BoundAggregate, ...]) -> list[tuple[str, str]]:
        time_type = f"timestamp[{self.stream.time_unit}]"
        return [
            ("window_start", time_type),
            ("window_end", time_type),
            *((key.name, key.arrow) for key in self.stream.key_fields),
            *((aggregate.name, aggregate.result_type) for aggregate in aggregates),
            ("group", "int32"),
            ("revision", "int32"),
            ("complete", "bool"),
        ]

    def result_schema(self) -> pa.Schema:
        """The Arrow schema of the results. Few aggregates can be null, as stddev of a single row."""
        import pyarrow as pa

        bound = self.bound()
        nullable = {aggregate.name for aggregate in bound.aggregates if aggregate.function.nullable}
        return pa.schema(
            [
                pa.field(name, arrow_type(kind), nullable=name in nullable)
                for name, kind in bound.result_fields
            ]
        )

    # -- serial form

    def to_dict(self) -> dict[str, Any]:
        steps: list[list[Any]] = []
        for step in self.steps:
            if isinstance(step, Filter):
                steps.append(["filter", expressions.to_json(step.expr)])
            elif isinstance(step, Map):
                steps.append(
                    ["map", {name: expressions.to_json(tree) for name, tree in step.columns.items()}]
                )
            else:
                steps.append(["project", list(step.names)])
        return {
            "version": PLAN_VERSION,
            "name": self.name,
            "stream": self.stream.to_dict(),
            "steps": steps,
            "window": None if self.window_spec is None else self.window_spec.to_dict(),
            "allowed_lateness": durations.format(self.allowed_lateness_ns),
            "aggregates": {name: aggregate.to_json() for name, aggregate in self.aggregates.items()},
        }

    def to_json(self, *, indent: int | None = None) -> str:
        """The plan's one serial form; it holds the stream's definition too. `Query.from_json` undoes it."""
        return json.dumps(self.to_dict(), indent=indent)

    @classmethod
    def from_dict(cls, body: Any) -> Query:
        """Built again step by step, so that a plan from elsewhere is checked like one written here."""
        if not isinstance(body, dict):
            raise QueryError(f"a query must be an object, not {str(body)[:200]}", code="bad_query")
        keys = {"version", "name", "stream", "steps", "window", "allowed_lateness", "aggregates"}
        if unknown := set(map(str, body)) - keys:
            raise QueryError(f"query has unknown parts {sorted(unknown)}", code="bad_query")
        if missing := {"name", "stream"} - set(body):
            raise QueryError(f"query lacks {sorted(missing)}", code="bad_query")
        if body.get("version", PLAN_VERSION) != PLAN_VERSION:
            raise QueryError(
                f"query has plan version {body['version']!r}, this is {PLAN_VERSION}",
                code="bad_version",
                hint="upgrade flexstream on the older side",
            )
        query = Stream.from_dict(body["stream"]).query(body["name"])
        steps, aggregates = body.get("steps", []), body.get("aggregates", {})
        if not isinstance(steps, list) or not isinstance(aggregates, dict):
            raise QueryError("steps must be a list and aggregates an object", code="bad_query")
        for step in steps:
            query = query._add_step(step)
        if body.get("window") is not None:
            spec = WindowSpec.from_dict(body["window"])
            query = query.window(spec, allowed_lateness=body.get("allowed_lateness", "0s"))
        if aggregates:
            query = query.agg(**{name: Aggregate.from_json(item) for name, item in aggregates.items()})
        return query

    def _add_step(self, step: Any) -> Query:
        match step:
            case ["filter", predicate]:
                return self.filter(expressions.from_json(predicate))
            case ["map", dict(columns)]:
                return self.map(**{name: expressions.from_json(tree) for name, tree in columns.items()})
            case ["project", list(names)]:
                return self.project(*names)
        raise QueryError(f"unknown step {str(step)[:200]}", code="bad_step", hint="filter, map or project")

    @classmethod
    def from_json(cls, text: str | bytes) -> Query:
        """The query of `to_json`'s text. Raises QueryError or SchemaError, never anything else."""
        if len(text) > MAX_JSON_BYTES:
            raise QueryError(f"a query of {len(text)} bytes; the limit is {MAX_JSON_BYTES}", code="bad_query")
        try:
            return cls.from_dict(json.loads(text))
        except FlexStreamError:
            raise
        except (ValueError, TypeError, RecursionError) as error:
            raise QueryError(f"query is not valid JSON for a plan: {error}", code="bad_query") from error

    def explain(self, what: str = "plan") -> str:
        """The "plan" for people, one line per step; as "optimised"; or the "code", the C that is compiled for it.

        Raises QueryError: `what` is neither, or it is the code of a query that could not be submitted.
        """
        if what == "code":
            from flexstream.compile.explain import code_of

            return code_of(self.bound())
        if what == "optimised":
            from flexstream.query.optimise import explain

            return explain(self.bound())
        if what != "plan":
            raise QueryError(
                f"explain({what!r}): there is no such view", code="bad_view", hint="'plan', 'optimised' or 'code'"
            )
        stream = self.stream
        lines = [
            f"query {self.name}",
            f"  from    {stream.name} ({stream.schema.row_bytes} bytes a row, event time {stream.time} in "
            f"{stream.time_unit}, disorder up to {durations.format(stream.max_disorder_ns)})",
        ]
        for step in self.steps:
            if isinstance(step, Filter):
                lines.append(f"  filter  {step.expr}")
            elif isinstance(step, Map):
                lines += [f"  map     {name} = {tree}" for name, tree in step.columns.items()]
            else:
                lines.append(f"  project {', '.join(step.names)}")
        lines.append(f"  key     {', '.join(stream.key)}")
        if self.window_spec is not None:
            lateness = durations.format(self.allowed_lateness_ns)
            pane = (
                f", panes of {durations.format(self.window_spec.pane_ns)}"
                if self.window_spec.kind != "tumbling"
                else ""
            )
            lines.append(f"  window  {self.window_spec}{pane}, allowed lateness {lateness}")
        lines += [f"  agg     {name} = {aggregate}" for name, aggregate in self.aggregates.items()]
        if self.window_spec is not None and self.aggregates:
            bound = self.bound()
            lines.append("  result  " + ", ".join(f"{name} {kind}" for name, kind in bound.result_fields))
            cannot = why_generic(bound)
            lines += [f"  variant {cannot}"] if cannot is not None else []
        else:
            lines.append("  (not complete: add .window(...) and .agg(...))")
        return "\n".join(lines)

    def to_spark(self, df: Any, *, groups: int = 128) -> Any:
        """The same query over a Spark DataFrame, batch or streaming: see `flexstream.spark.to_spark`."""
        from flexstream.spark.translate import to_spark

        return to_spark(self, df, groups=groups)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Query) and self.to_dict() == other.to_dict()

    def __hash__(self) -> int:
        return hash((self.name, self.stream))

    def __repr__(self) -> str:
        return f"<Query {self.name!r} over {self.stream.name!r}>"


def _column_type(tree: Expr, columns: dict[str, str]) -> str:
    """The schema type of an expression: a column keeps its own, so that min(x) of an i32 is an int32."""
    return expressions.bind(tree, columns).field_type
