"""A plan cut into what runs: the steps that work on each row alone, and the operator that keeps state behind them.

There is one stage so far: a stream's rows, steps, a window, aggregates, results.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from flexstream.query.plan.bind import BoundAggregate
from flexstream.query.plan.nodes import Aggregate, Filter, Map, Node, Project, Scan, Sink, Window, walk
from flexstream.query.windower import Windower
from flexstream.rows.layout import RowLayout

if TYPE_CHECKING:
    from flexstream.query.query import Query

Step = Filter | Map | Project


@dataclass(frozen=True, slots=True)
class Stage:
    """The parts of a plan by what they do. Without window or aggregate it is still being built."""

    scan: Scan
    steps: tuple[Step, ...]
    window: Window | None
    aggregate: Aggregate | None

    @property
    def before_window(self) -> Node:
        return self.steps[-1] if self.steps else self.scan


def stage_of(root: Node) -> Stage:
    nodes = list(walk(root))
    (scan,) = (node for node in nodes if isinstance(node, Scan))
    return Stage(
        scan,
        tuple(node for node in nodes if isinstance(node, Step)),
        next((node for node in nodes if isinstance(node, Window)), None),
        next((node for node in nodes if isinstance(node, Aggregate)), None),
    )


@dataclass(frozen=True)
class BoundQuery:
    """A complete query with all types worked out. Times are in units of the rows' time field.

    `root` is the plan that runs: the query's own, or what rewrites have made of it.
    """

    query: Query
    root: Sink

    @cached_property
    def _stage(self) -> Stage:
        return stage_of(self.root)

    @property
    def layout(self) -> RowLayout:
        """Of the rows that the pipeline reads."""
        return self._stage.scan.layout

    @property
    def steps(self) -> tuple[Step, ...]:
        return self._stage.steps

    @property
    def window(self) -> Window:
        window = self._stage.window
        assert window is not None, "a sink has aggregates below it, and they a window"
        return window

    @property
    def windower(self) -> Windower:
        return self.window.windower

    @property
    def aggregates(self) -> tuple[BoundAggregate, ...]:
        aggregate = self._stage.aggregate
        assert aggregate is not None, "a sink has aggregates below it"
        return aggregate.bound

    @property
    def result_fields(self) -> list[tuple[str, str]]:
        """The columns of results with their Arrow types, as text."""
        return [(name, column.arrow) for name, column in self.root.schema.items()]
