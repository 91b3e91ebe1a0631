"""Rows without sockets: grouped by key, handed to workers in place, with a bound on what is under way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from flexstream.catalog.sessions import FEED
from flexstream.cython_ext.produce.partition import by_group
from flexstream.cython_ext.worker.placement import Placement
from flexstream.cython_ext.worker.worker import Worker
from flexstream.errors import EngineError
from flexstream.rows.stream import TIME_LIMIT, event_time

if TYPE_CHECKING:
    from flexstream.catalog.entries import RunningStream

IN_FLIGHT_BYTES = 64 << 20
IN_FLIGHT_PIECES = 4096


class Feeder:
    """The in-process producer of an engine: one session per stream, registered when it is first fed.

    A worker reads fed rows in place; their buffer is kept here until the worker has passed them (its ticket).
    """

    def __init__(
        self,
        workers: list[Worker],
        groups: int,
        placement: Placement,
        routing: threading.Lock,
        check_alive: Callable[[], None],
    ) -> None:
        self._workers = workers
        self._groups = groups
        self._placement = placement
        self._routing = routing
        self._check_alive = check_alive
        self._lock = threading.Lock()
        self.handed: dict[int, Any] = {}  # stream -> rows per group that workers were given, so far
        self._lives = 0  # a session that ended does not come back: the next has a later epoch
        self._in_flight: list[tuple[Worker, int, Any, int]] = []  # worker, ticket, buffer, bytes

    def feed(
        self, running: RunningStream, rows: Any, group: int | None, watermark: int | bool | None, wait: bool,
        missing: Any = None,
    ) -> None:  # fmt: skip
        if watermark is not None and watermark is not False:
            watermark = event_time("watermark", watermark)
        if watermark is not None and watermark is not False and not -TIME_LIMIT <= watermark <= TIME_LIMIT:
            raise EngineError(
                f"watermark={watermark} is out of range",
                code="bad_watermark",
                hint="give an event time from -2**62 to 2**62; finish() ends the stream",
            )
        packed = running.stream.schema.pack(rows, missing)
        flat = packed.view(np.uint8).reshape(-1) if len(packed) else np.empty(0, np.uint8)
        with self._lock:
            if running.feeder is None or running.feeder.state in ("ending", "ended"):
                running.feeder = self._register(running)
            slot = running.feeder.slot
            if group is not None:
                self._feed_group(running, slot, flat, group, wait)
            else:
                self._feed_mixed(running, slot, flat)
            if watermark is None:
                watermark = self._reached(running, packed)
            if watermark is not None and watermark is not False:
                for worker in self._workers:
                    worker.session_watermark(running.index, slot, int(watermark), fed=True)

    def _reached(self, running: RunningStream, packed: Any) -> int | None:
        """The watermark that the rows bring: their largest time that has a window, less the bound on disorder."""
        times = packed[running.stream.time]
        latest, bound = int(times.max(initial=-TIME_LIMIT - 1)), running.port.latest_time()
        if latest > bound:  # such rows are rejected; they must not make others late
            latest = int(times.max(initial=-TIME_LIMIT - 1, where=times <= bound))
        if latest >= -TIME_LIMIT:
            running.fed_until = latest if running.fed_until is None else max(latest, running.fed_until)
        if running.fed_until is None:
            return None
        return max(running.fed_until - running.stream.max_disorder, -TIME_LIMIT)

    def _register(self, running: RunningStream) -> Any:
        if running.feeder is not None:
            while not running.feeder.ended.wait(0.2):  # the one before is still being worked off
                self._check_alive()
        running.fed_until = None
        self._lives += 1
        return running.sessions.register(FEED, self._lives, "in-process", kind=FEED)

    def _feed_group(self, running: RunningStream, slot: int, flat: Any, group: int, wait: bool) -> None:
        if not 0 <= group < self._groups:
            raise EngineError(f"group={group} must be from 0 to {self._groups - 1}", code="bad_group")
        schema = running.stream.schema
        first = flat[: schema.row_bytes].view(schema.dtype)
        if len(first) and running.stream.group_of(first, self._groups)[0] != group:
            raise EngineError(
                f"the first row does not belong to group {group}",
                code="wrong_group",
                hint="leave out group= for mixed rows",
            )
        self._hand_over(running.index, group, slot, flat, schema.row_bytes, 0)
        if wait:
            self._wait_for_all()
        elif len(self._in_flight) > IN_FLIGHT_PIECES:
            self._release()

    def _hand_over(self, stream: int, group: int, slot: int, piece: Any, row_bytes: int, size: int) -> tuple[Any, int]:
        """To the group's worker, before or after a move of the group but not in the middle of its beginning.

        The buffer is noted before the worker can see it, so that nothing frees it too early.
        """
        with self._routing:
            worker = self._workers[self._placement.owner(group)]
            self._in_flight.append((worker, worker.next_ticket, piece, size))
            handed = self.handed.setdefault(stream, np.zeros(self._groups))
            sequence = int(handed[group])
            handed[group] += len(piece) // row_bytes
            return worker, worker.feed(stream, group, slot, piece, row_bytes, sequence)

    def _feed_mixed(self, running: RunningStream, slot: int, flat: Any) -> None:
        row_bytes = running.stream.schema.row_bytes
        step = max(1, IN_FLIGHT_BYTES // 4 // row_bytes) * row_bytes
        for start in range(0, len(flat), step):
            part = flat[start : start + step]
            ordered, offsets = by_group(part, row_bytes, running.stream.key_hasher, self._groups)
            ends = (offsets * row_bytes).tolist()
            used = [group for group in range(self._groups) if ends[group + 1] > ends[group]]
            self._feed_parts(running, slot, [(group, ordered[ends[group] : ends[group + 1]]) for group in used])

    def feed_parts(self, running: RunningStream, slot: int, parts: list[tuple[int, Any]]) -> dict[Any, int]:
        """(group, its rows) of another in-process session; returns each worker's ticket of the last of them."""
        with self._lock:
            return self._feed_parts(running, slot, parts)

    def _feed_parts(self, running: RunningStream, slot: int, parts: list[tuple[int, Any]]) -> dict[Any, int]:
        """All of them at once, as `_hand_over` does it with one."""
        stream, row_bytes = running.index, running.stream.schema.row_bytes
        tickets: dict[Any, int] = {}
        with self._routing:
            owner = self._placement.owner
            owners = {group: self._workers[owner(group)] for group in {group for group, _ in parts}}
            sizes = dict.fromkeys(owners.values(), 0)
            for group, piece in parts:
                worker = owners[group]
                tickets[worker] = tickets.get(worker, worker.next_ticket - 1) + 1
                sizes[worker] += len(piece)
            self._in_flight += [(worker, tickets[worker], parts, sizes[worker]) for worker in tickets]
            handed = self.handed.setdefault(stream, np.zeros(self._groups))
            sequences = handed.astype(np.int64).tolist()
            groups = [group for group, _ in parts]
            np.add.at(handed, groups, [len(piece) // row_bytes for _, piece in parts])
            for group, piece in parts:
                owners[group].feed(stream, group, slot, piece, row_bytes, sequences[group])
                sequences[group] += len(piece) // row_bytes
        self._release()
        return tickets

    def _release(self) -> None:
        """Forget buffers that were worked off; wait while too much is under way."""
        self._in_flight = [item for item in self._in_flight if item[0].fed < item[1]]
        size = sum(item[3] for item in self._in_flight)
        while size > IN_FLIGHT_BYTES:
            size -= self._wait_for_first()

    def _wait(self, worker: Worker, ticket: int) -> None:
        while not worker.wait_fed(ticket, 0.2):
            if worker.ended:
                raise EngineError("the engine was closed while rows were fed", code="closed")
            self._check_alive()

    def _wait_for_first(self) -> int:
        worker, ticket, _, size = self._in_flight[0]
        self._wait(worker, ticket)
        self._in_flight.pop(0)
        return size

    def _wait_for_all(self) -> None:
        while self._in_flight:
            self._wait_for_first()

    def rows_handed(self, running: RunningStream) -> int:
        """Of the stream, to workers, so far."""
        handed = self.handed.get(running.index)
        return 0 if handed is None else int(handed.sum())

    def flush(self) -> None:
        with self._lock:
            self._wait_for_all()

    def end(self, streams: list[RunningStream]) -> None:
        """End of stream for what was fed."""
        with self._lock:
            for running in streams:
                if running.feeder is not None and running.feeder.state not in ("ending", "ended"):
                    running.sessions.end(running.feeder, None)
