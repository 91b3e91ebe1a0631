"""What can be said of a bound query without running or compiling it. Pure."""

from __future__ import annotations

from dataclasses import replace

from flexstream.errors import QueryError
from flexstream.query.plan.nodes import Filter, Map
from flexstream.query.plan.stages import BoundQuery
from flexstream.query.typed import CALENDAR, MAX_DEPTH, Typed
from flexstream.rows.schema import Schema

MAX_NODES = 10_000
SAFE_REAL = ("add", "sub", "mul", "neg", "abs", "round_f32", "if")
SAFE_WHOLE = ("floor", "floormod", "if", *CALENDAR)


def why_generic(bound: BoundQuery) -> str | None:
    """Why the query has no compiled variant; None: it has one."""
    found = next((aggregate.fn for aggregate in bound.aggregates if aggregate.function.ordered), None)
    return None if found is None else f"{found} is not compiled yet: the generic variant runs the query"


def resolve(node: Typed, columns: dict[str, Typed]) -> Typed:
    """The expression over fields of the row alone: `columns` are what map() made of them."""
    if node.op == "col":
        return columns.get(node.name or "", node)
    return replace(node, args=tuple(resolve(arg, columns) for arg in node.args)) if node.args else node


def can_fail(node: Typed, schema: Schema) -> bool:
    """May the expression lack a value for some row? A u64 field may: past int64 it has none."""
    if node.op == "col":
        return schema.field(node.name or "").kind == "u64"
    return not _is_safe(node) or any(can_fail(arg, schema) for arg in node.args)


def _is_safe(node: Typed) -> bool:
    """Has the operator a value whenever its arguments have?"""
    if node.type in ("bool", "bytes") or node.op == "lit" or node.op.startswith("hash_"):
        return True
    if node.op == "cast":
        return node.type == "f64" or node.args[0].type == "bool"
    if node.op in ("floordiv", "mod"):
        return node.args[1].op == "lit" and node.args[1].value not in (0, -1)
    return node.op in (SAFE_REAL if node.type == "f64" else SAFE_WHOLE)


def check_size(bound: BoundQuery) -> None:
    """Refuse what would be too large once map() columns stand in place of their names: it can double each step."""
    known: dict[str, tuple[int, int]] = {}

    def measure(node: Typed) -> tuple[int, int]:
        """How many operations, how deep."""
        if node.op == "col":
            return known.get(node.name or "", (1, 1))
        parts = [measure(arg) for arg in node.args]
        return 1 + sum(size for size, _ in parts), 1 + max((depth for _, depth in parts), default=0)

    total = 0
    for step in (*bound.steps, *bound.aggregates):
        if isinstance(step, Map):
            made = {name: measure(tree) for name, tree in step.typed.items()}
            known.update(made)
            found = list(made.values())
        else:
            trees = [step.typed] if isinstance(step, Filter) else getattr(step, "args", [])  # a project() has none
            found = [measure(tree) for tree in trees]
        total += sum(size for size, _ in found)
        if total > MAX_NODES or any(depth > MAX_DEPTH + 1 for _, depth in found):
            many = f"{MAX_NODES} operations" if total > MAX_NODES else f"{MAX_DEPTH} nested operations"
            raise QueryError(
                f"query {bound.query.name!r} has more than {many} once its map() columns are written out",
                code="too_complex",
                hint="split it into several queries",
            )
