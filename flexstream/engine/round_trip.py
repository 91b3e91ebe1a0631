"""Asks every worker whether it has worked off what was posted to it."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any


class RoundTrips:
    """A ping goes behind everything posted before; its answer comes behind everything reported before."""

    def __init__(self, workers: list[Any]) -> None:
        self._workers = workers
        self._tags = itertools.count(1)
        self._waiting: dict[int, tuple[set[int], threading.Event]] = {}

    def wait(self, deadline: float | None, check_alive: Callable[[], None]) -> bool:
        """False: not every worker has answered by then. Workers that have all ended have nothing left to do."""
        tag = next(self._tags)
        reached = threading.Event()
        self._waiting[tag] = (set(), reached)
        try:
            for worker in self._workers:
                worker.ping(tag)
            while not reached.wait(0.2):
                check_alive()
                if deadline is not None and time.monotonic() > deadline:
                    return False
                if all(worker.ended for worker in self._workers):
                    break
            return True
        finally:
            self._waiting.pop(tag, None)

    def pong(self, worker: int, tag: int) -> None:
        """The collector has read a worker's answer."""
        waiting = self._waiting.get(tag)
        if waiting is not None:
            waiting[0].add(worker)
            if len(waiting[0]) == len(self._workers):
                waiting[1].set()
