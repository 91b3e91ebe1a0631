"""The balancer's thread in an engine: looks at the loads, decides, and moves and splits groups through the door.

Every look reads samples of the workers; every tick asks `nic.balance.Balancer`. Looks come often while rows flow and
cost a fraction of a millisecond; one that sees the load turn, or a backlog grow on one side, hurries the next tick.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from flexstream.balance.door import Balance
from flexstream.balance.history import Entry, decision_numbers
from flexstream.balance.trim import Trim
from flexstream.errors import FlexStreamError
from flexstream.nic.balance.balancer import Balancer, Decision

log = logging.getLogger("flexstream.rebalance")

LOOK_S = 0.01
CALM_LOOK_S = 0.02
MOST_CALM_LOOK_S = 0.1
CALM_COST = 0.008  # of a core: with many connections looks cost more, and come less often while all is well
QUIET_LOOK_S = 0.25  # no rows come
OFF_LOOK_S = 1.0
MOVE_TIMEOUT_S = 10.0
PARTS_KNOWN_S = 0.3  # after a split, until it shows how many of its rows each worker gets
WORTH_TRIMMING = 0.5  # of the busiest worker's time: one with time to spare gains nothing by a few percent


class Rebalancer(threading.Thread):
    """Balances one engine, while its door says `auto`."""

    def __init__(self, door: Balance, cpu_clock: Callable[[], float] = time.thread_time) -> None:
        super().__init__(name="fs-rebalancer", daemon=True)
        self._door = door
        self._loads = door.loads
        self._watch = door.watch
        self._clock = door.clock
        self._cpu_clock = cpu_clock
        self._look_cost_s = 0.0
        self._balancer = Balancer(door.groups, door.config)
        self._trim = Trim(door.groups, door.config)

    # -- the thread

    def run(self) -> None:
        failed = False
        while not self._door.stopping.is_set():
            pause_s = OFF_LOOK_S
            try:
                pause_s = self.look()
                failed = False
            except Exception:  # whatever it is, groups stay served where they are
                if not failed:
                    log.exception("rebalancer_failed")
                failed = True
            self._door.changed.wait(pause_s)
            self._door.changed.clear()

    def stop(self) -> None:
        self._door.stopping.set()
        self._door.changed.set()

    # -- looking

    def look(self) -> float:
        """Read the loads, tick when it is time. Returns the seconds until the next look."""
        with self._door.acting:
            begin_s = self._cpu_clock()
            now_s = self._door.refresh()
            if not self._door.auto or self._loads.workers == 1:
                return OFF_LOOK_S
            if now_s is None:
                return LOOK_S
            turned = self._watch.turned(self._balancer, self._door.placement(), self._door.limits())
            if turned:
                turned = self._balancer.alarm(now_s, forget=True)
            ticks = self._balancer.due(now_s)
            if ticks:
                self._tick(now_s, turned)
            self._look_at_splits(now_s)
            self._look_at_trim(now_s)
            if not ticks:
                self._look_cost_s += 0.1 * (self._cpu_clock() - begin_s - self._look_cost_s)
            if self._watch.quiet:
                return QUIET_LOOK_S
            if self._balancer.next_at_s - now_s <= 2 * LOOK_S:
                return LOOK_S
            return min(max(CALM_LOOK_S, self._look_cost_s / CALM_COST), MOST_CALM_LOOK_S)

    def _tick(self, now_s: float, turned: bool) -> None:
        rows = self._watch.take(self._balancer, turned)
        decision = self._balancer.tick(now_s, rows, self._watch.waiting, self._door.placement(), self._door.limits())
        entry = self._door.note_decision(decision)
        if decision.moves:
            self._carry_out(entry, decision)
            self._trim.begin_anew(self._clock())

    def _look_at_trim(self, now_s: float) -> None:
        self._trim.add(self._loads.fresh)
        if not self._trim.due(now_s) or float(self._loads.busy.max()) < WORTH_TRIMMING:
            return
        decision = self._trim.tick(now_s, self._watch.roughness, self._door.placement(), self._door.limits())
        if decision.moves:
            entry = Entry("trim", decision.text, decision_numbers(decision))
            self._door.note(entry)
            self._carry_out(entry, decision)
            self._balancer.settle(self._clock(), self._door.config.cool_down_s)

    def _look_at_splits(self, now_s: float) -> None:
        if self._door.splitter.look(now_s, self._watch.rows_lately(), self._door.limits(), self._door.note):
            self._watch.moved()
            self._balancer.settle(self._clock(), PARTS_KNOWN_S)
            self._trim.begin_anew(self._clock())

    def _carry_out(self, entry: Entry, decision: Decision) -> None:
        targets = {group: target for group, _, target in decision.moves}
        try:
            self._door.carry_out(entry, targets, timeout=MOVE_TIMEOUT_S)
        except FlexStreamError as error:
            log.warning("rebalance_failed", extra={"fields": {"why": error.message, "plan": decision.text}})
        self._watch.moved()
