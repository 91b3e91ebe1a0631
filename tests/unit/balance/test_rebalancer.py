"""The balancer at work, on a clock and loads that the test makes up: when it moves what, and what it remembers."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from flexstream.balance.door import Balance
from flexstream.balance.mover import STEPS, GroupMove
from flexstream.balance.rebalancer import CALM_LOOK_S, LOOK_S, OFF_LOOK_S, QUIET_LOOK_S, Rebalancer
from flexstream.balance.splits import Split
from flexstream.errors import EngineError
from flexstream.nic.balance.balancer import BalancerConfig
from flexstream.results.collector import Latencies

GROUPS = 8


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class MadeUpLoads:
    """Rows per second and group, and what waits; a worker that hangs does not answer."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.rates = np.zeros(GROUPS)
        self.waiting = np.zeros(GROUPS)
        self.fresh = np.zeros(GROUPS)
        self.fresh_batches = 0.0
        self.steady = np.zeros((1, GROUPS))
        self.by_worker = np.zeros((workers, GROUPS))
        self.busy = np.zeros(workers)
        self.connections = 1
        self.busiest = 1.0
        self.served_by: Callable[[int], tuple[int, ...]] = lambda group: (0,)
        self.hangs = False
        self._last_s = 100.0

    def cores(self) -> list[int | None]:
        return [None] * self.workers

    def lanes(self) -> int:
        return GROUPS

    def forget_parts(self, group: int) -> None:
        self.by_worker[:, group] = 0.0

    def links(self, group: int) -> tuple[int, float]:
        return self.connections, self.busiest

    def want_samples(self) -> None:
        pass

    def sampled(self) -> bool:
        return not self.hangs

    def look(self, now_s: float) -> None:
        self.fresh = self.rates * (now_s - self._last_s)
        self.fresh_batches = float(self.fresh.sum()) / 10
        self.steady = self.steady * 0.5 ** (now_s - self._last_s) + self.fresh
        self.by_worker = self.by_worker * 0.5 ** (now_s - self._last_s)
        for group in range(GROUPS):
            served_by = self.served_by(group)
            self.by_worker[list(served_by), group] += self.fresh[group] / len(served_by)
        self._last_s = now_s

    def hot(self, placement: Sequence[int]) -> list[dict[str, Any]]:
        return []


class Table:
    """Moves at once, as the mover does in the end."""

    def __init__(self, placement: list[int]) -> None:
        self.placement = placement
        self.moved = 0
        self.nic_errors = 0
        self.orders: list[tuple[dict[int, int], str]] = []
        self.refuse: EngineError | None = None
        self.standing: dict[int, Split] = {}

    def move(self, targets: Mapping[int, int], reason: str = "", timeout: float = 0.0) -> list[GroupMove]:
        self.orders.append((dict(targets), reason))
        if self.refuse is not None:
            raise self.refuse
        done = []
        for group, worker in targets.items():
            steps = {step: 1_000_000 * at for at, step in enumerate(STEPS)}
            done.append(GroupMove(1, group, self.placement[group], worker, reason, steps, "moved"))
            self.placement[group] = worker
            self.moved += 1
        return done

    def under_way(self) -> list[GroupMove]:
        return []

    def splits(self) -> list[Split]:
        return list(self.standing.values())

    def split(self, group: int, workers: Sequence[int], timeout: float = 0.0) -> Split:
        if self.refuse is not None:
            raise self.refuse
        self.standing[group] = Split(group, self.placement[group], dict.fromkeys(workers, 1), len(workers))
        return self.standing[group]

    def unsplit(self, group: int, timeout: float = 0.0, *, keep_lanes: bool = False) -> list[Split]:
        return [self.standing.pop(group)] if group in self.standing else []

    def served_by(self, group: int) -> tuple[int, ...]:
        split = self.standing.get(group)
        return (self.placement[group],) if split is None else split.workers


class Rig:
    def __init__(self, workers: int = 2, auto: bool = True, placement: list[int] | None = None) -> None:
        self.clock = Clock()
        self.cpu_s = 0.0
        self.loads = MadeUpLoads(workers)
        self.table = Table(placement or [group % workers for group in range(GROUPS)])
        self.loads.served_by = self.table.served_by
        self.balance = Balance(
            self.loads,
            self.table,
            lambda: list(self.table.placement),
            Latencies(),
            auto=auto,
            config=BalancerConfig(),
            clock=self.clock,
        )
        self.rebalancer = Rebalancer(self.balance, cpu_clock=lambda: self.cpu_s)

    def run(self, seconds: float) -> None:
        until_s = self.clock.now_s + seconds
        while self.clock.now_s < until_s:
            self.clock.now_s += self.rebalancer.look()

    def ticks(self, verdict: str) -> list[dict[str, Any]]:
        return [entry for entry in self.balance.history() if entry.get("verdict") == verdict]

    def shares(self) -> list[float]:
        loads = np.bincount(self.table.placement, self.loads.rates, self.loads.workers)
        return list(loads / loads.sum())


def test_equal_loads_move_nothing_and_ticks_slow_down() -> None:
    rig = Rig()
    rig.loads.rates[:] = 100_000
    rig.run(10)
    assert rig.table.orders == []
    history = rig.balance.history()
    assert {entry["verdict"] for entry in history} <= {"quiet", "in_band"}
    assert history[-1]["next_tick_s"] == 1.0
    assert sum(entry["repeated"] for entry in history) < 25


def test_a_load_that_turns_is_balanced_within_a_tenth_of_a_second_also_when_ticks_are_slow() -> None:
    rig = Rig()
    rig.loads.rates[:] = 100_000
    rig.run(10)
    rig.loads.rates = np.where(np.arange(GROUPS) % 2 == 0, 180_000.0, 20_000.0)
    rig.run(0.1)
    assert rig.table.orders, "nothing moved"
    rig.run(2)
    assert max(rig.shares()) < 0.56
    moved = rig.ticks("move")
    assert moved[0]["imbalance_percent"] > 50
    assert moved[0]["moved"]
    assert moved[0]["took_ms"] == 6.0
    assert "on new rows the gain is" in moved[0]["text"]
    assert rig.table.orders[0][1] == f"tick: {moved[0]['text']}"


def test_it_is_calm_after_a_move() -> None:
    rig = Rig()
    rig.loads.rates = np.where(np.arange(GROUPS) % 2 == 0, 180_000.0, 20_000.0)
    rig.run(3)
    orders = len(rig.table.orders)
    rig.run(30)
    assert len(rig.table.orders) == orders


def test_a_backlog_that_grows_on_one_side_counts() -> None:
    """Equal rows come, but one worker cannot keep up with its groups."""
    rig = Rig()
    rig.loads.rates[:] = 100_000
    rig.run(3)
    for _ in range(60):
        rig.loads.waiting[::2] += 4_000
        rig.run(0.01)
    moves = rig.ticks("move")
    assert moves
    assert moves[0]["accumulation_used"]
    assert set(rig.table.placement[::2]) == {0, 1}  # who waits is spread


def test_what_waits_for_a_few_milliseconds_does_not_count() -> None:
    rig = Rig()
    rig.loads.rates[:] = 100_000
    rig.run(3)
    for turn in range(100):
        rig.loads.waiting[:] = 0
        rig.loads.waiting[turn % GROUPS] = 10_000  # of 800,000 rows a second
        rig.run(0.01)
    assert rig.table.orders == []


def test_nothing_is_decided_while_a_worker_does_not_answer() -> None:
    rig = Rig()
    rig.loads.rates[:] = 100_000
    rig.run(1)
    ticks = sum(entry["repeated"] for entry in rig.balance.history())
    rig.loads.hangs = True
    rig.loads.rates = np.where(np.arange(GROUPS) % 2 == 0, 180_000.0, 20_000.0)
    stopped = threading.Event()
    rig.balance.watch._stopping = stopped  # do not wait for an answer in real time
    stopped.set()
    rig.run(0.2)
    assert sum(entry["repeated"] for entry in rig.balance.history()) == ticks
    rig.run(2)  # for ever it does not wait
    assert rig.table.orders


def test_looks_are_rare_when_nothing_comes_or_nothing_is_to_be_done() -> None:
    assert Rig(auto=False).rebalancer.look() == OFF_LOOK_S
    assert Rig(workers=1).rebalancer.look() == OFF_LOOK_S
    rig = Rig()
    rig.run(1)
    assert rig.rebalancer.look() == QUIET_LOOK_S
    rig.loads.rates[:] = 100_000
    rig.run(5)
    assert rig.rebalancer.look() in (LOOK_S, CALM_LOOK_S)


def test_looks_that_cost_much_come_less_often_while_all_is_well() -> None:
    rig = Rig()
    rig.loads.rates[:] = 100_000
    look = rig.loads.look

    def costly(now_s: float) -> None:
        rig.cpu_s += 0.0005
        look(now_s)

    rig.loads.look = costly  # type: ignore[method-assign]
    rig.run(5)
    spent = rig.cpu_s
    rig.run(10)
    assert (rig.cpu_s - spent) / 10 < 0.015
    rig.loads.rates = np.where(np.arange(GROUPS) % 2 == 0, 180_000.0, 20_000.0)
    rig.run(0.2)
    assert rig.table.orders


def test_off_means_that_nothing_moves_until_it_is_on() -> None:
    rig = Rig(auto=False)
    rig.loads.rates = np.where(np.arange(GROUPS) % 2 == 0, 180_000.0, 20_000.0)
    rig.run(10)
    assert rig.table.orders == []
    assert rig.balance.set_auto(True)["text"] == "automatic moves are on"
    rig.run(2)
    assert rig.table.orders
    assert rig.balance.status()["automatic"] is True


def test_a_move_that_fails_is_in_the_history_and_the_balancer_goes_on() -> None:
    rig = Rig()
    rig.table.refuse = EngineError("a worker hangs", code="no_grace")
    rig.loads.rates = np.where(np.arange(GROUPS) % 2 == 0, 180_000.0, 20_000.0)
    rig.run(3)
    assert rig.ticks("move")[0]["error"] == "a worker hangs"
    rig.table.refuse = None
    rig.run(3)
    assert max(rig.shares()) < 0.56


def test_plan_changes_nothing_and_apply_does_it() -> None:
    rig = Rig(auto=False, placement=[0] * GROUPS)
    rig.loads.rates[:] = 1_000
    rig.run(2)
    made = rig.balance.plan()
    assert len(made["plan"]) == 4
    assert made["worker_percent"] == [200.0, 0.0]
    assert made["worker_percent_after"] == [100.0, 100.0]
    assert rig.table.placement == [0] * GROUPS
    done = rig.balance.apply()
    assert sorted(rig.table.placement) == [0] * 4 + [1] * 4
    assert len(done["moved"]) == 4
    assert done["what"] == "apply"
    assert rig.balance.apply()["moved"] == []


def test_a_drained_worker_is_empty_and_stays_so_until_it_is_added() -> None:
    rig = Rig(workers=3)
    rig.loads.rates[:] = 100_000
    rig.run(1)
    drained = rig.balance.drain(1)
    assert 1 not in rig.table.placement
    assert {move["from"] for move in drained["moved"]} == {1}
    rig.loads.rates[0] = 400_000
    rig.run(5)
    assert 1 not in rig.table.placement
    workers = rig.balance.status()["workers"]
    assert [worker["active"] for worker in workers] == [True, False, True]
    assert workers[1]["groups"] == 0
    assert rig.balance.add(1)["moved"]
    assert 1 in rig.table.placement
    assert rig.balance.status()["inactive"] == []


def test_draining_and_adding_works_without_any_rows() -> None:
    rig = Rig(auto=False)
    rig.balance.drain(0)
    assert rig.table.placement == [1] * GROUPS
    rig.balance.add(0)
    assert sorted(rig.table.placement) == [0] * 4 + [1] * 4
    assert rig.balance.add(0)["text"] == "worker 0 is active already"


def test_frozen_groups_stay() -> None:
    rig = Rig()
    rig.loads.rates = np.where(np.arange(GROUPS) % 2 == 0, 180_000.0, 20_000.0)
    rig.balance.freeze()
    rig.run(3)
    assert rig.table.orders == []
    assert rig.balance.status()["frozen"] == list(range(GROUPS))
    rig.balance.freeze([0, 1], on=False)
    rig.run(3)
    assert {group for targets, _ in rig.table.orders for group in targets} <= {0, 1}


@pytest.mark.parametrize(
    ("order", "code"),
    [
        (lambda r: r.move(GROUPS, 0), "bad_group"),
        (lambda r: r.move(-1, 0), "bad_group"),
        (lambda r: r.move(True, 0), "bad_group"),
        (lambda r: r.move("1", 0), "bad_group"),
        (lambda r: r.move(0, 2), "bad_worker"),
        (lambda r: r.move(0, 1.0), "bad_worker"),
        (lambda r: r.drain(2), "bad_worker"),
        (lambda r: r.add(-1), "bad_worker"),
        (lambda r: r.freeze([0, 99]), "bad_group"),
        (lambda r: (r.drain(0), r.drain(1)), "last_worker"),
        (lambda r: (r.drain(0), r.move(0, 0)), "drained"),
        (lambda r: (r.freeze([3]), r.move(3, 0)), "frozen"),
        (lambda r: (r.freeze([3]), r.drain(1)), "frozen"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(order: Any, code: str) -> None:
    with pytest.raises(EngineError) as refused:
        order(Rig(auto=False).balance)
    assert refused.value.code == code


def test_status_and_history_are_json_without_infinities() -> None:
    rig = Rig()
    rig.run(1)
    rig.loads.rates = np.where(np.arange(GROUPS) % 2 == 0, 180_000.0, 20_000.0)
    rig.run(2)
    json.dumps([rig.balance.status(), rig.balance.history(), rig.balance.plan()], allow_nan=False)


def test_the_history_is_bounded_and_repeats_are_one_line() -> None:
    rig = Rig()
    for turn in range(300):
        rig.balance.freeze([turn % GROUPS])
    assert len(rig.balance.history()) == 256
    assert len(rig.balance.history(3)) == 3


def test_latencies_of_a_stretch_of_time() -> None:
    latencies = Latencies()
    latencies.add(1_000_000)
    begin = time.monotonic_ns()
    for ms in range(1, 101):
        latencies.add(ms * 1_000_000)
    end = time.monotonic_ns()
    time.sleep(0.001)
    latencies.add(10**9)
    found = latencies.between(begin, end)
    assert found["count"] == 100
    assert found["max_ms"] == 100.0
    assert found["p99_ms"] == pytest.approx(99.0, abs=1)
    assert latencies.between(0, 1) == {"count": 0, "p50_ms": None, "p99_ms": None, "max_ms": None}
    assert latencies.summary()["count"] == 102


def hot_rig(connections: int = 4, busiest: float = 0.25) -> Rig:
    rig = Rig()
    rig.loads.rates = np.where(np.arange(GROUPS) == 3, 900_000.0, 20_000.0)
    rig.loads.busy[:] = 0.95
    rig.loads.connections, rig.loads.busiest = connections, busiest
    return rig


def entries(rig: Rig, what: str) -> list[dict[str, Any]]:
    return [entry for entry in rig.balance.history() if entry["what"] == what]


def test_a_group_hotter_than_a_core_is_split_once_and_joined_when_it_cools_down() -> None:
    rig = hot_rig()
    rig.run(3)
    assert [split.group for split in rig.table.splits()] == [3]
    (made,) = entries(rig, "split")
    assert made["group_percent"] > 150
    assert made["split"]["workers"] == [1, 0]
    assert made["took_ms"] is not None
    status = rig.balance.status()
    assert status["split"][0]["percent"] == pytest.approx([50, 50], abs=1)
    assert status["imbalance_percent"] < 30
    json.dumps(status)
    rig.run(30)
    assert len(entries(rig, "split")) == 1
    rig.loads.rates[:] = 100_000
    rig.run(15)
    assert rig.table.splits() == []
    (undone,) = entries(rig, "unsplit")
    assert undone["split"]["group"] == 3


def test_a_group_on_one_connection_is_said_to_be_too_hot_once_a_minute() -> None:
    rig = hot_rig(connections=1, busiest=1.0)
    rig.run(30)
    assert rig.table.splits() == []
    (said,) = entries(rig, "too hot")
    assert said["connections"] == 1
    assert "its only connection alone is" in said["text"]
    assert rig.balance.status()["too_hot"][0]["group"] == 3
    rig.loads.rates[:] = 100_000
    rig.run(5)
    assert rig.balance.status()["too_hot"] == []


def test_a_split_that_fails_is_in_the_history_and_not_tried_again_at_once() -> None:
    rig = hot_rig()
    rig.table.refuse = EngineError("no", code="not_split")
    rig.run(4)
    (failed,) = entries(rig, "split")
    assert failed["error"] == "no"


def test_a_split_by_hand_names_its_workers_and_refuses_nonsense() -> None:
    rig = Rig(auto=False)
    reply = rig.balance.split(2, [0, 1])
    assert reply["split"]["workers"] == [0, 1]
    assert reply["text"] == "group 2 is served by workers 0, 1"
    with pytest.raises(EngineError, match="split already"):
        rig.balance.split(2, [1])
    with pytest.raises(EngineError, match="on worker 1 already"):
        rig.balance.split(3, [1])
    with pytest.raises(EngineError, match="must be from 0 to 1"):
        rig.balance.split(3, [5])
    assert rig.balance.unsplit(2)["what"] == "unsplit"
    assert rig.balance.unsplit(2)["text"] == "group 2 is not split"


def test_a_drained_worker_shares_nothing() -> None:
    rig = Rig(workers=3, auto=False)
    rig.balance.split(0, [2])
    rig.balance.drain(2)
    assert rig.table.splits() == []
    with pytest.raises(EngineError, match="worker 2 is drained"):
        rig.balance.split(0, [2])
