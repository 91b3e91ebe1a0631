"""When groups change their worker: `plan` over time. Pure: no I/O, and the clock is an argument.

`Balancer` adds what keeps a running engine calm: counts that fade, a dead band, a confirmation on fresh numbers, a
cool-down, ticks that quicken under imbalance, and a history of decisions with the numbers behind each. What to move
at one moment is `placement_plan.plan`, which this module passes on.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flexstream.errors import ConfigError
from flexstream.nic.balance.growth import Growth, net_growth
from flexstream.nic.balance.jitter import Jitter
from flexstream.nic.balance.placement_plan import (
    SHARE,
    Limits,
    Move,
    Numbers,
    Plan,
    Reason,
    Weights,
    check_limits,
    check_numbers,
    group_percent,
    plan,
    weigh,
    worker_percent,
)

__all__ = [
    "Balancer",
    "BalancerConfig",
    "Decision",
    "Limits",
    "Move",
    "Plan",
    "Reason",
    "Verdict",
    "Weights",
    "group_percent",
    "plan",
]


@dataclass(frozen=True, slots=True)
class BalancerConfig:
    """How calm the balancer is. See docs/balancer.md for what each is good for."""

    min_tick_s: float = 0.01
    max_tick_s: float = 1.0
    dead_band_percent: float = 5.0
    noise_sigmas: float = 3.0  # for the dead band: an imbalance that chance would make is none
    gain_sigmas: float = 5.0  # for moving: looked at several times a second, so chance has many goes at it
    rows_per_batch: float = 1.0  # rows come in frames: this many arrive as one, and make the counts that much rougher
    confirm_ticks: int = 2
    cool_down_s: float = 0.05
    group_cool_down_s: float = 1.0
    half_life_s: float = 0.02
    growth_half_life_s: float = 0.3  # a worker that the machine stops for some milliseconds is not one that is slow
    accumulation_floor: float = 0.02  # backlog growth below this share of the rows is jitter, not a signal
    max_moves: int | None = None
    history: int = 256
    weights: Weights = field(default_factory=Weights)

    def __post_init__(self) -> None:
        if not 0 < self.min_tick_s <= self.max_tick_s:
            raise ConfigError(
                f"ticks from {self.min_tick_s} s to {self.max_tick_s} s cannot be used",
                code="bad_config",
                hint="0 < min_tick_s <= max_tick_s",
            )
        for name in (
            "dead_band_percent",
            "noise_sigmas",
            "gain_sigmas",
            "cool_down_s",
            "group_cool_down_s",
            "accumulation_floor",
        ):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}", code="bad_config", hint="give 0 or more")
        for name in ("half_life_s", "growth_half_life_s", "confirm_ticks", "history", "rows_per_batch"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}", code="bad_config", hint="give more than 0")


class Verdict(enum.StrEnum):
    """What a tick came to."""

    MOVE = "move"
    OFF = "off"
    QUIET = "quiet"
    IN_BAND = "in_band"
    CONFIRMING = "confirming"
    COOLING_DOWN = "cooling_down"
    NOT_WORTH_IT = "not_worth_it"


@dataclass(frozen=True, slots=True)
class Decision:
    """One tick: what was decided, and on which numbers. `repeated` equal verdicts in a row are one entry."""

    at_s: float
    verdict: Verdict
    text: str
    plan: Plan
    dead_band_percent: float  # in force at this tick: the configured one, or the noise of the counts
    rows: float
    accumulation_used: bool
    next_tick_s: float
    repeated: int = 1

    @property
    def moves(self) -> list[Move]:
        """What the caller must do now: empty unless the verdict is MOVE."""
        return self.plan.moves if self.verdict is Verdict.MOVE else []

    def to_dict(self) -> dict[str, Any]:
        """For `flexstream rebalance history`."""
        return {
            "at_s": self.at_s,
            "verdict": str(self.verdict),
            "text": self.text,
            "moves": [list(move) for move in self.moves],
            "reason": str(self.plan.reason),
            "objective_before": self.plan.objective_before,
            "objective_after": self.plan.objective_after,
            "imbalance_percent": self.plan.imbalance_before,
            "dead_band_percent": self.dead_band_percent,
            "worker_percent": list(self.plan.worker_percent_before),
            "worker_percent_after": list(self.plan.worker_percent_after),
            "hot_groups": list(self.plan.hot_groups),
            "rows": self.rows,
            "accumulation_used": self.accumulation_used,
            "next_tick_s": self.next_tick_s,
            "repeated": self.repeated,
        }


class Balancer:
    """The decision over time. The caller owns the clock (any monotonic seconds) and carries the moves out.

    Guarantees: groups move only after a plan's gain has shown again on rows that came after it was made (a plan that
    fits the noise of its own numbers does not); a group that has just moved stays for `group_cool_down_s`.
    Emptying an inactive worker waits for none of this. Assumes: one thread.
    """

    def __init__(self, groups: int, config: BalancerConfig = BalancerConfig(), *, seed: int = 0) -> None:
        self.config = config
        self.enabled = True
        self.history: deque[Decision] = deque(maxlen=config.history)
        self.next_at_s = -math.inf
        self._seed = seed
        self._rows = np.zeros(groups)
        self._growth = Growth(groups, config.growth_half_life_s)
        self.jitter = Jitter(config.half_life_s)  # of the shares; who looks at them tells it
        self._waiting: NDArray[np.float64] | None = None
        self._last_s: float | None = None
        self._interval_s = config.min_tick_s
        self._quiet_until_s = -math.inf
        self._moved_at_s = np.full(groups, -math.inf)
        self._candidate: Candidate | None = None

    def due(self, now_s: float) -> bool:
        return now_s >= self.next_at_s

    def alarm(self, now_s: float, *, forget: bool = False) -> bool:
        """Something looks wrong (a backlog grows): tick as soon as the shortest tick allows.

        `forget`: the load has turned, and what was counted before says nothing about it any more. True: it was
        forgotten. A load that is seen turning is seen again at the next looks, as the rows from before fade; the plan
        that the first one led to is kept then, for the rows that came since are what it waits for.
        """
        forgets = forget and self._candidate is None
        if forgets:
            self._rows = np.zeros_like(self._rows)
        self._interval_s = self.config.min_tick_s
        earliest = now_s if self._last_s is None else max(now_s, self._last_s + self.config.min_tick_s)
        self.next_at_s = min(self.next_at_s, earliest)
        return forgets

    def settle(self, now_s: float, for_s: float) -> None:
        """Something else has changed who serves what (a split): counts from before say nothing, nothing moves until it
        is known who has how much now, and then every group may."""
        self._rows = np.zeros_like(self._rows)
        self._growth.forget()
        self.jitter.moved()
        self._candidate = None
        self._quiet_until_s = now_s + for_s
        self._moved_at_s[:] = -math.inf

    def tick(self, now_s: float, rows: Numbers, waiting: Numbers, placement: Sequence[int], limits: Limits) -> Decision:
        """Decide. `rows` per group since the last tick; `waiting` per group now, in rows (sockets and blocks).

        `limits.frozen` must hold the groups that are moving. Errors: ConfigError, and nothing is remembered.
        """
        counted, waits = check_numbers("rows", rows), check_numbers("waiting", waiting)
        if len(counted) != len(self._rows) or len(waits) != len(self._rows):
            raise ConfigError(
                f"this balancer has {len(self._rows)} groups, but rows has {len(counted)} and waiting has {len(waits)}",
                code="bad_loads",
                hint="give one number per group",
            )
        if self._last_s is not None and now_s < self._last_s:
            raise ConfigError(
                f"the clock went back from {self._last_s} to {now_s}", code="bad_clock", hint="use a monotonic clock"
            )
        check_limits(limits, self.config.weights, placement, len(counted))
        elapsed_s = 0.0 if self._last_s is None else now_s - self._last_s
        grown = self._remember(now_s, elapsed_s, counted, waits)
        effective = self._effective(now_s, placement, limits)
        weighed = self._signal(self._rows, placement, limits)
        made = self._plan(self._rows, weighed, placement, effective)
        total = float(self._rows.sum() + weighed.sum())
        band = self.band_percent(total, limits.workers - len(limits.inactive), elapsed_s)
        if self._candidate is not None:
            self._candidate.add(counted, grown)
        verdict, text, chosen = self._judge(now_s, made, band, effective, limits)
        self._schedule(now_s, verdict)
        if verdict is Verdict.MOVE:
            self._quiet_until_s = now_s + self.config.cool_down_s
            self._candidate = None
            self._growth.forget()  # what piled up there, comes elsewhere now
            self.jitter.moved()
            for group, _, _ in chosen.moves:
                self._moved_at_s[group] = now_s
        rows_seen, gap_s = float(self._rows.sum()), self.next_at_s - now_s
        decision = Decision(now_s, verdict, text, chosen, band, rows_seen, bool(weighed.any()), gap_s)
        self._record(decision)
        return decision

    def _remember(
        self, now_s: float, elapsed_s: float, rows: NDArray[np.float64], waiting: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Counts fade with the half-life: short ticks share a window, long ones stand alone. Returns by how much what
        waits has grown."""
        grown = np.zeros_like(waiting) if self._waiting is None else waiting - self._waiting
        self._rows = self._rows * 0.5 ** (elapsed_s / self.config.half_life_s) + rows
        self._growth.add(elapsed_s, rows, grown)
        self._waiting = waiting.copy()
        self._last_s = now_s
        return grown

    def _plan(
        self, rows: NDArray[np.float64], growth: NDArray[np.float64], placement: Sequence[int], limits: Limits
    ) -> Plan:
        weights = weigh(self.config.weights, float(rows.sum()), float(growth.sum()))
        return plan(rows, growth, placement, limits, weights=weights, seed=self._seed)

    def _signal(self, rows: NDArray[np.float64], placement: Sequence[int], limits: Limits) -> NDArray[np.float64]:
        """The growth beside so many rows, or nothing where it is jitter."""
        growth = self._growth.beside(rows, placement, limits.workers)
        small = float(growth.sum()) <= self.config.accumulation_floor * float(rows.sum())
        return np.zeros_like(growth) if small else growth

    def rows_come_in(self, rows_per_batch: float) -> None:
        """So many rows arrive as one: counts are that much rougher."""
        self.config = replace(self.config, rows_per_batch=max(1.0, rows_per_batch))

    def band_percent(self, rows: float, active: int, over_s: float = 0.0) -> float:
        """The dead band for so many rows, counted over that time: how far a worker may seem out by chance alone
        (counts of independent batches, several sigmas), or as far as shares were seen to stray, and never less than the
        configured one."""
        if rows <= 0.0:
            return math.inf
        chance = SHARE * math.sqrt(active * self.config.rows_per_batch / rows)
        counted_s = self.config.half_life_s / math.log(2.0)
        strays = self.jitter.sigma * math.sqrt(counted_s / max(counted_s, over_s))
        return max(self.config.dead_band_percent, self.config.noise_sigmas * max(chance, strays))

    def _effective(self, now_s: float, placement: Sequence[int], limits: Limits) -> Limits:
        """The caller's limits, with what moved a moment ago frozen, except on workers that are to be emptied."""
        recent = np.flatnonzero(now_s - self._moved_at_s < self.config.group_cool_down_s)
        resting = {int(group) for group in recent if placement[int(group)] not in limits.inactive}
        caps = [cap for cap in (limits.max_moves, self.config.max_moves) if cap is not None]
        return replace(limits, frozen=limits.frozen | resting, max_moves=min(caps, default=None))

    def _judge(
        self, now_s: float, made: Plan, band: float, effective: Limits, limits: Limits
    ) -> tuple[Verdict, str, Plan]:
        """The verdict, its words, and the plan that it is about: the new one, or the candidate that was confirmed."""
        if not self.enabled:
            self._candidate = None
            return Verdict.OFF, f"automatic moves are off; the plan would be: {made.text}", made
        if made.reason is Reason.EVACUATION:
            return Verdict.MOVE, made.text, made
        if self._candidate is not None and self._candidate.fits(made, limits):
            return self._confirm(now_s, self._candidate, effective)
        self._candidate = None
        refusal = self._refusal(made, band)
        if refusal is not None:
            return *refusal, made
        if now_s < self._quiet_until_s:
            return Verdict.COOLING_DOWN, f"groups moved or split a moment ago; {made.text}", made
        if self.config.confirm_ticks == 1:
            return Verdict.MOVE, made.text, made
        self._candidate = Candidate(made, limits, now_s, len(self._rows))
        return Verdict.CONFIRMING, f"seen once, waiting for new rows to confirm it; {made.text}", made

    def _refusal(self, made: Plan, band: float) -> tuple[Verdict, str] | None:
        if made.reason is Reason.NO_LOAD or band >= SHARE:
            return Verdict.QUIET, "there are too few rows to decide"
        if made.imbalance_before <= band:
            return Verdict.IN_BAND, f"imbalance {made.imbalance_before:.1f}% is within {band:.1f}%"
        if not made.moves:
            return Verdict.NOT_WORTH_IT, made.text
        if made.gain < band * band:
            return Verdict.NOT_WORTH_IT, f"{made.text}: gain {made.gain:.0f} is below {band * band:.0f}"
        return None

    def _confirm(self, now_s: float, candidate: Candidate, effective: Limits) -> tuple[Verdict, str, Plan]:
        """By all rows since the plan was made, however few come: those of one tick alone prove nothing."""
        placement = candidate.placement()
        growth = self._signal(candidate.rows, placement, effective)
        further = float(net_growth(candidate.grown, placement, effective.workers).sum())
        growth = growth * min(1.0, further / max(float(growth.sum()), 1e-9))  # full buffers grow no further
        total = float(candidate.rows.sum() + growth.sum())
        band = self.band_percent(total, effective.workers - len(effective.inactive), now_s - candidate.at_s)
        gain, sigma = candidate.gain(growth, self.config)
        wanted = band * band + self.config.gain_sigmas * sigma
        numbers = f"on new rows the gain is {gain:.0f}, and {wanted:.0f} is needed"
        if candidate.ticks >= self.config.confirm_ticks and gain >= wanted:
            # While a load turns, a plan is made from rows of before and after, and moves too little: what is left would
            # need a second one. That something must move is proven; what, the fresh rows know best.
            newest = self._plan(candidate.rows, growth, placement, effective)
            chosen = newest if newest.moves else candidate.plan
            return Verdict.MOVE, f"{chosen.text}; {numbers}", chosen
        # Of a few rows none may be of the groups in question; that says nothing before the others would show it.
        telling = band < candidate.plan.imbalance_before
        hopeless = telling and gain + self.config.noise_sigmas * sigma < self.config.dead_band_percent**2
        if hopeless or now_s - candidate.at_s >= self.config.max_tick_s:
            self._candidate = None
            return Verdict.NOT_WORTH_IT, f"{candidate.plan.text}, but {numbers}", candidate.plan
        return Verdict.CONFIRMING, numbers, candidate.plan

    def _schedule(self, now_s: float, verdict: Verdict) -> None:
        """Confirming starts quickly, looks less and less often (each look is a chance to be wrong), and does not
        forget how slow the ticks were: an imbalance that nothing helps backs off."""
        gap_s = self.config.min_tick_s
        if verdict in (Verdict.MOVE, Verdict.COOLING_DOWN):
            self._interval_s = gap_s
        elif verdict is Verdict.CONFIRMING and self._candidate is not None:
            gap_s = min(gap_s * 2.0 ** (self._candidate.ticks - 1), self.config.max_tick_s)
        else:
            gap_s = self._interval_s = min(self._interval_s * 2.0, self.config.max_tick_s)
        self.next_at_s = now_s + gap_s

    def _record(self, decision: Decision) -> None:
        last = self.history[-1] if self.history else None
        if last is not None and last.verdict is decision.verdict and decision.verdict is not Verdict.MOVE:
            self.history[-1] = replace(decision, repeated=last.repeated + 1)
        else:
            self.history.append(decision)


class Candidate:
    """A plan that waits for rows that it was not made from."""

    def __init__(self, made: Plan, limits: Limits, at_s: float, groups: int) -> None:
        self.plan = made
        self.limits = limits
        self.at_s = at_s
        self.ticks = 1
        self.rows = np.zeros(groups)
        self.grown = np.zeros(groups)

    def placement(self) -> list[int]:
        """The one that the plan would change."""
        return before(self.plan)

    def fits(self, made: Plan, limits: Limits) -> bool:
        """Is it still about the placement and the limits of now?"""
        return before(made) == self.placement() and limits == self.limits

    def add(self, rows: NDArray[np.float64], grown: NDArray[np.float64]) -> None:
        self.ticks += 1
        self.rows = self.rows + rows
        self.grown = self.grown + grown

    def gain(self, growth: NDArray[np.float64], config: BalancerConfig) -> tuple[float, float]:
        """The plan's gain on the fresh rows, and its standard deviation (counts of independent batches)."""
        active = np.ones(self.limits.workers)
        active[list(self.limits.inactive)] = 0.0
        total = float(self.rows.sum() + growth.sum())
        if total <= 0.0:
            return 0.0, math.inf
        weights = weigh(config.weights, float(self.rows.sum()), float(growth.sum()))
        percent = group_percent(self.rows, growth, int(active.sum()), weights)
        new, old = np.array(self.plan.placement, np.int32), np.array(self.placement(), np.int32)
        now = worker_percent(percent, old, self.limits) - SHARE * active
        after = worker_percent(percent, new, self.limits) - SHARE * active
        gain = float((now**2).sum() - (after**2).sum()) - config.weights.beta * len(self.plan.moves)
        slope = 2.0 * (now[old] - after[new])
        variance = float((slope**2 * percent).sum()) * SHARE * float(active.sum()) * config.rows_per_batch / total
        return gain, math.sqrt(variance)


def before(made: Plan) -> list[int]:
    """The placement that the plan was made for."""
    placement = list(made.placement)
    for group, source, _ in made.moves:
        placement[group] = source
    return placement
