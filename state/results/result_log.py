"""The append-only log of a query's results, read by offset (= row number).

    log = ResultLog(Path("results/ysb"), schema)
    first = log.append(batch)
    for batch in log.read(first): ...

Offsets never change meaning: not by a restart, not by retention (which only removes whole segments at the
old end), not by a failed append. Survives `kill -9` up to the last whole batch, and a power cut up to the
last `flush()`.
"""

from __future__ import annotations

import errno
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pyarrow as pa

from flexstream.errors import ResultLogError
from flexstream.state.results.segments import (
    FIRST_LIFE,
    Life,
    MemorySegment,
    Segment,
    first_offset_of,
    plain,
    sync_directory,
)

SMALLEST_SEGMENT_BYTES = 64 << 10


def check_range(offset: int, max_rows: int) -> None:
    """Raises ResultLogError: no log can be read like that."""
    if offset < 0 or max_rows < 1:
        raise ResultLogError(
            f"cannot read {max_rows} rows from offset {offset}",
            code="bad_offset",
            hint="offset must be 0 or more and max_rows 1 or more",
        )


class ResultLog:
    """Append-only, thread-safe: one appender, many readers.

    directory: where the segments live (made if missing); None keeps everything in memory.
    plan: names what the query does. One with another plan, or after `end_generation()`, begins a new generation.
    retention_bytes, retention_s: what may be forgotten at the old end, in whole segments; None keeps all.
    describe: in place of `plan`, what a segment that begins at that offset says of its rows; must not fail.
    clock: seconds since 1970, for retention; tests pass their own.
    """

    def __init__(
        self,
        directory: Path | None,
        schema: pa.Schema,
        *,
        plan: str | None = None,
        retention_bytes: int | None = None,
        retention_s: float | None = None,
        describe: Callable[[int], str] | None = None,
        segment_bytes: int = 64 << 20,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.schema = plain(schema)
        self.directory = Path(directory) if directory is not None else None
        self.error: str | None = None  # the last append's failure; None when it worked
        self._retention_bytes = retention_bytes
        self._retention_s = retention_s
        if retention_bytes is not None:  # whole segments go: small ones keep what remains close to the bound
            segment_bytes = min(segment_bytes, max(retention_bytes // 8, SMALLEST_SEGMENT_BYTES))
        self._segment_bytes = segment_bytes
        self._describe = describe
        self._clock = clock
        self._lock = threading.Lock()  # guards the list of segments and the fields below
        self._grown = threading.Condition(self._lock)
        self._appending = threading.Lock()
        self._listeners: list[Callable[[int], None]] = []
        self._closed = False
        self._segments: deque[Segment | MemorySegment] = deque()
        try:
            self._open_segments()
            self._begin(plan)
        except OSError as error:
            self._close_segments()
            raise _io_error("open", self.directory, error) from error
        except ResultLogError:
            self._close_segments()
            raise

    def _open_segments(self) -> None:
        if self.directory is None:
            self._segments.append(MemorySegment(0, self._clock()))
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        firsts = {first_offset_of(path): path for path in self.directory.iterdir()}
        firsts.pop(None, None)
        ordered = sorted((first, path) for first, path in firsts.items() if first is not None)
        for (first, path), (following, _) in pairwise(ordered):
            self._segments.append(Segment.open_finished(path, self.schema, first, following))
        life = self._segments[-1].life if self._segments else FIRST_LIFE
        if ordered:
            first, path = ordered[-1]
            self._segments.append(Segment.open_newest(path, self.schema, first, life))
        else:
            self._segments.append(Segment.create(self.directory, self.schema, 0, self._clock(), life))

    # Generations --------------------------------------------------------------------------------------------

    @property
    def generation(self) -> int:
        """How many queries have written results under this name, one after the other."""
        with self._lock:
            return self._segments[-1].life.generation

    @property
    def generation_offset(self) -> int:
        """Where the newest generation begins, or what is left of it."""
        with self._lock:
            newest = self._segments[-1].life.generation
            return next(s.first_offset for s in self._segments if s.life.generation == newest)

    def _begin(self, plan: str | None) -> None:
        """Go on with the newest generation if it is of this plan, else begin one."""
        generation, known = life = self._segments[-1].life
        if plan is not None and known != plan:
            other = known is not None and self.generation_offset < self._segments[-1].next_offset
            self._turn(Life(generation + other, plan))
        elif not self._segments[-1].is_current:
            self._turn(life)

    def end_generation(self) -> None:
        """What comes next under this name is another query, whatever its plan. For a cancelled one.

        Raises ResultLogError when the disk refuses: the same plan would go on with this generation then.
        """
        with self._appending:
            if self._closed or self.generation_offset == self._segments[-1].next_offset:
                return
            try:
                self._turn(Life(self._segments[-1].life.generation + 1, None))
            except OSError as error:
                raise _io_error("write", self.directory, error) from error

    @property
    def plans(self) -> list[tuple[int, str | None]]:
        """(first offset, what it says of its rows) of each segment, the oldest first."""
        with self._lock:
            return [(segment.first_offset, segment.life.plan) for segment in self._segments]

    def describe_again(self) -> None:
        """Rows that come next have another meaning: a segment begins that says so.

        Raises ResultLogError when the disk refuses; nothing has changed then.
        """
        with self._appending:
            try:
                self._turn(self._next_life())
            except OSError as error:
                raise _io_error("write", self.directory, error) from error

    def _next_life(self) -> Life:
        newest = self._segments[-1]
        if self._describe is None:
            return newest.life
        return Life(newest.life.generation, self._describe(newest.next_offset))

    def _turn(self, life: Life) -> None:
        """From here on segments are of that life."""
        if self._segments[-1].rows:
            self._roll(self._clock(), life)
        else:
            self._segments[-1].begin(life)

    def newest_first(self) -> Iterator[pa.RecordBatch]:
        """The batches of the newest generation, the last one first."""
        with self._lock:
            segments = [s for s in self._segments if s.life.generation == self._segments[-1].life.generation]
        for segment in reversed(segments):
            try:
                for start in reversed(segment.starts()):
                    yield segment.load(start)
            except (OSError, pa.ArrowException) as error:
                raise _io_error("read", self.directory, error) from error

    # Reading ------------------------------------------------------------------------------------------------

    @property
    def first_offset(self) -> int:
        """The oldest row that is still here."""
        with self._lock:
            return self._segments[0].first_offset

    @property
    def next_offset(self) -> int:
        """The offset that the next appended row will have."""
        with self._lock:
            return self._segments[-1].next_offset

    @property
    def bytes(self) -> int:
        """Bytes on disk (in memory for a log without a directory)."""
        with self._lock:
            return sum(segment.size_bytes for segment in self._segments)

    @property
    def closed(self) -> bool:
        return self._closed

    def read(self, offset: int, max_rows: int = 65536) -> list[pa.RecordBatch]:
        """At most `max_rows` rows from `offset` on, in order; an empty list at the end.

        Raises ResultLogError with code `offset_expired` when retention has removed `offset`: the caller
        decides whether to go on at `first_offset`, because rows in between are lost to it.
        """
        check_range(offset, max_rows)
        batches: list[pa.RecordBatch] = []
        while max_rows > 0:
            batch = self.read_one(offset)
            if batch is None:
                break
            batch = batch.slice(0, min(max_rows, batch.num_rows))
            batches.append(batch)
            offset += batch.num_rows
            max_rows -= batch.num_rows
        return batches

    def read_one(self, offset: int) -> pa.RecordBatch | None:
        """The rest of the batch that holds `offset`, which is of one segment; None at the end. Raises as `read`."""
        while True:
            with self._lock:
                first = self._segments[0].first_offset
                if offset < first:
                    raise ResultLogError(
                        f"offset {offset} is gone: the log now begins at {first}",
                        code="offset_expired",
                        hint=f"continue at offset {first}, or raise retention_bytes / retention_s",
                    )
                if offset >= self._segments[-1].next_offset:
                    return None
                segment = next(s for s in reversed(self._segments) if s.first_offset <= offset)
            try:
                return segment.load(offset)
            except FileNotFoundError as error:
                if segment.first_offset >= self.first_offset:  # not retention: somebody removed the file
                    raise _io_error("read", self.directory, error) from error
            except (OSError, pa.ArrowException) as error:
                raise _io_error("read", self.directory, error) from error

    def wait(self, offset: int, timeout: float | None = None) -> bool:
        """Wait until a row with this offset exists; False after `timeout` seconds or when the log closes."""
        with self._grown:
            self._grown.wait_for(
                lambda: self._closed or self._segments[-1].next_offset > offset, timeout=timeout
            )
            return bool(self._segments) and self._segments[-1].next_offset > offset

    def add_listener(self, listener: Callable[[int], None]) -> Callable[[], None]:
        """Call `listener(next_offset)` after each append, on its thread, and on close; returns what stops it.

        It must be quick and must not append (an event loop's `call_soon_threadsafe` is right).
        """
        with self._lock:
            self._listeners.append(listener)

        def remove() -> None:
            with self._lock:
                if listener in self._listeners:
                    self._listeners.remove(listener)

        return remove

    # Writing ------------------------------------------------------------------------------------------------

    def append(self, batch: pa.RecordBatch) -> int:
        """Add the batch's rows; returns the offset of the first.

        Raises ResultLogError (`disk_full`, `log_io`, `log_schema`) and leaves the log as it was: the
        same append may be tried again.
        """
        if not batch.schema.equals(self.schema, check_metadata=False):
            raise ResultLogError(
                f"a batch with columns {batch.schema.names} does not fit the log's {self.schema.names}",
                code="log_schema",
                hint="append batches of the query's result_schema()",
            )
        with self._appending:
            if self._closed:
                raise ResultLogError("the result log is closed", code="log_closed", hint=None)
            offset = self._segments[-1].next_offset
            if batch.num_rows == 0:
                return offset
            try:
                self._append(batch)
            except OSError as error:
                failure = _io_error("write", self.directory, error)
                self.error = str(failure)
                raise failure from error
            self.error = None
            self._enforce_retention()
            with self._grown:
                self._grown.notify_all()
                listeners = list(self._listeners)
        for listener in listeners:
            listener(offset + batch.num_rows)
        return offset

    def _append(self, batch: pa.RecordBatch) -> None:
        now_s = self._clock()
        active = self._segments[-1]
        if active.rows and active.size_bytes + batch.nbytes > self._segment_bytes:
            active = self._roll(now_s)
        active.append(batch, now_s)

    def _roll(self, now_s: float, life: Life | None = None) -> Segment | MemorySegment:
        active = self._segments[-1]
        fresh: Segment | MemorySegment
        life = life or self._next_life()
        if self.directory is None:
            fresh = MemorySegment(active.next_offset, now_s, life)
        else:
            active.sync()
            fresh = Segment.create(self.directory, self.schema, active.next_offset, now_s, life)
        with self._lock:
            self._segments.append(fresh)
        active.close()
        return fresh

    def enforce_retention(self) -> int:
        """Forget what the retention settings allow (each append does it too); returns the segments removed.

        An idle log needs this call from a timer, or its old rows stay. Raises ResultLogError when the disk
        refuses; nothing is lost then.
        """
        with self._appending:
            if self._closed:
                return 0
            try:
                return self._enforce_retention()
            except OSError as error:
                raise _io_error("trim", self.directory, error) from error

    def _enforce_retention(self) -> int:
        now_s = self._clock()
        removed = 0
        active = self._segments[-1]
        if self._expired(active, now_s) and active.rows:
            try:
                self._roll(now_s)
            except OSError:
                return 0  # no room for a new file: the next append reports it
        while len(self._segments) > 1 and (self._expired(self._segments[0], now_s) or self._oversize()):
            with self._lock:
                old = self._segments.popleft()
            old.remove()
            removed += 1
        if removed and self.directory is not None:
            sync_directory(self.directory)
        return removed

    def _expired(self, segment: Segment | MemorySegment, now_s: float) -> bool:
        return self._retention_s is not None and segment.last_append_s < now_s - self._retention_s

    def _oversize(self) -> bool:
        total = sum(segment.size_bytes for segment in self._segments)
        return self._retention_bytes is not None and total > self._retention_bytes

    def flush(self) -> None:
        """Make everything appended so far survive a power cut."""
        with self._appending:
            if not self._closed:
                try:
                    self._segments[-1].sync()
                except OSError as error:
                    raise _io_error("flush", self.directory, error) from error

    def close(self) -> None:
        """Flush and stop appends; waiters get their answer at once. What is there can still be read.

        Closing again does nothing.
        """
        if self._closed:
            return
        try:
            self.flush()
        finally:
            with self._appending, self._grown:
                self._closed = True
                for segment in self._segments:
                    segment.close()
                self._grown.notify_all()
                listeners = list(self._listeners)
            for listener in listeners:
                listener(self.next_offset)

    def delete(self) -> None:
        """Close the log and remove its files. For a cancelled query whose results are not wanted any more."""
        self.close()
        for segment in self._segments:
            segment.remove()
        if self.directory is not None:
            self.directory.rmdir()

    def _close_segments(self) -> None:
        self._closed = True
        for segment in self._segments:
            segment.close()

    def __enter__(self) -> ResultLog:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _io_error(action: str, directory: Path | None, error: BaseException) -> ResultLogError:
    number = getattr(error, "errno", None)
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return ResultLogError(
            f"cannot {action} the result log in {directory}: {error}",
            code="disk_full",
            hint="free some space or lower retention_bytes; nothing is lost, and the write can be tried again",
        )
    return ResultLogError(
        f"cannot {action} the result log in {directory}: {error}",
        code="log_io",
        hint="check the disk and the permissions of the directory",
    )
