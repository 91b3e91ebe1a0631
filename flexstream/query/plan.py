"""The parts of a plan: the steps as written, and the same with all types worked out, which is what runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flexstream.query.aggregates import Function, function
from flexstream.query.expr import Expr, Typed
from flexstream.query.windower import Windower

if TYPE_CHECKING:
    from flexstream.query.query import Query


@dataclass(frozen=True, eq=False, slots=True)
class Filter:
    expr: Expr


@dataclass(frozen=True, eq=False, slots=True)
class Map:
    columns: dict[str, Expr]


@dataclass(frozen=True, slots=True)
class Project:
    names: tuple[str, ...]


Step = Filter | Map | Project


@dataclass(frozen=True, slots=True)
class BoundFilter:
    expr: Typed


@dataclass(frozen=True, slots=True)
class BoundMap:
    """All columns are computed from the row as it was before the step."""

    columns: dict[str, Typed]


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


@dataclass(frozen=True, slots=True)
class BoundQuery:
    """A complete query with all types worked out. Times are in units of the stream's time field."""

    query: Query
    steps: tuple[BoundFilter | BoundMap | Project, ...]
    aggregates: tuple[BoundAggregate, ...]
    result_fields: list[tuple[str, str]]
    windower: Windower
