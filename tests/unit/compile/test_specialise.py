"""From a sample of the rows to a variant: what is chosen, and that it does not flap."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

import flexstream as fs
from flexstream import col
from flexstream.compile.codegen import Pipeline
from flexstream.compile.specialise import MAX_DENSE_BYTES, Decision, Facts, Shape, best_order, cost, decide
from flexstream.compile.variant_choices import PLAIN, Choices

STREAM = fs.Stream("s", {"t": "timestamp[s]", "k": "i32", "x": "i64", "y": "i32", "f": "f64"}, key="k", time="t")


def shape(predicates: int = 0, **changes) -> Shape:
    return Shape(**{
        "costs": (2.0,) * predicates, "fold_cost": 9.0, "can_mask": True, "can_be_hot": True, "dense_bytes": 16,
        **changes,
    })  # fmt: skip


def facts(**changes) -> Facts:
    sample = {"rows": 1000, "passed": (), "keys": 1000, "least": 0, "most": 9999, "hottest": 0.01, "rows_per_key": 100}
    return Facts(**{**sample, **changes})


def test_the_shape_of_a_query():
    query = STREAM.query("q").filter((col("x") > 1) & (col("y") > 2)).filter(col("x") // col("y") > 3)
    made = Shape.of(Pipeline(query.window(fs.tumbling("10s")).agg(n=fs.count(), a=fs.sum("y")).bound()))
    assert len(made.costs) == 2
    assert not made.can_mask  # a filter that may fail comes behind
    assert made.can_be_hot
    assert made.dense_bytes == 16
    wide = Shape.of(Pipeline(STREAM.query("q").window(fs.tumbling("10s")).agg(a=fs.sum("x")).bound()))
    assert not wide.can_be_hot  # sums of 64 bits, added up apart, could overflow where in order they do not


def test_the_predicate_that_drops_most_comes_first():
    parts, _, _ = best_order(shape(3, can_mask=False), (0.99, 0.5, 0.01))
    assert parts[0] == (2,)


def test_near_one_half_there_is_no_branch():
    assert best_order(shape(1), (0.5,))[:2] == (((0,),), True)
    assert best_order(shape(1), (0.01,))[:2] == (((0,),), False)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=5), st.booleans())
def test_the_order_costs_what_it_says_and_no_cut_of_it_costs_less(passed, can_mask):
    made = shape(len(passed), can_mask=can_mask)
    parts, masked, least = best_order(made, passed)
    assert sorted(itertools.chain(*parts)) == list(range(len(passed)))
    assert cost(made, passed, parts, masked) == pytest.approx(least)
    order = list(itertools.chain(*parts))
    for cuts in itertools.product((False, True), repeat=len(order) - 1):
        tried: list[list[int]] = [[order[0]]]
        for number, cut in zip(order[1:], cuts, strict=True):
            if cut:
                tried.append([number])
            else:
                tried[-1].append(number)
        for mask in {False, can_mask}:
            assert cost(made, passed, tried, mask) >= least - 1e-9


def test_an_order_stays_when_another_is_hardly_better():
    made = shape(2, can_mask=False)
    first = decide(made, facts(passed=(0.9, 0.1), rows_per_key=1), Decision())
    assert first.choices.order == ((1,), (0,))
    again = decide(made, facts(passed=(0.1, 0.11), rows_per_key=1), first)
    assert again.what == first.what
    flipped = decide(made, facts(passed=(0.05, 0.95), rows_per_key=1), again)
    assert flipped.choices.order == ((0,), (1,))
    assert "pass 0.05, 0.95 of the rows" in flipped.reasons[0]


def test_keys_of_a_small_range_get_a_dense_array_with_some_room():
    found = decide(shape(), facts(), Decision())
    assert found.choices == Choices(dense=True)
    assert found.base == 0
    assert found.size == 16384
    assert "dense array" in found.reasons[0]
    negative = decide(shape(), facts(least=-500, most=-400), Decision())
    assert negative.base <= -500
    assert negative.base + negative.size > -400


@pytest.mark.parametrize(
    "changes", [{"most": 10**9}, {"rows_per_key": 1.5}, {"keys": 0, "least": 2**63 - 1, "most": -(2**63)}]
)
def test_no_dense_array_for_wide_ranges_and_keys_that_come_once(changes):
    assert decide(shape(), facts(**changes), Decision()).what == (PLAIN, 0, 0)
    assert decide(shape(dense_bytes=0), facts(), Decision()).what == (PLAIN, 0, 0)


@given(st.integers(-(2**63), 2**63 - 1), st.integers(1, MAX_DENSE_BYTES // 16))
def test_a_range_holds_all_keys_that_were_seen_and_is_never_too_large(least, span):
    most = min(least + span - 1, 2**63 - 1)
    found = decide(shape(), facts(least=least, most=most), Decision())
    assert found.size
    assert found.base <= least
    assert most < found.base + found.size
    assert found.size * 16 <= MAX_DENSE_BYTES
    assert -(2**63) <= found.base < 2**63


def test_a_range_stays_while_it_holds_the_keys_and_grows_when_it_does_not():
    first = decide(shape(), facts(), Decision())
    assert decide(shape(), facts(least=3, most=9000), first).what == first.what
    grown = decide(shape(), facts(most=20_000), first)
    assert grown.size > 20_000
    assert decide(shape(), facts(most=10**9), grown).what == (PLAIN, 0, 0)


def test_a_hot_key_is_folded_apart_until_it_is_clearly_not_hot():
    hot = decide(shape(dense_bytes=0), facts(hottest=0.6), Decision())
    assert hot.choices.hot
    assert decide(shape(dense_bytes=0), facts(hottest=0.4), hot).what == hot.what
    assert not decide(shape(dense_bytes=0), facts(hottest=0.2), hot).choices.hot
    assert not decide(shape(dense_bytes=0, can_be_hot=False), facts(hottest=1.0), Decision()).choices.hot


def test_facts_are_summed_over_the_workers():
    def part(rows, passed, least, most, first):
        buckets = [first] + [0] * 255
        return {"rows": rows, "passed": [passed] * 32, "keys": first, "least": least, "most": most, "buckets": buckets}

    made = Facts.of([part(100, 50, 3, 9, 40), part(300, 50, -7, 5, 60)], 1, 2.0)
    assert made == Facts(400, (0.25,), 100, -7, 9, 1.0, 2.0)
