"""When a group is split over several workers, and when that is undone. Pure: no I/O, and the clock is an argument.

A group hotter than a core cannot be helped by any placement. A split can, if its rows come on several connections, or
if its producers open further lanes. It costs: connections are served away from their bucket's core, and the group's
partials are merged. So there is a dead band between what makes a split and what undoes it, both must last a while, and
after either the group rests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flexstream.nic.balance.placement_plan import HOT_PERCENT, SHARE, Limits, Plan, worker_percent

BUSIEST_HELPED = 0.9  # of the group's rows on one connection: above this a split gives the others nothing to do


@dataclass(frozen=True, slots=True)
class SplitConfig:
    """How calm it is. See docs/balancer.md."""

    split_percent: float = HOT_PERCENT  # of a worker's fair share
    dead_band_percent: float = 4.0  # the imbalance that the best placement leaves: less is not worth a split
    slack_percent: float = 3.0  # so much less will do while it is confirmed: counts go up and down
    busy_share: float = 0.7  # of the owner's time: a core with time to spare needs no help
    undo_percent: float = 80.0  # a split group below this share fits one worker again
    undo_cores: float = 0.5  # or one that needs less than this of all its workers together
    uneven: float = 1.5  # times an equal part: above it the group is split anew
    confirm_s: float = 0.3
    undo_after_s: float = 3.0
    cool_down_s: float = 5.0
    lanes_wait_s: float = 1.0  # how long lanes are waited for,
    lanes_settle_s: float = 0.3  # and then, until it shows how much comes on which connection


@dataclass(frozen=True, slots=True)
class Traffic:
    """How a group's rows come. `busiest` is the part of them that one connection has."""

    connections: int
    busiest: float
    cores: float  # time that all workers together spend on it, in cores
    busy: float  # share of its owner's time that is not idle
    parts: Mapping[int, float]  # of its rows, for each worker that serves it
    lanes: bool  # whether one of its producers would open further lanes


@dataclass(frozen=True, slots=True)
class Action:
    """What to do with a group: "split" (over `workers`, the owner first), "undo", "again", or "too hot": nothing."""

    what: str
    group: int
    text: str
    percent: float
    traffic: Traffic
    workers: tuple[int, ...] = ()

    @property
    def wants_lanes(self) -> bool:
        """Whether the connections that there are cannot be shared evenly, and lanes can be had."""
        count, traffic = len(self.workers), self.traffic
        return traffic.lanes and (traffic.connections < count or traffic.busiest * count > 1.2)

    def numbers(self) -> dict[str, object]:
        return {
            "group": self.group,
            "group_percent": round(self.percent, 1),
            "connections": self.traffic.connections,
            "connection_percent": round(self.percent * self.traffic.busiest, 1),
            "busy_share": round(self.traffic.busy, 3),
            "cores": round(self.traffic.cores, 3),
            "workers": list(self.workers),
        }


class SplitRule:
    """The decision over time. The caller owns the clock, and says with `did` what it has carried out."""

    def __init__(self, config: SplitConfig = SplitConfig()) -> None:
        self.config = config
        self._since: dict[tuple[str, int], float] = {}  # since when a group asks for it
        self._rested: dict[int, float] = {}

    def did(self, group: int, now_s: float) -> None:
        """It was split or joined, or that failed: it rests."""
        self._rested[group] = now_s + self.config.cool_down_s
        self._since = {key: at for key, at in self._since.items() if key[1] != group}

    def concerned(self, percent: NDArray[np.float64], limits: Limits) -> bool:
        """Whether there is anything to consider: a group near what makes it hot, or a split."""
        if limits.split or bool(percent.max(initial=0.0) > self.config.split_percent - self.config.slack_percent):
            return True
        self._since = {}
        return False

    def consider(
        self,
        now_s: float,
        percent: NDArray[np.float64],
        made: Plan,
        placement: list[int],
        limits: Limits,
        traffic: Callable[[int], Traffic],
    ) -> list[Action]:
        """`percent` of a fair share per group, `made` the best placement for it. Frozen groups stay as they are."""
        config = self.config
        found: list[Action] = []
        asked: set[tuple[str, int]] = set()
        if limits.workers - len(limits.inactive) > 1:
            for group in self._hot(percent, made, limits):
                if group not in limits.frozen and (facts := traffic(group)).busy >= config.busy_share:
                    found.append(self._help(group, float(percent[group]), facts, percent, placement, limits))
        for group in limits.split:
            if group not in limits.frozen:
                found += self._look_at_split(group, float(percent[group]), traffic(group))
        due = []
        for action in found:
            key = (action.what, action.group)
            asked.add(key)
            since = self._since.setdefault(key, now_s)
            wait = config.undo_after_s if action.what == "undo" else config.confirm_s
            if now_s - since >= wait and now_s >= self._rested.get(action.group, -math.inf):
                due.append(action)
        self._since = {key: at for key, at in self._since.items() if key in asked}
        return due

    def _hot(self, percent: NDArray[np.float64], made: Plan, limits: Limits) -> list[int]:
        """Groups that no placement helps, the hottest first."""
        config = self.config
        warm = (int(g) for g in np.flatnonzero(percent > config.split_percent - config.slack_percent))
        found = []
        for group in sorted(warm, key=lambda g: -float(percent[g])):
            asks = any((what, group) in self._since for what in ("split", "too hot"))
            slack = config.slack_percent if asks else 0.0
            helpless = made.imbalance_after > config.dead_band_percent - slack
            if helpless and percent[group] > config.split_percent - slack and group not in limits.split:
                found.append(group)
        return found

    def _help(
        self,
        group: int,
        percent: float,
        traffic: Traffic,
        loads: NDArray[np.float64],
        placement: list[int],
        limits: Limits,
    ) -> Action:
        workers = share_with(group, loads, placement, limits)
        said = f"group {group} is {percent:.0f}% of a worker's share"
        said += f", worker {workers[0]} is {100 * traffic.busy:.0f}% busy"
        alone = percent * traffic.busiest
        if traffic.lanes or (traffic.connections > 1 and traffic.busiest <= BUSIEST_HELPED):
            text = f"{said}, and no placement helps: split over workers {', '.join(map(str, workers))}"
            if alone > self.config.split_percent and not traffic.lanes:
                text += f"; one connection alone is {alone:.0f}% and will stay too hot"
            return Action("split", group, text, percent, traffic, workers)
        why = "its only connection" if traffic.connections == 1 else f"one of its {traffic.connections} connections"
        if traffic.connections == 0:
            return Action(
                "too hot",
                group,
                f"{said}; its rows do not arrive on connections, so it cannot be split",
                percent,
                traffic,
                workers,
            )
        text = f"{said}; {why} alone is {alone:.0f}%, and its producer opens no lanes: no placement or split helps"
        return Action("too hot", group, text, percent, traffic, workers)

    def _look_at_split(self, group: int, percent: float, traffic: Traffic) -> list[Action]:
        config = self.config
        workers = tuple(traffic.parts)
        if percent < config.undo_percent or traffic.cores < config.undo_cores:
            text = f"group {group} is down to {percent:.0f}% of a worker's share"
            text += f" and {traffic.cores:.2f} cores: no longer split"
            return [Action("undo", group, text, percent, traffic, workers)]
        most = max(traffic.parts.values(), default=0.0) * len(workers)
        could_be = max(1.0, traffic.busiest * len(workers))
        if most > config.uneven * could_be and traffic.connections >= len(workers):
            text = f"group {group} is split unevenly ({100 * most / len(workers):.0f}% on one worker): split again"
            return [Action("again", group, text, percent, traffic, workers)]
        return []


def share_with(group: int, loads: NDArray[np.float64], placement: list[int], limits: Limits) -> tuple[int, ...]:
    """The owner, and the least loaded active workers: as many as it takes for no part to exceed a fair share."""
    owner = placement[group]
    rest = np.array(loads)
    rest[group] = 0.0
    load = worker_percent(rest, np.array(placement, np.int32), limits)
    others = [w for w in range(limits.workers) if w != owner and w not in limits.inactive]
    others.sort(key=lambda worker: float(load[worker]))
    count = max(2, math.ceil(float(loads[group]) / SHARE))
    return (owner, *others[: count - 1])
