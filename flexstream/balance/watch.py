"""The loads of an engine over time: since the last tick, in the last moments, in the last seconds."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from flexstream.nic.balance.balancer import Balancer, BalancerConfig
from flexstream.nic.balance.growth import Growth
from flexstream.nic.balance.placement_plan import SHARE, Limits, group_percent, weigh, worker_percent

Floats = NDArray[np.float64]

ANSWER_S = 0.005  # a worker answers within microseconds, unless the machine has something else to do
HUNG_S = 0.5
BACKLOG_S = 0.03  # what waits for less than this will be worked off: no sign of a worker that cannot keep up
LATELY_S = 0.3  # half-life of the rows by which groups are called hot


class LoadSource(Protocol):
    """What is read of the workers; `loads.Loads` in an engine."""

    fresh: Floats
    fresh_batches: float
    waiting: Floats
    steady: Floats
    busy: Floats
    by_worker: Floats

    @property
    def workers(self) -> int: ...
    def cores(self) -> list[int | None]: ...
    def lanes(self) -> int: ...
    def links(self, group: int) -> tuple[int, float]: ...
    def forget_parts(self, group: int) -> None: ...
    def want_samples(self) -> None: ...
    def sampled(self) -> bool: ...
    def look(self, now_s: float) -> None: ...
    def hot(self, placement: Sequence[int]) -> list[dict[str, Any]]: ...


class Watch:
    """The loads of an engine over time. For one thread at a time; others may read `steady_rows`."""

    def __init__(self, loads: LoadSource, groups: int, clock: Callable[[], float], stopping: threading.Event) -> None:
        self._loads = loads
        self._clock = clock
        self._stopping = stopping
        self._asked_s: float | None = None
        self._looked_s: float | None = None
        self._recent = np.zeros(groups)  # rows of the last moments: has the load turned?
        self._growth = Growth(groups, LATELY_S)
        self._lately = np.zeros(groups)
        self._since_tick = np.zeros(groups)
        self._batches = 0.0
        self._frame_rows = 1.0
        self._lanes = groups
        self._level = 0.0  # the imbalance that the last tick knew of
        self._shares_s: float | None = None  # when the workers' shares were looked at
        self.waiting = np.zeros(groups)  # backlog above what comes in a few milliseconds

    def refresh(self, half_life_s: float) -> float | None:
        """Look at a new sample of every worker; returns when. None: some of them has not run since it was asked."""
        now_s = self._clock()
        if self._asked_s is None:
            self._loads.want_samples()
            self._asked_s = now_s
        until_s = now_s + ANSWER_S
        while not self._loads.sampled() and self._clock() < until_s and not self._stopping.is_set():
            time.sleep(0.001)
        now_s = self._clock()
        if not self._loads.sampled() and now_s < self._asked_s + HUNG_S:
            return None
        self._asked_s = None
        self._loads.look(now_s)
        elapsed_s = 0.0 if self._looked_s is None else now_s - self._looked_s
        fade = 0.5 ** (elapsed_s / half_life_s)
        self._recent = self._recent * fade + self._loads.fresh
        self._lately = self._lately * 0.5 ** (elapsed_s / LATELY_S) + self._loads.fresh
        waits = self._loads.waiting
        excess = max(0.0, 1.0 - self._rows_per_s(half_life_s) * BACKLOG_S / max(float(waits.sum()), 1e-9))
        self._growth.add(elapsed_s, self._loads.fresh, waits * excess - self.waiting)
        self.waiting = waits * excess
        self._since_tick = self._since_tick + self._loads.fresh
        self._batches += self._loads.fresh_batches
        self._looked_s = now_s
        return now_s

    def _rows_per_s(self, half_life_s: float) -> float:
        """By the last moments, or the time before: whichever had more."""
        return math.log(2.0) * max(float(self._recent.sum()) / half_life_s, float(self._lately.sum()) / LATELY_S)

    @property
    def quiet(self) -> bool:
        return not self._recent.sum() + self._loads.waiting.sum() >= 1.0

    def turned(self, balancer: Balancer, placement: Sequence[int], limits: Limits) -> bool:
        """Whether the last moments are out of balance by more than the last tick knew: then tick now, on them."""
        active = limits.workers - len(limits.inactive)
        growth = self._growth.beside(self._recent, placement, limits.workers)
        total = float(self._recent.sum() + growth.sum())
        if active < 2 or total < 1.0:
            return False
        strayed = excess(self._recent, growth, placement, limits, balancer.config)
        out = float(np.abs(strayed).max())
        if self._shares_s is not None and self._looked_s is not None:
            balancer.jitter.add(self._looked_s - self._shares_s, strayed)
        self._shares_s = self._looked_s
        if out > self._level + balancer.config.dead_band_percent:  # most looks end here: the rest costs more
            balancer.rows_come_in(self.roughness(total))
            if out > self._level + balancer.band_percent(total, active):
                self._level = out
                return True
        self._level = min(self._level, out)
        return False

    def take(self, balancer: Balancer, turned: bool) -> Floats:
        """The rows for a tick: all since the last one, or those of the last moments if the load has turned."""
        rows = self._recent if turned else self._since_tick
        if self._batches > 0:
            self._frame_rows = max(1.0, float(self._since_tick.sum()) / self._batches)
        self._lanes = self._loads.lanes()
        balancer.rows_come_in(self.roughness(float(rows.sum())))
        self.forget_tick()
        return rows

    def forget_tick(self) -> None:
        self._since_tick = np.zeros_like(self._since_tick)
        self._batches = 0.0

    def moved(self) -> None:
        """What waited, waits elsewhere now."""
        self._growth.forget()
        self._level = 0.0

    def roughness(self, rows: float) -> float:
        """How many rows count as one when chance is judged.

        At worst the rows of a frame. But a lane sends its frames in turn, so its count is out by less than a frame,
        however many came: with enough frames per lane that is the smaller error.
        """
        frame = self._frame_rows
        return min(frame, 1.0 + self._lanes * frame * frame / (6.0 * max(rows, 1.0)))

    def rows_lately(self) -> Floats:
        """As `steady_rows`, of a shorter time."""
        return self._lately if self._lately.sum() >= 1.0 else np.zeros(len(self._lately))

    def steady_rows(self) -> Floats:
        """Rows per group of the last seconds; all zero when there were none."""
        steady = self._loads.steady
        rows = steady.sum(axis=0) if len(steady) else np.zeros(len(self.waiting))
        return rows if rows.sum() >= 1.0 else np.zeros(len(rows))


def excess(rows: Floats, growth: Floats, placement: Sequence[int], limits: Limits, config: BalancerConfig) -> Floats:
    """How far each worker is from its share, in percent of it."""
    came, grew = float(rows.sum()), float(growth.sum())
    active = limits.workers - len(limits.inactive)
    if came + grew <= 0.0:
        return np.zeros(limits.workers)
    percent = rows
    if grew > config.accumulation_floor * came:
        percent = group_percent(rows, growth, active, weigh(config.weights, came, grew))
    placed = worker_percent(percent, np.array(placement, np.int32), limits)
    placed *= SHARE * active / float(placed.sum())
    placed[[worker for worker in range(limits.workers) if worker not in limits.inactive]] -= SHARE
    return placed
