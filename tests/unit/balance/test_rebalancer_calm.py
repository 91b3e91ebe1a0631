"""The balancer when nothing turns: rows that come in fits and starts, and a few percent that stay uneven."""

from __future__ import annotations

import math

import numpy as np
import pytest

from flexstream.balance.trim import Trim
from flexstream.nic.balance.balancer import Balancer
from flexstream.nic.balance.jitter import Jitter
from flexstream.nic.balance.placement_plan import Limits
from tests.unit.balance.test_rebalancer_turn import GROUPS, TURN_S, WORKERS, Frames

RATE, FIT_S, END_S = 2e6, 0.03, 8.0


class Fits(Frames):
    """Each worker's groups get more for a moment, then less: as when producers wait for full sockets."""

    def __init__(self, uneven: float = 0.0, fits: float = 0.0, seed: int = 0, turns_s: float = math.inf) -> None:
        super().__init__(0.9, seed=seed)
        self.uneven, self.fits, self.turns_s = uneven, fits, turns_s
        self.owned_first = np.array(self.placement) == 0
        self.fit, self.fit_ends_s = 0.0, 0.0
        self.busy = np.ones(WORKERS)

    def shares(self) -> np.ndarray:
        uneven = 0.6 if self.now_s >= self.turns_s else self.uneven
        return np.where(self.owned_first, 1.0 + uneven, 1.0 - uneven) / GROUPS

    def advance(self, seconds: float) -> None:
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            if self.now_s >= self.fit_ends_s:
                self.fit = float(np.clip(self.random.normal(0.0, self.fits), -0.6, 0.6))
                self.fit_ends_s = self.now_s + FIT_S
            end_s = min(until_s, self.fit_ends_s)
            on_first = np.array(self.placement) == 0
            came = self.shares() * np.where(on_first, 1.0 + self.fit, 1.0 - self.fit)
            self.came = self.came + came / came.sum() * RATE * (end_s - self.now_s)
            self.now_s = end_s

    def imbalance(self) -> float:
        return float(abs(np.bincount(self.placement, self.shares(), WORKERS)[0] * 200.0 - 100.0))


def run(fits: Fits) -> Fits:
    fits.run(END_S)
    return fits


# -- fits and starts


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("size", [0.1, 0.2])
def test_rows_in_fits_and_starts_move_next_to_nothing(size: float, seed: int) -> None:
    fits = run(Fits(fits=size, seed=seed))
    assert len(fits.batches) <= 3, fits.batches  # in eight seconds; ten times as many without a look at the fits
    assert fits.imbalance() <= 5.0


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("size", "turns_s", "within_s"), [(0.1, 4.0, 0.3), (0.02, 1.0, 0.1), (0.02, 4.0, 0.1)])
def test_a_load_that_turns_is_no_fit(size: float, turns_s: float, within_s: float, seed: int) -> None:
    fits = run(Fits(fits=size, seed=seed, turns_s=turns_s))
    after_s = [at_s + TURN_S - turns_s for at_s, _ in fits.batches if at_s + TURN_S > turns_s]
    assert after_s, fits.batches
    assert after_s[0] <= within_s, fits.batches
    assert fits.imbalance() <= 5.0


def test_how_far_shares_stray_is_their_deviation_from_the_mean() -> None:
    jitter = Jitter(half_life_s=0.02)
    for look in range(2000):
        stray = 8.0 if look % 2 else -8.0
        jitter.add(0.02, np.array([5.0 + stray, -5.0 - stray]))
    assert jitter.sigma == pytest.approx(8.0, rel=0.1)  # the mean is not what it is about
    before = jitter.sigma
    jitter.moved()
    jitter.add(0.02, np.array([90.0, -90.0]))  # moved on purpose
    assert jitter.sigma == before


def test_shares_that_do_not_stray_leave_the_band_as_it_is() -> None:
    balancer = Balancer(8)
    for _ in range(100):
        balancer.jitter.add(0.02, np.array([30.0, -30.0]))
    assert balancer.jitter.sigma == 0.0
    assert balancer.band_percent(1e6, 2) == balancer.config.dead_band_percent


def test_the_band_is_as_wide_as_shares_stray_and_narrower_over_a_longer_time() -> None:
    balancer = Balancer(8)
    for look in range(2000):
        balancer.jitter.add(0.02, np.array([10.0, -10.0]) * (1 if look % 2 else -1))
    wide = balancer.band_percent(1e6, 2)
    assert wide == pytest.approx(3 * 10.0, rel=0.1)
    assert balancer.band_percent(1e6, 2, over_s=1.0) < wide / 3


# -- a few percent


@pytest.mark.parametrize("fits", [0.0, 0.03, 0.1])
def test_a_few_percent_that_stay_uneven_are_evened_out(fits: float) -> None:
    """Four percent are within the quick balancer's dead band."""
    found = run(Fits(uneven=0.04, fits=fits, seed=1))
    assert found.batches
    assert len(found.batches) <= 3, found.batches
    assert found.imbalance() <= 2.0


def test_what_is_even_is_not_trimmed() -> None:
    assert run(Fits(uneven=0.01)).batches == []


def test_workers_with_time_to_spare_are_not_trimmed() -> None:
    idle = Fits(uneven=0.04)
    idle.busy = np.full(WORKERS, 0.3)
    assert run(idle).batches == []


def test_a_trim_begins_anew_after_a_move() -> None:
    """Rows from before it would have it undo what was done."""
    trim, placement = Trim(4, Balancer(4).config), [0, 1, 0, 1]
    limits, moved = Limits(2), []
    for step in range(1, 40):
        now_s = step * 0.25
        trim.add(np.array([54e3, 48e3, 50e3, 48e3]))
        if now_s == 0.75:
            trim.begin_anew(now_s)
        if trim.due(now_s) and trim.tick(now_s, lambda rows: 1.0, placement, limits).moves:
            moved.append(now_s)
    assert moved
    assert moved[0] > 0.75 + 0.5
