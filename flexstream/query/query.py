"""Queries: a name and a plan, built step by step, checked as it is built, with one serial form."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from flexstream import durations
from flexstream.durations import Duration
from flexstream.errors import FlexStreamError, QueryError
from flexstream.query import expr as expressions
from flexstream.query.aggregates import Aggregate
from flexstream.query.expr import Expr
from flexstream.query.plan import nodes, serial
from flexstream.query.plan.bind import check_query_name, told_of
from flexstream.query.plan.nodes import Node, Scan, Sink
from flexstream.query.plan.stages import BoundQuery, Stage, Step, stage_of
from flexstream.query.windows import WindowSpec
from flexstream.rows.schema import arrow_type
from flexstream.rows.stream import Stream

if TYPE_CHECKING:
    import pyarrow as pa

MAX_JSON_BYTES = 1 << 20


@dataclass(frozen=True, eq=False, repr=False)
class Query:
    """A query over a stream. Immutable: each method returns a new one. Begin with `stream.query(name)`.

    Steps run in the order written. A row whose expression fails (integer overflow, division by zero, a float
    that is no integer) is rejected by this query alone, and counted. Raises QueryError as soon as a step
    cannot work.
    """

    name: str
    root: Node

    def __post_init__(self) -> None:
        check_query_name(self.name)
        if len(self.steps) > nodes.MAX_STEPS:
            raise nodes.too_many_steps()

    @classmethod
    def over(cls, stream: Stream, name: str) -> Query:
        return cls(name, Scan(stream))

    # -- building

    def filter(self, predicate: Expr) -> Query:
        """Keep the rows for which `predicate` is true."""
        return self._then(nodes.Filter, predicate)

    def map(self, /, **columns: Any) -> Query:
        """Add columns, or replace them. All are computed from the row as it was before this step."""
        return self._then(nodes.Map, {name: expressions.lit(value) for name, value in columns.items()})

    def project(self, *names: str) -> Query:
        """Keep only these columns for the steps that follow. Key and time stay in any case."""
        return self._then(nodes.Project, names)

    def window(self, spec: WindowSpec, *, allowed_lateness: Duration = "0s") -> Query:
        """Collect rows by event time. Rows that come after their window fired, but no later than
        `allowed_lateness` past its end, make a new revision of its results; later ones go to the late output.
        """
        return self._then(nodes.Window, spec, durations.parse(allowed_lateness))

    def agg(self, /, **aggregates: Aggregate) -> Query:
        """Say what each window tells about each key. Result columns get these names."""
        return self._then(nodes.Aggregate, self.stream.key, dict(aggregates))._then(Sink)

    def key_by(self, *names: str) -> Query:
        """Refused, unless it names the stream's key: another key needs a re-shuffle."""
        if names == self.stream.key:
            return self
        with told_of(self.name):
            raise nodes.needs_reshuffle(names, self.stream.layout)

    def _then(self, kind: Any, *arguments: Any) -> Query:
        """With one more node. Results are behind everything: what is built upon is what goes to them."""
        before = self.root.input if isinstance(self.root, Sink) else self.root
        with told_of(self.name):
            return replace(self, root=kind(before, *arguments))

    # -- the plan's parts

    @cached_property
    def _stage(self) -> Stage:
        return stage_of(self.root)

    @property
    def stream(self) -> Stream:
        return self._stage.scan.stream

    @property
    def steps(self) -> tuple[Step, ...]:
        return self._stage.steps

    @property
    def window_spec(self) -> WindowSpec | None:
        window = self._stage.window
        return None if window is None else window.spec

    @property
    def allowed_lateness_ns(self) -> int:
        window = self._stage.window
        return 0 if window is None else window.lateness_ns

    @property
    def aggregates(self) -> dict[str, Aggregate]:
        """As written: the plan of a query is never a rewritten one."""
        known = {} if self._stage.aggregate is None else self._stage.aggregate.aggregates
        return {name: aggregate for name, aggregate in known.items() if isinstance(aggregate, Aggregate)}

    @property
    def columns(self) -> dict[str, str]:
        """The columns after the steps so far: name -> type, as in a schema."""
        return dict(self._stage.before_window.types)

    # -- bound form

    def bound(self) -> BoundQuery:
        """The query with all types, ready to run. Raises QueryError when it is not complete."""
        if not isinstance(self.root, Sink):
            missing = "window" if self._stage.window is None else "aggregates"
            raise QueryError(
                f"query {self.name!r} is not complete: it has no {missing}",
                code="incomplete",
                hint=".window(fs.tumbling('10s')).agg(n=fs.count())",
            )
        return BoundQuery(self, self.root)

    def result_schema(self) -> pa.Schema:
        """The Arrow schema of the results. Few aggregates can be null, as stddev of a single row."""
        import pyarrow as pa

        columns = self.bound().root.schema
        return pa.schema(
            [pa.field(name, arrow_type(column.arrow), nullable=column.nullable) for name, column in columns.items()]
        )

    # -- serial form

    def to_dict(self) -> dict[str, Any]:
        return serial.write(self.name, self.root)

    def to_json(self, *, indent: int | None = None) -> str:
        """The plan's one serial form; it holds the stream's definition too. `Query.from_json` undoes it."""
        return json.dumps(self.to_dict(), indent=indent)

    @classmethod
    def from_dict(cls, body: Any) -> Query:
        """A plan from elsewhere is checked like one written here. Plans of version 1 are read too."""
        return cls(*serial.read(body))

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
        from flexstream.query.plan import explain

        if what == "optimised":
            return explain.as_optimised(self.bound())
        if what != "plan":
            raise QueryError(
                f"explain({what!r}): there is no such view", code="bad_view", hint="'plan', 'optimised' or 'code'"
            )
        return explain.as_written(self.name, self.root, self.bound() if isinstance(self.root, Sink) else None)

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
