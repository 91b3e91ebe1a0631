"""What each aggregate keeps of a key's rows: which fold, over which arguments. Pure.

Folds, what they keep and what may be done with it are in folds.h, once for all; FOLDS is that list. A fold's slots are
a mergeable partial, whatever variant made it.
"""

from __future__ import annotations

from dataclasses import dataclass

from flexstream.cython_ext.operators.table import fold_flags, folds
from flexstream.query.analysis import resolve
from flexstream.query.plan.bind import BoundAggregate
from flexstream.query.typed import Typed

FLAGS: dict[str, int] = fold_flags()


@dataclass(frozen=True, slots=True)
class Fold:
    """A line of FS_FOLDS: its number, how many 8-byte slots of an entry it keeps, and what holds of it."""

    name: str
    number: int
    slots: int
    flags: int

    def has(self, flag: str) -> bool:
        """A flag of folds.h, without its FS_."""
        return bool(self.flags & FLAGS[flag])


FOLDS: dict[str, Fold] = {name: Fold(name, *facts) for name, facts in folds().items()}


def folded(aggregate: BoundAggregate, columns: dict[str, Typed]) -> tuple[Fold, Typed | None, Typed | None]:
    """The fold that does the aggregate's work, what it is over and what decides, both over fields of the row alone."""
    record = aggregate.function
    argument = None if aggregate.arg is None else resolve(aggregate.arg, columns)
    by = None if aggregate.by is None else resolve(aggregate.by, columns)
    fold = FOLDS[record.fold(None if argument is None else argument.type, None if by is None else by.type)]
    if argument is not None and record.cast not in (None, argument.type):
        argument = Typed("cast", record.cast or "", (argument,))
    return fold, argument, by
