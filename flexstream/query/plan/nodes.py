"""The nodes of a plan: immutable, typed when they are made, each with the schema and the traits of its rows.

A kind of node is a class here: what it takes, what its rows are, how it is written in JSON and shown to people. KINDS
has them all, by the name (`op`) that JSON, the oracle and the translation to Spark know them by.

An expression in a node is an `Expr` as somebody wrote it, or `Typed` where a rewrite made it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

from flexstream import durations
from flexstream.errors import QueryError
from flexstream.query import aggregates as functions
from flexstream.query import expr as expressions
from flexstream.query.expr import Expr, Typed
from flexstream.query.plan.bind import (
    BoundAggregate,
    PlanError,
    bind_aggregate,
    bind_expression,
    bind_filter,
    check_column_name,
)
from flexstream.query.plan.traits import ColumnType, Traits, after_map, after_project
from flexstream.query.windower import Windower
from flexstream.query.windows import MOST_WINDOWS_COUNTED_ANEW, WindowSpec
from flexstream.rows.layout import RowLayout
from flexstream.rows.schema import FieldType, near_names
from flexstream.rows.stream import Stream

MAX_STEPS = 256  # that a query is written in; rewrites may cut one into several
MAX_COLUMNS = 1024
MAX_AGGREGATES = 256
Columns = Mapping[str, ColumnType]
Streams = Mapping[str, Stream]


class Node(ABC):
    """One operator of a plan. `layout`: the rows that the pipeline reads which the node is in.

    The fields of a kind say what it is told; __post_init__ checks it and sets schema and traits, so that a node that
    exists makes sense. Raises QueryError.
    """

    op: ClassVar[str]
    arity: ClassVar[int] = 1
    parts: ClassVar[tuple[str, ...]]  # what JSON says of the node beside `id`, `op` and `in`
    schema: Columns
    traits: Traits
    layout: RowLayout

    @property
    @abstractmethod
    def inputs(self) -> tuple[Node, ...]: ...

    @abstractmethod
    def over(self, *inputs: Node) -> Node:
        """The same node over other inputs."""

    @abstractmethod
    def body(self) -> dict[str, Any]:
        """Its parts, as JSON has them."""

    @classmethod
    @abstractmethod
    def read(cls, body: Mapping[str, Any], inputs: tuple[Node, ...], streams: Streams) -> Node:
        """The node of a body that has its parts. Raises FlexStreamError."""

    @abstractmethod
    def lines(self) -> list[str]:
        """The node for people."""

    @cached_property
    def types(self) -> dict[str, str]:
        return {name: column.type for name, column in self.schema.items()}

    def _is(self, schema: Columns, traits: Traits, layout: RowLayout) -> None:
        for name, value in (("schema", schema), ("traits", traits), ("layout", layout)):
            object.__setattr__(self, name, value)  # frozen for everybody else

    def __repr__(self) -> str:
        return f"<{'; '.join(self.lines())}>"


@dataclass(frozen=True, eq=False, repr=False)
class Scan(Node):
    """The rows of a stream, as they come."""

    op = "scan"
    arity = 0
    parts = ("stream",)
    stream: Stream

    def __post_init__(self) -> None:
        stream = self.stream
        schema = {name: ColumnType(kind) for name, kind in stream.schema.to_dict().items()}
        self._is(schema, Traits(dist=stream.key, time=stream.time), stream.layout)

    @property
    def inputs(self) -> tuple[Node, ...]:
        return ()

    def over(self, *inputs: Node) -> Node:
        return self

    def body(self) -> dict[str, Any]:
        return {"stream": self.stream.name}

    @classmethod
    def read(cls, body: Mapping[str, Any], inputs: tuple[Node, ...], streams: Streams) -> Node:
        name = body["stream"]
        if not isinstance(name, str) or name not in streams:
            raise QueryError(
                f"stream is {shown(name)}, which `streams` does not define",
                code="unknown_stream",
                hint=near_names(str(name)[:64], list(streams)) if streams else "add its definition to `streams`",
            )
        return cls(streams[name])

    def lines(self) -> list[str]:
        stream = self.stream
        return [
            f"from    {stream.name} ({stream.schema.row_bytes} bytes a row, event time {stream.time} in "
            f"{stream.time_unit}, disorder up to {durations.format(stream.max_disorder_ns)})"
        ]


@dataclass(frozen=True, eq=False, repr=False)
class _OneInput(Node):
    input: Node

    @property
    def inputs(self) -> tuple[Node, ...]:
        return (self.input,)

    def over(self, *inputs: Node) -> Node:
        (one,) = inputs
        return replace(self, input=one)


class _Step(_OneInput):
    """Works on each row alone: part of the pipeline of what consumes it."""

    def _check_place(self, step: str) -> None:
        if self.input.traits.window is not None:
            raise QueryError(
                f"{step}() comes before the window, not after it",
                code="bad_step",
                hint="queries over results are not there yet: filter the results where you read them",
            )


@dataclass(frozen=True, eq=False, repr=False)
class Filter(_Step):
    """The rows for which the predicate is true."""

    op = "filter"
    parts = ("predicate",)
    expr: Expr | Typed
    typed: Typed = field(init=False)

    def __post_init__(self) -> None:
        self._check_place("filter")
        object.__setattr__(self, "typed", bind_filter(self.expr, self.input.types))
        self._is(self.input.schema, self.input.traits, self.input.layout)

    def body(self) -> dict[str, Any]:
        return {"predicate": expressions.to_json(_written(self.expr))}

    @classmethod
    def read(cls, body: Mapping[str, Any], inputs: tuple[Node, ...], streams: Streams) -> Node:
        return cls(inputs[0], expressions.from_json(body["predicate"]))

    def lines(self) -> list[str]:
        return [f"filter  {self.expr}"]


@dataclass(frozen=True, eq=False, repr=False)
class Map(_Step):
    """The rows with more columns, or others of the same name: all computed from the row as it was before."""

    op = "map"
    parts = ("columns",)
    columns: Mapping[str, Expr | Typed]
    typed: dict[str, Typed] = field(init=False)

    def __post_init__(self) -> None:
        self._check_place("map")
        if not self.columns:
            raise QueryError(
                "map() needs at least one column", code="bad_step", hint="map(total=col('a') + col('b'))"
            )
        if len({*self.input.schema, *self.columns}) > MAX_COLUMNS:
            raise QueryError(
                f"a query has at most {MAX_COLUMNS} columns", code="too_large", hint="project() first"
            )
        placed = self.input.traits.placed
        typed = {name: self._bound(name, tree, placed) for name, tree in self.columns.items()}
        object.__setattr__(self, "typed", typed)
        made = {name: ColumnType(tree.field_type) for name, tree in typed.items()}
        copies = {name: tree.name if tree.op == "col" else None for name, tree in typed.items()}
        self._is({**self.input.schema, **made}, after_map(self.input.traits, copies), self.input.layout)

    def _bound(self, name: str, tree: Expr | Typed, placed: frozenset[str]) -> Typed:
        check_column_name(name)
        if name in placed:
            role = "a key" if name in self.input.traits.dist else "the time"
            raise QueryError(
                f"map() cannot replace {name!r}, {role} field of stream {self.input.layout.of!r}: rows "
                "have their place already, another needs a re-shuffle",
                code="needs_reshuffle",
                hint="give the new column another name",
            )
        typed = bind_expression(tree, self.input.types)
        if typed.type == "bytes" and typed.op != "col":
            raise QueryError(f"map() cannot make a column of the constant {tree}", code="bad_types")
        return typed

    def body(self) -> dict[str, Any]:
        return {"columns": {name: expressions.to_json(_written(tree)) for name, tree in self.columns.items()}}

    @classmethod
    def read(cls, body: Mapping[str, Any], inputs: tuple[Node, ...], streams: Streams) -> Node:
        columns = expect(body, "columns", dict, 'an object such as {"total": ["col", "price"]}')
        return cls(inputs[0], {name: expressions.from_json(tree) for name, tree in columns.items()})

    def lines(self) -> list[str]:
        return [f"map     {name} = {tree}" for name, tree in self.columns.items()]


@dataclass(frozen=True, eq=False, repr=False)
class Project(_Step):
    """The rows with these columns alone, and with those that place them: key and time."""

    op = "project"
    parts = ("columns",)
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        self._check_place("project")
        if not self.names:
            raise QueryError("project() needs at least one column", code="bad_step")
        known = self.input.schema
        for name in self.names:
            if not isinstance(name, str) or name not in known:
                raise _unknown(name, known)
        object.__setattr__(self, "names", tuple(dict.fromkeys(self.names)))
        kept = {*self.names, *self.input.traits.placed}
        schema = {name: column for name, column in known.items() if name in kept}
        self._is(schema, after_project(self.input.traits, schema), self.input.layout)

    def body(self) -> dict[str, Any]:
        return {"columns": list(self.names)}

    @classmethod
    def read(cls, body: Mapping[str, Any], inputs: tuple[Node, ...], streams: Streams) -> Node:
        return cls(inputs[0], tuple(expect(body, "columns", list, 'a list of names such as ["price"]')))

    def lines(self) -> list[str]:
        return [f"project {', '.join(self.names)}"]


@dataclass(frozen=True, eq=False, repr=False)
class Window(_OneInput):
    """The rows, each in the windows of event time that hold it; late ones may come until `lateness_ns` past the end.

    It adds no columns: whoever consumes it works window by window.
    """

    op = "window"
    parts = ("window", "allowed_lateness")
    spec: WindowSpec
    lateness_ns: int = 0

    def __post_init__(self) -> None:
        before = self.input.traits
        if before.window is not None:
            raise PlanError(lambda query: f"{query} has a window already: {before.window}", code="bad_step")
        if not isinstance(self.spec, WindowSpec):
            raise QueryError(
                f"window() takes a window, not {self.spec!r}",
                code="bad_window",
                hint="fs.tumbling('10s') or fs.sliding(...)",
            )
        self._check_spans()
        if self.lateness_ns and self.spec.windows_per_row > MOST_WINDOWS_COUNTED_ANEW:
            raise QueryError(
                "with allowed lateness every pane keeps a count for each of its windows: "
                f"{self.spec.windows_per_row} of them with {self.spec}; the limit is {MOST_WINDOWS_COUNTED_ANEW}",
                code="too_costly",
                hint="use a longer slide, or no allowed lateness",
            )
        self._is(self.input.schema, replace(before, window=self.spec), self.input.layout)

    def _check_spans(self) -> None:
        layout = self.input.layout
        spans = {"size": self.spec.size_ns, "slide": self.spec.slide_ns, "allowed lateness": self.lateness_ns}
        for what, value in spans.items():
            if value % layout.unit_ns:
                raise QueryError(
                    f"the window's {what} of {durations.format(value)} is not a whole number of "
                    f"{layout.time_unit}, the unit of {layout.time!r}",
                    code="bad_window",
                    hint=f"use a multiple of 1{layout.time_unit}, or a finer time field",
                )
            if why := layout.too_long(value):
                raise QueryError(
                    f"the window's {what} of {durations.format(value)} is too long: {why}",
                    code="bad_window",
                    hint="use a shorter one, or a time field with a coarser unit",
                )

    @property
    def windower(self) -> Windower:
        return self.spec.windower(self.layout.unit_ns, self.lateness_ns)

    def body(self) -> dict[str, Any]:
        return {"window": self.spec.to_dict(), "allowed_lateness": durations.format(self.lateness_ns)}

    @classmethod
    def read(cls, body: Mapping[str, Any], inputs: tuple[Node, ...], streams: Streams) -> Node:
        return cls(inputs[0], WindowSpec.from_dict(body["window"]), durations.parse(body["allowed_lateness"]))

    def lines(self) -> list[str]:
        pane = f", panes of {durations.format(self.spec.pane_ns)}" if self.spec.kind != "tumbling" else ""
        return [f"window  {self.spec}{pane}, allowed lateness {durations.format(self.lateness_ns)}"]


@dataclass(frozen=True, eq=False, repr=False)
class Aggregate(_OneInput):
    """A row for each window and each key in it: what the aggregates say about its rows."""

    op = "aggregate"
    parts = ("keys", "aggregates")
    keys: tuple[str, ...]
    aggregates: Mapping[str, functions.Aggregate | BoundAggregate]
    bound: tuple[BoundAggregate, ...] = field(init=False)

    def __post_init__(self) -> None:
        spec = self._checked_window()
        if self.keys != self.input.traits.dist:
            raise needs_reshuffle(self.keys, self.input.layout)
        if not self.aggregates:
            raise QueryError(
                "agg() needs at least one aggregate", code="bad_aggregate", hint="agg(n=fs.count())"
            )
        if len(self.aggregates) > MAX_AGGREGATES:
            raise QueryError(f"a query has at most {MAX_AGGREGATES} aggregates", code="too_large")
        types = self.input.types
        bound = tuple(bind_aggregate(*item, types, self.keys, spec) for item in self.aggregates.items())
        object.__setattr__(self, "bound", bound)
        self._is(self._result(bound), self._result_traits(spec), self.input.layout)

    def _checked_window(self) -> WindowSpec:
        spec = self.input.traits.window
        if spec is None:
            raise PlanError(
                lambda query: f"{query} has no window to aggregate over",
                code="bad_step",
                hint="call .window(fs.tumbling('10s')) before .agg()",
            )
        if not isinstance(self.input, Window):
            raise PlanError(
                lambda query: f"{query} has aggregates already", code="bad_step", hint="give all in one agg()"
            )
        return spec

    def _result(self, bound: tuple[BoundAggregate, ...]) -> Columns:
        layout = self.input.layout
        time = ColumnType(f"timestamp[{layout.time_unit}]")
        return {
            "window_start": time,
            "window_end": time,
            **{name: self.input.schema[name] for name in self.keys},
            **{a.name: ColumnType(FieldType.parse(a.result_type).text, a.function.nullable) for a in bound},
        }

    def _result_traits(self, spec: WindowSpec) -> Traits:
        """A result's event time is the last moment of its window, which no column has: it has no time column."""
        assert isinstance(self.input, Window)
        return Traits(dist=self.keys, window=spec, mode="revisions" if self.input.lateness_ns else "append")

    def body(self) -> dict[str, Any]:
        made = {name: _written(aggregate).to_json() for name, aggregate in self.aggregates.items()}
        return {"keys": list(self.keys), "aggregates": made}

    @classmethod
    def read(cls, body: Mapping[str, Any], inputs: tuple[Node, ...], streams: Streams) -> Node:
        keys = tuple(map(str, expect(body, "keys", list, 'a list of names such as ["user"]')))
        given = expect(body, "aggregates", dict, 'an object such as {"n": ["count"]}')
        made = {name: functions.Aggregate.from_json(item) for name, item in given.items()}
        return cls(inputs[0], keys, made)

    def lines(self) -> list[str]:
        return [f"agg     {name} = {aggregate}" for name, aggregate in self.aggregates.items()]


@dataclass(frozen=True, eq=False, repr=False)
class Sink(_OneInput):
    """Where the rows go: to the results of the query, each with its group and revision, and whether it is complete."""

    op = "sink"
    parts = ("to",)
    to: str = "results"

    def __post_init__(self) -> None:
        if self.to != "results":
            raise QueryError(f"to is {shown(self.to)}, which is no sink", code="bad_sink", hint='"results" is the one')
        if not isinstance(self.input, Aggregate):
            raise PlanError(
                lambda query: f"{query} has no aggregates, and only those have results so far",
                code="incomplete",
                hint=".window(fs.tumbling('10s')).agg(n=fs.count())",
            )
        about = {"group": ColumnType("i32"), "revision": ColumnType("i32"), "complete": ColumnType("bool")}
        self._is({**self.input.schema, **about}, self.input.traits, self.input.layout)

    def body(self) -> dict[str, Any]:
        return {"to": self.to}

    @classmethod
    def read(cls, body: Mapping[str, Any], inputs: tuple[Node, ...], streams: Streams) -> Node:
        return cls(inputs[0], body["to"])

    def lines(self) -> list[str]:
        return ["result  " + ", ".join(f"{name} {column.arrow}" for name, column in self.schema.items())]


KINDS: dict[str, type[Node]] = {
    kind.op: kind for kind in (Scan, Filter, Map, Project, Window, Aggregate, Sink)
}


def walk(root: Node) -> Iterator[Node]:
    """Every node of the plan once, each after its inputs."""
    seen: set[int] = set()
    left: list[tuple[Node, bool]] = [(root, False)]
    while left:
        node, ready = left.pop()
        if ready:
            yield node
        elif id(node) not in seen:
            seen.add(id(node))
            left.append((node, True))
            left += [(before, False) for before in reversed(node.inputs)]


def needs_reshuffle(keys: tuple[object, ...], layout: RowLayout) -> PlanError:
    return PlanError(
        lambda query: f"{query} cannot be keyed by {', '.join(map(str, keys)) or 'nothing'}: stream "
        f"{layout.of!r} is keyed by {', '.join(layout.key)}; another key needs a re-shuffle",
        code="needs_reshuffle",
        hint="define a stream with that key and send the rows to it",
    )


def too_many_steps() -> QueryError:
    return QueryError(f"a query has at most {MAX_STEPS} steps", code="too_large", hint="join some with &")


def _unknown(name: object, known: Columns) -> PlanError:
    return PlanError(
        lambda query: f"no column {name!r} in {query}",
        code="unknown_field",
        hint=near_names(str(name), list(known)),
    )


def shown(value: object) -> str:
    """A value from elsewhere, for a message: short, whatever it is."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def expect(body: Mapping[str, Any], part: str, kind: type, what: str) -> Any:
    """The part of a node's JSON, if it is of that kind."""
    if not isinstance(body[part], kind):
        raise QueryError(f"{part} is {shown(body[part])}", code="bad_query", hint=f"{part} is {what}")
    return body[part]


def _written(what: Any) -> Any:
    """Only what was written has a serial form: no plan is stored after rewrites."""
    assert not isinstance(what, Typed | BoundAggregate), "rewritten plans are not written down"
    return what
