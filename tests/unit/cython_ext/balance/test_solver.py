"""The native solver's own contract: sizes, determinism, the cost it reports."""

from __future__ import annotations

import numpy as np
import pytest

from flexstream.cython_ext.balance.solver import Solver


def solve(solver: Solver, weight: np.ndarray, placement: np.ndarray, **options: int) -> tuple[float, np.ndarray]:
    workers = solver.workers
    excess = np.bincount(placement, weight, workers) - weight.sum() / workers
    result = np.empty_like(placement)
    cost = solver.solve(
        weight, placement, np.zeros(len(weight), np.uint8), np.ones(workers, np.uint8), excess, result,
        beta=1.0, max_moves=options.get("max_moves", len(weight)), budget=options.get("budget", 4000),
        seed=options.get("seed", 0),
    )  # fmt: skip
    return cost, result


def test_the_cost_is_that_of_the_placement(seed: int) -> None:
    random = np.random.default_rng(seed)
    for _ in range(100):
        groups, workers = int(random.integers(1, 200)), int(random.integers(1, 30))
        weight, placement = random.random(groups), random.integers(0, workers, groups).astype(np.int32)
        cost, result = solve(Solver(groups, workers), weight, placement)
        squares = ((np.bincount(result, weight, workers) - weight.sum() / workers) ** 2).sum()
        assert cost == pytest.approx(squares + (result != placement).sum())


def test_a_used_solver_answers_like_a_fresh_one(seed: int) -> None:
    random = np.random.default_rng(seed)
    used = Solver(50, 5)
    for _ in range(20):
        weight, placement = random.random(50) * 20, random.integers(0, 5, 50).astype(np.int32)
        assert solve(used, weight, placement)[1].tolist() == solve(Solver(50, 5), weight, placement)[1].tolist()


def test_the_budget_bounds_the_effort() -> None:
    random = np.random.default_rng(1)
    solver = Solver(500, 50)
    weight, placement = random.random(500) * 10, np.zeros(500, np.int32)
    solve(solver, weight, placement, budget=1000)
    assert solver.evaluations < 1000 + 4 * 500
    assert solver.tries == 1


def test_sizes_and_workers_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one group"):
        Solver(0, 1)
    with pytest.raises(ValueError, match="do not fit"):
        solve(Solver(3, 2), np.ones(4), np.zeros(4, np.int32))
    with pytest.raises(ValueError, match="group 0 is on worker 2"):
        Solver(1, 2).solve(
            np.ones(1), np.array([2], np.int32), np.zeros(1, np.uint8), np.ones(2, np.uint8), np.zeros(2),
            np.zeros(1, np.int32), beta=1.0, max_moves=1, budget=10, seed=0,
        )  # fmt: skip
