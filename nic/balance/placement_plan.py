"""Which groups should change their worker, for one set of numbers. Pure: no I/O, no clock, a seed for randomness.

The objective (FlexStream 5.2 after RSS++, corrected): loads L and accumulation A are each scaled to sum to
100 x active workers, so that 100 is one worker's fair share; minimise
`sum over workers (a1 * L_i + a2 * A_i - 100)^2 + beta * moved`.
A vector that is all zero says nothing and cannot be scaled: its factor goes to the other one.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from flexstream.cython_ext.balance.solver import Solver
from flexstream.errors import ConfigError

SHARE = 100.0  # percent: what each active worker should carry
HOT_PERCENT = 104.0  # a group heavier than this is hotter than a core, whatever the placement
EVALUATIONS = 100_000  # solver effort, divided by the groups: about 20 us at 128 groups x 24 workers
MIN_EFFORT, MAX_EFFORT = 750, 16_000

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
    """What a plan may do. `split` maps a split group to the workers that serve it; it stays where it is. `parts` says
    how its rows are shared among them, in the same order, when that is known (and says nothing about what may be done).
    """

    workers: int
    inactive: frozenset[int] = frozenset()
    frozen: frozenset[int] = frozenset()
    split: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    max_moves: int | None = None
    parts: Mapping[int, tuple[float, ...]] = field(default_factory=dict, compare=False)


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
    load, waiting = check_numbers("loads", loads), check_numbers("accumulation", accumulation)
    if len(load) != len(waiting):
        raise ConfigError(
            f"loads has {len(load)} groups, but accumulation has {len(waiting)}",
            code="bad_loads",
            hint="give one per group",
        )
    load_sum, waiting_sum = float(load.sum()), float(waiting.sum())
    if not (math.isfinite(load_sum) and math.isfinite(waiting_sum)):
        raise ConfigError("the numbers are too large to add up", code="bad_loads", hint="give rows, not bytes")
    factor = weights.load + weights.accumulation
    total = SHARE * workers
    if load_sum == 0.0 and waiting_sum == 0.0:
        return np.zeros(len(load))
    if waiting_sum == 0.0:
        return load / load_sum * (factor * total)
    if load_sum == 0.0:
        return waiting / waiting_sum * (factor * total)
    return load / load_sum * (weights.load * total) + waiting / waiting_sum * (weights.accumulation * total)


def weigh(weights: Weights, rows: float, growth: float) -> Weights:
    """The factors when growth is as many rows as it is.

    The objective scales both to the same sum. Where as many rows pile up as come, that is what is wanted. But a hundred
    rows that wait would outweigh ten thousand that came; a plan made from them moves the wrong groups, or too many,
    and the next one moves others back. So the factors are those of rows against rows.
    """
    total = weights.load * rows + weights.accumulation * growth
    if total <= 0.0:
        return weights
    factor = weights.load + weights.accumulation
    part = factor * weights.accumulation * growth / total
    return replace(weights, load=factor - part, accumulation=part)


def plan(
    loads: Numbers,
    accumulation: Numbers,
    placement: Sequence[int],
    limits: Limits,
    *,
    weights: Weights = Weights(),
    seed: int = 0,
) -> Plan:
    """The moves that make the objective smaller, or none and the reason why.

    `loads` are the groups' rows since the last tick, `accumulation` the growth of their rows that wait; neither may
    be negative. The same input and seed give the same plan. Errors: ConfigError for numbers that cannot be used.
    """
    check_limits(limits, weights, placement, len(loads))
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
    excess = worker_percent(solved, start, limits) - SHARE * active
    result = start.copy()
    spent = (0, 0)
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
            budget=effort(groups),
            seed=seed % 2**32,
        )
        if idle:
            result[active[start] == 1] = start[active[start] == 1]
        spent = (solver.evaluations, solver.tries)
    before, after = worker_percent(percent, start, limits), worker_percent(percent, result, limits)
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
        evaluations=spent[0],
        tries=spent[1],
    )
    reason, text = _explain(made, percent, evacuees, idle=idle, stuck=bool(fixed.all()), limits=limits)
    return replace(made, reason=reason, text=text)


def effort(groups: int) -> int:
    """Candidates that the solver may look at: more where each is cheap, and near the optimum worth it."""
    return min(max(EVALUATIONS // groups, MIN_EFFORT), MAX_EFFORT)


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
            count += f" (one tick may make at most {limits.max_moves})"
        text = f"{count}: imbalance {made.imbalance_before:.1f}% -> {made.imbalance_after:.1f}%"
        if evacuees:
            return Reason.EVACUATION, f"{text}; {evacuees} groups were on inactive workers"
        return Reason.MOVES, f"{text}; {hot}" if hot else text
    if idle:
        return Reason.NO_LOAD, "no rows arrived and none are waiting"
    if limits.workers - len(limits.inactive) == 1 and not evacuees:
        return Reason.ONE_WORKER, "there is only one active worker"
    if hot:
        return Reason.HOT_GROUP, hot
    if stuck:
        return Reason.NOTHING_MOVABLE, "every group is frozen, moving or split"
    if made.objective_before <= 1e-6:
        return Reason.BALANCED, "every worker has its fair share"
    return Reason.NOTHING_BETTER, f"imbalance {made.imbalance_before:.1f}%, and no move gains more than it costs"


def worker_percent(percent: NDArray[np.float64], placement: NDArray[np.int32], limits: Limits) -> NDArray[np.float64]:
    """Each worker's load; a split group counts in parts for the workers that serve it, equal ones if nobody knows."""
    if not limits.split:
        return np.asarray(np.bincount(placement, percent, limits.workers), dtype=np.float64)
    whole = percent.copy()
    whole[list(limits.split)] = 0.0
    loads = np.asarray(np.bincount(placement, whole, limits.workers), dtype=np.float64)
    for group, served_by in limits.split.items():
        workers = served_by or (int(placement[group]),)
        equal = (1.0 / len(workers),) * len(workers)
        for worker, part in zip(workers, limits.parts.get(group, equal), strict=True):
            loads[worker] += percent[group] * part
    return loads


def check_numbers(name: str, values: Numbers) -> NDArray[np.float64]:
    array = np.ascontiguousarray(values, dtype=np.float64)
    if array.ndim != 1 or not len(array):
        raise ConfigError(f"{name} must be one number per group", code="bad_loads", hint="give a flat sequence")
    bad = np.flatnonzero(~(np.isfinite(array) & (array >= 0.0)))
    if len(bad):
        group = int(bad[0])
        raise ConfigError(
            f"{name} of group {group} is {array[group]}; it must be finite and not negative",
            code="bad_loads",
            hint="accumulation is growth: count a group that shrinks as 0",
        )
    return array


def check_limits(limits: Limits, weights: Weights, placement: Sequence[int], groups: int) -> None:
    def refuse(message: str, hint: str) -> None:
        raise ConfigError(message, code="bad_limits", hint=hint)

    if limits.workers < 1:
        refuse(f"there must be at least one worker, not {limits.workers}", "give the number of workers")
    if len(placement) != groups:
        refuse(f"placement has {len(placement)} groups, but loads has {groups}", "give one worker per group")
    everyone = range(limits.workers)
    for group, worker in enumerate(placement):
        if worker not in everyone:
            refuse(f"group {group} is on worker {worker}; there are {limits.workers} workers", "workers count from 0")
    for worker in limits.inactive:
        if worker not in everyone:
            refuse(
                f"inactive worker {worker} does not exist; there are {limits.workers} workers", "workers count from 0"
            )
    if len(limits.inactive) >= limits.workers:
        refuse("every worker is inactive", "leave one active: the groups must be somewhere")
    for group in [*limits.frozen, *limits.split]:
        if not 0 <= group < groups:
            refuse(f"group {group} does not exist; there are {groups} groups", "groups count from 0")
    for group, served_by in limits.split.items():
        if any(worker not in everyone for worker in served_by):
            refuse(f"split group {group} is served by {served_by}; there are {limits.workers} workers", "count from 0")
    if limits.max_moves is not None and limits.max_moves < 0:
        refuse(f"max_moves is {limits.max_moves}", "give 0 or more, or None for no limit")
    factors = (weights.load, weights.accumulation, weights.beta)
    if not all(math.isfinite(value) and value >= 0.0 for value in factors) or weights.load + weights.accumulation <= 0:
        refuse(f"weights {factors} cannot be used", "give finite numbers, not negative, load or accumulation above 0")
