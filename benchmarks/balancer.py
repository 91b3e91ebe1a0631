"""How long does a plan take, and how near the optimum is it?

  python -m benchmarks.balancer --json

"median_us" is one call of the native solver at 128 groups x 24 workers (target: at most 25), the median over
several kinds of load; "plan_us" the same through the Python interface. "quality" is the mean of objective / exact
optimum over small random cases, the optimum found by trying every placement (target: at most 1.01).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from benchmarks import harness
from flexstream.cython_ext.balance.solver import Solver
from flexstream.nic.balance.balancer import Limits, Weights, group_percent, plan
from flexstream.nic.balance.placement_plan import effort

GROUPS, WORKERS = 128, 24
Loads = NDArray[np.float64]


def cases(random: np.random.Generator) -> dict[str, tuple[Callable[[], Loads], list[int]]]:
    """A name, a maker of loads, and the placement that they meet."""
    spread, heap = [group % WORKERS for group in range(GROUPS)], [0] * GROUPS
    ranks = np.arange(1, GROUPS + 1)
    return {
        "uniform loads": (lambda: random.random(GROUPS), spread),
        "zipf 0.5": (lambda: random.permutation(1.0 / ranks**0.5), spread),
        "zipf 1.0": (lambda: random.permutation(1.0 / ranks), spread),
        "zipf 2.0": (lambda: random.permutation(1.0 / ranks**2.0), spread),
        "all on one worker": (lambda: random.random(GROUPS), heap),
        "equal, all on one": (lambda: np.ones(GROUPS), heap),
    }


def measure(loads: Callable[[], Loads], placement: list[int], calls: int) -> tuple[list[float], list[float], float]:
    """Microseconds of each solver call, of each plan, and the median imbalance that is left."""
    solver, result = Solver(GROUPS, WORKERS), np.empty(GROUPS, np.int32)
    fixed, active = np.zeros(GROUPS, np.uint8), np.ones(WORKERS, np.uint8)
    start, nothing, limits = np.array(placement, np.int32), np.zeros(GROUPS), Limits(WORKERS)
    solver_us, plan_us, left = [], [], []
    for _ in range(calls):
        load = loads()
        percent = group_percent(load, nothing, WORKERS, Weights())
        excess = np.asarray(np.bincount(start, percent, WORKERS), dtype=np.float64) - 100.0
        began = time.perf_counter_ns()
        solver.solve(
            percent, start, fixed, active, excess, result, beta=1.0, max_moves=GROUPS, budget=effort(GROUPS), seed=0
        )
        solver_us.append((time.perf_counter_ns() - began) / 1e3)
        began = time.perf_counter_ns()
        made = plan(load, nothing, placement, limits)
        plan_us.append((time.perf_counter_ns() - began) / 1e3)
        left.append(made.imbalance_after)
    return solver_us, plan_us, harness.median(left)


def ratios_to_exact(random: np.random.Generator, count: int) -> Iterator[float]:
    for _ in range(count):
        workers = int(random.integers(2, 5))
        groups = int(random.integers(3, {2: 13, 3: 10, 4: 9}[workers]))
        loads, growth = random.random(groups) ** random.choice([0.5, 1.0, 3.0]), random.random(groups)
        old = random.integers(0, workers, groups)
        percent = group_percent(loads, growth, workers, Weights())
        every = np.array(list(itertools.product(range(workers), repeat=groups)), dtype=np.int8)
        squares = sum(((every == worker) @ percent - 100.0) ** 2 for worker in range(workers))
        best = float((squares + (every != old).sum(axis=1)).min())
        yield plan(loads, growth, old.tolist(), Limits(workers)).objective_after / best


def main() -> None:
    options = harness.arguments(__doc__ or "", pairs=400)
    harness.start("balancer")
    random = np.random.default_rng(4)
    rows, every = [], []
    all_plans: list[float] = []
    for name, (loads, placement) in cases(random).items():
        measure(loads, placement, 5)  # warm up
        solver_us, plan_us, left = measure(loads, placement, options.pairs)
        every += solver_us
        all_plans += plan_us
        rows.append((name, harness.median(solver_us), harness.spread(solver_us), harness.median(plan_us), left))
    harness.print_table(("loads", "solver us", "quartiles", "plan() us", "imbalance left %"), rows)
    ratios = list(ratios_to_exact(random, 30 if options.quick else 200))
    median_us, quality = harness.median(every), float(np.mean(ratios))
    print(f"median_us {median_us:.1f}, target 25: {'met' if median_us <= 25 else 'MISSED'}")
    print(f"quality {quality:.5f} (worst {max(ratios):.3f}), target 1.01: {'met' if quality <= 1.01 else 'MISSED'}")
    result = {
        "median_us": median_us,
        "plan_us": harness.median(all_plans),
        "quality": quality,
        "quality_worst": max(ratios),
        "optimal_share": float(np.mean(np.array(ratios) < 1 + 1e-9)),
        "cases": {row[0]: row[1] for row in rows},
    }
    harness.finish(result, as_json=options.json)


if __name__ == "__main__":
    main()
