"""The collector: the one thread that reads what workers report, and writes results to the logs."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from flexstream.errors import EngineError
from flexstream.results.late_log import LateLog
from flexstream.results.query_late import QueryLate
from flexstream.results.result_writer import ResultWriter

log = logging.getLogger("flexstream.collector")

MAX_HELD_BYTES = 64 << 20  # of results that a log refused, before workers feel it
RETRY_S = 0.2
MOST_REPORTS = 256  # of a worker at a time
MOST_AHEAD = 16_384  # reports read while a callback waits: a few hundred megabytes at the very most
AHEAD_S = 0.001
LATENCIES_KEPT = 100_000
MOST_LATENCY_NS = 24 * 3600 * 10**9  # a marker's time is the sender's word: beyond that it tells nothing


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


class Collector(threading.Thread):
    """Reads the workers' reports until it is stopped and they have ended."""

    def __init__(self, workers: list[Any], reader_fd: int) -> None:
        super().__init__(name="fs-collector", daemon=True)
        self._workers = workers
        self._reader_fd = reader_fd
        self._handlers: dict[str, Callable[..., None]] = {}
        self._results: dict[int, ResultWriter] = {}
        self._late: dict[int, QueryLate] = {}
        self._late_logs: dict[int, LateLog] = {}  # by stream
        self._ahead: deque[tuple[int, list[tuple[Any, ...]]]] = deque()  # read already: (worker, its reports)
        self._stopping = threading.Event()
        self.latencies = Latencies()
        self.failure: BaseException | None = None

    def subscribe(self, kind: str, handler: Callable[..., None]) -> None:
        """`handler(worker, *report)` takes what is not a result: "closed", "pong", ... One per kind, before `start`.

        Not in the constructor: most of those who take reports wait for the collector, and are made after it.
        """
        self._handlers[kind] = handler

    def check_alive(self) -> None:
        """Raises EngineError when it failed: nobody will read what workers report."""
        if self.failure is not None:
            raise EngineError(f"the collector failed: {self.failure}", code="failed")

    def add_query(self, query_id: int, stream: int, results: ResultWriter, late: QueryLate) -> None:
        self._results[query_id] = results
        self._late[query_id] = late
        self._late_logs[stream] = late.stream

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

    def unwritten(self) -> ResultWriter | LateLog | None:
        """One whose log refused its rows, and refuses them still. From any thread, without waiting."""
        return next((writer for writer in self._writers() if writer.error is not None), None)

    def _writers(self) -> list[ResultWriter | LateLog]:
        return [*self._results.values(), *self._late_logs.values()]

    def _held_bytes(self) -> int:
        return sum(writer.held_bytes for writer in self._writers())

    def _flush_held(self) -> None:
        for writer in self._writers():
            if writer.held:
                writer.flush()

    def _read_all(self) -> int:
        """One round over the workers; blocks of a query that came together become one batch."""
        count = 0
        for worker in self._workers:
            self._ahead.append((worker.index, worker.reports(MOST_REPORTS)))
            while self._ahead:
                index, reports = self._ahead.popleft()
                count += len(reports)
                self._work_through(index, reports)
        return count

    def _work_through(self, worker: int, reports: list[tuple[Any, ...]]) -> None:
        """In their order: a slot in late rows is that of the query that the worker's last report of it named."""
        pending: dict[tuple[str, int], list[bytes]] = {}
        for report in reports:
            kind = report[0]
            if kind in ("results", "late"):
                pending.setdefault((kind, report[1]), []).append(report[2])
                continue
            self._write(worker, pending)
            if kind == "marker":
                self.latencies.add(time.time_ns() - report[2])
            elif kind == "query_here":
                query_id, stream, slot = report[1:]
                self._late_logs[stream].seat(worker, slot, self._late.get(query_id))
            elif kind in self._handlers:
                self._handlers[kind](worker, *report[1:])
        self._write(worker, pending)

    @contextmanager
    def reading_on(self) -> Iterator[None]:
        """Around what waits for workers. In a callback they may wait for the collector, which would wait for itself:
        another thread reads on meanwhile. What it reads is worked through in its order, after the callback.
        """
        if threading.current_thread() is not self:
            yield
            return
        enough = threading.Event()
        reader = threading.Thread(target=self._read_ahead, args=(enough,), name="fs-reading-on", daemon=True)
        reader.start()
        try:
            yield
        finally:
            enough.set()
            reader.join()

    def _read_ahead(self, enough: threading.Event) -> None:
        while not enough.wait(AHEAD_S):
            if sum(len(reports) for _, reports in self._ahead) >= MOST_AHEAD:
                continue
            for worker in self._workers:
                if reports := worker.reports(MOST_REPORTS):
                    self._ahead.append((worker.index, reports))

    def _write(self, worker: int, pending: dict[tuple[str, int], list[bytes]]) -> None:
        for (kind, number), parts in pending.items():
            if kind == "late":
                self._late_logs[number].write(worker, b"".join(parts))
            elif number in self._results:
                self._results[number].write(b"".join(parts))
        pending.clear()
