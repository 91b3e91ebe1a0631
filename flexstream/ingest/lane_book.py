"""Further lanes: which were asked for, of whom, and which are open.

All connections that a producer has for a group share a bucket, and there is one of them. So that a group of few
producers can be served by several workers, they are asked for further lanes, one for each of these workers, from ports
that the NIC steers there. Producers that do not know lanes are never asked.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from flexstream.wire.frames import lanes_frame

if TYPE_CHECKING:
    from flexstream.catalog.entries import RunningStream
    from flexstream.catalog.sessions import Session

NUMBERS = 1 << 31


class LaneBook:
    """Which further lanes producers were asked for, and which of them are open. Thread-safe."""

    def __init__(
        self,
        streams: Callable[[], Sequence[RunningStream]],
        placement: Callable[[], list[int]],
        ordered_queries: Callable[[], list[str]] = list,
    ) -> None:
        self._streams = streams
        self._placement = placement
        self._ordered_queries = ordered_queries  # they need a producer's rows of a group on one connection
        self._lock = threading.Lock()
        self._asked: dict[int, dict[int, int]] = {}  # group: {number: worker}
        # A number is used once, also if producers outlive the engine that gave it out.
        self._last = int(time.time()) % NUMBERS

    def _producers(self) -> Iterator[tuple[int, Session]]:
        for running in self._streams():
            for session in running.sessions.all():
                if session.most_lanes and session.state not in ("ending", "ended"):
                    yield running.index, session

    def can_open(self, group: int) -> bool:
        if self._ordered_queries():
            return False
        return any(session.groups[group] > 0 and session.speak is not None for _, session in self._producers())

    def ask(self, group: int, workers: Sequence[int]) -> int:
        with self._lock:
            self._asked[group] = {}
            for worker in workers:
                self._last = self._last % NUMBERS + 1
                self._asked[group][self._last] = worker
        return self._tell(group)

    def release(self, group: int) -> None:
        with self._lock:
            if self._asked.pop(group, None) is None:
                return
        self._tell(group)

    def _tell(self, group: int) -> int:
        """All that are asked for now; returns how many producers with rows for the group have been told."""
        told = 0
        for _, session in list(self._producers()):
            if (speak := session.speak) is not None:
                speak(lanes_frame(group, self.wanted(group)))
                told += session.groups[group] > 0
        return told

    def wanted(self, group: int) -> dict[int, int]:
        """{number: group whose bucket it should come to}."""
        with self._lock:
            asked = dict(self._asked.get(group, {}))
        return {number: self._steer(group, worker) for number, worker in asked.items()}

    def all_wanted(self) -> dict[int, dict[int, int]]:
        with self._lock:
            groups = list(self._asked)
        return {group: self.wanted(group) for group in groups}

    def _steer(self, group: int, worker: int) -> int:
        """A group of that worker: its bucket is the worker's."""
        placement = self._placement()
        return next((other for other, owner in enumerate(placement) if owner == worker), group)

    def arrives_as(self, group: int, number: int) -> int:
        """The group whose bucket a lane was asked to come to."""
        with self._lock:
            worker = self._asked.get(group, {}).get(number)
        return group if worker is None else self._steer(group, worker)

    def ready(self, group: int) -> bool:
        with self._lock:
            numbers = list(self._asked.get(group, {}))
        for _, session in list(self._producers()):
            if session.groups[group] > 0 and session.speak is not None:
                open_ = {key[1] for key, lane in list(session.lanes.items()) if key[0] == group and lane.connections}
                if not open_.issuperset(numbers):
                    return False
        return True

    def meant_for(self, group: int, worker: int) -> list[tuple[int, int]]:
        with self._lock:
            numbers = [number for number, meant in self._asked.get(group, {}).items() if meant == worker]
        found = []
        for stream, session in list(self._producers()):
            for number in numbers:
                lane = session.lanes.get((group, number))
                if lane is not None and lane.state == "live" and lane.connections:
                    found.append((stream, lane.slot))
        return found
