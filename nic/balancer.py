"""Which groups should change their worker: the plan for one moment, and the decision over time.

Pure: no I/O, no clock of its own, no randomness but a seed. `plan` answers for one set of numbers; `Balancer` adds
what keeps a running engine calm: smoothing, a dead band, a cool-down, ticks that quicken under imbalance, and a
history of decisions with the numbers behind each.

The objective (FlexStream 5.2 after RSS++, corrected): loads L and accumulation A are each scaled to sum to
100 x active workers, so that 100 is one worker's fair share; minimise
`sum over workers (a1 * L_i + a2 * A_i - 100)^2 + beta * moved`.
A vector that is all zero says nothing and cannot be scaled: its factor goes to the other one.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flexstream.cython_ext.solver import Solver
from flexstream.errors import ConfigError

SHARE = 100.0  # percent: what each active worker should carry
HOT_PERCENT = 105.0  # a group heavier than this is hotter than a core, whatever the placement
EVALUATIONS = 128_000  # solver effort, divided by the groups: about 20 us at 128 groups x 24 workers
MIN_EFFORT, MAX_EFFORT = 1000, 16_000

Numbers = Sequence[float] | NDArray[np.float64]
Move = tuple[int, int, int]  # group, from, to


@dataclass(frozen=True, slots=True)
class Weights:
    """The factors of the objective."""

    load: float = 0.3
    accumulation: float = 0.7
    beta: float = 1.0


@dataclass(frozen=True, slots=True)
class Limits:
    """What a plan may do. `split` maps a split group to the workers that serve it; it stays where it is."""

    workers: int
    inactive: frozenset[int] = frozenset()
    frozen: frozenset[int] = frozenset()
    split: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    max_moves: int | None = None


class Reason(enum.StrEnum):
    """Why a plan is as it is; `Plan.text` says it with numbers."""

    MOVES = "moves"
    EVACUATION = "evacuation"
    BALANCED = "balanced"
    HOT_GROUP = "hot_group"
    NOTHING_BETTER = "nothing_better"
    NOTHING_MOVABLE = "nothing_movable"
    NO_LOAD = "no_load"
    ONE_WORKER = "one_worker"


@dataclass(frozen=True, slots=True)
class Plan:
    """What to move, and the numbers behind it. Loads are percent of a worker's fair share."""

    moves: list[Move]
    objective_before: float
    objective_after: float
    reason: Reason
    text: str
    placement: tuple[int, ...]
    worker_percent_before: tuple[float, ...]
    worker_percent_after: tuple[float, ...]
    imbalance_before: float
    imbalance_after: float
    hot_groups: tuple[int, ...] = ()
    evaluations: int = 0
    tries: int = 0

    @property
    def gain(self) -> float:
        return self.objective_before - self.objective_after


def group_percent(loads: Numbers, accumulation: Numbers, workers: int, weights: Weights) -> NDArray[np.float64]:
    """Each group's weight in percent of a worker's fair share; all zero when nothing came and nothing waits."""
    load, waiting = _numbers("loads", loads), _numbers("accumulation", accumulation)
    if len(load) != len(waiting):
        raise ConfigError(
            f"loads has {len(load)} groups, accumulation {len(waiting)}", code="bad_loads", hint="give one per group"
        )
    load_sum, waiting_sum = float(load.sum()), float(waiting.sum())
    if not (math.isfinite(load_sum) and math.isfinite(waiting_sum)):
        raise ConfigError("the numbers are too large to be added up", code="bad_loads", hint="give rows, not bytes")
    factor = weights.load + weights.accumulation
    total = SHARE * workers
    if load_sum == 0.0 and waiting_sum == 0.0:
        return np.zeros(len(load))
    if waiting_sum == 0.0:
        return load * (factor * total / load_sum)
    if load_sum == 0.0:
        return waiting * (factor * total / waiting_sum)
    return load / load_sum * (weights.load * total) + waiting / waiting_sum * (weights.accumulation * total)


def plan(
    loads: Numbers,
    accumulation: Numbers,
    placement: Sequence[int],
    limits: Limits,
    *,
    weights: Weights = Weights(),  # noqa: B008 - frozen
    seed: int = 0,
) -> Plan:
    """The moves that make the objective smaller, or none and the reason why.

    `loads` are the groups' rows since the last tick, `accumulation` the growth of their rows that wait; neither may
    be negative. The same input and seed give the same plan. Errors: ConfigError for numbers that cannot be used.
    """
    _check(limits, weights, placement, len(loads))
    percent = group_percent(loads, accumulation, limits.workers - len(limits.inactive), weights)
    groups = len(percent)
    start = np.array(placement, dtype=np.int32)
    active = np.ones(limits.workers, dtype=np.uint8)
    active[list(limits.inactive)] = 0
    fixed = np.zeros(groups, dtype=np.uint8)
    fixed[list(limits.frozen | set(limits.split))] = 1
    idle = not percent.any()
    evacuees = int(((active[start] == 0) & (fixed == 0)).sum())
    # Without load every placement is as good; when groups must leave all the same, spread them by number.
    solved = np.full(groups, SHARE * int(active.sum()) / groups) if idle else percent
    excess = _worker_percent(solved, start, limits) - SHARE * active
    result = start.copy()
    effort = (0, 0)
    if (limits.max_moves is None or limits.max_moves > 0) and not fixed.all() and (evacuees or not idle):
        solver = Solver(groups, limits.workers)
        solver.solve(
            solved,
            start,
            fixed,
            active,
            excess,
            result,
            beta=weights.beta,
            max_moves=groups if limits.max_moves is None else limits.max_moves,
            budget=min(max(EVALUATIONS // groups, MIN_EFFORT), MAX_EFFORT),
            seed=seed % 2**32,
        )
        if idle:
            result[active[start] == 1] = start[active[start] == 1]
        effort = (solver.evaluations, solver.tries)
    before, after = _worker_percent(percent, start, limits), _worker_percent(percent, result, limits)
    moves = [(int(g), int(start[g]), int(result[g])) for g in np.flatnonzero(result != start)]
    moves.sort(key=lambda move: -percent[move[0]])  # heaviest first: a caller that stops early has done the most
    hot = tuple(int(g) for g in np.flatnonzero(percent > HOT_PERCENT) if int(g) not in limits.split)
    target = SHARE * active if not idle else np.zeros(limits.workers)
    penalised = sum(1 for _, source, _ in moves if active[source])
    made = Plan(
        moves=moves,
        objective_before=float(((before - target) ** 2).sum()),
        objective_after=float(((after - target) ** 2).sum()) + weights.beta * penalised,
        reason=Reason.MOVES,
        text="",
        placement=tuple(int(worker) for worker in result),
        worker_percent_before=tuple(before.tolist()),
        worker_percent_after=tuple(after.tolist()),
        imbalance_before=float(np.abs(before - target).max()),
        imbalance_after=float(np.abs(after - target).max()),
        hot_groups=hot if limits.workers - len(limits.inactive) > 1 else (),
        evaluations=effort[0],
        tries=effort[1],
    )
    reason, text = _explain(made, percent, evacuees, idle=idle, stuck=bool(fixed.all()), limits=limits)
    return replace(made, reason=reason, text=text)


def _explain(
    made: Plan, percent: NDArray[np.float64], evacuees: int, *, idle: bool, stuck: bool, limits: Limits
) -> tuple[Reason, str]:
    hottest = max(made.hot_groups, key=lambda group: float(percent[group]), default=None)
    hot = (
        f"group {hottest} alone is {percent[hottest]:.0f}% of a worker's share: no placement helps, only a split does"
        if hottest is not None
        else ""
    )
    if made.moves:
        count = f"{len(made.moves)} move{'s' if len(made.moves) > 1 else ''}"
        if limits.max_moves is not None and len(made.moves) >= limits.max_moves:
            count += f" (as many as one tick may make: {limits.max_moves})"
        text = f"{count}: imbalance {made.imbalance_before:.1f}% -> {made.imbalance_after:.1f}%"
        if evacuees:
            return Reason.EVACUATION, f"{text}; {evacuees} groups were on inactive workers"
        return Reason.MOVES, f"{text}; {hot}" if hot else text
    if idle:
        return Reason.NO_LOAD, "no rows came and none wait"
    if limits.workers - len(limits.inactive) == 1 and not evacuees:
        return Reason.ONE_WORKER, "there is only one active worker"
    if hot:
        return Reason.HOT_GROUP, hot
    if stuck:
        return Reason.NOTHING_MOVABLE, "every group is frozen, moving or split"
    if made.objective_before <= 1e-6:
        return Reason.BALANCED, "every worker has its fair share"
    return Reason.NOTHING_BETTER, f"imbalance {made.imbalance_before:.1f}%, and no move gains more than it costs"


def _worker_percent(percent: NDArray[np.float64], placement: NDArray[np.int32], limits: Limits) -> NDArray[np.float64]:
    """Each worker's load; a split group counts in equal parts for the workers that serve it."""
    if not limits.split:
        return np.bincount(placement, percent, limits.workers)
    whole = percent.copy()
    whole[list(limits.split)] = 0.0
    loads = np.bincount(placement, whole, limits.workers)
    for group, served_by in limits.split.items():
        for worker in served_by or (int(placement[group]),):
            loads[worker] += percent[group] / max(len(served_by), 1)
    return loads


def _numbers(name: str, values: Numbers) -> NDArray[np.float64]:
    array = np.ascontiguousarray(values, dtype=np.float64)
    if array.ndim != 1 or not len(array):
        raise ConfigError(f"{name} must be one number per group", code="bad_loads", hint="give a flat sequence")
    bad = np.flatnonzero(~(np.isfinite(array) & (array >= 0.0)))
    if len(bad):
        group = int(bad[0])
        raise ConfigError(
            f"{name} of group {group} is {array[group]}; it must be finite and not negative",
            code="bad_loads",
            hint="accumulation is growth: what shrinks counts as 0",
        )
    return array


def _check(limits: Limits, weights: Weights, placement: Sequence[int], groups: int) -> None:
    def refuse(message: str, hint: str) -> None:
        raise ConfigError(message, code="bad_limits", hint=hint)

    if limits.workers < 1:
        refuse(f"there must be at least one worker, not {limits.workers}", "give the number of workers")
    if len(placement) != groups:
        refuse(f"placement has {len(placement)} groups, loads {groups}", "give one worker per group")
    everyone = range(limits.workers)
    for group, worker in enumerate(placement):
        if worker not in everyone:
            refuse(f"group {group} is on worker {worker}; there are {limits.workers}", "workers count from 0")
    for worker in limits.inactive:
        if worker not in everyone:
            refuse(f"inactive worker {worker} does not exist; there are {limits.workers}", "workers count from 0")
    if len(limits.inactive) >= limits.workers:
        refuse("every worker is inactive", "leave one active: the groups must be somewhere")
    for group in [*limits.frozen, *limits.split]:
        if not 0 <= group < groups:
            refuse(f"group {group} does not exist; there are {groups}", "groups count from 0")
    for group, served_by in limits.split.items():
        if any(worker not in everyone for worker in served_by):
            refuse(f"split group {group} is served by {served_by}; there are {limits.workers} workers", "count from 0")
    if limits.max_moves is not None and limits.max_moves < 0:
        refuse(f"max_moves is {limits.max_moves}", "give 0 or more, or None for no limit")
    factors = (weights.load, weights.accumulation, weights.beta)
    if not all(math.isfinite(value) and value >= 0.0 for value in factors) or weights.load + weights.accumulation <= 0:
        refuse(f"weights {factors} cannot be used", "give finite numbers, not negative, load or accumulation above 0")


@dataclass(frozen=True, slots=True)
class BalancerConfig:
    """How calm the balancer is. See docs/balancer.md for what each is good for."""

    min_tick_s: float = 0.01
    max_tick_s: float = 1.0
    dead_band_percent: float = 5.0
    noise_sigmas: float = 3.0
    rows_per_batch: float = 1.0  # rows come in frames: this many arrive as one, and make the counts that much rougher
    confirm_ticks: int = 2
    cool_down_s: float = 0.05
    group_cool_down_s: float = 1.0
    half_life_s: float = 0.02
    accumulation_floor: float = 0.02  # backlog growth below this share of the rows is jitter, not a signal
    max_moves: int | None = None
    history: int = 256
    weights: Weights = Weights()

    def __post_init__(self) -> None:
        if not 0 < self.min_tick_s <= self.max_tick_s:
            raise ConfigError(
                f"ticks from {self.min_tick_s} s to {self.max_tick_s} s cannot be used",
                code="bad_config",
                hint="0 < min_tick_s <= max_tick_s",
            )
        for name in ("dead_band_percent", "noise_sigmas", "cool_down_s", "group_cool_down_s", "accumulation_floor"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}", code="bad_config", hint="give 0 or more")
        if self.half_life_s <= 0 or self.confirm_ticks < 1 or self.history < 1 or self.rows_per_batch <= 0:
            raise ConfigError(
                "half_life_s, confirm_ticks, history and rows_per_batch must be above 0", code="bad_config"
            )


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

    Guarantees: a group that has just moved stays for `group_cool_down_s` unless its worker is to be emptied; an
    imbalance must last `confirm_ticks` ticks and be worth more than the dead band squared. Assumes: one thread.
    """

    def __init__(self, groups: int, config: BalancerConfig = BalancerConfig(), *, seed: int = 0) -> None:  # noqa: B008
        self.config = config
        self.enabled = True
        self.history: deque[Decision] = deque(maxlen=config.history)
        self.next_at_s = -math.inf
        self._seed = seed
        self._rows = np.zeros(groups)
        self._growth = np.zeros(groups)
        self._waiting: NDArray[np.float64] | None = None
        self._last_s: float | None = None
        self._interval_s = config.min_tick_s
        self._out_of_band = 0
        self._quiet_until_s = -math.inf
        self._moved_at_s = np.full(groups, -math.inf)

    def due(self, now_s: float) -> bool:
        return now_s >= self.next_at_s

    def alarm(self, now_s: float) -> None:
        """Something looks wrong (a backlog grows): tick as soon as the shortest tick allows."""
        self._interval_s = self.config.min_tick_s
        earliest = now_s if self._last_s is None else max(now_s, self._last_s + self.config.min_tick_s)
        self.next_at_s = min(self.next_at_s, earliest)

    def tick(self, now_s: float, rows: Numbers, waiting: Numbers, placement: Sequence[int], limits: Limits) -> Decision:
        """Decide. `rows` per group since the last tick; `waiting` per group now, in rows (sockets and blocks).

        `limits.frozen` must hold the groups that are moving. Errors: ConfigError, and nothing is remembered.
        """
        counted, waits = _numbers("rows", rows), _numbers("waiting", waiting)
        if len(counted) != len(self._rows) or len(waits) != len(self._rows):
            raise ConfigError(
                f"this balancer has {len(self._rows)} groups; rows has {len(counted)}, waiting {len(waits)}",
                code="bad_loads",
                hint="give one number per group",
            )
        if self._last_s is not None and now_s < self._last_s:
            raise ConfigError(
                f"the clock went back from {self._last_s} to {now_s}", code="bad_clock", hint="use a monotonic clock"
            )
        _check(limits, self.config.weights, placement, len(counted))
        self._remember(now_s, counted, waits)
        total = float(self._rows.sum())
        use_growth = float(self._growth.sum()) > self.config.accumulation_floor * total
        growth = self._growth if use_growth else np.zeros_like(self._growth)
        made = plan(
            self._rows, growth, placement, self._effective(now_s, placement, limits),
            weights=self.config.weights, seed=self._seed,
        )  # fmt: skip
        active = limits.workers - len(limits.inactive)
        noise = math.sqrt(active * self.config.rows_per_batch / total) if total > 0 else math.inf
        band = max(self.config.dead_band_percent, self.config.noise_sigmas * SHARE * noise)
        verdict, text = self._judge(now_s, made, band, use_growth=use_growth)
        self._schedule(now_s, verdict)
        if verdict is Verdict.MOVE:
            self._quiet_until_s = now_s + self.config.cool_down_s
            self._out_of_band = 0
            for group, _, _ in made.moves:
                self._moved_at_s[group] = now_s
        decision = Decision(now_s, verdict, text, made, band, total, use_growth, self.next_at_s - now_s)
        self._record(decision)
        return decision

    def _remember(self, now_s: float, rows: NDArray[np.float64], waiting: NDArray[np.float64]) -> None:
        """Counts fade with the half-life: short ticks share a window, long ones stand alone."""
        elapsed = 0.0 if self._last_s is None else now_s - self._last_s
        fade = 0.5 ** (elapsed / self.config.half_life_s)
        growth = np.zeros_like(waiting) if self._waiting is None else np.maximum(waiting - self._waiting, 0.0)
        self._rows = self._rows * fade + rows
        self._growth = self._growth * fade + growth
        self._waiting = waiting.copy()
        self._last_s = now_s

    def _effective(self, now_s: float, placement: Sequence[int], limits: Limits) -> Limits:
        """The caller's limits, with what moved a moment ago frozen, except on workers that are to be emptied."""
        recent = np.flatnonzero(now_s - self._moved_at_s < self.config.group_cool_down_s)
        resting = {int(group) for group in recent if placement[int(group)] not in limits.inactive}
        caps = [cap for cap in (limits.max_moves, self.config.max_moves) if cap is not None]
        return replace(limits, frozen=limits.frozen | resting, max_moves=min(caps, default=None))

    def _judge(self, now_s: float, made: Plan, band: float, *, use_growth: bool) -> tuple[Verdict, str]:
        if not self.enabled:
            return Verdict.OFF, f"automatic moves are off; the plan is: {made.text}"
        if made.reason is Reason.EVACUATION:
            return Verdict.MOVE, made.text
        if made.reason is Reason.NO_LOAD or (band >= SHARE and not use_growth):
            self._out_of_band = 0
            return Verdict.QUIET, "too few rows to tell"
        if made.imbalance_before <= band:
            self._out_of_band = 0
            return Verdict.IN_BAND, f"imbalance {made.imbalance_before:.1f}% is within {band:.1f}%"
        if not made.moves or made.gain < band * band:
            self._out_of_band = 0
            text = made.text if not made.moves else f"{made.text}: gain {made.gain:.0f} is below {band * band:.0f}"
            return Verdict.NOT_WORTH_IT, text
        self._out_of_band += 1
        if now_s < self._quiet_until_s:
            return Verdict.COOLING_DOWN, f"moved {self.config.cool_down_s} s ago or less; {made.text}"
        if self._out_of_band < self.config.confirm_ticks:
            return Verdict.CONFIRMING, f"out of band for {self._out_of_band} of {self.config.confirm_ticks} ticks"
        return Verdict.MOVE, made.text

    def _schedule(self, now_s: float, verdict: Verdict) -> None:
        if verdict in (Verdict.MOVE, Verdict.CONFIRMING, Verdict.COOLING_DOWN):
            self._interval_s = self.config.min_tick_s
        else:
            self._interval_s = min(self._interval_s * 2.0, self.config.max_tick_s)
        self.next_at_s = now_s + self._interval_s

    def _record(self, decision: Decision) -> None:
        last = self.history[-1] if self.history else None
        if last is not None and last.verdict is decision.verdict and decision.verdict is not Verdict.MOVE:
            self.history[-1] = replace(decision, repeated=last.repeated + 1)
        else:
            self.history.append(decision)
