"""Producers that were there before a restart: whoever is back first must not drive the watermark alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

from flexstream.catalog.sessions import SessionRefused

if TYPE_CHECKING:
    from flexstream.catalog.entries import RunningStream


class ExpectedSessions:
    """The producers that streams wait for after a restart, as (producer, epoch).

    Call `expect` before a stream is added, `hold` when it is.
    """

    def __init__(self) -> None:
        self._known: dict[str, list[tuple[str, int]]] = {}

    def expect(self, stream: str, known: Iterable[tuple[str, int]]) -> None:
        self._known[stream] = list(known)

    def hold(self, running: RunningStream) -> None:
        """Its windows wait for the producers that are expected, as for ones whose connection broke."""
        with contextlib.suppress(SessionRefused):  # there are as many as may be
            for producer, epoch in self._known.pop(running.stream.name, ()):
                running.sessions.wait_for(producer, epoch)
