"""How much of what comes piles up, over a while. Pure: no I/O, no clock."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Growth:
    """By how much what waits has grown for each group, and how many rows came in the same time; both fade."""

    def __init__(self, groups: int, half_life_s: float) -> None:
        self._half_life_s = half_life_s
        self._grown = np.zeros(groups)
        self._rows = 0.0
        self._seen = 0.0  # how much of its time it has seen since it was told to forget, from 0 to 1

    def add(self, elapsed_s: float, rows: Floats, grown: Floats) -> None:
        """`grown` is negative where what waits has shrunk."""
        fade = 0.5 ** (elapsed_s / self._half_life_s)
        self._grown = self._grown * fade + grown
        self._rows = self._rows * fade + float(rows.sum())
        self._seen = 1.0 - (1.0 - self._seen) * fade

    def forget(self) -> None:
        self._grown = np.zeros_like(self._grown)
        self._rows = self._seen = 0.0

    def beside(self, rows: Floats, placement: Sequence[int], workers: int) -> Floats:
        """The growth per group that goes with so many rows. Never negative; nothing where a worker's groups shrink."""
        growth = net_growth(self._grown, placement, workers)
        times = float(rows.sum()) / self._rows if self._rows >= 1.0 else 1.0
        return np.asarray(growth * (self._seen * times), np.float64)


def net_growth(grown: Floats, placement: Sequence[int], workers: int) -> Floats:
    """Accumulation from growth with its sign: what each worker's groups gain together, by what each of them gained.

    A socket is full at one look and empty at the next. That is no growth: only what a worker cannot keep up with is.
    """
    owners = np.asarray(placement)
    gained = np.maximum(grown, 0.0)
    net = np.maximum(np.bincount(owners, grown, workers), 0.0)
    gross = np.maximum(np.bincount(owners, gained, workers), 1e-9)
    return np.asarray(gained * (net / gross)[owners], np.float64)
