"""The balancer at work in an engine: looks at the loads, decides, moves groups, and remembers why.

Every look reads samples of the workers; every tick asks `nic.balancer.Balancer`. Looks come often while rows flow and
cost a fraction of a millisecond; one that sees the load turn, or a backlog grow on one side, hurries the next tick.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from flexstream.balance.history import LATENCY_TAIL_S, Entry, Latency, decision_numbers, plan_numbers
from flexstream.balance.split_keeper import SplitKeeper
from flexstream.balance.splits import LaneSource, NoLanes
from flexstream.balance.trim import Trim
from flexstream.balance.watch import LoadSource, Watch, excess
from flexstream.errors import EngineError, FlexStreamError
from flexstream.nic.balance.balancer import Balancer, BalancerConfig, Decision, Verdict
from flexstream.nic.balance.placement_plan import Limits, Plan, plan, worker_percent

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
HISTORY = 256


class Moves(Protocol):
    """What carries moves out; `moving.Mover` in an engine."""

    moved: int
    nic_errors: int

    def move(self, targets: Mapping[int, int], reason: str = ..., timeout: float = ...) -> list[Any]: ...
    def under_way(self) -> list[Any]: ...
    def splits(self) -> list[Any]: ...
    def split(self, group: int, workers: Sequence[int], timeout: float = ...) -> Any: ...
    def unsplit(self, group: int, timeout: float = ..., *, keep_lanes: bool = ...) -> list[Any]: ...


class Rebalancer(threading.Thread):
    """Balances one engine. Methods are thread-safe; one of them that moves groups runs at a time."""

    def __init__(
        self,
        loads: LoadSource,
        mover: Moves,
        placement: Callable[[], list[int]],
        latency: Latency,
        *,
        auto: bool,
        config: BalancerConfig = BalancerConfig(),  # noqa: B008 - frozen
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
        lanes: LaneSource = NoLanes(),  # noqa: B008 - has no state
    ) -> None:
        super().__init__(name="fs-rebalancer", daemon=True)
        self._loads = loads
        self._mover = mover
        self._placement = placement
        self._latency = latency
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._look_cost_s = 0.0
        self._acting = threading.Lock()
        self._stopping = threading.Event()
        self._changed = threading.Event()
        self._inactive: frozenset[int] = frozenset()
        self._frozen: frozenset[int] = frozenset()
        self._history: deque[Entry] = deque(maxlen=HISTORY)
        groups = self._groups = len(placement())
        self.balancer = Balancer(groups, config)
        self.trim = Trim(groups, config)
        self.auto = auto
        self._watch = Watch(loads, groups, clock, self._stopping)
        self._decision: Decision | None = None
        self.splitter = SplitKeeper(loads, mover, lanes, placement, clock)

    # -- the thread

    def run(self) -> None:
        failed = False
        while not self._stopping.is_set():
            pause_s = OFF_LOOK_S
            try:
                pause_s = self.look()
                failed = False
            except Exception:  # whatever it is, groups stay served where they are
                if not failed:
                    log.exception("rebalancer_failed")
                failed = True
            self._changed.wait(pause_s)
            self._changed.clear()

    def stop(self) -> None:
        self._stopping.set()
        self._changed.set()

    # -- looking

    def look(self) -> float:
        """Read the loads, tick when it is time. Returns the seconds until the next look."""
        with self._acting:
            begin_s = self._cpu_clock()
            now_s = self._refresh()
            if not self.auto or self._loads.workers == 1:
                return OFF_LOOK_S
            if now_s is None:
                return LOOK_S
            turned = self._watch.turned(self.balancer, self._placement(), self.limits())
            if turned:
                turned = self.balancer.alarm(now_s, forget=True)
            ticks = self.balancer.due(now_s)
            if ticks:
                self._tick(now_s, turned)
            self._look_at_splits(now_s)
            self._trim(now_s)
            if not ticks:
                self._look_cost_s += 0.1 * (self._cpu_clock() - begin_s - self._look_cost_s)
            if self._watch.quiet:
                return QUIET_LOOK_S
            if self.balancer.next_at_s - now_s <= 2 * LOOK_S:
                return LOOK_S
            return min(max(CALM_LOOK_S, self._look_cost_s / CALM_COST), MOST_CALM_LOOK_S)

    def _refresh(self) -> float | None:
        return self._watch.refresh(self.balancer.config.half_life_s)

    def _tick(self, now_s: float, turned: bool) -> None:
        rows = self._watch.take(self.balancer, turned)
        decision = self.balancer.tick(now_s, rows, self._watch.waiting, self._placement(), self.limits())
        self._decision = decision
        entry = self._note_decision(decision)
        if decision.moves:
            self._carry_out_by_itself(entry, decision)
            self.trim.begin_anew(self._clock())

    def _trim(self, now_s: float) -> None:
        self.trim.add(self._loads.fresh)
        if not self.trim.due(now_s) or float(self._loads.busy.max()) < WORTH_TRIMMING:
            return
        decision = self.trim.tick(now_s, self._watch.roughness, self._placement(), self.limits())
        if decision.moves:
            entry = Entry("trim", decision.text, decision_numbers(decision))
            self._history.append(entry)
            self._carry_out_by_itself(entry, decision)
            self.balancer.settle(self._clock(), self.balancer.config.cool_down_s)

    def _carry_out_by_itself(self, entry: Entry, decision: Decision) -> None:
        targets = {group: target for group, _, target in decision.moves}
        try:
            self._carry_out(entry, targets, MOVE_TIMEOUT_S)
        except FlexStreamError as error:
            log.warning("rebalance_failed", extra={"fields": {"why": error.message, "plan": decision.text}})
        self._watch.moved()

    def _look_at_splits(self, now_s: float) -> None:
        if self.splitter.look(now_s, self._watch.rows_lately(), self.limits(), self._history.append):
            self._watch.moved()
            self.balancer.settle(self._clock(), PARTS_KNOWN_S)
            self.trim.begin_anew(self._clock())

    def _note_decision(self, decision: Decision) -> Entry:
        entry = Entry("tick", decision.text, decision_numbers(decision))
        last = self._history[-1] if self._history else None
        same = last is not None and last.what == "tick" and last.numbers["verdict"] == entry.numbers["verdict"]
        if same and last is not None and decision.verdict is not Verdict.MOVE:
            entry.repeated = last.repeated + 1
            self._history[-1] = entry
        else:
            self._history.append(entry)
        return entry

    def _carry_out(self, entry: Entry, targets: Mapping[int, int], timeout_s: float | None = None) -> None:
        options = {} if timeout_s is None else {"timeout": timeout_s}
        try:
            entry.moves = self._mover.move(targets, f"{entry.what}: {entry.text}", **options)
        except BaseException as error:
            entry.error = error.message if isinstance(error, FlexStreamError) else str(error)
            raise

    # -- what it may do

    def limits(self) -> Limits:
        return self._limits(self._inactive)

    def _limits(self, inactive: frozenset[int]) -> Limits:
        """Groups that are on their way, or split, stay where they are."""
        moving = {move.group for move in self._mover.under_way()}
        split, parts = self.splitter.shares()
        return Limits(self._loads.workers, inactive, self._frozen | moving, split, parts=parts)

    def _plan(self, inactive: frozenset[int], *, spread: bool = False) -> Plan:
        """On the rows of the last seconds. `spread`: without any, count every group as equal."""
        limits = self._limits(inactive)
        rows = self._watch.steady_rows()
        if spread and not rows.any():
            rows = np.ones(len(rows))
        return plan(rows, np.zeros(len(rows)), self._placement(), limits)

    # -- what people ask for

    def plan(self) -> dict[str, Any]:
        """What would move now, by the rows of the last seconds. Changes nothing."""
        with self._acting:
            self._refresh()
            return plan_numbers(self._plan(self._inactive))

    def apply(self) -> dict[str, Any]:
        """Make the plan of now, and carry it out at once: no dead band, no cool-down."""
        with self._acting:
            self._refresh()
            made = self._plan(self._inactive)
            return self._do("apply", made.text, {g: t for g, _, t in made.moves}, plan_numbers(made))

    def move(self, group: int, worker: int) -> dict[str, Any]:
        self._check_group(group)
        self._check_worker(worker)
        with self._acting:
            if worker in self._inactive:
                raise EngineError(
                    f"worker {worker} is drained", code="drained", hint=f"flexstream rebalance add {worker}"
                )
            if group in self._frozen:
                raise EngineError(
                    f"group {group} is frozen", code="frozen", hint=f"flexstream rebalance freeze --off {group}"
                )
            text = f"group {group} to worker {worker}"
            if self._placement()[group] == worker:
                text = f"group {group} is on worker {worker} already"
            return self._do("move", text, {group: worker})

    def drain(self, worker: int) -> dict[str, Any]:
        """Every group of the worker goes to the others; it gets none until it is added again."""
        self._check_worker(worker)
        with self._acting:
            inactive = self._inactive | {worker}
            if len(inactive) == self._loads.workers:
                raise EngineError(
                    f"worker {worker} is the last active one: its groups have nowhere to go",
                    code="last_worker",
                    hint="add another worker first",
                )
            stuck = [g for g, w in enumerate(self._placement()) if w == worker and g in self._frozen]
            if stuck:
                raise EngineError(
                    f"worker {worker} has frozen groups: {', '.join(map(str, stuck[:8]))}",
                    code="frozen",
                    hint="flexstream rebalance freeze --off lets them go",
                )
            self.splitter.leave(worker)
            self._refresh()
            made = self._plan(inactive)
            self._inactive = inactive
            targets = {g: t for g, source, t in made.moves if source == worker}
            return self._do("drain", f"worker {worker} is drained: {made.text}", targets, plan_numbers(made))

    def add(self, worker: int) -> dict[str, Any]:
        """A drained worker is active again, and gets its share at once."""
        self._check_worker(worker)
        with self._acting:
            if worker not in self._inactive:
                return self._do("add", f"worker {worker} is active already", {})
            self._inactive = self._inactive - {worker}
            self._refresh()
            made = self._plan(self._inactive, spread=True)
            targets = {g: t for g, _, t in made.moves}
            return self._do("add", f"worker {worker} is active: {made.text}", targets, plan_numbers(made))

    def split(self, group: int, workers: Iterable[int]) -> dict[str, Any]:
        """These workers serve the group's connections beside its owner (which may be named or not).

        Producers that know lanes are asked for one for each worker. Raises EngineError: one connection cannot be
        shared, or the group is split already.
        """
        self._check_group(group)
        chosen = list(workers)
        for worker in chosen:
            self._check_worker(worker)
        with self._acting:
            if drained := sorted(set(chosen) & self._inactive):
                raise EngineError(
                    f"worker {drained[0]} is drained", code="drained", hint=f"flexstream rebalance add {drained[0]}"
                )
            self._refresh()
            return self._finished(self.splitter.split(group, chosen, self._refresh))

    def unsplit(self, group: int) -> dict[str, Any]:
        """The owner serves all connections of the group again, and its producers end their lanes."""
        self._check_group(group)
        with self._acting:
            return self._finished(self.splitter.unsplit(group))

    def _finished(self, entry: Entry) -> dict[str, Any]:
        self._history.append(entry)
        if entry.span_ns is not None:
            self._watch.moved()
            time.sleep(LATENCY_TAIL_S)
        entry.measure(self._latency)
        return entry.to_dict()

    def set_auto(self, on: bool) -> dict[str, Any]:
        with self._acting:
            self.auto = on
            self._watch.forget_tick()
            reply = self._do(f"auto {'on' if on else 'off'}", f"automatic moves are {'on' if on else 'off'}", {})
        self._changed.set()
        return reply

    def freeze(self, groups: Iterable[int] | None = None, on: bool = True) -> dict[str, Any]:
        """These groups (None: all) stay where they are, whatever the balancer would like; or `on=False`: no more."""
        every = range(self._groups)
        chosen = frozenset(every if groups is None else groups)
        for group in chosen:
            self._check_group(group)
        with self._acting:
            self._frozen = self._frozen | chosen if on else self._frozen - chosen
            count = "no group is" if not self._frozen else f"{len(self._frozen)} of {len(every)} groups are"
            return self._do("freeze" if on else "unfreeze", f"{count} frozen", {})

    def _check_group(self, group: int) -> None:
        last = self._groups - 1
        if not isinstance(group, int) or isinstance(group, bool) or not 0 <= group <= last:
            raise EngineError(f"group {group!r} must be from 0 to {last}", code="bad_group")

    def _check_worker(self, worker: int) -> None:
        last = self._loads.workers - 1
        if not isinstance(worker, int) or isinstance(worker, bool) or not 0 <= worker <= last:
            raise EngineError(f"worker {worker!r} must be from 0 to {last}", code="bad_worker")

    def _do(
        self, what: str, text: str, targets: Mapping[int, int], numbers: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        rest = {name: value for name, value in (numbers or {}).items() if name != "text"}
        entry = Entry(what, text, rest)
        self._history.append(entry)
        if targets:
            self._carry_out(entry, targets)
            time.sleep(LATENCY_TAIL_S)
        entry.measure(self._latency)
        return entry.to_dict()

    # -- what people see

    def history(self, most: int = HISTORY) -> list[dict[str, Any]]:
        """Decisions and orders, the oldest first, each with its numbers and what it moved."""
        entries = list(self._history)[-most:] if most else []
        for entry in entries:
            entry.measure(self._latency)
        return [entry.to_dict() for entry in entries]

    def status(self) -> dict[str, Any]:
        if self._acting.acquire(blocking=False):  # never waits for a move
            try:
                self._refresh()
            finally:
                self._acting.release()
        placement = self._placement()
        rows = self._watch.steady_rows()
        total = float(rows.sum())
        limits = self.limits()
        shares = worker_percent(rows, np.array(placement, np.int32), limits) / total if total else None
        waiting = np.bincount(placement, self._loads.waiting, self._loads.workers)
        decision = self._decision
        last = next((entry for entry in reversed(self._history) if entry.moves), None)
        if last is not None:
            last.measure(self._latency)
        strayed = excess(rows, np.zeros(len(rows)), placement, limits, self.balancer.config)
        return {
            "automatic": self.auto,
            "frozen": sorted(self._frozen),
            "inactive": sorted(self._inactive),
            "split": self.splitter.status(),
            "too_hot": list(self.splitter.too_hot.values()),
            "imbalance_percent": round(float(np.abs(strayed).max()), 1) if total else None,
            "dead_band_percent": round(decision.dead_band_percent, 1)
            if decision is not None and math.isfinite(decision.dead_band_percent)
            else None,
            "verdict": str(decision.verdict) if decision is not None else None,
            "text": decision.text if decision is not None else "no tick yet",
            "moves": self._mover.moved,
            "nic_errors": self._mover.nic_errors,
            "under_way": [move.to_dict() for move in self._mover.under_way()],
            "last": last.to_dict() if last is not None else None,
            "hot": [self._said_of(hot, limits) for hot in self._loads.hot(placement)],
            "workers": [
                {
                    "worker": worker,
                    "cpu": core,
                    "active": worker not in self._inactive,
                    "groups": placement.count(worker),
                    "load_percent": round(100.0 * float(shares[worker]), 1) if shares is not None else None,
                    "waiting_rows": round(float(waiting[worker])),
                }
                for worker, core in enumerate(self._loads.cores())
            ],
        }

    @staticmethod
    def _said_of(hot: dict[str, Any], limits: Limits) -> dict[str, Any]:
        """A hot group with what is done about it."""
        workers = limits.split.get(hot["group"])
        if workers is None:
            return hot
        shared = f"{hot['text']}; split over workers {', '.join(map(str, workers))}"
        return {**hot, "split": list(workers), "text": shared}
