"""The last few percent: what stays uneven for seconds, and is too little to hurry about.

The balancer that answers a turned load within milliseconds judges by few rows, so it must let small differences be.
Over seconds rows tell them from chance. Here the same rule works on a slower clock and with a narrower band, whenever
the quick one has had nothing to do for a while.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from flexstream.balance.watch import Floats, excess
from flexstream.nic.balance.balancer import Balancer, BalancerConfig, Decision
from flexstream.nic.balance.placement_plan import Limits

TICK_S, LONGEST_TICK_S = 0.5, 4.0
BAND_PERCENT = 1.5
CALM_S = 0.5  # since the last move or split


class Trim:
    """The slow balancer, which evens out the last few percent. For one thread at a time."""

    def __init__(self, groups: int, config: BalancerConfig) -> None:
        slow = replace(
            config, min_tick_s=TICK_S, max_tick_s=LONGEST_TICK_S, dead_band_percent=BAND_PERCENT, half_life_s=TICK_S
        )
        self.balancer = Balancer(groups, slow)
        self._rows = np.zeros(groups)
        self._ticked_s: float | None = None

    def add(self, rows: Floats) -> None:
        """Rows that came since the look before."""
        self._rows = self._rows + rows

    def begin_anew(self, now_s: float) -> None:
        """Something has moved, was split or turned: what was counted before says nothing."""
        self._rows = np.zeros_like(self._rows)
        self._ticked_s = None
        self.balancer.settle(now_s, CALM_S)
        self.balancer.next_at_s = now_s + CALM_S

    def due(self, now_s: float) -> bool:
        return self.balancer.due(now_s)

    def tick(
        self, now_s: float, roughness: Callable[[float], float], placement: Sequence[int], limits: Limits
    ) -> Decision:
        """What to move now, if anything. `roughness` tells how many of so many rows count as one."""
        nothing = np.zeros_like(self._rows)
        if self._ticked_s is not None and self._rows.sum() >= 1.0:
            strayed = excess(self._rows, nothing, placement, limits, self.balancer.config)
            self.balancer.jitter.add(now_s - self._ticked_s, strayed)
        self._ticked_s = now_s
        rows, self._rows = self._rows, nothing
        self.balancer.rows_come_in(roughness(float(rows.sum())))
        return self.balancer.tick(now_s, rows, nothing, placement, limits)
