"""The late rows of a stream, in one log: a row that is late for several of its queries is stored once.

Each stored row has a bit for every query that it was late for (`_late_mask`; which 64 bits they are says `_late_word`).
What a bit means is in the header of the row's segment: the query, its generation, and how many late rows it had before.
So a query's offsets count its own late rows (query_late.py), and no segment is needed to read another.

What a query had when it left the headers is in `queries.json` beside the segments: who has its name next goes on with
its offsets, as another generation.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from flexstream.errors import FlexStreamError, ResultLogError
from flexstream.results.late_marks import WORD_BITS, Entry, chosen_by, table_of, without
from flexstream.results.query_late import QueryLate
from flexstream.results.result_rows import LateRows
from flexstream.state.results.result_log import ResultLog
from flexstream.state.results.segments import sync_directory

log = logging.getLogger("flexstream.collector")

NAMES = "queries.json"


class Held(NamedTuple):
    batch: pa.RecordBatch
    counts: dict[QueryLate, int]  # how many of the rows are late for each


class LateLog:
    """Written by the collector's thread; read, opened and ended for queries from any."""

    def __init__(
        self, stream: str, rows: LateRows, directory: Path | None, retention_bytes: int | None = None,
        retention_s: float | None = None,
    ) -> None:  # fmt: skip
        """Raises ResultLogError: other columns, a damaged log, the disk."""
        self.what = f"late rows of stream {stream}"
        self._stream = stream
        self.rows = rows
        self.held: list[Held] = []
        self.held_bytes = 0
        self.error: str | None = None
        self.grown = threading.Condition()
        self._lock = threading.RLock()  # over what follows, and over appends
        self._seats: dict[tuple[int, int], QueryLate | None] = {}  # (worker, slot)
        self._open: dict[str, QueryLate] = {}
        self._table: dict[str, Entry] = {}  # what bits mean in the newest segment
        self._appending: tuple[int, dict[QueryLate, int]] = (0, {})  # at that offset these are being appended
        try:
            self.log = ResultLog(
                directory, rows.stored, describe=self._described,
                retention_bytes=retention_bytes, retention_s=retention_s,
            )  # fmt: skip
        except ResultLogError as error:
            if error.code != "log_schema":
                raise
            hint = f"give the changed stream another name, or stop, and move {directory} away"
            raise ResultLogError(error.message, code=error.code, hint=hint) from error
        self._saved = self._read_names()
        self._known = dict(self._saved)  # what queries had that are not open, or when they were opened
        self._table = table_of(self.log.plans[-1][1])
        counts = self._count_newest()
        for entry in self._table.values():
            self._note(entry._replace(before=entry.before + counts[entry.query]))

    # Queries ------------------------------------------------------------------------------------------------

    def open(self, query: str, plan: str, earlier: ResultLog | None = None) -> QueryLate:
        """To go on with what the query had, if it is the one of that name. `earlier`: its log of an older version."""
        with self._lock:
            if query in self._open:  # a cancel that is not through yet
                self.end(self._open[query])
            entry = self._next_life(query, plan, earlier)
            oldest = entry.generation if self.log.directory is None else 1  # in memory a name begins anew
            late = QueryLate(self, entry, oldest, earlier)
            self._open[query] = late
            return late

    def _next_life(self, query: str, plan: str, earlier: ResultLog | None) -> Entry:
        known = self._known.get(query)
        if known is None:
            generation, offset = (1, 0) if earlier is None else (earlier.generation, earlier.next_offset)
            return Entry(self._free_bit(), query, generation, plan, offset)
        if known.plan == plan:
            in_use = any(late.bit == known.bit for late in self._open.values())
            return known._replace(bit=self._free_bit()) if in_use else known
        offset = 0 if self.log.directory is None else known.before
        return Entry(self._free_bit(), query, known.generation + 1, plan, offset)

    def _free_bit(self) -> int:
        used = {late.bit for late in self._open.values()}
        return next(bit for bit in range(len(used) + 1) if bit not in used)

    def end(self, late: QueryLate) -> None:
        """It was cancelled: who has its name next is another query. Rows of it that are not written yet are not.

        Raises ResultLogError when the disk refuses: the same plan would go on with this generation then.
        """
        with self._lock:
            if self._open.get(late.name) is not late:
                return
            self._leave(late)
            for at, (batch, counts) in enumerate(self.held):
                if counts.pop(late, 0):
                    self.held[at] = Held(without(batch, late.bit), counts)
            self.held = [held for held in self.held if held.counts]
            self.held_bytes = sum(held.batch.nbytes for held in self.held)
            if late.next_offset:
                self._known[late.name] = late.entry._replace(plan=None, before=late.next_offset)
                self.log.flush()  # what is said to have been is there
                self._write_names()

    def _leave(self, late: QueryLate) -> None:
        del self._open[late.name]
        self._seats = {seat: who for seat, who in self._seats.items() if who is not late}

    def _note(self, entry: Entry) -> None:
        """What is said of a generation that was cancelled stands."""
        known = self._known.get(entry.query)
        if known is None or entry.generation > known.generation or known.plan is not None:
            self._known[entry.query] = entry

    def knows(self, query: str) -> bool:
        return query in self._known

    # Rows in ------------------------------------------------------------------------------------------------

    def seat(self, worker: int, slot: int, late: QueryLate | None) -> None:
        """From here on the worker's slot is that query's; None: of nobody who wants to know."""
        with self._lock:
            self._seats[worker, slot] = late

    def write(self, worker: int, data: bytes) -> None:
        """Rows as a worker writes them."""
        with self._lock:
            table = np.frombuffer(data, self.rows.dtype)
            words: dict[int, dict[QueryLate, np.ndarray[Any, Any]]] = {}
            for late, chosen in self._late_for(worker, table):
                words.setdefault(late.bit // WORD_BITS, {})[late] = chosen
            for word, queries in words.items():
                self._hold(table, word, queries)
        self.flush()

    def _late_for(self, worker: int, table: np.ndarray[Any, Any]) -> Iterator[tuple[QueryLate, np.ndarray[Any, Any]]]:
        """Queries, and which of the rows are late for each."""
        used = int(np.bitwise_or.reduce(table["mask"]))
        for slot in range(WORD_BITS):
            late = self._seats.get((worker, slot)) if used >> slot & 1 else None
            if late is None:
                continue
            chosen = (table["mask"] >> np.uint64(slot)) & np.uint64(1) == 1
            if late.known is not None:
                chosen[chosen] = late.known.fresh(self.rows.one_query(table[chosen]))
            if chosen.any():
                yield late, chosen

    def _hold(self, table: np.ndarray[Any, Any], word: int, queries: dict[QueryLate, np.ndarray[Any, Any]]) -> None:
        masks = np.zeros(len(table), np.uint64)
        for late, chosen in queries.items():
            masks[chosen] |= np.uint64(1 << late.bit % WORD_BITS)
        wanted = masks != 0
        batch = self.rows.batch(table[wanted], word, masks[wanted])
        self.held.append(Held(batch, {late: int(chosen.sum()) for late, chosen in queries.items()}))
        self.held_bytes += batch.nbytes

    def flush(self) -> None:
        """Append what is held, in order. A refusal is kept in `error` and tried again later."""
        grown: set[QueryLate] = set()
        with self._lock:
            while self.held:
                batch, counts = self.held[0]
                try:
                    self._introduce(counts)
                    self._appending = (self.log.next_offset, counts)
                    self.log.append(batch)
                except FlexStreamError as error:
                    if self.error is None:
                        fields = {"stream": self._stream, "error": str(error)}
                        log.error("late_rows_not_written", extra={"fields": fields})
                    self.error = str(error)
                    break
                self.held.pop(0)
                self.error = None
                self._appending = (0, {})
                for late, count in counts.items():
                    late.grow(count)
                grown.update(counts)
            if not self.held:
                self.held_bytes = 0
        self.tell(grown)

    def tell(self, changed: set[QueryLate]) -> None:
        with self.grown:
            self.grown.notify_all()
        for late in changed:
            late.tell()

    def _introduce(self, counts: dict[QueryLate, int]) -> None:
        """Bits of these queries mean them in the newest segment: else another segment begins, which says so."""
        table = self._table
        if all(late.name in table and table[late.name][:3] == late.entry[:3] for late in counts):
            return
        if any(self._known.get(name) != self._saved.get(name) for name in table if name not in self._open):
            self._write_names()  # before the headers forget them
        self._table = {late.name: late.entry for late in self._open.values()}
        try:
            self.log.describe_again()
        except FlexStreamError:
            self._table = table
            raise

    def _described(self, offset: int) -> str:
        """What a segment says that begins at the offset."""
        entries = []
        since, counts = self._appending
        for entry in self._table.values():
            late = self._open.get(entry.query)
            if late is not None and late.generation == entry.generation:
                rows = late.next_offset + (counts.get(late, 0) if offset > since else 0)
                entries.append(entry._replace(before=rows))
            elif entry.query in self._known:
                entries.append(entry._replace(before=self._known[entry.query].before))
        return json.dumps(sorted(entries))

    # What bits mean -----------------------------------------------------------------------------------------

    def tables(self) -> list[tuple[int, dict[str, Entry]]]:
        """(first row, {query: what it is there}) of each segment, the oldest first."""
        return [(first, table_of(plan)) for first, plan in self.log.plans]

    def _count_newest(self) -> dict[str, int]:
        """Of the newest segment's rows, how many are late for each query that it knows."""
        row = self.log.plans[-1][0]
        found = dict.fromkeys(self._table, 0)
        while batches := self.log.read(row):
            for batch in batches:
                row += batch.num_rows
                for entry in self._table.values():
                    found[entry.query] += int(chosen_by(batch, entry.bit).sum())
        return found

    def _names_path(self) -> Path | None:
        return self.log.directory / NAMES if self.log.directory is not None else None

    def _read_names(self) -> dict[str, Entry]:
        path = self._names_path()
        if path is None or not path.exists():
            return {}
        try:
            return {name: Entry(0, name, *said) for name, said in json.loads(path.read_text()).items()}
        except (OSError, ValueError, TypeError) as error:
            raise ResultLogError(
                f"cannot read {path}: {error}",
                code="log_damaged",
                hint="restore it from a backup, or move the directory away: the late rows in it are then gone",
            ) from error

    def _write_names(self) -> None:
        """Whole or not at all: a crash leaves the one before."""
        path = self._names_path()
        if path is None:
            return
        said = {name: entry[2:] for name, entry in sorted(self._known.items())}
        fresh = path.with_suffix(".new")
        try:
            with fresh.open("w") as file:
                json.dump(said, file)
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(path)
            sync_directory(path.parent)
            self._saved = dict(self._known)
        except OSError as error:
            raise ResultLogError(f"cannot write {path}: {error}", code="log_io", hint="look at the disk") from error

    # Life ---------------------------------------------------------------------------------------------------

    def enforce_retention(self) -> int:
        with self._lock:
            return self.log.enforce_retention()

    def close(self) -> None:
        """Flush and stop appends. What is there can still be read."""
        with self._lock:
            for late in list(self._open.values()):
                late.close()
            self.log.close()
