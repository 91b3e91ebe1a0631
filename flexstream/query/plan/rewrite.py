"""Rewrites of a plan: the same results from less work. Pure: a plan in, an equal one out. `optimise` is all of them.

- `write_out`: map columns are written out where they are read; what nothing reads is gone, steps too.
- `fold_constants`: operators on constants, and the parts of a condition that they decide.
- `split_conditions`: conditions are cut at their `&`, so that a later one sees only the rows that passed.
- `drop_repeats`: a condition that holds already is gone; with one that never does nothing behind it matters.

Equal sub-expressions are then equal trees, which both variants compute once. Nothing changes which rows are rejected,
or why: what may lack a value is neither dropped nor moved past another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from flexstream.query.analysis import check_size, resolve
from flexstream.query.plan.bind import BoundAggregate
from flexstream.query.plan.nodes import Aggregate, Filter, Map, Node, Project, Sink, walk
from flexstream.query.plan.stages import BoundQuery
from flexstream.query.simplify import FALSE, TRUE, conjuncts, fold
from flexstream.query.typed import Typed

Rule = Callable[[Node], Node]


def optimise(bound: BoundQuery) -> BoundQuery:
    """The plan that runs. Raises QueryError for what is too large to run anyway."""
    check_size(bound)
    root: Node = bound.root
    for rule in RULES:
        root = rule(root)
    assert isinstance(root, Sink)
    return BoundQuery(bound.query, root)


def write_out(root: Node) -> Node:
    """After it there are only expressions over fields of the row."""
    made: dict[int, dict[str, Typed]] = {}  # what map() made, for who reads the node

    def visit(node: Node, inputs: tuple[Node, ...]) -> Node:
        columns = {name: tree for before in node.inputs for name, tree in made[id(before)].items()}
        made[id(node)] = columns
        if isinstance(node, Map):
            made[id(node)] = {**columns, **{name: resolve(tree, columns) for name, tree in node.typed.items()}}
        if isinstance(node, Map | Project):
            return inputs[0]
        return _with_expressions(node, inputs, lambda tree: resolve(tree, columns))

    return _rewritten(root, visit)


def fold_constants(root: Node) -> Node:
    return _rewritten(
        root,
        lambda node, inputs: _with_expressions(node, inputs, lambda tree: fold(tree, node.layout.schema)),
    )


def split_conditions(root: Node) -> Node:
    def visit(node: Node, inputs: tuple[Node, ...]) -> Node:
        if not isinstance(node, Filter):
            return node.over(*inputs)
        (last,) = inputs
        for part in conjuncts(node.typed):
            last = Filter(last, part)
        return last

    return _rewritten(root, visit)


def drop_repeats(root: Node) -> Node:
    holding: dict[int, list[Typed]] = {}  # what holds for the rows of a node

    def visit(node: Node, inputs: tuple[Node, ...]) -> Node:
        known = [tree for before in node.inputs for tree in holding[id(before)]]
        holding[id(node)] = known
        if not isinstance(node, Filter):
            return node.over(*inputs)
        if node.typed == TRUE or node.typed in known or FALSE in known:
            return inputs[0]
        holding[id(node)] = [*known, node.typed]
        return node.over(*inputs)

    return _rewritten(root, visit)


RULES: tuple[Rule, ...] = (write_out, fold_constants, split_conditions, drop_repeats)


def _rewritten(root: Node, visit: Callable[[Node, tuple[Node, ...]], Node]) -> Node:
    """`visit` says what each node becomes, told what its inputs became."""
    became: dict[int, Node] = {}
    for node in walk(root):
        became[id(node)] = visit(node, tuple(became[id(before)] for before in node.inputs))
    return became[id(root)]


def _with_expressions(node: Node, inputs: tuple[Node, ...], change: Callable[[Typed], Typed]) -> Node:
    if isinstance(node, Filter):
        return Filter(inputs[0], change(node.typed))
    if isinstance(node, Aggregate):
        return Aggregate(inputs[0], node.keys, {one.name: _changed(one, change) for one in node.bound})
    return node.over(*inputs)


def _changed(aggregate: BoundAggregate, change: Callable[[Typed], Typed]) -> BoundAggregate:
    arg, by = (None if tree is None else change(tree) for tree in (aggregate.arg, aggregate.by))
    return replace(aggregate, arg=arg, by=by)
