"""The middle of a chain of values: right in any order, whatever the slices, and for a bounded amount of work."""

import math
import random

import pytest

from flexstream.cython_ext.testing.ranking_probe import median_of
from flexstream.testing.oracle import AGGREGATES

SPECIAL = [0.0, math.inf, -math.inf, math.nan, 5e-324, -5e-324, 1.7e308, -1.7e308, 1.0]
WHOLE = [0, 1, -1, 2**63 - 1, -(2**63), 2**53 + 1, 2**62]


def expected(pairs):
    return AGGREGATES["median"]([value for value, rows in pairs for _ in range(rows)], [])


def same(left, right):
    return left == right or (math.isnan(left) and math.isnan(right))


def random_pairs(rnd):
    """Distinct values mostly, each with some rows; some values twice, as parts of a pane have them."""
    n = rnd.choice((1, 2, 3, 4, 7, 50, 300))
    make = rnd.choice(
        (
            lambda: rnd.randint(-5, 5),
            lambda: rnd.choice(WHOLE),
            lambda: rnd.getrandbits(64) - 2**63,
            lambda: rnd.choice(SPECIAL),
            lambda: rnd.gauss(0, 1),
            lambda: rnd.uniform(-1e308, 1e308),
        )
    )
    most = rnd.choice((1, 2, 20))
    return [(make(), rnd.randint(1, most)) for _ in range(n)]


def test_it_is_what_sorting_says_in_slices_of_any_size():
    for seed in range(3_000):
        rnd = random.Random(f"ranking/{seed}")
        pairs, budget = random_pairs(rnd), rnd.choice((1, 2, 7, 100, 4096))
        found, _ = median_of(pairs, slice_values=budget)
        assert same(found, expected(pairs)), (seed, pairs, budget)


def organ_pipe(n):
    return [i if i % 2 else -i for i in range(n)]


def killer(n):
    """Each head of what is left is its greatest or its least."""
    values = []
    for i in range(n):
        values.insert(0, i if i % 2 else n * 4 - i)
    return values


@pytest.mark.parametrize("order", [lambda n: list(range(n)), lambda n: list(range(n))[::-1], organ_pipe, killer])
@pytest.mark.parametrize("scale", [1, 2**48])
def test_no_order_of_values_costs_more_than_three_passes_for_each_bit(order, scale):
    n = 4_000
    pairs = [(value * scale, 1) for value in order(n)]
    found, looked_at = median_of(pairs)
    assert found == expected(pairs)
    assert looked_at <= (3 * 64 + 1) * n


def test_values_in_random_order_are_looked_at_a_few_times():
    rnd = random.Random(7)
    pairs = [(rnd.random(), 1) for _ in range(100_000)]
    found, looked_at = median_of(pairs)
    assert found == expected(pairs)
    assert looked_at < 12 * len(pairs)
