"""Expressions without what constants decide. Pure: an expression in, an equal one out.

Nothing changes which rows are rejected, or why: what may lack a value is neither dropped nor moved past another.
"""

from __future__ import annotations

from dataclasses import replace

from flexstream.query.analysis import can_fail
from flexstream.query.constants import evaluate
from flexstream.query.typed import Typed
from flexstream.rows.schema import Schema

_COMMUTES = ("add", "mul", "eq", "ne")
_OPPOSITE = {"lt": "ge", "ge": "lt", "gt": "le", "le": "gt", "eq": "ne", "ne": "eq"}
TRUE = Typed("lit", "bool", value=True)
FALSE = Typed("lit", "bool", value=False)


def conjuncts(node: Typed) -> list[Typed]:
    return [part for arg in node.args for part in conjuncts(arg)] if node.op == "and" else [node]


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
    decides = FALSE if node.op == "and" else TRUE
    neutral = TRUE if node.op == "and" else FALSE
    if left in (decides, right) or right == neutral:
        return left
    if left == neutral:
        return right
    return decides if right == decides and not can_fail(left, schema) else node


def _conditional(node: Typed, schema: Schema) -> Typed:
    condition, then, otherwise = node.args
    if condition.op == "lit":  # what is not chosen does not count
        return then if condition.value else otherwise
    if (then, otherwise) == (TRUE, FALSE):
        return condition
    if (then, otherwise) == (FALSE, TRUE):
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
