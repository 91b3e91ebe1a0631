"""Asks every worker whether it has worked off what was posted to it."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from flexstream.errors import EngineError

if TYPE_CHECKING:
    from flexstream.cython_ext.worker.reports import Pong
    from flexstream.cython_ext.worker.worker import Worker


class RoundTrips:
    """Waits until workers have read everything posted so far, and their reports are read.

    A ping goes behind everything posted before; its answer comes behind everything reported before.

    `check_alive` raises when nobody will read the answers.
    """

    def __init__(self, workers: list[Worker], check_alive: Callable[[], None]) -> None:
        self._workers = workers
        self._check_alive = check_alive
        self._tags = itertools.count(1)
        self._waiting: dict[int, tuple[set[int], threading.Event]] = {}

    def wait_for_workers(self, deadline: float | None = None) -> None:
        """Until every worker has worked off what was posted, and all that it has reported is in the logs.

        Raises EngineError: not by then, in seconds of the monotonic clock.
        """
        if not self._wait(deadline):
            raise EngineError("the workers did not answer in time", code="not_finished")

    def _wait(self, deadline: float | None) -> bool:
        """False: not every worker has answered by then. Workers that have all ended have nothing left to do."""
        tag = next(self._tags)
        reached = threading.Event()
        self._waiting[tag] = (set(), reached)
        try:
            for worker in self._workers:
                worker.ping(tag)
            while not reached.wait(0.2):
                self._check_alive()
                if deadline is not None and time.monotonic() > deadline:
                    return False
                if all(worker.ended for worker in self._workers):
                    break
            return True
        finally:
            self._waiting.pop(tag, None)

    def pong(self, worker: int, report: Pong) -> None:
        """The collector has read a worker's answer."""
        waiting = self._waiting.get(report.tag)
        if waiting is not None:
            waiting[0].add(worker)
            if len(waiting[0]) == len(self._workers):
                waiting[1].set()
