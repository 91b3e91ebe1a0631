"""How far the workers' shares stray by themselves. Pure: no I/O, no clock."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MEAN_TIMES, SPREAD_TIMES = 10.0, 100.0  # half-lives of what is followed, in those of the counts
LEAST_SEEN = 0.1  # of that time: after less, what was seen is taken for that much
MOST_SIGMAS, MOST_MORE = 3.0, 5.0  # what strays further is no jitter but a load that turns; or else it will come again


class Jitter:
    """The deviation of the workers' shares from their own running mean, as it was seen lately.

    Counting rows says how rough counts are if rows come by chance. They may be much rougher: producers that wait for
    full sockets, on a machine whose cores have other things to do, send in fits and starts.
    """

    def __init__(self, half_life_s: float) -> None:
        self._half_life_s = half_life_s
        self._mean: Floats | None = None
        self._square = 0.0
        self._seen = 0.0  # how much of its time it has seen, from 0 to 1

    def add(self, elapsed_s: float, shares: Floats) -> None:
        if self._mean is None or len(self._mean) != len(shares):
            self._mean = shares.copy()
            return
        strayed = min(float(np.abs(shares - self._mean).max()), MOST_SIGMAS * self.sigma + MOST_MORE)
        age = elapsed_s / self._half_life_s
        kept, followed = 0.5 ** (age / SPREAD_TIMES), 0.5 ** (age / MEAN_TIMES)
        self._square = self._square * kept + strayed * strayed * (1.0 - kept)
        self._seen = 1.0 - (1.0 - self._seen) * kept
        self._mean = self._mean * followed + shares * (1.0 - followed)

    def moved(self) -> None:
        """The shares are others from now on, on purpose; how much they stray is as it was."""
        self._mean = None

    @property
    def sigma(self) -> float:
        return math.sqrt(self._square / max(self._seen, LEAST_SEEN))
