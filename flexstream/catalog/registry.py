"""What runs: streams by name and index, queries by name and number, and whether all workers know of the same ones."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

from flexstream.catalog.entries import RunningQuery, RunningStream, StreamPort
from flexstream.cython_ext.worker.reports import QueryGone, SessionAwake, SessionDone
from flexstream.errors import EngineError, QueryError


class Registry:
    """The streams and queries of one engine. Thread-safe.

    `changing` is held, before `lock`, by whoever changes streams and queries, or moves groups. Streams are never
    removed, so that an index means the same for good; a query that was dropped keeps its number until no worker has it.
    """

    def __init__(self, groups: int) -> None:
        self.groups = groups
        self.lock = threading.RLock()
        self.changing = threading.RLock()
        self.streams: dict[str, RunningStream] = {}
        self.by_index: list[RunningStream] = []
        self.queries: dict[str, RunningQuery] = {}
        self._by_number: dict[int, RunningQuery] = {}
        self._numbers = 0
        self._changes = self._settled = 0
        self._closed = False

    # -- open or closed

    def check_open(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed", code="closed", hint="make a new Engine")

    def close(self) -> bool:
        """Nothing is added or ordered any more. False: it was closed before."""
        with self.lock:
            before, self._closed = self._closed, True
            return not before

    # -- what there is

    def all_streams(self) -> list[RunningStream]:
        """By index. Takes no lock."""
        return list(self.by_index)

    def running(self) -> tuple[list[RunningStream], list[RunningQuery]]:
        with self.lock:
            return list(self.streams.values()), list(self.queries.values())

    def stream(self, name: str) -> RunningStream:
        with contextlib.suppress(KeyError):
            return self.streams[name]
        raise EngineError(
            f"no stream {name!r}", code="unknown_stream", hint=f"known streams: {', '.join(self.streams) or 'none yet'}"
        )

    def port_of(self, stream: str) -> StreamPort | None:
        running = self.streams.get(stream)
        return running.port if running is not None else None

    def query(self, name: str) -> RunningQuery:
        with self.lock, contextlib.suppress(KeyError):
            return self.queries[name]
        raise QueryError(
            f"no query {name!r}", code="unknown_query", hint=f"known queries: {', '.join(self.queries) or 'none yet'}"
        )

    def ordered_queries(self) -> list[str]:
        """Those that need rows in the order of arrival."""
        return [name for name, running in list(self.queries.items()) if running.states[0].ordered]

    def graph_size(self) -> tuple[int, int]:
        """How many streams and operators workers may have."""
        return len(self.by_index), len(self._by_number)

    # -- changes, by whoever holds both locks

    def add_stream(self, running: RunningStream) -> None:
        self.by_index.append(running)
        self.streams[running.stream.name] = running

    def next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def add_query(self, running: RunningQuery) -> None:
        self.queries[running.query.name] = running
        self._by_number[running.number] = running

    def told_workers(self) -> None:
        """Of a query that came or goes. Only then: who waits for the workers must wait behind what they were told."""
        self._changes += 1

    def settle(self, timeout: float, wait_for_workers: Callable[[float], None]) -> bool:
        """Whether all workers have the same queries; waits for that, with a timeout other than 0."""
        changes = self._changes
        if timeout > 0 and self._settled != changes:
            wait_for_workers(time.monotonic() + timeout)
            self._settled = changes
        return self._settled == self._changes

    # -- what workers report, on the collector's thread

    def query_gone(self, worker: int, report: QueryGone) -> None:
        running = self._by_number[report.query]
        running.gone.add(worker)
        if len(running.gone) == len(running.states):
            del self._by_number[report.query]
            running.dropped.set()

    def session_ended_in(self, worker: int, report: SessionDone) -> None:
        self.by_index[report.stream].sessions.ended_in(report.slot, report.groups)

    def session_awake(self, worker: int, report: SessionAwake) -> None:
        self.by_index[report.stream].sessions.awake(report.slot)
