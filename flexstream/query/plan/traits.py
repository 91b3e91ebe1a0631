"""What is known of the rows that come out of a node, beside their values. Pure rules: traits in, traits out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from flexstream.query.windows import WindowSpec
from flexstream.rows.schema import FieldType

Mode = Literal["append", "revisions"]
Equal = frozenset[frozenset[str]]


@dataclass(frozen=True, slots=True)
class ColumnType:
    """`type` is written as in a stream's fields: i32, timestamp[ms]."""

    type: str
    nullable: bool = False

    @property
    def arrow(self) -> str:
        return FieldType.parse(self.type).arrow


@dataclass(frozen=True, slots=True)
class Traits:
    """`dist`: the columns whose values say which group, and so which worker, has a row. `time`: the column of event
    time; None: the rows have none. `window`: the windows that rows are in; None: they are in none yet. `mode`: a row
    is final (append), or a later one may replace it (revisions). `equal`: columns that have the same values.
    """

    dist: tuple[str, ...]
    time: str | None = None
    window: WindowSpec | None = None
    mode: Mode = "append"
    equal: Equal = frozenset()

    @property
    def placed(self) -> frozenset[str]:
        """The columns that place rows, in space and in time: they stay as they are."""
        return frozenset(self.dist if self.time is None else (*self.dist, self.time))


def after_map(traits: Traits, copies: Mapping[str, str | None]) -> Traits:
    """`copies`: the new columns; which column each has the values of, None where it is computed."""
    kept = _among(traits.equal, lambda name: name not in copies)
    home = {name: names for names in kept for name in names}
    grown: dict[frozenset[str], set[str]] = {}
    for new, of in copies.items():
        if of is not None and of not in copies:
            names = home.get(of, frozenset({of}))
            grown.setdefault(names, set(names)).add(new)
    return replace(traits, equal=kept - grown.keys() | set(map(frozenset, grown.values())))


def after_project(traits: Traits, kept: Iterable[str]) -> Traits:
    names = set(kept)
    return replace(traits, equal=_among(traits.equal, names.__contains__))


def _among(equal: Equal, stays: Callable[[str], bool]) -> Equal:
    found = (frozenset(filter(stays, names)) for names in equal)
    return frozenset(names for names in found if len(names) > 1)
