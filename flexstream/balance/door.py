"""The one door to an engine's placement: groups move, are split, frozen and drained through here, whoever asks.

`Engine.move`, the HTTP routes and the balancer's own thread get the same: an order is checked, then it is a line of the
history, then it is carried out, and the line is the answer.
"""

from __future__ import annotations

import math
import operator
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from flexstream.balance.history import HISTORY, LATENCY_TAIL_S, Entry, History, Latency, plan_numbers
from flexstream.balance.split_keeper import SplitKeeper
from flexstream.balance.splits import LaneSource, NoLanes, Split
from flexstream.balance.watch import LoadSource, Watch, excess
from flexstream.errors import EngineError
from flexstream.nic.balance.balancer import BalancerConfig, Decision
from flexstream.nic.balance.placement_plan import Limits, Plan, plan, worker_percent

if TYPE_CHECKING:
    from flexstream.balance.mover import GroupMove

ASKED_FOR = "asked for"


class Moves(Protocol):
    """What carries moves out; `mover.Mover` in an engine."""

    moved: int
    nic_errors: int

    def move(self, targets: Mapping[int, int], reason: str = ..., timeout: float = ...) -> list[GroupMove]: ...
    def under_way(self) -> list[GroupMove]: ...
    def splits(self) -> list[Split]: ...
    def split(self, group: int, workers: Sequence[int], timeout: float = ...) -> Split: ...
    def unsplit(self, group: int, timeout: float = ..., *, keep_lanes: bool = ...) -> list[Split]: ...


class Balance:
    """The commands that change an engine's placement, and what became of them. Thread-safe; one command runs at a time.

    Every order answers with its line of the history, as a dict. All raise EngineError, and groups are served where they
    were: no such group or worker, `frozen`, `drained`, what the mover says, and whatever `check_open` raises.
    """

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
        lanes: LaneSource = NoLanes(),  # noqa: B008 - has no state
        check_open: Callable[[], None] = lambda: None,
    ) -> None:
        self._mover = mover
        self._latency = latency
        self._check_open = check_open
        self._groups = len(placement())
        self._every_group = frozenset(range(self._groups))
        self._every_worker = frozenset(range(loads.workers))
        self._inactive: frozenset[int] = frozenset()
        self._frozen: frozenset[int] = frozenset()
        self._history = History(latency)
        self.auto = auto
        self.splitter = SplitKeeper(loads, mover, lanes, placement, clock)
        # The rest is for the balancer's thread, which holds `acting` while it looks.
        self.acting = threading.Lock()
        self.stopping = threading.Event()
        self.changed = threading.Event()  # set: do not wait for the next look
        self.loads = loads
        self.placement = placement
        self.config = config
        self.clock = clock
        self.watch = Watch(loads, self._groups, clock, self.stopping)

    @property
    def groups(self) -> int:
        return self._groups

    # -- for the balancer's thread

    def refresh(self) -> float | None:
        return self.watch.refresh(self.config.half_life_s)

    def limits(self) -> Limits:
        return self._limits(self._inactive)

    def note(self, entry: Entry) -> None:
        self._history.note(entry)

    def note_decision(self, decision: Decision) -> Entry:
        return self._history.note_decision(decision)

    def carry_out(self, entry: Entry, targets: Mapping[int, int], reason: str | None = None, **options: float) -> None:
        """Of a line of the history. What goes wrong is in it."""
        try:
            entry.moves = self._mover.move(targets, reason or f"{entry.what}: {entry.text}", **options)
        except BaseException as error:
            entry.failed(error)
            raise

    # -- what may be done

    def _limits(self, inactive: frozenset[int]) -> Limits:
        """Groups that are on their way, or split, stay where they are."""
        moving = {move.group for move in self._mover.under_way()}
        split, parts = self.splitter.shares()
        return Limits(self.loads.workers, inactive, self._frozen | moving, split, parts=parts)

    def _plan(self, inactive: frozenset[int], *, spread: bool = False) -> Plan:
        """On the rows of the last seconds. `spread`: without any, count every group as equal."""
        limits = self._limits(inactive)
        rows = self.watch.steady_rows()
        if spread and not rows.any():
            rows = np.ones(len(rows))
        return plan(rows, np.zeros(len(rows)), self.placement(), limits)

    def _check_group(self, group: int) -> int:
        return _numbered("group", group, self._groups)

    def _check_worker(self, worker: int) -> int:
        return _numbered("worker", worker, self.loads.workers)

    def _check_targets(self, targets: Mapping[int, int]) -> Mapping[int, int]:
        plain = {*map(type, targets), *map(type, targets.values())} <= {int}
        if plain and self._every_group.issuperset(targets) and self._every_worker.issuperset(targets.values()):
            return targets  # nearly always
        return {self._check_group(group): self._check_worker(worker) for group, worker in targets.items()}

    def _check_active(self, workers: Iterable[int]) -> None:
        if self._inactive and (drained := self._inactive.intersection(workers)):
            worker = min(drained)
            raise EngineError(
                f"worker {worker} is drained", code="drained", hint=f"add it again: flexstream rebalance add {worker}"
            )

    def _check_not_frozen(self, groups: Iterable[int]) -> None:
        if self._frozen and (frozen := self._frozen.intersection(groups)):
            group = min(frozen)
            raise EngineError(
                f"group {group} is frozen",
                code="frozen",
                hint=f"unfreeze it: flexstream rebalance freeze --off {group}",
            )

    # -- orders

    def plan(self) -> dict[str, Any]:
        """What would move now, by the rows of the last seconds. Changes nothing, and is no line of the history."""
        self._check_open()
        with self.acting:
            self.refresh()
            return plan_numbers(self._plan(self._inactive))

    def apply(self) -> dict[str, Any]:
        """Make the plan of now, and carry it out at once: no dead band, no cool-down."""
        self._check_open()
        with self.acting:
            self.refresh()
            made = self._plan(self._inactive)
            return self._do("apply", made.text, {g: t for g, _, t in made.moves}, plan_numbers(made))

    def move(self, group: int, worker: int) -> dict[str, Any]:
        """Move a group to a worker. Returns when it is settled there."""
        self._check_open()
        targets = {self._check_group(group): self._check_worker(worker)}
        with self.acting:
            return self._answer(self._move(targets))

    def move_all(self, targets: Mapping[int, int], reason: str = ASKED_FOR) -> list[GroupMove]:
        """Move groups, {group: worker}, all at once; one that may not move keeps all where they are.

        Returns the moves that were needed, and does not wait for their latency: the history has it later.
        """
        self._check_open()
        checked = self._check_targets(targets)
        with self.acting:
            return self._move(checked, reason).moves

    def _move(self, targets: Mapping[int, int], reason: str | None = None) -> Entry:
        self._check_active(targets.values())
        self._check_not_frozen(targets)
        entry = Entry("move", _said(targets, self.placement()))
        self.note(entry)
        self.carry_out(entry, targets, reason)
        return entry

    def drain(self, worker: int) -> dict[str, Any]:
        """Every group of the worker goes to the others; it gets none until it is added again."""
        self._check_open()
        worker = self._check_worker(worker)
        with self.acting:
            inactive = self._inactive | {worker}
            if len(inactive) == self.loads.workers:
                raise EngineError(
                    f"worker {worker} is the last active one: its groups have nowhere to go",
                    code="last_worker",
                    hint="add another worker first",
                )
            stuck = [g for g, w in enumerate(self.placement()) if w == worker and g in self._frozen]
            if stuck:
                raise EngineError(
                    f"worker {worker} has frozen groups: {', '.join(map(str, stuck[:8]))}",
                    code="frozen",
                    hint="unfreeze them: flexstream rebalance freeze --off",
                )
            self.splitter.leave(worker)
            self.refresh()
            made = self._plan(inactive)
            self._inactive = inactive
            targets = {g: t for g, source, t in made.moves if source == worker}
            return self._do("drain", f"worker {worker} is drained: {made.text}", targets, plan_numbers(made))

    def add(self, worker: int) -> dict[str, Any]:
        """A drained worker is active again, and gets its share at once."""
        self._check_open()
        worker = self._check_worker(worker)
        with self.acting:
            if worker not in self._inactive:
                return self._do("add", f"worker {worker} is active already", {})
            self._inactive = self._inactive - {worker}
            self.refresh()
            made = self._plan(self._inactive, spread=True)
            targets = {g: t for g, _, t in made.moves}
            return self._do("add", f"worker {worker} is active: {made.text}", targets, plan_numbers(made))

    def split(self, group: int, workers: Iterable[int]) -> dict[str, Any]:
        """These workers serve the group's connections beside its owner (which may be named or not).

        Producers that know lanes are asked for one for each worker. Raises EngineError: one connection cannot be
        shared, or the group is split already.
        """
        self._check_open()
        group = self._check_group(group)
        chosen = [self._check_worker(worker) for worker in workers]
        with self.acting:
            self._check_active(chosen)
            self.refresh()
            return self._finished(self.splitter.split(group, chosen, self.note, self.refresh))

    def unsplit(self, group: int) -> dict[str, Any]:
        """The owner serves all connections of the group again, and its producers end their lanes."""
        self._check_open()
        group = self._check_group(group)
        with self.acting:
            return self._finished(self.splitter.unsplit(group, self.note))

    def set_auto(self, on: bool) -> dict[str, Any]:
        """Whether groups move and are split by themselves."""
        self._check_open()
        with self.acting:
            self.auto = on
            self.watch.forget_tick()
            reply = self._do(f"auto {'on' if on else 'off'}", f"automatic moves are {'on' if on else 'off'}", {})
        self.changed.set()
        return reply

    def freeze(self, groups: Iterable[int] | None = None, on: bool = True) -> dict[str, Any]:
        """These groups (None: all) stay where they are, whatever the balancer would like; or `on=False`: no more."""
        self._check_open()
        chosen = self._every_group if groups is None else frozenset(map(self._check_group, groups))
        with self.acting:
            self._frozen = self._frozen | chosen if on else self._frozen - chosen
            count = "no group is" if not self._frozen else f"{len(self._frozen)} of {self._groups} groups are"
            return self._do("freeze" if on else "unfreeze", f"{count} frozen", {})

    # -- answers

    def _do(
        self, what: str, text: str, targets: Mapping[int, int], numbers: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        rest = {name: value for name, value in (numbers or {}).items() if name != "text"}
        entry = Entry(what, text, rest)
        self.note(entry)
        if targets:
            self.carry_out(entry, targets)
        return self._answer(entry)

    def _finished(self, entry: Entry) -> dict[str, Any]:
        if entry.span_ns is not None:
            self.watch.moved()
        return self._answer(entry)

    def _answer(self, entry: Entry) -> dict[str, Any]:
        if entry.moves or entry.span_ns is not None:
            time.sleep(LATENCY_TAIL_S)
        entry.measure(self._latency)
        return entry.to_dict()

    # -- what people see

    def history(self, most: int = HISTORY) -> list[dict[str, Any]]:
        """Decisions and orders, the oldest first, each with its numbers and what it moved."""
        return self._history.lines(most)

    def status(self) -> dict[str, Any]:
        if self.acting.acquire(blocking=False):  # never waits for a move
            try:
                self.refresh()
            finally:
                self.acting.release()
        placement = self.placement()
        rows = self.watch.steady_rows()
        total = float(rows.sum())
        limits = self.limits()
        shares = worker_percent(rows, np.array(placement, np.int32), limits) / total if total else None
        waiting = np.bincount(placement, self.loads.waiting, self.loads.workers)
        decision = self._history.decision
        last = self._history.last_move()
        strayed = excess(rows, np.zeros(len(rows)), placement, limits, self.config)
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
            "hot": [_said_of(hot, limits) for hot in self.loads.hot(placement)],
            "workers": [
                {
                    "worker": worker,
                    "cpu": core,
                    "active": worker not in self._inactive,
                    "groups": placement.count(worker),
                    "load_percent": round(100.0 * float(shares[worker]), 1) if shares is not None else None,
                    "waiting_rows": round(float(waiting[worker])),
                }
                for worker, core in enumerate(self.loads.cores())
            ],
        }


def _numbered(what: str, number: int, count: int) -> int:
    """A whole number below `count`; numpy's are ones, too. Raises EngineError `bad_group`, `bad_worker`."""
    whole = hasattr(number, "__index__") and not isinstance(number, bool)
    if not whole or not 0 <= operator.index(number) < count:
        raise EngineError(f"{what} {number!r} must be from 0 to {count - 1}", code=f"bad_{what}")
    return operator.index(number)


def _said(targets: Mapping[int, int], placement: Sequence[int]) -> str:
    """What a move is about."""
    there = all(placement[group] == worker for group, worker in targets.items())
    if len(targets) == 1:
        ((group, worker),) = targets.items()
        return f"group {group} is on worker {worker} already" if there else f"group {group} to worker {worker}"
    workers = sorted(set(targets.values()))
    where = f"worker{'s' if len(workers) > 1 else ''} {', '.join(map(str, workers))}"
    if not targets:
        return "no group was named"
    return f"{len(targets)} groups are on {where} already" if there else f"{len(targets)} groups to {where}"


def _said_of(hot: dict[str, Any], limits: Limits) -> dict[str, Any]:
    """A hot group with what is done about it."""
    workers = limits.split.get(hot["group"])
    if workers is None:
        return hot
    shared = f"{hot['text']}; split over workers {', '.join(map(str, workers))}"
    return {**hot, "split": list(workers), "text": shared}
