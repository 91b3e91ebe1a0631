"""Splits of hot groups, as the balancer makes and undoes them: `nic.split_rule` decides, the mover carries out.

Every one is an entry of the history with the numbers behind it. Producers that know lanes are asked for some first,
and waited for a moment; the others' connections are shared as they are.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from flexstream.balance.history import Entry
from flexstream.balance.splits import LaneSource
from flexstream.balance.watch import Floats, LoadSource
from flexstream.cython_ext.worker.worker import now_ns
from flexstream.errors import EngineError, FlexStreamError
from flexstream.nic.balance.placement_plan import SHARE, Limits, plan
from flexstream.nic.balance.split_rule import Action, SplitRule, Traffic

if TYPE_CHECKING:
    from flexstream.balance.door import Moves

log = logging.getLogger("flexstream.rebalance")

LOOK_S = 0.1
TIMEOUT_S = 10.0
POLL_S = 0.005
SAY_AGAIN_S = 60.0  # a group that nothing helps is a line of the history this often


class SplitKeeper:
    """Splits groups that are hotter than a core, watches the splits, and ends them.

    For one thread at a time, the one that holds the balancer; others may read `status` and `too_hot`.
    """

    def __init__(
        self,
        loads: LoadSource,
        mover: Moves,
        lanes: LaneSource,
        placement: Callable[[], list[int]],
        clock: Callable[[], float],
    ) -> None:
        self._loads = loads
        self._mover = mover
        self._lanes = lanes
        self._placement = placement
        self._clock = clock
        self._next_s = 0.0
        self._waiting: dict[int, tuple[float, Action]] = {}  # lanes were asked for: until when to wait for them
        self._say_again_s: dict[int, float] = {}
        self.rule = SplitRule()
        self.made = 0
        self.too_hot: dict[int, dict[str, Any]] = {}

    # -- what there is

    def shares(self) -> tuple[dict[int, tuple[int, ...]], dict[int, tuple[float, ...]]]:
        """The workers of each split group, and the parts of its rows that they had in the last seconds."""
        split = {one.group: tuple(one.workers) for one in self._mover.splits()}
        parts = {}
        for group, workers in split.items():
            rows = self._loads.by_worker[list(workers), group]
            if rows.sum() >= 1.0:
                parts[group] = tuple((rows / rows.sum()).tolist())
        return split, parts

    def status(self) -> list[dict[str, Any]]:
        _, parts = self.shares()
        found = []
        for one in self._mover.splits():
            shares = [round(100.0 * part, 1) for part in parts.get(one.group, ())]
            found.append({**one.to_dict(), "percent": shares or None})
        return found

    def _traffic(self, group: int) -> Traffic:
        connections, busiest = self._loads.links(group)
        split, parts = self.shares()
        workers = split.get(group, (self._placement()[group],))
        rows = self._loads.by_worker
        of_worker = np.maximum(rows.sum(axis=1), 1e-9)
        cores = float((self._loads.busy * rows[:, group] / of_worker).sum())
        share = dict(zip(workers, parts.get(group, (1.0 / len(workers),) * len(workers)), strict=True))
        lanes = self._lanes.can_open(group)
        return Traffic(connections, busiest, cores, float(self._loads.busy[workers[0]]), share, lanes)

    # -- by itself

    def look(self, now_s: float, rows: Floats, limits: Limits, note: Callable[[Entry], None]) -> bool:
        """Split and join what is due. True: something changed."""
        if now_s < self._next_s:
            return False
        self._next_s = now_s + LOOK_S
        changed = False
        for group, (until_s, action) in list(self._waiting.items()):
            if now_s >= until_s:
                del self._waiting[group]
                changed |= self._carry_out(action, now_s, note)
            elif self._lanes.ready(group):
                self._waiting[group] = (min(until_s, now_s + self.rule.config.lanes_settle_s), action)
        total = float(rows.sum())
        active = limits.workers - len(limits.inactive)
        percent = rows * (SHARE * active / total) if total >= 1.0 else np.zeros(len(rows))
        if not self.rule.concerned(percent, limits):
            self.too_hot = {}
            return changed
        placement = self._placement()
        made = plan(percent, np.zeros(len(percent)), placement, limits)
        due = self.rule.consider(now_s, percent, made, placement, limits, self._traffic)
        self._remember_too_hot(due, placement)
        for action in due:
            if action.group in self._waiting:
                continue
            if action.what == "too hot":
                self._say_too_hot(action, now_s, note)
            elif action.what == "split" and action.wants_lanes:
                asked = self._lanes.ask(action.group, action.workers[1:])
                text = f"{action.text}; {asked} producer{'s' if asked != 1 else ''} asked for lanes"
                note(Entry("lanes", text, {**action.numbers(), "producers": asked}))
                self._waiting[action.group] = (now_s + self.rule.config.lanes_wait_s, action)
            else:
                changed |= self._carry_out(action, now_s, note)
        return changed

    def _remember_too_hot(self, due: Sequence[Action], placement: list[int]) -> None:
        """With the key that makes it so."""
        found = {}
        for action in due:
            if action.what == "too hot":
                hot = next((one for one in self._loads.hot(placement) if one["group"] == action.group), None)
                keys = hot["keys"] if hot is not None else []
                blame = f"; key {keys[0]['key']} alone is {keys[0]['percent']:.0f}%" if keys else ""
                found[action.group] = {**action.numbers(), "keys": keys, "text": action.text + blame}
        self.too_hot = found

    def _say_too_hot(self, action: Action, now_s: float, note: Callable[[Entry], None]) -> None:
        if now_s >= self._say_again_s.get(action.group, 0.0):
            self._say_again_s[action.group] = now_s + SAY_AGAIN_S
            said = self.too_hot[action.group]
            note(Entry("too hot", said["text"], {**action.numbers(), "keys": said["keys"]}))
            log.warning("group_too_hot", extra={"fields": {"group": action.group, "why": said["text"]}})

    def _carry_out(self, action: Action, now_s: float, note: Callable[[Entry], None]) -> bool:
        entry = Entry(action.what if action.what == "split" else "unsplit", action.text, action.numbers())
        note(entry)
        try:
            if action.what == "split":
                self._split(entry, action.group, action.workers[1:])
            else:
                self._join(entry, action.group, keep_lanes=action.what == "again")
                if action.what == "again":
                    entry.what = "split"
                    self._split(entry, action.group, action.workers[1:])
        except FlexStreamError as error:
            entry.failed(error)
            log.warning("split_failed", extra={"fields": {"why": error.message, "group": action.group}})
            if action.what != "undo":
                self._lanes.release(action.group)
            return False
        finally:
            self.rule.did(action.group, now_s)
        return True

    def _split(self, entry: Entry, group: int, workers: Sequence[int]) -> None:
        begin = now_ns()
        made = self._mover.split(group, workers, timeout=TIMEOUT_S)
        entry.span_ns = (begin if entry.span_ns is None else entry.span_ns[0], now_ns())
        entry.numbers["split"] = made.to_dict()
        self._loads.forget_parts(group)
        self.made += 1

    def _join(self, entry: Entry, group: int, *, keep_lanes: bool = False) -> bool:
        begin = now_ns()
        ended = self._mover.unsplit(group, timeout=TIMEOUT_S, keep_lanes=keep_lanes)
        if ended:
            entry.span_ns = (begin, now_ns())
            entry.numbers["split"] = ended[0].to_dict()
            self._loads.forget_parts(group)
        return bool(ended)

    # -- when told to

    def split(
        self, group: int, workers: Sequence[int], note: Callable[[Entry], None], refresh: Callable[[], object]
    ) -> Entry:
        """Ask for lanes, wait for them, split. Raises EngineError; then the lanes end again."""
        owner = self._placement()[group]
        others = tuple(worker for worker in dict.fromkeys(workers) if worker != owner)
        if not others:
            raise EngineError(
                f"group {group} is on worker {owner} already", code="not_split", hint="name another worker to share it"
            )
        if any(one.group == group for one in self._mover.splits()):
            raise EngineError(
                f"group {group} is split already", code="not_split", hint=f"flexstream rebalance unsplit {group}"
            )
        action = Action("split", group, "", 0.0, self._traffic(group), (owner, *others))
        text = f"group {group} is served by workers {', '.join(map(str, (owner, *others)))}"
        entry = Entry("split", text, {"group": group, "connections": action.traffic.connections})
        note(entry)
        if action.wants_lanes:
            entry.numbers["producers"] = self._lanes.ask(group, others)
            until_s = time.monotonic() + self.rule.config.lanes_wait_s
            while not self._lanes.ready(group) and time.monotonic() < until_s:
                time.sleep(POLL_S)
            refresh()
            time.sleep(self.rule.config.lanes_settle_s)
            refresh()
        try:
            self._split(entry, group, others)
        except FlexStreamError as error:
            entry.failed(error)
            self._lanes.release(group)
            raise
        self.rule.did(group, self._clock())
        return entry

    def unsplit(self, group: int, note: Callable[[Entry], None]) -> Entry:
        entry = Entry("unsplit", f"group {group} is on worker {self._placement()[group]} alone", {"group": group})
        note(entry)
        try:
            if not self._join(entry, group):
                entry.text = f"group {group} is not split"
        except FlexStreamError as error:
            entry.failed(error)
            raise
        self.rule.did(group, self._clock())
        return entry

    def leave(self, worker: int) -> None:
        """The worker is drained: what it shares is joined."""
        for one in self._mover.splits():
            if worker in one.workers:
                self._mover.unsplit(one.group, timeout=TIMEOUT_S)
                self.rule.did(one.group, self._clock())
