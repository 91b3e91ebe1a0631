"""Expressions and aggregates get their types where a node is made, so that mistakes show where they are written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from flexstream.errors import QueryError, SchemaError
from flexstream.query import expr as expressions
from flexstream.query.aggregates import Aggregate, Function, check_window, function, result_type
from flexstream.query.expr import Expr, Typed
from flexstream.query.windows import WindowSpec
from flexstream.rows.schema import check_field_name
from flexstream.rows.stream import RESULT_NAMES, check_name

Types = Mapping[str, str]  # a column's name -> its type, as in a schema


class PlanError(QueryError):
    """A node that cannot be. Nodes do not know whose plan they are in: `of` says the same about a query by its name."""

    def __init__(self, told: Callable[[str], str], *, code: str, hint: str | None = None) -> None:
        super().__init__(told("the plan"), code=code, hint=hint)
        self._told = told

    def of(self, whose: str) -> QueryError:
        return QueryError(self._told(whose), code=self.code, hint=self.hint)

    def __reduce__(self) -> tuple[object, ...]:
        return self.of("the plan").__reduce__()


@contextmanager
def told_of(name: str) -> Iterator[None]:
    """Mistakes in nodes that are made meanwhile are told of the query of that name."""
    try:
        yield
    except PlanError as error:
        raise error.of(f"query {name!r}") from None


@dataclass(frozen=True, slots=True)
class BoundAggregate:
    """`result_type` is the Arrow type, as text, of the result column."""

    name: str
    fn: str
    arg: Typed | None
    result_type: str
    by: Typed | None = None  # what decides which row it is of

    @property
    def args(self) -> list[Typed]:
        return [arg for arg in (self.arg, self.by) if arg is not None]

    @property
    def function(self) -> Function:
        return function(self.fn)


def bind_expression(tree: Expr | Typed, types: Types) -> Typed:
    """What a rewrite has made is bound already."""
    if isinstance(tree, Typed):
        return tree
    if isinstance(tree, expressions.Cases):
        expressions.lit(tree)  # says what it lacks
    if not isinstance(tree, Expr):
        raise QueryError(
            f"{tree!r} is not an expression", code="bad_expression", hint="begin with col('name')"
        )
    with _about_the_query():
        return expressions.bind(tree, types)


def bind_filter(predicate: Expr | Typed, types: Types) -> Typed:
    typed = bind_expression(predicate, types)
    if typed.type != "bool":
        raise PlanError(
            lambda query: f"{query}: a filter must be true or false, but {predicate} is {typed.type}",
            code="bad_types",
            hint="compare it with something",
        )
    return typed


def bind_aggregate(
    name: str, aggregate: Aggregate | BoundAggregate, types: Types, keys: tuple[str, ...], window: WindowSpec
) -> BoundAggregate:
    if isinstance(aggregate, BoundAggregate):
        return aggregate
    if name in RESULT_NAMES or name in keys:
        raise QueryError(
            f"an aggregate cannot be called {name!r}: results have a column of that name",
            code="bad_name",
            hint="choose another name",
        )
    check_column_name(name)
    if not isinstance(aggregate, Aggregate):
        raise QueryError(
            f"{name}={aggregate!r} is not an aggregate",
            code="bad_aggregate",
            hint="fs.sum('price'), fs.count()",
        )
    typed = None if aggregate.arg is None else bind_expression(aggregate.arg, types)
    by = None if aggregate.by is None else bind_expression(aggregate.by, types)
    with _about_the_query():
        kind = result_type(aggregate, typed, "nothing" if typed is None else typed.field_type, by)
        check_window(aggregate, window)
    return BoundAggregate(name, aggregate.fn, typed, kind, by)


def check_column_name(name: object) -> None:
    with _of_a_query():
        check_field_name(name)


def check_query_name(name: object) -> str:
    with _of_a_query():
        return check_name("query", name)


@contextmanager
def _of_a_query() -> Iterator[None]:
    """A bad name is a mistake in the query here, not in a stream."""
    try:
        yield
    except SchemaError as error:
        raise QueryError(error.message, code=error.code, hint=error.hint) from None


@contextmanager
def _about_the_query() -> Iterator[None]:
    try:
        yield
    except QueryError as error:
        message = error.message
        raise PlanError(lambda query: f"{query}: {message}", code=error.code, hint=error.hint) from None
