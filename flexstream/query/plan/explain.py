"""Plans for people: as written, and as rewrites have made them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from flexstream.query.analysis import why_generic
from flexstream.query.plan.nodes import Filter, Node, walk
from flexstream.query.plan.rewrite import optimise
from flexstream.query.plan.stages import BoundQuery
from flexstream.query.typed import BINARY, HASH_SEED, UNARY, Typed


def as_written(name: str, root: Node, bound: BoundQuery | None) -> str:
    """One line per step. `bound` is None while the query is not complete."""
    nodes = list(walk(root))
    lines = [line for node in nodes if node.traits.window is None for line in node.lines()]
    lines.append(f"key     {', '.join(root.traits.dist)}")
    lines += [line for node in nodes if node.traits.window is not None for line in node.lines()]
    if bound is None:
        lines.append("(not complete: add .window(...) and .agg(...))")
    else:
        lines += _variant(bound)
    return "\n  ".join([f"query {name}", *lines])


def as_optimised(bound: BoundQuery) -> str:
    """The plan that runs, one line per step."""
    plan, layout = optimise(bound), bound.layout
    trees = [step.typed for step in plan.steps if isinstance(step, Filter)]
    lines = [f"query {bound.query.name}, optimised", *(f"filter  {text(tree)}" for tree in trees)]
    for aggregate in plan.aggregates:
        trees += aggregate.args
        lines.append(f"agg     {aggregate.name} = {aggregate.fn}({', '.join(map(text, aggregate.args))})")
    read = {*layout.key, layout.time}.union(*(_names(tree) for tree in trees))
    fields = [field for field in layout.schema if field.name in read]
    size = sum(field.size for field in fields)
    lines.insert(
        1, f"read    {', '.join(field.name for field in fields)} ({size} of {layout.schema.row_bytes} bytes)"
    )
    lines += _variant(bound)
    used = Counter(node for tree in trees for node in _operators(tree))
    lines += [f"common  {text(node)}, {times} times, computed once" for node, times in used.items() if times > 1]
    return "\n  ".join(lines)


def _variant(bound: BoundQuery) -> list[str]:
    cannot = why_generic(bound)
    return [f"variant {cannot}"] if cannot is not None else []


def _names(node: Typed) -> set[str]:
    return {node.name or ""} if node.op == "col" else {name for arg in node.args for name in _names(arg)}


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
