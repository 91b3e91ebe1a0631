"""Sessions that went silent stop counting; sessions that broke and did not come back end."""

from __future__ import annotations

import threading

from flexstream.catalog.entries import RunningStream
from flexstream.cython_ext.worker.worker import Worker, now_ns

TICK_S = 0.1
ROOM = 2048  # orders that each mailbox must have room for


class SessionClock(threading.Thread):
    """Looks at all sessions of an engine ten times a second.

    The idle clock of a session runs only while its worker has nothing left to read: what waits in a socket was sent.
    """

    def __init__(
        self, workers: list[Worker], streams: list[RunningStream], idle_timeout_s: float, session_timeout_s: float
    ) -> None:
        super().__init__(name="fs-sessions", daemon=True)
        self._workers = workers
        self._streams = streams
        self._idle_ns = idle_timeout_s * 1e9
        self._session_timeout_s = session_timeout_s
        self._stop_wanted = threading.Event()

    def stop(self) -> None:
        self._stop_wanted.set()

    def run(self) -> None:
        while not self._stop_wanted.wait(TICK_S):
            if any(worker.mailbox_room < ROOM for worker in self._workers):
                continue  # what it would post would wait there, and with it everybody who asks for a session
            drained = min(worker.stats()["drained_ns"] for worker in self._workers)
            for running in list(self._streams):
                running.sessions.expire(self._session_timeout_s)
                for session in running.sessions.all():
                    slots = [one.slot for one in session.family()]
                    seen = max(handle.seen_ns(slot) for handle in running.handles for slot in slots)
                    if session.state == "live" and seen and min(drained, now_ns()) - seen > self._idle_ns:
                        running.sessions.set_idle(session)
