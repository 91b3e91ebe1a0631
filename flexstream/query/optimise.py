"""The optimised plan: what runs, and what `explain("optimised")` shows. Pure: a bound query in, an equal one out.

- Constant folding: operators on constants, and the parts of a condition that they decide.
- Predicate push-down: conditions are cut at their `&`, written over fields of the row, and come first.
- Projection pruning: map columns are written out where they are read; what nothing reads is gone, fields too.
- Common sub-expressions: equal ones become equal trees, which both variants compute once.

Nothing changes which rows are rejected, or why: what may lack a value is neither dropped nor moved past another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from flexstream.query.analysis import can_fail, check_size, resolve, why_generic
from flexstream.query.constants import evaluate
from flexstream.query.plan import BoundFilter, BoundMap, BoundQuery
from flexstream.query.typed import BINARY, HASH_SEED, UNARY, Typed
from flexstream.rows.schema import Schema

_COMMUTES = ("add", "mul", "eq", "ne")
_OPPOSITE = {"lt": "ge", "ge": "lt", "gt": "le", "le": "gt", "eq": "ne", "ne": "eq"}
__all__ = ["evaluate", "explain", "fold", "optimise", "text"]


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

    def folded(argument: Typed | None) -> Typed | None:
        return None if argument is None else fold(resolve(argument, columns), schema)

    aggregates = tuple(replace(known, arg=folded(known.arg), by=folded(known.by)) for known in bound.aggregates)
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
    if node.op == "if":
        return _conditional(node, schema)
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


def _conditional(node: Typed, schema: Schema) -> Typed:
    condition, then, otherwise = node.args
    if condition.op == "lit":  # what is not chosen does not count
        return then if condition.value else otherwise
    if (then, otherwise) == (_TRUE, _FALSE):
        return condition
    if (then, otherwise) == (_FALSE, _TRUE):
        return fold(Typed("not", "bool", (condition,)), schema)
    if then == otherwise and not can_fail(condition, schema):
        return then
    if condition.op == "not":
        return replace(node, args=(condition.args[0], otherwise, then))
    return node


def _identity(node: Typed) -> Typed:
    left, right = node.args
    if right.op == "lit" and right.value == {"add": 0, "sub": 0, "mul": 1, "floordiv": 1, "floor": 1}.get(node.op):
        return left
    if left.op == "lit" and left.value == {"add": 0, "mul": 1}.get(node.op):
        return right
    return node


# -- for people


def text(node: Typed) -> str:
    if node.op == "col":
        return node.name or ""
    if node.op == "lit":
        return repr(node.value.rstrip(b"\0") if isinstance(node.value, bytes) else node.value)
    if node.op.startswith("hash_"):
        return f"hash({', '.join(_hashed(node))})"
    arguments = [text(arg) for arg in node.args]
    if node.op == "cast":
        return f"cast({arguments[0]} as {node.type})"
    if node.op == "if":
        return f"when({arguments[0]}, {arguments[1]}).otherwise({arguments[2]})"
    if node.op.startswith(("fit_", "round_")):
        return f"cast({arguments[0]} as {node.op.partition('_')[2]})"
    if node.op in BINARY and len(arguments) == 2:
        return f"({arguments[0]} {BINARY[node.op]} {arguments[1]})"
    if node.op in UNARY and node.op != "abs":
        return f"{UNARY[node.op]}{arguments[0]}"
    return f"{node.op}({', '.join(arguments)})"


def _hashed(node: Typed) -> list[str]:
    """What a chain of hashes is of, in order; its seed only where it is not the usual one."""
    value, seed = node.args
    if seed.op.startswith("hash_"):
        return [*_hashed(seed), text(value)]
    return [text(value)] if seed.value == HASH_SEED else [f"seed {text(seed)}", text(value)]


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
        trees += aggregate.args
        lines.append(f"  agg     {aggregate.name} = {aggregate.fn}({', '.join(map(text, aggregate.args))})")
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
