"""Plans of version 1, which had one stream, steps in a row, a window and aggregates. They are read, not written.

Result logs know their query by its plan in this form (`identity`), so that they go on after an upgrade.
"""

from __future__ import annotations

from typing import Any

from flexstream import durations
from flexstream.errors import QueryError
from flexstream.query import aggregates as functions
from flexstream.query import expr as expressions
from flexstream.query.plan.bind import check_query_name, told_of
from flexstream.query.plan.nodes import (
    MAX_STEPS,
    Aggregate,
    Filter,
    Map,
    Node,
    Project,
    Scan,
    Sink,
    Window,
    too_many_steps,
)
from flexstream.query.plan.stages import stage_of
from flexstream.query.windows import WindowSpec
from flexstream.rows.stream import Stream

VERSION = 1


def read(body: dict[str, Any]) -> tuple[str, Node]:
    """The query's name and the root of its plan. Raises FlexStreamError."""
    keys = {"version", "name", "stream", "steps", "window", "allowed_lateness", "aggregates"}
    if unknown := set(map(str, body)) - keys:
        raise QueryError(f"query has unknown parts {sorted(unknown)}", code="bad_query")
    if missing := {"name", "stream"} - set(body):
        raise QueryError(f"query lacks {sorted(missing)}", code="bad_query")
    stream, name = Stream.from_dict(body["stream"]), check_query_name(body["name"])
    steps, aggregates = body.get("steps", []), body.get("aggregates", {})
    if not isinstance(steps, list) or not isinstance(aggregates, dict):
        raise QueryError("steps must be a list and aggregates an object", code="bad_query")
    if len(steps) > MAX_STEPS:
        raise too_many_steps()
    with told_of(name):
        node: Node = Scan(stream)
        for step in steps:
            node = _step(node, step)
        if body.get("window") is not None:
            lateness = durations.parse(body.get("allowed_lateness", "0s"))
            node = Window(node, WindowSpec.from_dict(body["window"]), lateness)
        if aggregates:
            made = {name: functions.Aggregate.from_json(item) for name, item in aggregates.items()}
            node = Sink(Aggregate(node, stream.key, made))
    return name, node


def _step(node: Node, step: Any) -> Node:
    match step:
        case ["filter", predicate]:
            return Filter(node, expressions.from_json(predicate))
        case ["map", dict(columns)]:
            return Map(node, {name: expressions.from_json(tree) for name, tree in columns.items()})
        case ["project", list(names)]:
            return Project(node, tuple(names))
    raise QueryError(f"unknown step {str(step)[:200]}", code="bad_step", hint="filter, map or project")


def identity(root: Node) -> dict[str, Any]:
    """What the plan does, as version 1 says it: without the query's name and the stream."""
    stage = stage_of(root)
    window, aggregate = stage.window, stage.aggregate
    return {
        "steps": [[step.op, *step.body().values()] for step in stage.steps],
        "window": None if window is None else window.spec.to_dict(),
        "allowed_lateness": durations.format(0 if window is None else window.lateness_ns),
        "aggregates": {} if aggregate is None else aggregate.body()["aggregates"],
    }
