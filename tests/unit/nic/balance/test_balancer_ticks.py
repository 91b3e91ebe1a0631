"""The balancer over simulated time: quick when it matters, still when it does not."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from flexstream.errors import ConfigError
from flexstream.nic.balance.balancer import Balancer, BalancerConfig, Decision, Limits, Verdict

GROUPS = 128


class Simulation:
    """Poisson rows at fixed shares; workers of equal speed; what they cannot do waits, per group."""

    def __init__(
        self, shares: NDArray[np.float64], workers: int, *, rows_per_s: float, speed: float, seed: int,
        config: BalancerConfig | None = None,
    ) -> None:  # fmt: skip
        self.random = np.random.default_rng(seed)
        self.shares = shares / shares.sum()
        self.limits = Limits(workers)
        self.rate = rows_per_s
        self.speed = speed  # rows a second that one worker can do
        self.placement = [group % workers for group in range(len(shares))]
        self.waiting = np.zeros(len(shares))
        self.balancer = Balancer(len(shares), config or BalancerConfig())
        self.now = 0.0
        self.last = 0.0

    def step(self) -> Decision:
        """Time goes on to the next tick; its moves are carried out at once."""
        self.now = max(self.now, self.balancer.next_at_s)
        elapsed = self.now - self.last
        self.last = self.now
        backlog = self.waiting + self.random.poisson(self.shares * self.rate * elapsed)
        done = np.zeros(len(backlog))
        for worker in range(self.limits.workers):
            mine = np.array(self.placement) == worker
            total = backlog[mine].sum()
            done[mine] = backlog[mine] * min(1.0, self.speed * elapsed / total if total else 1.0)
        self.waiting = backlog - done
        decision = self.balancer.tick(self.now, done, self.waiting, self.placement, self.limits)
        for group, source, target in decision.moves:
            assert self.placement[group] == source
            self.placement[group] = target
        return decision

    def run(self, seconds: float) -> list[Decision]:
        end, decisions = self.now + seconds, []
        while self.now < end:
            decisions.append(self.step())
        return decisions

    def true_squares(self) -> float:
        """The first term of the objective, by the shares and not by what was counted."""
        loads = np.bincount(self.placement, self.shares, self.limits.workers) * self.limits.workers * 100
        return float(((loads - 100) ** 2).sum())

    def imbalance(self) -> float:
        loads = np.bincount(self.placement, self.shares, self.limits.workers) * self.limits.workers * 100
        return float(np.abs(loads - 100).max())


SEEDS = pytest.mark.parametrize("seed", [1, 2, 3])  # noise may be unlucky: what is asserted of it stands on fixed seeds


def zipf(exponent: float, seed: int) -> NDArray[np.float64]:
    return np.random.default_rng(seed).permutation(1.0 / np.arange(1, GROUPS + 1) ** exponent)


@pytest.mark.parametrize("seed", [1])
@pytest.mark.parametrize("workers", [2, 4, 24])
@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 2.0])
def test_stationary_noise_settles_and_then_nothing_moves(workers: int, exponent: float, seed: int) -> None:
    simulation = Simulation(zipf(exponent, seed), workers, rows_per_s=2e6, speed=2e6, seed=seed)
    simulation.run(5.0)
    settled = simulation.true_squares()
    moving = [decision for decision in simulation.run(120.0) if decision.moves]
    # A better placement may yet be found, once or twice in two minutes; it must be better in truth, not in the noise.
    assert len(moving) <= 2
    assert simulation.true_squares() <= settled


@SEEDS
@pytest.mark.parametrize("exponent", [0.2, 0.6, 1.0])
def test_zipf_load_is_balanced_within_a_second(exponent: float, seed: int) -> None:
    simulation = Simulation(zipf(exponent, seed), 4, rows_per_s=2e6, speed=2e6, seed=seed)
    simulation.placement = [0] * GROUPS
    simulation.run(1.0)
    assert simulation.imbalance() < 10.0


@SEEDS
def test_a_sudden_skew_under_overload_is_gone_in_a_few_short_ticks(seed: int) -> None:
    simulation = Simulation(np.ones(GROUPS), 2, rows_per_s=1e6, speed=7e5, seed=seed)
    simulation.run(3.0)
    simulation.shares = np.where(np.arange(GROUPS) % 2 == 0, 0.8, 0.2) / 64
    simulation.now += 0.01
    simulation.balancer.alarm(simulation.now)
    simulation.now = simulation.balancer.next_at_s
    simulation.run(0.2)
    assert simulation.imbalance() < 10.0


def ready(**options: object) -> Balancer:
    return Balancer(4, BalancerConfig(**options))  # type: ignore[arg-type]


SKEWED, ZERO = [4000.0, 4000.0, 0.0, 0.0], [0.0] * 4
EVEN = [2000.0] * 4


def test_an_imbalance_is_confirmed_before_anything_moves_and_then_cools_down() -> None:
    balancer = ready(cool_down_s=0.5, group_cool_down_s=0.0)
    verdicts = []
    for at in (0.0, 0.01, 0.02):
        verdicts.append(balancer.tick(at, SKEWED, ZERO, [0, 0, 1, 1], Limits(2)).verdict)
    assert verdicts == [Verdict.CONFIRMING, Verdict.MOVE, Verdict.COOLING_DOWN]
    assert balancer.tick(0.6, SKEWED, ZERO, [0, 0, 1, 1], Limits(2)).verdict is Verdict.CONFIRMING
    assert balancer.tick(0.61, SKEWED, ZERO, [0, 0, 1, 1], Limits(2)).verdict is Verdict.MOVE


def test_a_group_that_moved_rests() -> None:
    balancer = ready(confirm_ticks=1, cool_down_s=0.0, group_cool_down_s=1.0)
    moved = {group for group, _, _ in balancer.tick(0.0, SKEWED, ZERO, [0, 0, 1, 1], Limits(2)).moves}
    assert moved
    again = balancer.tick(0.5, SKEWED, ZERO, [0, 0, 1, 1], Limits(2))
    assert not moved & {group for group, _, _ in again.moves}
    assert moved & {group for group, _, _ in balancer.tick(1.5, SKEWED, ZERO, [0, 0, 1, 1], Limits(2)).moves}


def test_ticks_slow_down_in_balance_and_quicken_under_imbalance_and_alarm() -> None:
    balancer = ready()
    now, gaps = 0.0, []
    for _ in range(10):
        gaps.append(balancer.tick(now, EVEN, ZERO, [0, 0, 1, 1], Limits(2)).next_tick_s)
        now = balancer.next_at_s
    assert gaps == pytest.approx([0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.0, 1.0, 1.0, 1.0])
    assert gaps[-1] == pytest.approx(1.0)
    balancer.alarm(now - 0.9)
    assert balancer.due(now - 0.9)
    assert balancer.tick(now, SKEWED, ZERO, [0, 0, 1, 1], Limits(2)).next_tick_s == pytest.approx(0.01)


def test_off_shows_the_plan_and_moves_nothing() -> None:
    balancer = ready(confirm_ticks=1)
    balancer.enabled = False
    decision = balancer.tick(0.0, SKEWED, ZERO, [0, 0, 1, 1], Limits(2))
    assert decision.verdict is Verdict.OFF
    assert decision.moves == []
    assert decision.plan.moves


def test_a_draining_worker_is_emptied_at_once_even_while_cooling_down() -> None:
    balancer = ready(confirm_ticks=1, cool_down_s=9.0, group_cool_down_s=9.0)
    placement = [0, 0, 1, 1]
    for group, _, target in balancer.tick(0.0, SKEWED, ZERO, placement, Limits(2)).moves:
        placement[group] = target
    decision = balancer.tick(0.01, SKEWED, ZERO, placement, Limits(2, inactive=frozenset({1})))
    assert decision.verdict is Verdict.MOVE
    assert {group for group, _, _ in decision.moves} == {g for g in range(4) if placement[g] == 1}


def test_a_little_backlog_is_jitter_and_much_of_it_is_a_signal() -> None:
    for more, used in ((30.0, False), (3000.0, True)):
        balancer = ready()
        for tick in range(31):
            waiting = [more * tick, 0.0, 0.0, 0.0]
            decision = balancer.tick(0.01 * tick, EVEN, waiting, [0, 0, 1, 1], Limits(2))
        assert decision.accumulation_used is used


def test_a_hiccup_of_the_machine_and_sockets_that_fill_in_turn_are_no_accumulation() -> None:
    """The backlog of a few milliseconds that comes and goes, and one that wanders from group to group."""
    balancer = ready()
    for tick in range(200):
        hiccup = 4000.0 if tick % 20 == 10 else 0.0
        waiting = [hiccup, 500.0 * (tick % 2), 500.0 * (1 - tick % 2), 0.0]
        decision = balancer.tick(0.01 * tick, EVEN, waiting, [0, 1, 1, 0], Limits(2))
        assert not decision.moves
    assert balancer.history[-1].verdict is Verdict.IN_BAND


def test_rows_that_pile_up_count_as_many_as_they_are() -> None:
    """160 and 40 percent come; of the first a tenth piles up. Moving by that alone would take half of them away."""
    placement = [0] * 16 + [1] * 16
    rows = np.where(np.array(placement) == 0, 1600.0, 400.0)
    balancer = Balancer(32, BalancerConfig(confirm_ticks=1))
    for tick in range(100):
        waiting = np.where(np.array(placement) == 0, 160.0 * tick, 0.0)
        decision = balancer.tick(0.01 * tick, rows, waiting, placement, Limits(2))
        if decision.moves:
            break
    after = np.bincount(decision.plan.placement, rows, 2) / rows.sum() * 200.0
    assert abs(after[0] - 100.0) <= 10.0


def test_what_piled_up_before_a_move_does_not_count_after_it() -> None:
    placement = [0, 0, 1, 1]
    balancer = Balancer(4, BalancerConfig(confirm_ticks=1, cool_down_s=0.0, group_cool_down_s=0.0))
    for tick in range(100):
        waiting = [3000.0 * tick, 3000.0 * tick, 0.0, 0.0]
        decision = balancer.tick(0.01 * tick, EVEN, waiting, placement, Limits(2))
        if decision.moves:
            break
    after = balancer.tick(0.01 * (tick + 1), EVEN, waiting, list(decision.plan.placement), Limits(2))
    assert not after.accumulation_used


def test_few_rows_prove_nothing() -> None:
    balancer = ready()
    assert balancer.tick(0.0, [3.0, 2.0, 0.0, 0.0], ZERO, [0, 0, 1, 1], Limits(2)).verdict is Verdict.QUIET
    assert balancer.tick(1.0, ZERO, ZERO, [0, 0, 1, 1], Limits(2)).verdict is Verdict.QUIET


def test_history_is_bounded_and_has_the_numbers() -> None:
    balancer = ready(history=8, confirm_ticks=1, cool_down_s=0.0, group_cool_down_s=0.0)
    for index in range(50):
        rows = SKEWED if index % 2 else EVEN
        balancer.tick(float(index), rows, ZERO, [0, 0, 1, 1], Limits(2))
    assert len(balancer.history) == 8
    entry = next(d for d in balancer.history if d.verdict is Verdict.MOVE).to_dict()
    assert entry["moves"]
    assert entry["objective_before"] > entry["objective_after"]
    assert entry["worker_percent"] == pytest.approx([200.0, 0.0])


def test_equal_verdicts_in_a_row_are_one_entry() -> None:
    balancer = ready()
    for index in range(5):
        balancer.tick(float(index), EVEN, ZERO, [0, 0, 1, 1], Limits(2))
    assert [decision.repeated for decision in balancer.history] == [5]


def test_bad_input_is_refused_and_forgotten() -> None:
    balancer = ready()
    balancer.tick(1.0, EVEN, ZERO, [0, 0, 1, 1], Limits(2))
    with pytest.raises(ConfigError, match="clock went back"):
        balancer.tick(0.5, EVEN, ZERO, [0, 0, 1, 1], Limits(2))
    with pytest.raises(ConfigError, match="waiting of group 2 is nan"):
        balancer.tick(2.0, EVEN, [0.0, 0.0, float("nan"), 0.0], [0, 0, 1, 1], Limits(2))
    with pytest.raises(ConfigError, match="has 4 groups"):
        balancer.tick(2.0, [1.0], [0.0], [0], Limits(2))
    with pytest.raises(ConfigError, match="ticks from"):
        BalancerConfig(min_tick_s=2.0)
    assert balancer.tick(2.0, EVEN, ZERO, [0, 0, 1, 1], Limits(2)).verdict is Verdict.IN_BAND
