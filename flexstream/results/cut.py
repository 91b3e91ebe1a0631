"""Windows that a stop or a crash may have taken rows from: their results say `complete` = false.

There are no checkpoints yet, so a restarted daemon has lost the rows of open windows that nobody committed. After a
clean stop it knows which windows were open. After a crash it knows only that rows had come; then every window counts
that began before the event time that producers have reached when the first window fires: a producer that comes back
promises at once what it had promised before, so what it had sent is behind that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np

log = logging.getLogger("flexstream.results")

Times = np.ndarray[Any, np.dtype[np.int64]]


class Cut:
    """Of one query. `until`: windows that begin before it may lack rows (None: none does).

    `reached`, for a query that comes back after a crash: the event time that producers have reached, or None when none
    of them is there any more. It is asked when windows fire, until it has an answer.
    """

    def __init__(self, query: str, until: int | None = None, reached: Callable[[], int | None] | None = None) -> None:
        self._query = query
        self._reached = reached
        self.until = until
        self.results = 0  # that were said to be incomplete

    @property
    def open(self) -> bool:
        """After a crash, and no window has fired since."""
        return self._reached is not None

    def complete(self, starts: Times, ends: Times) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """For each result, by its window: whether no row of it can be lost."""
        if self._reached is not None and len(starts):
            self._ask(self._reached, int(ends.max()))
        if self.until is None:
            return np.ones(len(starts), np.bool_)
        whole = starts >= self.until
        self.results += len(starts) - int(whole.sum())
        return whole

    def _ask(self, reached: Callable[[], int | None], last_end: int) -> None:
        found = reached()
        if found is not None:
            self._reached = None
            if self.results == 0:
                self._raise(found)
                fields = {"query": self._query, "began_before": self.until}
                log.warning("windows_may_lack_rows_lost_in_a_crash", extra={"fields": fields})
        else:  # all producers ended, and everything fires at once
            self._raise(last_end)

    def _raise(self, until: int) -> None:
        self.until = until if self.until is None else max(until, self.until)
