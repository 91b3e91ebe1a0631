"""The balancer when a load turns, with rows that come in frames, wait in sockets and are worked off in turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from flexstream.balance.door import Balance
from flexstream.balance.rebalancer import Rebalancer
from flexstream.nic.balance.balancer import BalancerConfig
from flexstream.results.collector import Latencies

GROUPS, WORKERS, FRAME_ROWS, SPEED = 64, 2, 210, 1e6
STEP_S, TURN_S, END_S = 0.0005, 1.0, 2.2
RECEIVED = 840  # rows that a worker takes from a socket before the next has its turn


class Frames:
    """A sender of frames to all groups in turn, and after the turn most to those that worker 0 has; two workers."""

    def __init__(self, share: float, stopped: float = 0.0, seed: int = 0, turned: float = 0.8) -> None:
        self.rate = share * WORKERS * SPEED
        self.turned = turned
        self.placement = [group % WORKERS for group in range(GROUPS)]
        self.turned_to = [group for group in range(GROUPS) if self.placement[group] == 0]
        self.cold = [group for group in range(GROUPS) if self.placement[group] == 1]
        self.sent = {"all": 0, "hot": 0, "cold": 0}
        self.now_s = self.credit = self.to_send = 0.0
        self.came, self.waits = np.zeros(GROUPS), np.zeros(GROUPS)
        self.next_socket, self.resumes_s = [0] * WORKERS, [0.0] * WORKERS
        self.stopped, self.random = stopped, np.random.default_rng(seed)
        self.batches: list[tuple[float, int]] = []
        # what a LoadSource has
        self.workers = WORKERS
        self.seen, self.fresh, self.waiting = np.zeros(GROUPS), np.zeros(GROUPS), np.zeros(GROUPS)
        self.fresh_batches = 0.0
        self.steady, self.by_worker, self.busy = np.zeros((1, GROUPS)), np.zeros((WORKERS, GROUPS)), np.zeros(WORKERS)
        # what carries out moves has
        self.moved = self.nic_errors = 0

    def clock(self) -> float:
        return self.now_s

    def _next_group(self) -> int:
        if self.now_s < TURN_S:
            which, groups = "all", list(range(GROUPS))
        else:
            self.credit += self.turned
            which, groups = ("hot", self.turned_to) if self.credit >= 1.0 else ("cold", self.cold)
            self.credit -= which == "hot"
        self.sent[which] += 1
        return groups[self.sent[which] % len(groups)]

    def advance(self, seconds: float) -> None:
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s += STEP_S
            self.to_send += self.rate * STEP_S
            while self.to_send >= FRAME_ROWS:
                self.to_send -= FRAME_ROWS
                group = self._next_group()
                self.came[group] += FRAME_ROWS
                self.waits[group] += FRAME_ROWS
            for worker in range(WORKERS):
                self._work(worker)

    def _work(self, worker: int) -> None:
        if self.stopped and self.random.random() < self.stopped * STEP_S / 0.004:
            self.resumes_s[worker] = self.now_s + 0.004  # the machine has something else to do
        left = SPEED * STEP_S if self.now_s >= self.resumes_s[worker] else 0.0
        for _ in range(GROUPS):
            group = self.next_socket[worker] % GROUPS
            if left <= 0.0:
                break
            if self.placement[group] == worker:
                done = min(self.waits[group], RECEIVED, left)
                self.waits[group] -= done
                left -= done
            self.next_socket[worker] += 1

    def imbalance(self) -> float:
        """Of what comes after the turn, in percent of a worker's share."""
        rows = np.where(
            np.isin(np.arange(GROUPS), self.turned_to),
            self.turned / len(self.turned_to),
            (1 - self.turned) / len(self.cold),
        )
        return float(abs(np.bincount(self.placement, rows, WORKERS)[0] * 200.0 - 100.0))

    # -- LoadSource

    def look(self, now_s: float) -> None:
        before, self.seen = self.seen, self.came.copy()
        self.fresh = self.seen - before
        self.fresh_batches = float(self.fresh.sum()) / FRAME_ROWS
        self.waiting = self.waits.copy()

    def cores(self) -> list[int | None]:
        return [None] * WORKERS

    def lanes(self) -> int:
        return GROUPS

    def links(self, group: int) -> tuple[int, float]:
        return 1, 1.0

    def forget_parts(self, group: int) -> None: ...

    def want_samples(self) -> None: ...

    def sampled(self) -> bool:
        return True

    def hot(self, placement: Sequence[int]) -> list[dict[str, Any]]:
        return []

    # -- Moves

    def move(self, targets: Mapping[int, int], reason: str = "", timeout: float = 0.0) -> list[Any]:
        self.batches.append((self.now_s - TURN_S, len(targets)))
        for group, worker in targets.items():
            self.placement[group] = worker
        return []

    def under_way(self) -> list[Any]:
        return []

    def splits(self) -> list[Any]:
        return []

    def split(self, group: int, workers: Sequence[int], timeout: float = 0.0) -> Any:
        raise AssertionError("nothing is to be split here")

    def unsplit(self, group: int, timeout: float = 0.0, *, keep_lanes: bool = False) -> list[Any]:
        return []

    def run(self, until_s: float = END_S) -> None:
        door = Balance(
            self, self, lambda: list(self.placement), Latencies(), auto=True, config=BalancerConfig(), clock=self.clock
        )
        rebalancer = Rebalancer(door, cpu_clock=lambda: 0.0)
        while self.now_s < until_s:
            self.advance(rebalancer.look())


@pytest.mark.parametrize("share", [0.5, 0.75, 0.9])
def test_a_load_that_turns_is_balanced_by_one_batch_of_moves(share: float) -> None:
    """At 0.75 and above the worker that it turns to cannot keep up, so that rows pile up as well."""
    frames = Frames(share)
    frames.run()
    (after_s, groups), *later = frames.batches
    assert 0.0 < after_s <= 0.1
    assert groups < GROUPS // 4
    assert all(at_s > after_s + 0.25 and few <= 3 for at_s, few in later), frames.batches
    assert len(later) <= 1, frames.batches  # what a few milliseconds could not tell
    assert frames.imbalance() <= 7.5


@pytest.mark.parametrize("seed", range(3))
def test_workers_that_are_stopped_now_and_then_are_not_given_and_taken_groups(seed: int) -> None:
    """For a tenth of the time the machine has something else to do, a few milliseconds each."""
    frames = Frames(0.75, stopped=0.1, seed=seed)
    frames.run()
    assert all(after_s > 0.0 for after_s, _ in frames.batches), frames.batches
    assert 1 <= len(frames.batches) <= 2, frames.batches
    assert frames.imbalance() <= 15.0


def test_an_imbalance_that_few_rows_prove_is_balanced_when_they_have_proven_it() -> None:
    """Two hundred frames a second in 64 groups: those of one tick say nothing, those of a second do."""
    frames = Frames(0.02, turned=0.75)
    frames.run()
    assert frames.batches
    assert all(after_s > 0.0 for after_s, _ in frames.batches), frames.batches
    assert frames.imbalance() < 50.0 / 2
