"""How often somebody may do something: so many times at once, and then at a steady rate."""

from __future__ import annotations

import time
from collections.abc import Callable


class Pace:
    """`burst` turns at once, then `rate` a second. For one thread."""

    def __init__(self, rate: float, burst: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._burst, self._clock = rate, burst, clock
        self._left, self._at = burst, clock()

    def take(self) -> float:
        """Takes a turn, and returns how many seconds to wait before using it."""
        now = self._clock()
        self._left = min(self._burst, self._left + (now - self._at) * self._rate) - 1.0
        self._at = now
        return max(0.0, -self._left / self._rate)

    def allows(self) -> bool:
        """Takes a turn if there is one now."""
        if self.take() == 0.0:
            return True
        self._left += 1.0
        return False
