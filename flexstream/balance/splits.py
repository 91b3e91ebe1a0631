"""Groups that several workers serve at once, because they are hotter than a core (design section 5).

The owner lends connections to other workers, which count their rows in partials of their own and send them in; the
owner merges and fires. `Splits` belongs to the mover, whose locks its caller holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from flexstream.cython_ext.worker.placement import LoanHandle, MoveHandle, Placement
from flexstream.errors import EngineError

GRACE_S = 5.0
SETTLE_S = 30.0


class GroupWorker(Protocol):
    """Whom groups are moved and lent between; `worker.Worker` in an engine."""

    def sweep(self, move: MoveHandle) -> None: ...
    def drain_point(self, move: MoveHandle) -> None: ...
    def split(self, loan: LoanHandle) -> None: ...
    def recall(self, loan: LoanHandle) -> None: ...
    def advance(self, stream: int, group: int) -> None: ...


class LaneSource(Protocol):
    """Further lanes of a group, which producers open when they are asked to; `lane_book.LaneBook` in an engine."""

    def can_open(self, group: int) -> bool:
        """Whether a producer with rows for the group would open some."""
        ...

    def ask(self, group: int, workers: Sequence[int]) -> int:
        """Ask for a lane for each of these workers; returns how many producers were asked."""
        ...

    def ready(self, group: int) -> bool:
        """Whether all that were asked for are open."""
        ...

    def meant_for(self, group: int, worker: int) -> list[tuple[int, int]]:
        """(stream, slot) of the open lanes that were asked for this worker."""
        ...

    def release(self, group: int) -> None:
        """Producers may end the lanes of the group."""
        ...


class NoLanes:
    """Nobody is asked for any."""

    def can_open(self, group: int) -> bool:
        return False

    def ask(self, group: int, workers: Sequence[int]) -> int:
        return 0

    def ready(self, group: int) -> bool:
        return True

    def meant_for(self, group: int, worker: int) -> list[tuple[int, int]]:
        return []

    def release(self, group: int) -> None:
        pass


@dataclass(frozen=True)
class Split:
    """A group whose connections are served by several workers. `lent`: how many each of the others has."""

    group: int
    owner: int
    lent: dict[int, int] = field(default_factory=dict)
    away: int = 0  # connections that are served away from their bucket's core

    @property
    def workers(self) -> tuple[int, ...]:
        return (self.owner, *sorted(self.lent))

    @property
    def connections(self) -> int:
        return sum(self.lent.values())

    def to_dict(self) -> dict[str, Any]:
        return {
            "group": self.group,
            "owner": self.owner,
            "workers": list(self.workers),
            "lent": [{"worker": worker, "connections": n} for worker, n in sorted(self.lent.items())],
            "misaligned": self.away,
        }


class Splits:
    """The groups of one engine that several workers serve. For one thread at a time, with the mover's locks."""

    def __init__(
        self,
        placement: Placement,
        workers: Sequence[GroupWorker],
        graph_size: Callable[[], tuple[int, int]],
        max_sessions: int,
        lanes: LaneSource,
        ordered_queries: Callable[[], list[str]],
    ) -> None:
        self._placement = placement
        self._workers = workers
        self._graph_size = graph_size
        self._max_sessions = max_sessions
        self._standing: dict[int, Split] = {}
        self._begun: dict[int, list[LoanHandle]] = {}  # loans whose borrower has not answered yet
        self._stuck: list[LoanHandle] = []  # parcels that a worker may still have
        self.lanes = lanes
        self._ordered_queries = ordered_queries  # those that need rows in the order of arrival

    def standing(self) -> list[Split]:
        return list(self._standing.values())

    def split(self, group: int, borrowers: Sequence[int], timeout: float = SETTLE_S) -> Split:
        """Let the borrowers serve about equal parts of the group's rows, beside the owner.

        Raises EngineError, and the group is not split: it is already, it has fewer than two connections, or a worker
        does not answer.
        """
        owner = self._placement.owner(group)
        self._check(group, owner, borrowers)
        if not self._placement.grace(self._placement.publish([group], ()), GRACE_S):
            raise self._refused(group, "a worker did not reach a quiescent point in time")
        lent: dict[int, int] = {}
        away = 0
        for number, borrower in enumerate(borrowers):
            meant = self.lanes.meant_for(group, borrower)
            loan = self._loan(group, owner, borrower, 100 // (len(borrowers) + 1 - number), meant)
            self._workers[owner].split(loan)
            if not loan.done(timeout):
                self._begun[group] = [loan]  # it may still come about: the end of the split waits for it
                self._standing[group] = Split(group, owner, {**lent, borrower: 0}, away)
                raise EngineError(
                    f"group {group} cannot be split: worker {borrower} has not answered after {timeout:g} s",
                    code="not_split",
                    hint="flexstream rebalance unsplit gives all its connections back to one worker",
                )
            if loan.connections:
                lent[borrower] = loan.connections
                away += max(0, loan.connections - len(meant))
        if not lent:
            raise self._refused(
                group, "it needs two connections that different workers can serve: a connection has one worker"
            )
        self._standing[group] = Split(group, owner, lent, away)
        return self._standing[group]

    def _check(self, group: int, owner: int, borrowers: Sequence[int]) -> None:
        why = None
        if ordered := self._ordered_queries():
            raise EngineError(
                f"group {group} cannot be split: {', '.join(ordered)} needs rows in the order of arrival",
                code="not_split",
                hint="order_hash keeps a group on one worker; cancel the query first",
            )
        if group in self._standing:
            why = "it is split already"
        elif not borrowers or len(set(borrowers)) != len(borrowers):
            why = f"workers {list(borrowers)} must be at least one besides the owner, each named once"
        elif owner in borrowers:
            why = f"worker {owner} is its owner"
        if why is not None:
            raise EngineError(f"group {group} cannot be split: {why}", code="not_split")

    def _loan(
        self, group: int, owner: int, borrower: int, share: int, wanted: Iterable[tuple[int, int]] = ()
    ) -> LoanHandle:
        return LoanHandle(group, owner, borrower, share, *self._graph_size(), self._max_sessions, wanted)

    def _refused(self, group: int, why: str) -> EngineError:
        self._placement.grace(self._placement.publish((), [group]), GRACE_S)
        return EngineError(f"group {group} cannot be split: {why}", code="not_split")

    def join(self, groups: Iterable[int], timeout: float = SETTLE_S, *, keep_lanes: bool = False) -> list[Split]:
        """The owner serves all connections of these groups again; returns the splits that this ended.

        Raises EngineError when a worker does not give them back in time: ask again.
        """
        ended = []
        for group in [group for group in groups if group in self._standing]:
            split = self._standing[group]
            whole = replace(split, lent=dict(split.lent))
            for loan in self._begun.pop(group, []):
                if not loan.done(timeout):
                    self._begun[group] = [loan]
                    raise self._not_settled(split.group, loan.borrower, timeout)
            for borrower in list(split.lent):
                loan = self._loan(group, split.owner, borrower, 0)
                self._workers[borrower].recall(loan)
                if not loan.done(timeout):
                    self._stuck.append(loan)
                    raise self._not_settled(group, borrower, timeout)
                del split.lent[borrower]
            del self._standing[group]
            self._placement.grace(self._placement.publish((), [group]), GRACE_S)
            if not keep_lanes:
                self.lanes.release(group)
            ended.append(whole)
        return ended

    @staticmethod
    def _not_settled(group: int, borrower: int, timeout: float) -> EngineError:
        return EngineError(
            f"worker {borrower} has not given group {group} back after {timeout:g} s", code="not_settled"
        )
