"""When a group is split and joined again, on made-up numbers and a made-up clock."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flexstream.nic.balance.placement_plan import Limits, plan
from flexstream.nic.balance.split_rule import Action, SplitConfig, SplitRule, Traffic, share_with

CONFIG = SplitConfig()
EVEN = Traffic(connections=4, busiest=0.25, cores=1.0, busy=1.0, parts={0: 1.0}, lanes=False)


class Run:
    """One rule over time."""

    def __init__(self, loads: list[float], workers: int = 2, traffic: Traffic = EVEN, **limits: Any) -> None:
        self.rule = SplitRule()
        self.traffic = traffic
        self.limits = Limits(workers, **limits)
        self.now_s = 10.0
        self.load(loads)

    def load(self, loads: list[float]) -> None:
        active = self.limits.workers - len(self.limits.inactive)
        self.percent = np.array(loads, np.float64) * (100.0 * active / sum(loads))
        self.placement = [group % self.limits.workers for group in range(len(loads))]

    def look(self, seconds: float = 0.1) -> list[Action]:
        self.now_s += seconds
        made = plan(self.percent, np.zeros(len(self.percent)), self.placement, self.limits)
        return self.rule.consider(
            self.now_s, self.percent, made, self.placement, self.limits, lambda group: self.traffic
        )

    def until(self, seconds: float) -> list[Action]:
        """What is due first within so many seconds."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            if due := self.look():
                return due
        return []


def test_a_group_hotter_than_a_core_is_split_when_it_has_been_so_for_a_while() -> None:
    run = Run([80, 5, 5, 10])
    assert run.look() == []
    (action,) = run.until(2)
    assert (action.what, action.group, action.workers) == ("split", 0, (0, 1))
    assert run.now_s - 10.1 >= CONFIG.confirm_s
    assert "160% of a worker's share" in action.text
    assert not action.wants_lanes
    assert action.numbers()["connection_percent"] == 40.0


@pytest.mark.parametrize(
    ("loads", "workers", "traffic", "limits"),
    [
        ([30, 30, 20, 20], 2, EVEN, {}),
        ([80, 5, 5, 10], 2, replace(EVEN, busy=0.5), {}),
        ([80, 5, 5, 10], 2, EVEN, {"frozen": frozenset({0})}),
        ([80, 5, 5, 10], 2, EVEN, {"inactive": frozenset({1})}),
        ([51.5, 20, 20, 8.5], 2, EVEN, {}),
    ],
    ids=["a placement helps", "the core has time", "frozen", "nobody to share with", "not worth it"],
)
def test_what_needs_no_split_gets_none(loads: list[float], workers: int, traffic: Traffic, limits: Any) -> None:
    run = Run(loads, workers, traffic, **limits)
    run.placement = [0, 1, 1, 1] if not limits else run.placement
    assert run.until(10) == []


def test_a_group_a_little_hotter_than_a_core_is_split_when_the_rest_cannot_make_up_for_it() -> None:
    run = Run([53, 20, 20, 7])
    run.placement = [0, 1, 1, 1]
    (action,) = run.until(2)
    assert (action.what, action.group) == ("split", 0)


def test_counts_that_go_up_and_down_do_not_keep_a_split_from_being_confirmed() -> None:
    run = Run([53, 20, 20, 7])
    due = []
    for look in range(5):
        run.load([51.2, 20, 20, 8.8] if look % 2 else [53, 20, 20, 7])
        run.placement = [0, 1, 1, 1]
        due += run.look()
    assert [action.what for action in due[:1]] == ["split"]


def test_there_is_nothing_to_consider_while_no_group_is_warm_and_none_is_split() -> None:
    rule = SplitRule()
    assert not rule.concerned(np.array([99.0, 60.0, 41.0]), Limits(2))
    assert rule.concerned(np.array([99.0, 60.0, 41.0]), Limits(2, split={1: (0, 1)}))
    assert rule.concerned(np.array([102.0, 57.0, 41.0]), Limits(2))


def test_one_connection_without_lanes_is_too_hot_and_said_to_be() -> None:
    run = Run([80, 5, 5, 10], traffic=replace(EVEN, connections=1, busiest=1.0))
    (action,) = run.until(2)
    assert action.what == "too hot"
    assert "its only connection alone is 160%" in action.text
    assert "no placement or split helps" in action.text


def test_one_of_several_connections_that_has_nearly_all_rows_is_too_hot() -> None:
    run = Run([80, 5, 5, 10], traffic=replace(EVEN, connections=3, busiest=0.97))
    (action,) = run.until(2)
    assert action.what == "too hot"
    assert "one of its 3 connections alone is 155%" in action.text


def test_a_split_that_leaves_a_hot_connection_says_so() -> None:
    run = Run([90, 2, 4, 4], traffic=replace(EVEN, connections=2, busiest=0.8))
    (action,) = run.until(2)
    assert action.what == "split"
    assert "one connection alone is 144% and will stay too hot" in action.text


def test_lanes_are_wanted_when_the_connections_do_not_suffice() -> None:
    one = replace(EVEN, connections=1, busiest=1.0, lanes=True)
    (action,) = Run([80, 5, 5, 10], traffic=one).until(2)
    assert (action.what, action.wants_lanes) == ("split", True)
    (action,) = Run([80, 5, 5, 10], traffic=replace(EVEN, lanes=True)).until(2)
    assert not action.wants_lanes


def test_it_is_undone_when_the_group_has_cooled_down_for_long_and_not_before() -> None:
    run = Run([80, 5, 5, 10], split={0: (0, 1)}, traffic=replace(EVEN, parts={0: 0.5, 1: 0.5}))
    run.rule.did(0, run.now_s)
    assert run.until(20) == []
    run.load([45, 20, 20, 15])  # in the dead band: it would fit a worker, just
    assert run.until(20) == []
    run.load([20, 30, 30, 20])
    assert run.until(CONFIG.undo_after_s - 0.3) == []
    run.load([80, 5, 5, 10])
    run.look()
    run.load([20, 30, 30, 20])
    began = run.now_s
    (action,) = run.until(20)
    assert action.what == "undo"
    assert run.now_s - began >= CONFIG.undo_after_s
    assert "down to 40% of a worker's share" in action.text


def test_a_split_group_that_needs_little_time_is_joined_however_large_its_share() -> None:
    run = Run([90, 4, 3, 3], split={0: (0, 1)}, traffic=replace(EVEN, cores=0.1, parts={0: 0.5, 1: 0.5}))
    (action,) = run.until(20)
    assert action.what == "undo"


def test_a_group_rests_after_a_split_and_after_its_end() -> None:
    run = Run([80, 5, 5, 10])
    run.rule.did(0, run.now_s)
    began = run.now_s
    assert run.until(20)
    assert run.now_s - began >= CONFIG.cool_down_s


def test_an_uneven_split_is_made_anew_if_its_connections_allow_for_better() -> None:
    uneven = replace(EVEN, parts={0: 0.9, 1: 0.1})
    run = Run([80, 5, 5, 10], split={0: (0, 1)}, traffic=uneven)
    (action,) = run.until(20)
    assert (action.what, action.workers) == ("again", (0, 1))
    run = Run([80, 5, 5, 10], split={0: (0, 1)}, traffic=replace(uneven, busiest=0.9))
    assert run.until(20) == []


def test_a_group_is_shared_with_as_many_of_the_least_loaded_as_it_takes() -> None:
    loads = np.array([250.0, 60.0, 30.0, 10.0, 50.0])
    limits = Limits(5, inactive=frozenset({3}))
    assert share_with(0, loads, [0, 1, 2, 3, 4], limits) == (0, 2, 4)
    assert share_with(0, loads * 2, [0, 1, 2, 3, 4], limits) == (0, 2, 4, 1)


def test_measured_parts_count_when_they_are_known() -> None:
    loads, placement = [80.0, 10.0, 10.0], [0, 1, 1]
    equal = plan(loads, [0.0] * 3, placement, Limits(2, split={0: (0, 1)}))
    known = plan(loads, [0.0] * 3, placement, Limits(2, split={0: (0, 1)}, parts={0: (0.75, 0.25)}))
    assert equal.worker_percent_before == pytest.approx((80, 120))
    assert known.worker_percent_before == pytest.approx((120, 80))
