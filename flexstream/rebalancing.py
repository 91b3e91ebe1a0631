"""The balancer at work in an engine: looks at the loads, decides, moves groups, and remembers why.

Every look reads counters; every tick asks `nic.balancer.Balancer`. Looks come often while rows flow and cost some
tens of microseconds; a look that sees the load turn, or a backlog grow on one side, brings the next tick forward.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from flexstream.errors import EngineError, FlexStreamError
from flexstream.nic.balancer import Balancer, BalancerConfig, Decision, Verdict
from flexstream.nic.placement_plan import Limits, Plan, group_percent, plan, worker_percent

log = logging.getLogger("flexstream.rebalance")

LOOK_S = 0.01
CALM_LOOK_S = 0.02
QUIET_LOOK_S = 0.25  # no rows come
OFF_LOOK_S = 1.0
MOVE_TIMEOUT_S = 10.0
LATENCY_TAIL_S = 0.05  # a marker that a move held up is seen a little after it
HISTORY = 256


class LoadSource(Protocol):
    """What is read of the workers; `loads.Loads` in an engine."""

    fresh: NDArray[np.float64]
    fresh_batches: float
    waiting: NDArray[np.float64]
    steady: NDArray[np.float64]

    @property
    def workers(self) -> int: ...
    def cores(self) -> list[int | None]: ...
    def want_samples(self) -> None: ...
    def look(self, now_s: float) -> None: ...
    def hot(self, placement: Sequence[int]) -> list[dict[str, Any]]: ...


class Moves(Protocol):
    """What carries moves out; `moving.Mover` in an engine."""

    moved: int
    nic_errors: int

    def move(self, targets: Mapping[int, int], reason: str = ..., timeout: float = ...) -> list[Any]: ...
    def under_way(self) -> list[Any]: ...


class Latency(Protocol):
    def between(self, begin_ns: int, end_ns: int) -> dict[str, Any]: ...


@dataclass(eq=False)
class Entry:
    """One line of the history: a tick's decision, or what somebody asked for, and what came of it."""

    what: str
    text: str
    at: float
    numbers: dict[str, Any] = field(default_factory=dict)
    moves: list[Any] = field(default_factory=list)
    error: str | None = None
    repeated: int = 1
    latency: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        moved = [move.to_dict() for move in self.moves]
        return {
            "at": round(self.at, 3),
            "what": self.what,
            "text": self.text,
            "error": self.error,
            "repeated": self.repeated,
            "moved": moved,
            "took_ms": took_ms(self.moves),
            "latency": self.latency,
            **self.numbers,
        }


def took_ms(moves: Iterable[Any]) -> float | None:
    """From the first step of the first move to the last step of the last."""
    stamps = [at for move in moves for at in move.steps.values()]
    return round((max(stamps) - min(stamps)) / 1e6, 3) if stamps else None


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
    ) -> None:
        super().__init__(name="fs-rebalancer", daemon=True)
        self._loads = loads
        self._mover = mover
        self._placement = placement
        self._latency = latency
        self._clock = clock
        self._acting = threading.Lock()
        self._stopping = threading.Event()
        self._changed = threading.Event()
        self._inactive: frozenset[int] = frozenset()
        self._frozen: frozenset[int] = frozenset()
        self._history: deque[Entry] = deque(maxlen=HISTORY)
        groups = len(placement())
        self.balancer = Balancer(groups, config)
        self.auto = auto
        self._looked_s: float | None = None
        self._recent = np.zeros(groups)  # rows and growth of the last moments: has the load turned?
        self._recent_growth = np.zeros(groups)
        self._waiting = np.zeros(groups)
        self._since_tick = np.zeros(groups)
        self._batches_since_tick = 0.0
        self._level = 0.0  # the imbalance that the last tick knew of
        self._decision: Decision | None = None

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
            now_s = self._refresh()
            if not self.auto or self._loads.workers == 1:
                return OFF_LOOK_S
            self._loads.want_samples()
            turned = self._has_turned(now_s)
            if self.balancer.due(now_s):
                self._tick(now_s, turned)
            if not self._recent.sum() + self._waiting.sum() >= 1.0:
                return QUIET_LOOK_S
            return LOOK_S if self.balancer.next_at_s - now_s <= 2 * LOOK_S else CALM_LOOK_S

    def _refresh(self) -> float:
        now_s = self._clock()
        self._loads.look(now_s)
        elapsed_s = 0.0 if self._looked_s is None else now_s - self._looked_s
        fade = 0.5 ** (elapsed_s / self.balancer.config.half_life_s)
        growth = np.maximum(self._loads.waiting - self._waiting, 0.0)
        self._recent = self._recent * fade + self._loads.fresh
        self._recent_growth = self._recent_growth * fade + growth
        self._since_tick = self._since_tick + self._loads.fresh
        self._batches_since_tick += self._loads.fresh_batches
        self._waiting = self._loads.waiting
        self._looked_s = now_s
        return now_s

    def _has_turned(self, now_s: float) -> bool:
        """Whether the last moments are out of balance by more than the last tick knew: then tick now, on them."""
        limits = self.limits()
        active = limits.workers - len(limits.inactive)
        total = float(self._recent.sum() + self._recent_growth.sum())
        if active < 2 or total < 1.0:
            return False
        band = self.balancer.band_percent(total, active)
        imbalance = self._imbalance(self._recent, self._recent_growth, limits)
        if imbalance <= self._level + band:
            self._level = min(self._level, imbalance)
            return False
        self._level = imbalance
        self.balancer.alarm(now_s, forget=True)
        return True

    def _imbalance(self, rows: NDArray[np.float64], growth: NDArray[np.float64], limits: Limits) -> float:
        """How far the worst worker is from its share, in percent of it."""
        small = float(growth.sum()) <= self.balancer.config.accumulation_floor * float(rows.sum())
        weighed = np.zeros_like(growth) if small else growth
        active = np.array([worker not in limits.inactive for worker in range(limits.workers)])
        percent = group_percent(rows, weighed, int(active.sum()), self.balancer.config.weights)
        if not percent.any():
            return 0.0
        placed = worker_percent(percent, np.array(self._placement(), np.int32), limits)
        return float(np.abs(placed - 100.0 * active).max())

    def _tick(self, now_s: float, turned: bool) -> None:
        rows = self._recent if turned else self._since_tick
        if self._batches_since_tick > 0:
            self.balancer.rows_come_in(float(self._since_tick.sum()) / self._batches_since_tick)
        decision = self.balancer.tick(now_s, rows, self._waiting, self._placement(), self.limits())
        self._since_tick = np.zeros_like(self._since_tick)
        self._batches_since_tick = 0.0
        self._decision = decision
        entry = self._note_decision(decision)
        if decision.moves:
            targets = {group: target for group, _, target in decision.moves}
            try:
                self._carry_out(entry, targets, MOVE_TIMEOUT_S)
            except FlexStreamError as error:
                log.warning("rebalance_failed", extra={"fields": {"why": error.message, "plan": decision.text}})
            self._recent_growth = np.zeros_like(self._recent_growth)  # what waited, waits elsewhere now
            self._level = 0.0

    def _note_decision(self, decision: Decision) -> Entry:
        numbers = decision.to_dict()
        text = numbers.pop("text")
        for name in ("moves", "at_s", "repeated"):
            numbers.pop(name)
        if not math.isfinite(decision.dead_band_percent):
            numbers["dead_band_percent"] = None  # too few rows for any
        last = self._history[-1] if self._history else None
        same = last is not None and last.what == "tick" and last.numbers["verdict"] == numbers["verdict"]
        entry = Entry("tick", text, time.time(), numbers)
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
        moving = {move.group for move in self._mover.under_way()}
        return Limits(self._loads.workers, inactive=self._inactive, frozen=self._frozen | moving)

    def _plan(self, inactive: frozenset[int], *, spread: bool = False) -> Plan:
        """On the rows of the last seconds. `spread`: without any, count every group as equal."""
        moving = {move.group for move in self._mover.under_way()}
        limits = Limits(self._loads.workers, inactive=inactive, frozen=self._frozen | moving)
        rows = self._steady_rows()
        if spread and not rows.any():
            rows = np.ones(len(rows))
        return plan(rows, np.zeros(len(rows)), self._placement(), limits)

    def _steady_rows(self) -> NDArray[np.float64]:
        groups = len(self._recent)
        rows = self._loads.steady.sum(axis=0) if len(self._loads.steady) else np.zeros(groups)
        return rows if rows.sum() >= 1.0 else np.zeros(groups)

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

    def set_auto(self, on: bool) -> dict[str, Any]:
        with self._acting:
            self.auto = on
            self._since_tick = np.zeros_like(self._since_tick)
            reply = self._do(f"auto {'on' if on else 'off'}", f"automatic moves are {'on' if on else 'off'}", {})
        self._changed.set()
        return reply

    def freeze(self, groups: Iterable[int] | None = None, on: bool = True) -> dict[str, Any]:
        """These groups (None: all) stay where they are, whatever the balancer would like; or `on=False`: no more."""
        every = range(len(self._recent))
        chosen = frozenset(every if groups is None else groups)
        for group in chosen:
            self._check_group(group)
        with self._acting:
            self._frozen = self._frozen | chosen if on else self._frozen - chosen
            count = "no group is" if not self._frozen else f"{len(self._frozen)} of {len(every)} groups are"
            return self._do("freeze" if on else "unfreeze", f"{count} frozen", {})

    def _check_group(self, group: int) -> None:
        last = len(self._recent) - 1
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
        entry = Entry(what, text, time.time(), rest)
        self._history.append(entry)
        if targets:
            self._carry_out(entry, targets)
            time.sleep(LATENCY_TAIL_S)
        self._measure(entry)
        return entry.to_dict()

    def _measure(self, entry: Entry) -> None:
        stamps = [at for move in entry.moves for at in move.steps.values()]
        if stamps and entry.latency is None:
            end_ns = max(stamps) + int(LATENCY_TAIL_S * 1e9)
            measured = self._latency.between(min(stamps), end_ns)
            if time.monotonic_ns() > end_ns:
                entry.latency = measured

    # -- what people see

    def history(self, most: int = HISTORY) -> list[dict[str, Any]]:
        """Decisions and orders, the oldest first, each with its numbers and what it moved."""
        entries = list(self._history)[-most:] if most else []
        for entry in entries:
            self._measure(entry)
        return [entry.to_dict() for entry in entries]

    def status(self) -> dict[str, Any]:
        if self._acting.acquire(blocking=False):  # never waits for a move
            try:
                self._refresh()
            finally:
                self._acting.release()
        placement = self._placement()
        rows = self._steady_rows()
        total = float(rows.sum())
        shares = np.bincount(placement, rows, self._loads.workers) / total if total else None
        waiting = np.bincount(placement, self._waiting, self._loads.workers)
        limits = self.limits()
        decision = self._decision
        last = next((entry for entry in reversed(self._history) if entry.moves), None)
        if last is not None:
            self._measure(last)
        nothing = np.zeros(len(rows))
        return {
            "automatic": self.auto,
            "frozen": sorted(self._frozen),
            "inactive": sorted(self._inactive),
            "split": [],
            "imbalance_percent": round(self._imbalance(rows, nothing, limits), 1) if total else None,
            "dead_band_percent": round(decision.dead_band_percent, 1)
            if decision is not None and math.isfinite(decision.dead_band_percent)
            else None,
            "verdict": str(decision.verdict) if decision is not None else None,
            "text": decision.text if decision is not None else "no tick yet",
            "moves": self._mover.moved,
            "nic_errors": self._mover.nic_errors,
            "under_way": [move.to_dict() for move in self._mover.under_way()],
            "last": last.to_dict() if last is not None else None,
            "hot": self._loads.hot(placement),
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


def plan_numbers(made: Plan) -> dict[str, Any]:
    return {
        "plan": [{"group": group, "from": source, "to": target} for group, source, target in made.moves],
        "text": made.text,
        "reason": str(made.reason),
        "objective_before": round(made.objective_before, 3),
        "objective_after": round(made.objective_after, 3),
        "imbalance_percent": round(made.imbalance_before, 1),
        "imbalance_percent_after": round(made.imbalance_after, 1),
        "worker_percent": [round(share, 1) for share in made.worker_percent_before],
        "worker_percent_after": [round(share, 1) for share in made.worker_percent_after],
        "hot_groups": list(made.hot_groups),
    }
