"""What each aggregate keeps of a key's rows: which fold, over which argument, in how many 8-byte slots. Pure.

Numbers as in the Fold enum of table.pxd. A fold's slots are a mergeable partial, whatever variant made it.
"""

from __future__ import annotations

from flexstream.query.expr import Typed
from flexstream.query.plan import BoundAggregate

MAX_SLOTS = 1024  # of all aggregates of a query; MAX_SLOTS of table.pxd

FOLDS: dict[tuple[str, str | None], tuple[int, int]] = {
    ("count", None): (0, 0),
    ("sum", "i64"): (1, 1), ("sum", "f64"): (2, 2),
    ("min", "i64"): (3, 1), ("max", "i64"): (4, 1), ("min", "f64"): (5, 1), ("max", "f64"): (6, 1),
    ("avg", "f64"): (7, 2), ("stddev", "f64"): (8, 4),
    ("first", "i64"): (9, 4), ("first", "f64"): (9, 4), ("first", "bool"): (9, 4),
    ("last", "i64"): (10, 4), ("last", "f64"): (10, 4), ("last", "bool"): (10, 4),
    ("approx_distinct", "i64"): (11, 128), ("approx_distinct", "bool"): (11, 128),
    ("approx_distinct", "f64"): (12, 128),
    ("distinct", "i64"): (13, 2), ("distinct", "bool"): (13, 2), ("distinct", "f64"): (14, 2),
    ("order_hash", "i64"): (15, 1), ("order_hash", "bool"): (15, 1), ("order_hash", "f64"): (16, 1),
}  # fmt: skip
MAX_SIDES = 4  # aggregates of a query with a table of their own beside the entries; MAX_SIDES of table.pxd
_REAL = ("avg", "stddev")


def folded(aggregate: BoundAggregate, argument: Typed | None) -> tuple[str, Typed | None]:
    """The fold that does the aggregate's work, and what it is over; `argument` is over fields of the row alone."""
    if argument is None:
        return "count", None
    if aggregate.fn == "count_if":  # true counts one
        return "sum", Typed("cast", "i64", (argument,))
    if aggregate.fn in _REAL and argument.type != "f64":
        return aggregate.fn, Typed("cast", "f64", (argument,))
    return aggregate.fn, argument
