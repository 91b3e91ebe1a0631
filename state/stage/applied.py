"""Which batches were applied: what makes a repeated commit harmless.

A sink says with each commit how long it may repeat it (`remember_s`, from the last batch of that query on). Within that
time nobody's commits push a query out: when its sink has as many as it may have, or all sinks together, a query that is
new is refused. One that is known always has room, for its last batch at least.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from flexstream.errors import StageError

REMEMBERED_BATCHES = 100  # of a query, one by one with their rows; older ones as a range
SINK_QUERIES = 10_000
ALL_QUERIES = 50_000
ALL_BATCHES = 200_000  # past them a query is known by its last batch, and the range before it
DEFAULT_REMEMBER_S = 90 * 86_400.0


@dataclass(slots=True)
class Applied:
    """The batches of one (sink, query) that were applied: all below `floor`, and those in `batches` (their rows)."""

    floor: int = 0
    batches: dict[int, int | None] = field(default_factory=dict)
    at: float = 0.0
    remember_s: float = DEFAULT_REMEMBER_S

    def __contains__(self, batch: int) -> bool:
        return batch < self.floor or batch in self.batches

    def keep(self, most: int) -> None:
        """Know so many one by one, the others as a range."""
        while len(self.batches) > most:
            oldest = min(self.batches)
            del self.batches[oldest]
            self.floor = max(self.floor, oldest + 1)


class AppliedBatches:
    """The applied batches of all sinks. Not thread-safe: the journal's lock is held."""

    def __init__(self) -> None:
        self._sinks: dict[str, dict[str, Applied]] = {}
        self.queries = 0
        self.batches = 0

    def get(self, sink: str, query: str) -> Applied | None:
        return self._sinks.get(sink, {}).get(query)

    def make_room(self, sink: str, query: str) -> None:
        """For a batch to be added. What may not be repeated any more goes. StageError `sink_full` when that is not
        enough.
        """
        if self.get(sink, query) is not None:
            return
        if len(self._sinks.get(sink, {})) >= SINK_QUERIES:
            self._forget_outdated([sink])
            if len(self._sinks.get(sink, {})) >= SINK_QUERIES:
                raise _full(f"sink {sink!r:.80} has", SINK_QUERIES, "another sink_id, or ")
        if self.queries >= ALL_QUERIES:
            self._forget_outdated(list(self._sinks))
            if self.queries >= ALL_QUERIES:
                raise _full("the sinks of this daemon have", ALL_QUERIES, "")

    def _forget_outdated(self, sinks: list[str]) -> None:
        now = time.time()
        for sink in sinks:
            known = self._sinks[sink]
            for query in [query for query, applied in known.items() if applied.at + applied.remember_s < now]:
                self.queries -= 1
                self.batches -= len(known.pop(query).batches)
            if not known:
                del self._sinks[sink]

    def add(self, sink: str, query: str, batch: int, rows: int | None, at: float, remember_s: float) -> None:
        known = self._sinks.setdefault(sink, {}).get(query)
        if known is None:
            known = self._put(sink, query, Applied())
        known.at, known.remember_s = at, remember_s
        self.batches -= len(known.batches)
        known.batches[batch] = rows
        known.keep(max(1, min(REMEMBERED_BATCHES, ALL_BATCHES - self.batches)))
        self.batches += len(known.batches)

    def _put(self, sink: str, query: str, applied: Applied) -> Applied:
        self._sinks.setdefault(sink, {})[query] = applied
        self.queries += 1
        self.batches += len(applied.batches)
        return applied

    def to_list(self) -> list[Any]:
        return [
            [sink, query, known.floor, [[*pair] for pair in sorted(known.batches.items())], known.at, known.remember_s]
            for sink, queries in self._sinks.items()
            for query, known in queries.items()
        ]

    def from_list(self, listed: list[Any]) -> None:
        for sink, query, floor, batches, at, *more in listed:
            known: Any = (one if isinstance(one, list) else [one, None] for one in batches)  # once without their rows
            self._put(sink, query, Applied(floor, dict(known), at, *more))


def _full(who: str, most: int, instead: str) -> StageError:
    return StageError(
        f"{who} {most} queries and jobs whose batches may still be repeated: there is no room for another",
        code="sink_full",
        hint=f"use {instead}a shorter remember_s: a query makes room once its batches can no longer be repeated",
    )
