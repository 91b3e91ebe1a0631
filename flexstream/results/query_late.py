"""One query's late rows in its stream's log (late_log.py), read by offset: the number of the row among its own."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

import pyarrow as pa

from flexstream.errors import ResultLogError
from flexstream.results.late_marks import Entry, chosen_by
from flexstream.state.results.already_logged import KnownLate
from flexstream.state.results.result_log import ResultLog, check_range
from flexstream.state.results.segments import Life, of_generation

if TYPE_CHECKING:
    from flexstream.results.late_log import LateLog


class QueryLate:
    """To be read like a ResultLog, from any thread. The stream's log makes it, and says how it grows."""

    def __init__(self, stream: LateLog, entry: Entry, oldest: int, earlier: ResultLog | None) -> None:
        """`oldest`: the first generation of the name that is shown; `earlier`: rows that an older version has kept."""
        self.stream = stream
        self.entry = entry
        self.schema = stream.rows.schema
        self.known: KnownLate | None = None  # what the log held before a restart, and must not get again
        self._oldest = oldest
        self._earlier = earlier
        self._rows = entry.before
        self._hints = Hints()
        self._listeners: list[Callable[[int], None]] = []
        self._closed = False

    @property
    def name(self) -> str:
        return self.entry.query

    @property
    def bit(self) -> int:
        return self.entry.bit

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def error(self) -> str | None:
        """Why rows of the stream are not written now."""
        return self.stream.error

    # Offsets ------------------------------------------------------------------------------------------------

    @property
    def next_offset(self) -> int:
        """The offset that the next late row of the query will have."""
        return self._rows

    @property
    def first_offset(self) -> int:
        """The oldest late row of the query that is still here."""
        oldest = next((entry.before for _, entry in self._entries()), self._rows)
        if self._earlier is not None and self._earlier.next_offset == oldest:
            return self._earlier.first_offset
        return oldest

    @property
    def generation(self) -> int:
        return self.entry.generation

    @property
    def generation_offset(self) -> int:
        """Where the newest generation begins, or what is left of it."""
        first = self.first_offset
        if self._earlier is not None and self._earlier.generation == self.generation \
                and first < self._earlier.next_offset:
            return self._earlier.generation_offset
        befores = (entry.before for _, entry in self._entries() if entry.generation == self.generation)
        return next(befores, self._rows)

    def _entries(self) -> list[tuple[int, Entry]]:
        """(first row of a segment, what the query is there), the oldest first."""
        found = [(first, table.get(self.name)) for first, table in self.stream.tables()]
        return [(first, entry) for first, entry in found if entry is not None and entry.generation >= self._oldest]

    # Reading ------------------------------------------------------------------------------------------------

    def read(self, offset: int, max_rows: int = 65536) -> list[pa.RecordBatch]:
        """At most `max_rows` of the query's late rows from `offset` on, in order; an empty list at the end.

        Raises ResultLogError as a ResultLog does.
        """
        check_range(offset, max_rows)
        batches: list[pa.RecordBatch] = []
        while max_rows > 0 and offset < self._rows:
            batch = self._read_some(offset, max_rows)
            batches.append(batch)
            offset += batch.num_rows
            max_rows -= batch.num_rows
        return batches

    def _read_some(self, offset: int, most: int) -> pa.RecordBatch:
        """At least one row. Assumes: the query has had one of that offset."""
        while True:
            first = self.first_offset
            if offset < first:
                raise ResultLogError(
                    f"offset {offset} is gone: the log starts at {first} now",
                    code="offset_expired",
                    hint=f"go on at offset {first}, or raise late_bytes / retention_bytes / retention_s",
                )
            try:
                if self._earlier is not None and offset < self._earlier.next_offset:
                    return self._earlier.read(offset, most)[0]  # of one generation
                return self._find(offset, most)
            except ResultLogError as error:
                if error.code != "offset_expired":  # retention was quicker: look what is left
                    raise
                self._hints.forget(offset)

    def _find(self, offset: int, most: int) -> pa.RecordBatch:
        row, skip = self._begin(offset)
        tables = self.stream.tables()
        while True:
            batch = self.stream.log.read_one(row)
            assert batch is not None, "the query has had a row of that offset"
            entry = next(table for first, table in reversed(tables) if first <= row).get(self.name)
            if entry is not None:
                places = chosen_by(batch, entry.bit).nonzero()[0]
                if len(places) > skip:
                    places = places[skip : skip + most]
                    self._hints.add(offset + len(places), row + int(places[-1]) + 1)
                    return of_generation(self.stream.rows.public(batch, places), Life(entry.generation, None))
                skip -= len(places)
            row += batch.num_rows

    def _begin(self, offset: int) -> tuple[int, int]:
        """(row of the stream's log, late rows of the query from there to the one of the offset)."""
        row = self._hints.of(offset)
        if row is not None:
            return row, 0
        row, entry = next(found for found in reversed(self._entries()) if found[1].before <= offset)
        return row, offset - entry.before

    def wait(self, offset: int, timeout: float | None = None) -> bool:
        """Wait until a row with this offset exists; False after `timeout` seconds or when the log closes."""
        with self.stream.grown:
            self.stream.grown.wait_for(lambda: self._closed or self._rows > offset, timeout=timeout)
        return self._rows > offset

    def add_listener(self, listener: Callable[[int], None]) -> Callable[[], None]:
        """Call `listener(next_offset)` after rows came, and on close; returns what stops it. It must be quick."""
        self._listeners.append(listener)

        def remove() -> None:
            if listener in self._listeners:
                self._listeners.remove(listener)

        return remove

    # Life ---------------------------------------------------------------------------------------------------

    def grow(self, rows: int) -> None:
        self._rows += rows

    def tell(self) -> None:
        for listener in list(self._listeners):
            listener(self._rows)

    def enforce_retention(self) -> int:
        removed = self._earlier.enforce_retention() if self._earlier is not None else 0
        return removed + self.stream.enforce_retention()

    def end_generation(self) -> None:
        """What comes next under this name is another query, whatever its plan. For a cancelled one."""
        if self._earlier is not None:
            self._earlier.end_generation()
        self.stream.end(self)

    def close(self) -> None:
        """No row comes any more; waiters get their answer at once. What is there can still be read."""
        if self._closed:
            return
        self._closed = True
        if self._earlier is not None:
            self._earlier.close()
        self.stream.tell({self})


class Hints:
    """Where readers were: offset -> row of the stream's log, of the last ones who came by."""

    def __init__(self, most: int = 256) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._rows: OrderedDict[int, int] = OrderedDict()

    def add(self, offset: int, row: int) -> None:
        with self._lock:
            self._rows[offset] = row
            while len(self._rows) > self._most:
                self._rows.popitem(last=False)

    def of(self, offset: int) -> int | None:
        return self._rows.get(offset)

    def forget(self, offset: int) -> None:
        with self._lock:
            self._rows.pop(offset, None)
