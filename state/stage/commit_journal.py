"""The journal of committed batches: which were applied, and which must be applied again after a restart.

A text file of one record per line, `crc32 json`. A record counts when its line is whole; a torn last line is cut, a bad
line before others is damage and said. Appends are durable (fsync) when they return; a failed one leaves the journal as
it was. When it has grown it is written anew, beside, and renamed.

    commit  a batch: its key (sink, query, batch), its stages, and what the engine looked like before it
    done    batches whose windows are all in the result log: their stages may go
    gone    a query was cancelled: the batches before do not count for one of that name that comes later
    applying  the batch that is being applied from here on, or null; it is not waited for on the disk. The last one of a
            process that died names the batch that it died of, perhaps
    aside   a batch that is not applied any more, because each time the process died of it
    state   the beginning of a journal that was written anew
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import zlib
from pathlib import Path
from typing import Any

from flexstream.errors import StageError
from flexstream.state.results.segments import sync_directory
from flexstream.state.stage.applied import DEFAULT_REMEMBER_S, AppliedBatches
from flexstream.state.stage.stage_file import io_error

NAME = "journal"
REWRITE_BYTES = 1 << 20

Record = dict[str, Any]


class CommitJournal:
    """Which batches are committed, and which are applied. `directory` None keeps it in memory. Thread-safe."""

    def __init__(self, directory: Path | None) -> None:
        """Read the journal. Raises StageError (`journal_damaged`, `stage_io`)."""
        self.path = directory / NAME if directory is not None else None
        self.applied = AppliedBatches()
        self.kept: dict[int, Record] = {}  # batches whose windows are not all in the log, by number, in order
        self.sinks: dict[str, dict[str, int | None]] = {}  # stream -> live sink -> largest event time applied
        self.dropped_stages: list[str] = []  # of batches that were done when the journal was read
        self.aside: list[Record] = []  # batches that were set aside: who, which, how many rows, their stages
        self.attempts: dict[int, int] = {}  # number of a kept batch -> processes that died while they applied it
        self._applying: int | None = None
        self.next_number = 1
        self._state_from = 0  # `applied` and `sinks` know already of batches with a lower number
        self._lock = threading.RLock()
        self._fd = -1
        self._size = 0
        self._written_size = 0  # when it was last written anew
        if self.path is not None:
            try:
                self._open(self.path)
            except OSError as error:
                raise io_error("open", self.path, error) from error

    def _open(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
        data = path.read_bytes()
        lines = data.split(b"\n")
        torn = len(lines.pop())
        at = 0
        for index, line in enumerate(lines):
            record = _parse(line)
            if record is None:
                if index < len(lines) - 1:
                    raise StageError(
                        f"{path} is damaged in line {index + 1}, which is not the last one",
                        code="journal_damaged",
                        hint="restore it from a backup: without it, committed rows of open windows are lost",
                    )
                torn += len(line) + 1
                break
            self._take(record)
            at += len(line) + 1
        self._size = at
        if torn:
            os.ftruncate(self._fd, at)
            os.fsync(self._fd)
        if self._applying in self.kept:
            self.attempts[self._applying] = self.attempts.get(self._applying, 0) + 1
        self._applying = None
        sync_directory(path.parent)

    # What it says -------------------------------------------------------------------------------------------

    def is_applied(self, sink: str, query: str, batch: int) -> bool:
        with self._lock:
            known = self.applied.get(sink, query)
            return known is not None and batch in known

    def applied_rows(self, sink: str, query: str, batch: int) -> int | None:
        """The rows of a batch that was applied; None: not known any more, -1: known as one of many."""
        with self._lock:
            known = self.applied.get(sink, query)
            return None if known is None else known.batches.get(batch, -1)

    def kept_of(self, stream: str) -> list[Record]:
        return [record for record in self.kept_records() if record["stream"] == stream]

    def kept_records(self) -> list[Record]:
        """In the order of their commits."""
        with self._lock:
            return list(self.kept.values())

    def _take(self, record: Record) -> None:
        kind = record["op"]
        if kind == "commit":
            self._take_commit(record)
        elif kind == "done":
            for number in record["numbers"]:
                self.attempts.pop(number, None)
                done = self.kept.pop(number, None)
                if done is not None:
                    self.dropped_stages += [stage["stage"] for stage in done["stages"]]
        elif kind == "gone":
            for kept in self.kept.values():
                kept["queries"] = [name for name in kept["queries"] if name != record["query"]]
        elif kind == "applying":
            if self._applying is not None:
                self.attempts.pop(self._applying, None)
            self._applying = record["number"]
        elif kind == "aside":
            self._take_aside(record)
        elif kind == "state":
            self.next_number = self._state_from = record["next"]
            self.sinks = record["sinks"]
            self.aside = record.get("aside", [])
            self.attempts = {int(number): count for number, count in record.get("attempts", {}).items()}
            self.applied.from_list(record["applied"])

    def _take_commit(self, record: Record) -> None:
        self.next_number = max(self.next_number, record["number"] + 1)
        if record["batch"] is not None and record["number"] >= self._state_from:
            about = record["rows"], record["at"], record.get("remember_s", DEFAULT_REMEMBER_S)
            self.applied.add(record["sink"], record["query"], record["batch"], *about)
        if record["stream"] is None:
            return
        self.kept[record["number"]] = record
        if record["number"] < self._state_from:
            return
        live = self.sinks.setdefault(record["stream"], {})
        if record["end"]:
            live.pop(record["sink"], None)
        else:
            live[record["sink"]] = record["until"]

    def _take_aside(self, record: Record) -> None:
        bad = self.kept.pop(record["number"], None)
        if bad is None:
            return
        about = {name: bad[name] for name in ("number", "sink", "query", "batch", "stream", "rows")}
        stages = [stage["stage"] for stage in bad["stages"]]
        self.aside.append({**about, "stages": stages, "died": self.attempts.pop(bad["number"], 0), "at": record["at"]})
        self._without_its_time(bad)

    def _without_its_time(self, bad: Record) -> None:
        """What its sink has reached is what it has reached without the batch."""
        if bad["end"]:  # later batches of the sink begin anew
            return
        sink, until = bad["sink"], bad["until"]
        reached = {sink: bad["before"][sink]} if sink in bad["before"] else {}
        for later in self.kept.values():
            if later["number"] < bad["number"] or later["stream"] != bad["stream"]:
                continue
            if later["before"].get(sink) == until:
                later["before"] = _without(later["before"], sink) | reached
            if later["sink"] == sink and later["until"] == until:
                times = [t for t in (reached.get(sink), later["max_time"]) if t is not None]
                later["until"] = max(times, default=None)
                reached = {sink: later["until"]}
        live = self.sinks.get(bad["stream"], {})
        if sink in live and live[sink] == until:
            self.sinks[bad["stream"]] = _without(live, sink) | reached

    # Writing ------------------------------------------------------------------------------------------------

    def commit(self, record: Record) -> Record:
        """Make a batch applied, for good. StageError: it is not, and nothing else has changed."""
        with self._lock:
            if record["batch"] is not None:
                self.applied.make_room(record["sink"], record["query"])
            record = {"op": "commit", "number": self.next_number, "at": time.time(), **record}
            self._append(record)
            self._take(record)
            return record

    def done(self, numbers: list[int]) -> None:
        with self._lock:
            record = {"op": "done", "numbers": numbers}
            self._append(record)
            self._take(record)
            self.dropped_stages.clear()  # the caller removes them; only a reopened journal may find them left over

    def applying(self, number: int | None) -> None:
        """Batch `number` is being applied from now on; the one before is applied. For whoever finds out later what a
        process died of: not worth a wait for the disk, nor an error.
        """
        with self._lock, contextlib.suppress(StageError):
            record = {"op": "applying", "number": number}
            self._append(record, sync=False)
            self._take(record)

    def set_aside(self, number: int) -> None:
        """Do not apply it any more."""
        with self._lock:
            record = {"op": "aside", "number": number, "at": time.time()}
            self._append(record)
            self._take(record)

    def query_gone(self, name: str) -> None:
        with self._lock:
            if any(name in record["queries"] for record in self.kept.values()):
                record = {"op": "gone", "query": name}
                self._append(record)
                self._take(record)

    def _append(self, record: Record, *, sync: bool = True) -> None:
        if self.path is None:
            return
        if self._fd < 0:
            raise StageError("the engine is closed", code="closed")
        line = _line(record)
        try:
            if os.pwrite(self._fd, line, self._size) != len(line):
                raise OSError(28, os.strerror(28))
            if sync:
                os.fsync(self._fd)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size)
                os.fsync(self._fd)
            raise io_error("write", self.path, error) from error
        self._size += len(line)

    @property
    def has_grown(self) -> bool:
        return self._size >= max(REWRITE_BYTES, 2 * self._written_size)

    def rewrite(self, *, always: bool = False) -> None:
        """Write it anew when it has grown: what is not needed any more goes. StageError leaves the old one."""
        with self._lock:
            if self._fd >= 0 and (self.has_grown or always):
                self._rewrite()

    def _rewrite(self) -> None:
        assert self.path is not None
        state = {
            "op": "state",
            "next": self.next_number,
            "sinks": self.sinks,
            "aside": self.aside,
            "attempts": self.attempts,
            "applied": self.applied.to_list(),
        }
        now = [] if self._applying is None else [{"op": "applying", "number": self._applying}]
        data = b"".join(map(_line, [state, *self.kept.values(), *now]))
        beside = self.path.with_name(NAME + ".new")
        try:
            fd = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o640)
            try:
                if os.pwrite(fd, data, 0) != len(data):
                    raise OSError(28, os.strerror(28))
                os.fsync(fd)
                os.replace(beside, self.path)
                sync_directory(self.path.parent)
            except OSError:
                os.close(fd)
                raise
        except OSError as error:
            beside.unlink(missing_ok=True)
            raise io_error("write", beside, error) from error
        os.close(self._fd)
        self._fd, self._size = fd, len(data)
        self._written_size = len(data)

    def close(self) -> None:
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1


def _without(sinks: dict[str, int | None], sink: str) -> dict[str, int | None]:
    return {name: reached for name, reached in sinks.items() if name != sink}


def _line(record: Record) -> bytes:
    body = json.dumps(record, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(body), body)


def _parse(line: bytes) -> Record | None:
    crc, _, body = line.partition(b" ")
    try:
        if len(crc) != 8 or int(crc, 16) != zlib.crc32(body):
            return None
        record = json.loads(body)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
