"""How often somebody may do something: so many times at once, and then at a steady rate."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable


class Pace:
    """How often something may happen: `burst` times at once, then `rate` times a second. For one thread."""

    def __init__(self, rate: float, burst: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._burst, self._clock = rate, burst, clock
        self._left, self._at = burst, clock()

    def take(self, owed: float | None = None) -> float:
        """Takes a turn, and returns how many seconds to wait before using it; `owed`: no more than so many."""
        now = self._clock()
        self._left = min(self._burst, self._left + (now - self._at) * self._rate) - 1.0
        if owed is not None:
            self._left = max(self._left, -owed * self._rate)
        self._at = now
        return max(0.0, -self._left / self._rate)


class Slowing:
    """How long a peer that failed waits for its answer: not at all at first, then ever longer, never too long.

    Remembers a bounded number of peers, those that failed last. For one thread.
    """

    def __init__(
        self, rate: float = 1.0, burst: float = 10.0, most_s: float = 5.0, peers: int = 1024,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._rate, self._burst, self._most_s, self._peers, self._clock = rate, burst, most_s, peers, clock
        self._paces: OrderedDict[str, Pace] = OrderedDict()

    def failed(self, peer: str) -> float:
        """Seconds."""
        pace = self._paces.pop(peer, None) or Pace(self._rate, self._burst, self._clock)
        self._paces[peer] = pace
        if len(self._paces) > self._peers:
            self._paces.popitem(last=False)
        return pace.take(owed=self._most_s)
