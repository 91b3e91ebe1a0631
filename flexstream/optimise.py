"""The optimised plan: what runs, and what `explain("optimised")` shows. Pure: a bound query in, an equal one out.

- Constant folding: operators on constants, and the parts of a condition that they decide.
- Predicate push-down: conditions are cut at their `&`, written over fields of the row, and come first.
- Projection pruning: map columns are written out where they are read; what nothing reads is gone, fields too.
- Common sub-expressions: equal ones become equal trees, which both variants compute once.

Nothing changes which rows are rejected, or why: what may lack a value is neither dropped nor moved past another.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from flexstream.cython_ext.folds import why_generic
from flexstream.cython_ext.lowering import can_fail, check_size, resolve
from flexstream.expr import BINARY, I64_MAX, I64_MIN, UNARY, Typed
from flexstream.plan import BoundFilter, BoundMap, BoundQuery
from flexstream.schema import Schema

_COMMUTES = ("add", "mul", "eq", "ne")
_OPPOSITE = {"lt": "ge", "ge": "lt", "gt": "le", "le": "gt", "eq": "ne", "ne": "eq"}
_ORDER = {"eq": (0,), "ne": (-1, 1), "lt": (-1,), "le": (-1, 0), "gt": (1,), "ge": (0, 1)}
Value = int | float | bool | bytes


def optimise(bound: BoundQuery) -> BoundQuery:
    """The same results from less work. Raises QueryError for what is too large to run anyway."""
    check_size(bound)
    schema = bound.query.stream.schema
    columns: dict[str, Typed] = {}
    filters: list[Typed] = []
    for step in bound.steps:
        if isinstance(step, BoundMap):
            columns = {**columns, **{name: resolve(tree, columns) for name, tree in step.columns.items()}}
        elif isinstance(step, BoundFilter):
            filters += conjuncts(fold(resolve(step.expr, columns), schema))
    kept = [part for part in _without_repeats(filters) if part != _TRUE]
    aggregates = tuple(
        aggregate if aggregate.arg is None else replace(aggregate, arg=fold(resolve(aggregate.arg, columns), schema))
        for aggregate in bound.aggregates
    )
    return replace(bound, steps=tuple(BoundFilter(part) for part in kept), aggregates=aggregates)


_TRUE = Typed("lit", "bool", value=True)
_FALSE = Typed("lit", "bool", value=False)


def _without_repeats(filters: list[Typed]) -> list[Typed]:
    """A condition that stood before already holds. With one that never does nothing behind it matters."""
    found: list[Typed] = []
    for part in filters:
        if part not in found:
            found.append(part)
        if part == _FALSE:
            break
    return found


def conjuncts(node: Typed) -> list[Typed]:
    return [part for arg in node.args for part in conjuncts(arg)] if node.op == "and" else [node]


def names(node: Typed) -> set[str]:
    return {node.name or ""} if node.op == "col" else {name for arg in node.args for name in names(arg)}


def fold(node: Typed, schema: Schema) -> Typed:
    """Without what constants decide. For expressions over fields of the row."""
    if not node.args:
        return node
    node = replace(node, args=tuple(fold(arg, schema) for arg in node.args))
    if all(arg.op == "lit" for arg in node.args):
        value = evaluate(node)
        return node if value is None else replace(node, op="lit", args=(), value=value)
    if node.op in ("and", "or"):
        return _connective(node, schema)
    if node.op == "not":
        (inner,) = node.args
        if inner.op == "not":
            return inner.args[0]
        if inner.op in _OPPOSITE:  # a total order: NaN is the greatest
            return replace(inner, op=_OPPOSITE[inner.op])
    if node.type == "i64" and len(node.args) == 2:
        return _identity(node)
    if node.op in _COMMUTES and not any(can_fail(arg, schema) for arg in node.args):
        return replace(node, args=tuple(sorted(node.args, key=repr)))
    return node


def _connective(node: Typed, schema: Schema) -> Typed:
    left, right = node.args
    decides = _FALSE if node.op == "and" else _TRUE
    neutral = _TRUE if node.op == "and" else _FALSE
    if left in (decides, right) or right == neutral:
        return left
    if left == neutral:
        return right
    return decides if right == decides and not can_fail(left, schema) else node


def _identity(node: Typed) -> Typed:
    left, right = node.args
    if right.op == "lit" and right.value == {"add": 0, "sub": 0, "mul": 1, "floordiv": 1}.get(node.op):
        return left
    if left.op == "lit" and left.value == {"add": 0, "mul": 1}.get(node.op):
        return right
    return node


def evaluate(node: Typed) -> Value | None:
    """An operator on constants, as workers compute it. None: no value, or not worth it."""
    values = [arg.value for arg in node.args]
    kind = node.args[0].type
    first, last = values[0], values[-1]
    if node.op == "not":
        return not first
    if node.op in _ORDER:
        return _compare(first, last) in _ORDER[node.op]
    if kind in ("bool", "bytes") and node.op != "cast":
        return {"and": first and last, "or": first or last}.get(node.op)
    assert not isinstance(first, bytes)
    assert not isinstance(last, bytes)
    assert first is not None
    assert last is not None
    if node.op == "cast":
        return _cast(first, node.type)
    return _real(node.op, float(first), float(last)) if kind == "f64" else _integer(node.op, int(first), int(last))


def _compare(first: Value | None, last: Value | None) -> int:
    """-1, 0 or 1; NaN is the greatest, and equal to itself."""
    if isinstance(first, float) and isinstance(last, float) and (math.isnan(first) or math.isnan(last)):
        return math.isnan(first) - math.isnan(last)
    return (first > last) - (first < last)  # type: ignore[operator]


def _cast(value: int | float, to: str) -> int | float | None:
    if to == "f64":
        return float(value)
    if isinstance(value, float) and not -(2.0**63) <= value < 2.0**63:
        return None
    return int(value)


def _real(op: str, first: float, last: float) -> float | None:
    if op == "div":
        return None if last == 0 else first / last
    try:
        return {"add": first + last, "sub": first - last, "mul": first * last, "neg": -first, "abs": abs(first)}.get(op)
    except OverflowError:
        return None


def _integer(op: str, first: int, last: int) -> int | None:
    if op in ("floordiv", "mod"):
        if last == 0:
            return None
        quotient = abs(first) // abs(last) * (1 if (first < 0) == (last < 0) else -1)  # cut towards zero
        found = quotient if op == "floordiv" else first - quotient * last
    else:
        table = {"add": first + last, "sub": first - last, "mul": first * last, "neg": -first, "abs": abs(first)}
        if op not in table:
            return None
        found = table[op]
    return found if I64_MIN <= found <= I64_MAX else None


# -- for people


def text(node: Typed) -> str:
    if node.op == "col":
        return node.name or ""
    if node.op == "lit":
        return repr(node.value.rstrip(b"\0") if isinstance(node.value, bytes) else node.value)
    arguments = [text(arg) for arg in node.args]
    if node.op == "cast":
        return f"cast({arguments[0]} as {node.type})"
    if node.op in BINARY and len(arguments) == 2:
        return f"({arguments[0]} {BINARY[node.op]} {arguments[1]})"
    if node.op in UNARY and node.op != "abs":
        return f"{UNARY[node.op]}{arguments[0]}"
    return f"{node.op}({', '.join(arguments)})"


def _operators(node: Typed) -> Iterator[Typed]:
    if node.args:
        yield node
    for arg in node.args:
        yield from _operators(arg)


def explain(bound: BoundQuery) -> str:
    """The optimised plan, one line per step."""
    plan, stream = optimise(bound), bound.query.stream
    trees = [step.expr for step in plan.steps if isinstance(step, BoundFilter)]
    lines = [f"query {bound.query.name}, optimised", *(f"  filter  {text(tree)}" for tree in trees)]
    for aggregate in plan.aggregates:
        if aggregate.arg is not None:
            trees.append(aggregate.arg)
        lines.append(f"  agg     {aggregate.name} = {aggregate.fn}({text(aggregate.arg) if aggregate.arg else ''})")
    read = {*stream.key, stream.time}.union(*(names(tree) for tree in trees))
    fields = [field for field in stream.schema if field.name in read]
    size = sum(field.size for field in fields)
    lines.insert(
        1, f"  read    {', '.join(field.name for field in fields)} ({size} of {stream.schema.row_bytes} bytes)"
    )
    cannot = why_generic(bound)
    lines += [f"  variant {cannot}"] if cannot is not None else []
    used = Counter(node for tree in trees for node in _operators(tree))
    lines += [f"  common  {text(node)}, {times} times, computed once" for node, times in used.items() if times > 1]
    return "\n".join(lines)
