"""Moves groups between workers while rows arrive (design section 5).

The order of a move: flag, grace, sweep, table, drain, adopt, clear. Each step has a name and a time stamp. Whatever
fails, and wherever, the group has exactly one owner: before the placement flips it is the old one, and the move is
given up; after that it is the new one, and the move is only ever finished. A NIC that refuses its table costs
alignment, nothing else.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from flexstream.balance.splits import GroupWorker, LaneSource, Split, Splits
from flexstream.cython_ext.worker.placement import MoveHandle, Placement
from flexstream.cython_ext.worker.worker import now_ns
from flexstream.errors import EngineError

STEPS = ("flag", "grace", "sweep", "table", "drain", "adopt", "clear")
GRACE_S = 5.0
SETTLE_S = 30.0
HISTORY = 1000


@dataclass(eq=False)
class GroupMove:
    """One group on its way. `steps` has the CLOCK_MONOTONIC nanoseconds at which each step was done."""

    number: int
    group: int
    source: int
    target: int
    reason: str
    steps: dict[str, int] = field(default_factory=dict)
    state: str = "waiting"  # waiting | moving | moved | given up
    error: str | None = None
    facts: dict[str, int] = field(default_factory=dict)
    began_at: float = field(default_factory=time.time)
    handle: MoveHandle | None = None

    @property
    def parcel(self) -> MoveHandle:
        """What it travels in, until it has moved."""
        assert self.handle is not None
        return self.handle

    def to_dict(self) -> dict[str, Any]:
        begin = min(self.steps.values(), default=0)
        return {
            "number": self.number,
            "group": self.group,
            "from": self.source,
            "to": self.target,
            "reason": self.reason,
            "state": self.state,
            "error": self.error,
            "at": self.began_at,
            "steps_ms": {name: round((at - begin) / 1e6, 3) for name, at in self.steps.items()},
            "took_ms": round((max(self.steps.values()) - begin) / 1e6, 3) if self.steps else None,
            **{name: self.facts.get(name, 0) for name in ("connections", "panes", "entries", "bytes")},
        }


class Mover:
    """Moves groups for one engine: one batch of moves at a time, any number of groups in it.

    `routing` is held by whoever looks up a group's worker and feeds it: rows fed under it are ahead of the move.
    `follow` tells the NIC the new placement, and returns why that did not work. `interrupt(step)` is for tests: it is
    called after each step.
    """

    def __init__(
        self,
        placement: Placement,
        workers: Sequence[GroupWorker],
        catalog: threading.RLock,
        graph_size: Callable[[], tuple[int, int]],
        settle_catalog: Callable[[float], bool],
        follow: Callable[[list[int]], str | None],
        max_sessions: int,
        *,
        lanes: LaneSource,
        ordered_queries: Callable[[], list[str]],
    ) -> None:
        self._placement = placement
        self._workers = workers
        self._catalog = catalog
        self._graph_size = graph_size
        self._settle_catalog = settle_catalog
        self._follow = follow
        self._max_sessions = max_sessions
        self._one_at_a_time = threading.Lock()
        self.routing = threading.Lock()
        self._under_way: dict[int, GroupMove] = {}
        self._numbers = 0
        self._stopping = False
        self.shared = Splits(placement, workers, graph_size, max_sessions, lanes, ordered_queries)
        self.moved = 0
        self.nic_errors = 0
        self.history: deque[GroupMove] = deque(maxlen=HISTORY)
        self.interrupt: Callable[[str], None] = lambda step: None

    def move(self, targets: Mapping[int, int], reason: str = "asked for", timeout: float = SETTLE_S) -> list[GroupMove]:
        """Move each group to its worker; returns the moves that were needed, all of them settled.

        Raises EngineError: no such group or worker, the engine stops, or a worker does not come to a quiescent
        point; then nothing has moved.
        """
        self._check(targets)
        with self._settled_catalog(timeout):
            if self._stopping:
                raise EngineError("the engine is stopping and moves no more groups", code="closed")
            self._finish(self.under_way(), timeout)
            self.shared.join(targets, timeout)
            owners = self._placement.owners()
            moves = [self._new(g, owners[g], w, reason) for g, w in sorted(targets.items()) if owners[g] != w]
            if moves:
                self._run(moves, timeout)
            return moves

    # -- splits

    def split(self, group: int, workers: int | Iterable[int], timeout: float = SETTLE_S) -> Split:
        """Let these workers serve connections of the group beside its owner, about the same part of its rows each.

        Raises EngineError: the group is split already, or has fewer than two connections: a connection is served by
        one worker only.
        """
        borrowers = [workers] if isinstance(workers, int) else list(workers)
        for worker in borrowers:
            self._check({group: worker})
        with self._settled_catalog(timeout):
            self._finish(self.under_way(), timeout)
            return self.shared.split(group, borrowers, timeout)

    def unsplit(self, group: int, timeout: float = SETTLE_S, *, keep_lanes: bool = False) -> list[Split]:
        """The owner serves all connections of the group again. A group that is not split stays as it is."""
        with self._one_at_a_time, self._catalog:
            return self.shared.join([group], timeout, keep_lanes=keep_lanes)

    @contextmanager
    def without_splits(self, timeout: float = SETTLE_S) -> Iterator[None]:
        """The catalog, to change it: a borrower and an owner have the same queries."""
        with self._one_at_a_time, self._catalog:
            self.shared.join([split.group for split in self.splits()], timeout)
            yield

    def splits(self) -> list[Split]:
        return self.shared.standing()

    @contextmanager
    def _settled_catalog(self, timeout: float) -> Iterator[None]:
        """The catalog, when all workers have the same queries. It is not held while that is waited for: what is
        waited for comes through the collector, which may be in a callback that wants the catalog."""
        while True:
            self._settle_catalog(timeout)
            with self._one_at_a_time, self._catalog:
                if self._settle_catalog(0):
                    yield
                    return

    def _check(self, targets: Mapping[int, int]) -> None:
        groups, workers = self._placement.groups, len(self._workers)
        for group, worker in targets.items():
            if not 0 <= group < groups:
                raise EngineError(f"group {group} must be from 0 to {groups - 1}", code="bad_group")
            if not 0 <= worker < workers:
                raise EngineError(f"worker {worker} must be from 0 to {workers - 1}", code="bad_worker")

    def _new(self, group: int, source: int, target: int, reason: str) -> GroupMove:
        self._numbers += 1
        move = GroupMove(self._numbers, group, source, target, reason)
        move.handle = MoveHandle(move.number, group, source, target, *self._graph_size(), self._max_sessions)
        self.history.append(move)
        return move

    def _stamp(self, moves: Iterable[GroupMove], step: str) -> None:
        now = now_ns()
        for move in moves:
            move.steps[step] = now
        self.interrupt(step)

    def _run(self, moves: list[GroupMove], timeout: float) -> None:
        groups = [move.group for move in moves]
        for move in moves:
            move.state = "moving"
            self._placement.expect(move.group, 1)
        version = self._placement.publish(groups, ())
        try:
            self._stamp(moves, "flag")
            if not self._placement.grace(version, GRACE_S):
                raise EngineError(
                    f"a worker did not reach a quiescent point within {GRACE_S:g} s; no group was moved",
                    code="no_grace",
                )
            self._stamp(moves, "grace")
        except BaseException as error:
            self._give_up(moves, str(error) or type(error).__name__)
            raise
        # From here on the new owners are the truth: every move is finished, whatever happens on the way.
        for move in moves:
            self._under_way[move.number] = move
            with self.routing:
                self._placement.flip(move.group, move.target)
                self._workers[move.source].sweep(move.parcel)
                self._workers[move.source].drain_point(move.parcel)
        try:
            self._stamp(moves, "sweep")
            self._tell_nic(moves)
        finally:
            self._finish(moves, timeout)

    def _give_up(self, moves: list[GroupMove], why: str) -> None:
        groups = [move.group for move in moves]
        for move in moves:
            self._placement.expect(move.group, 0)
            move.state, move.error = "given up", why
        self._placement.grace(self._placement.publish((), groups), GRACE_S)
        for move in moves:
            for stream in range(self._graph_size()[0]):
                self._workers[move.source].advance(stream, move.group)

    def _tell_nic(self, moves: list[GroupMove]) -> None:
        refused = self._follow(self._placement.owners())
        if refused is not None:
            self.nic_errors += 1
            for move in moves:
                move.error = f"the NIC did not follow: {refused}"
        self._stamp(moves, "table")

    def _finish(self, moves: list[GroupMove], timeout: float) -> None:
        """Wait for the new owners, then clear the flags."""
        deadline = time.monotonic() + timeout
        for move in moves:
            if not move.parcel.arrived(max(0.0, deadline - time.monotonic())) and not self._stopping:
                raise EngineError(
                    f"group {move.group} is on worker {move.target}, but worker {move.source} has not handed over all "
                    f"its state after {timeout:g} s; it continues by itself",
                    code="not_settled",
                    hint="flexstream rebalance history shows how far it is",
                )
        arrived = [move for move in moves if move.parcel.arrived(0)]
        if not arrived:
            return
        for move in arrived:
            move.facts = move.parcel.facts()
            move.steps["drain"] = move.facts["drained_ns"]
            move.steps["adopt"] = move.facts["absorbed_ns"]
        self._placement.grace(self._placement.publish((), [move.group for move in arrived]), GRACE_S)
        for move in arrived:
            move.steps["clear"] = now_ns()
            move.state = "moved"
            move.handle = None
            self._under_way.pop(move.number, None)
            self.moved += 1
        self.interrupt("clear")

    def under_way(self) -> list[GroupMove]:
        return list(self._under_way.values())

    def stop(self, timeout: float = 5.0) -> None:
        """Let moves that are under way finish; no new ones begin."""
        self._stopping = True
        deadline = time.monotonic() + timeout
        with self._one_at_a_time:
            for move in self.under_way():
                move.parcel.arrived(max(0.0, deadline - time.monotonic()))
