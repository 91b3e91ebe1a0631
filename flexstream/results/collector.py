"""The collector: the one thread that reads what workers report, and writes results to the logs."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from flexstream.errors import FlexStreamError

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger("flexstream.collector")

MAX_HELD_BYTES = 64 << 20  # of results that a log refused, before workers feel it
RETRY_S = 0.2
LATENCIES_KEPT = 100_000
MOST_LATENCY_NS = 24 * 3600 * 10**9  # a marker's time is the sender's word: beyond that it tells nothing


class Sink(Protocol):
    """Where rows of one query go."""

    def append(self, batch: pa.RecordBatch) -> Any: ...


class Known(Protocol):
    """Rows that a log holds already."""

    def without(self, data: bytes) -> bytes: ...


def _percentiles(values: Any) -> dict[str, Any]:
    if not len(values):
        return {"count": 0, "p50_ms": None, "p99_ms": None, "max_ms": None}
    p50, p99 = np.percentile(values, [50, 99]) / 1e6
    return {
        "count": len(values),
        "p50_ms": round(float(p50), 3),
        "p99_ms": round(float(p99), 3),
        "max_ms": round(int(values.max()) / 1e6, 3),
    }


class Latencies:
    """Marker latencies: the last 100,000, for percentiles. A time that cannot be one is ignored, and counted."""

    def __init__(self) -> None:
        self._kept: deque[int] = deque(maxlen=LATENCIES_KEPT)
        self._at: deque[int] = deque(maxlen=LATENCIES_KEPT)  # when each was seen, CLOCK_MONOTONIC
        self._lock = threading.Lock()
        self.count = 0
        self.ignored = 0
        self.max_ns = 0

    def add(self, ns: int) -> None:
        with self._lock:
            if not 0 <= ns <= MOST_LATENCY_NS:
                self.ignored += 1
                return
            self._kept.append(ns)
            self._at.append(time.monotonic_ns())
            self.count += 1
            self.max_ns = max(self.max_ns, ns)

    def summary(self) -> dict[str, Any]:
        with self._lock:
            values = np.fromiter(self._kept, np.int64, len(self._kept))
        summed = _percentiles(values)
        if summed["count"]:
            summed |= {"count": self.count, "max_ms": round(self.max_ns / 1e6, 3)}
        return {**summed, "ignored": self.ignored}

    def between(self, begin_ns: int, end_ns: int) -> dict[str, Any]:
        """Of the markers that were seen in that time (CLOCK_MONOTONIC) and are still kept."""
        with self._lock:
            at = np.fromiter(self._at, np.int64, len(self._at))
            values = np.fromiter(self._kept, np.int64, len(self._kept))
        first, last = np.searchsorted(at, [begin_ns, end_ns + 1])
        return _percentiles(values[first:last])


class Feed:
    """One query's way from native rows to its log, with what the log refused kept for another try."""

    def __init__(self, name: str, rows: Any, log: Sink) -> None:
        self.name = name
        self.rows = rows
        self.log = log
        self.held: list[pa.RecordBatch] = []
        self.held_bytes = 0
        self.error: str | None = None
        self.callbacks: list[Callable[[pa.RecordBatch], None]] = []
        self.known: Known | None = None  # what the log held before a restart, and must not get again

    def write(self, data: bytes) -> None:
        if self.known is not None:
            data = self.known.without(data)
            if not data:
                return
        self.held.append(self.rows.batch(data))
        self.held_bytes += len(data)
        self.flush()

    def flush(self) -> None:
        """Append what is held, in order. A refusal is kept in `error` and tried again later."""
        while self.held:
            batch = self.held[0]
            try:
                self.log.append(batch)
            except FlexStreamError as error:
                if self.error is None:
                    log.error("results_not_written", extra={"fields": {"query": self.name, "error": str(error)}})
                self.error = str(error)
                return
            self.held.pop(0)
            self.error = None
            for callback in self.callbacks:
                try:
                    callback(batch)
                except Exception:
                    log.exception("results_callback_failed", extra={"fields": {"query": self.name}})
        self.held_bytes = 0


class Collector(threading.Thread):
    """Reads the workers' reports until it is stopped and they have ended.

    `handlers` take what is not a result: {"closed": f(worker, *report), ...}.
    """

    def __init__(self, workers: list[Any], reader_fd: int, handlers: dict[str, Callable[..., None]]) -> None:
        super().__init__(name="fs-collector", daemon=True)
        self._workers = workers
        self._reader_fd = reader_fd
        self._handlers = handlers
        self._results: dict[int, Feed] = {}
        self._late: dict[int, Feed] = {}
        self._stopping = threading.Event()
        self.latencies = Latencies()
        self.failure: BaseException | None = None

    def add_query(self, query_id: int, results: Feed, late: Feed) -> None:
        self._results[query_id] = results
        self._late[query_id] = late

    def remove_query(self, query_id: int) -> None:
        self._results.pop(query_id, None)
        self._late.pop(query_id, None)

    def stop(self) -> None:
        self._stopping.set()
        os.eventfd_write(self._reader_fd, 1)  # it may be asleep

    def run(self) -> None:
        try:
            while not (self._stopping.is_set() and all(worker.ended for worker in self._workers)):
                self._flush_held()
                if self._held_bytes() > MAX_HELD_BYTES:
                    time.sleep(RETRY_S)
                elif not self._read_all() and self._may_sleep():
                    timeout_ms = int(RETRY_S * 1000) if self._held_bytes() else 500
                    self._workers[0].sleep_until_reports(50 if self._stopping.is_set() else timeout_ms)
            while self._read_all():
                pass
            self._flush_held()
        except BaseException as error:  # without a collector nothing moves: make it visible
            self.failure = error
            log.exception("collector_failed")
            raise

    def _may_sleep(self) -> bool:
        quiet = [worker.about_to_sleep() for worker in self._workers]  # each of them must be asked
        return all(quiet)

    def unwritten(self) -> Feed | None:
        """One whose log refused its rows, and refuses them still. From any thread, without waiting."""
        return next((feed for feed in self._feeds() if feed.error is not None), None)

    def _feeds(self) -> list[Feed]:
        return [*self._results.values(), *self._late.values()]

    def _held_bytes(self) -> int:
        return sum(feed.held_bytes for feed in self._feeds())

    def _flush_held(self) -> None:
        for feed in self._feeds():
            if feed.held:
                feed.flush()

    def _read_all(self) -> int:
        """One round over the workers; blocks of a query that came together become one batch."""
        count = 0
        for worker in self._workers:
            reports = worker.reports(256)
            count += len(reports)
            pending: dict[tuple[str, int], list[bytes]] = {}
            for report in reports:
                kind = report[0]
                if kind in ("results", "late"):
                    pending.setdefault((kind, report[1]), []).append(report[2])
                    continue
                self._write(pending)
                if kind == "marker":
                    self.latencies.add(time.time_ns() - report[2])
                elif kind in self._handlers:
                    self._handlers[kind](worker.index, *report[1:])
            self._write(pending)
        return count

    def _write(self, pending: dict[tuple[str, int], list[bytes]]) -> None:
        for (kind, query_id), parts in pending.items():
            feed = (self._results if kind == "results" else self._late).get(query_id)
            if feed is not None:
                feed.write(b"".join(parts))
        pending.clear()
