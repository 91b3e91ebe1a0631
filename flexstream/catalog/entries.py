"""What an engine knows of a stream and of a query while they run."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

from flexstream.catalog.sessions import Session, StreamSessions
from flexstream.cython_ext.operators.queries import QueryState
from flexstream.cython_ext.worker.streams import StreamHandle
from flexstream.query.query import Query
from flexstream.results.query_late import QueryLate
from flexstream.results.result_writer import ResultWriter
from flexstream.rows.stream import TIME_LIMIT, Stream
from flexstream.state.results.result_log import ResultLog

MAX_HISTORY = 256


@dataclass(frozen=True, slots=True)
class StreamPort:
    """What the acceptor needs to know of a stream."""

    stream: Stream
    index: int
    sessions: StreamSessions
    handles: list[StreamHandle]  # the stream's state on each worker
    max_future_ns: int | None = None  # how far ahead of the clock its rows may be

    def latest_time(self) -> int:
        """Rows beyond this are rejected, as of now."""
        if self.max_future_ns is None:
            return TIME_LIMIT
        return min((time.time_ns() + self.max_future_ns) // self.stream.unit_ns, TIME_LIMIT)


@dataclass(eq=False)
class RunningStream:
    stream: Stream
    index: int
    handles: list[StreamHandle]
    sessions: StreamSessions
    feeder: Session | None = None
    max_future_ns: int | None = None
    fed_until: int | None = None  # largest event time fed so far
    received_shown: int = 0  # by the status: it never goes back

    def reached(self) -> int | None:
        """The largest event time that a producer which is still there has promised to be past, and its disorder."""
        slots = [one.slot for session in self.sessions.all() for one in session.family()]
        marks = [handle.session_reached(slot) for handle in self.handles for slot in slots]
        known = [mark for mark in marks if mark is not None]
        return max(known) + self.stream.max_disorder if known else None

    @property
    def port(self) -> StreamPort:
        return StreamPort(self.stream, self.index, self.sessions, self.handles, self.max_future_ns)


@dataclass(eq=False)
class RunningQuery:
    query: Query
    number: int
    stream: RunningStream
    states: list[QueryState]  # one per worker
    results: ResultWriter
    log: ResultLog
    late_log: QueryLate
    variant: str = "generic"
    variant_reason: str | None = None  # why it is not compiled
    watched_by: str | None = None  # once compiled: hardware counters, or why not
    history: list[dict[str, Any]] = field(default_factory=list)
    submitted_at: float = field(default_factory=time.monotonic)
    gone: set[int] = field(default_factory=set)
    dropped: threading.Event = field(default_factory=threading.Event)

    def note(self, variant: str, reason: str, choices: str | None = None) -> None:
        """A line of the history: from now on that variant, and why. The oldest lines make room."""
        after_s = round(time.monotonic() - self.submitted_at, 4)
        entry = {"variant": variant, "after_s": after_s, "reason": reason}
        self.history.append(entry if choices is None else {**entry, "choices": choices})
        if len(self.history) > MAX_HISTORY:
            del self.history[1]  # the first says how it came to be compiled
