"""Producers' sessions on one stream: who is registered, in which slot, and whether it still counts.

A session is a producer's life on a stream. It gets a slot, which is its index in the workers' arrays, and keeps it
through reconnects until it has ended in every group, and for a while after that: a producer whose last ACKs were
lost comes back and must not be counted again. Workers own the watermarks; this is the book that says which slots are
in use and why.

A further lane of a group has a slot of its own: to workers it is a session that has ended in all groups but one. So its
rows have their own numbers, and its watermark holds the group, from before its first row until its EOS.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from flexstream.addresses import host_of
from flexstream.wire.frames import ErrorCode, bitmap

log = logging.getLogger("flexstream.sessions")

MOST_LANES = 64  # of one session in one group
NETWORK = "network"  # kinds of sessions, each with names of its own: nobody is taken over from another kind
FEED = "feed"  # rows that are fed in-process; their producer's name, too
SINK = "sink"  # rows that were staged and committed
BEFORE_RESTART = "before the restart"  # instead of a peer's address
KINDS = (NETWORK, FEED, SINK)


class SessionRefused(Exception):
    """A producer that may not register; `code` goes into the ERROR frame."""

    def __init__(self, code: ErrorCode, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.hint = code, message, hint


@dataclass(eq=False)
class Session:
    producer: str
    epoch: int
    slot: int
    peer: str
    kind: str = NETWORK
    number: int = 0  # sessions of a stream, lanes too, in the order in which they first registered, from 1
    state: str = "live"  # live | idle | broken | ending | ended
    connections: int = 0
    control: object | None = None  # the control connection that speaks for it now
    broken_at: float = 0.0  # when its control connection was lost; 0: it was not
    ended_at: float = 0.0
    since: float = field(default_factory=time.monotonic)
    ended_groups: int = 0
    cut: bool = False  # it was ended, by the clock or by order, before it had ended in every group
    ended: threading.Event = field(default_factory=threading.Event)
    on_ended: list[Callable[[], object]] = field(default_factory=list)
    groups: Counter[int] = field(default_factory=Counter)  # connections of each, further lanes not counted
    most_lanes: int = 0  # further lanes that its producer would open
    speak: Callable[[bytes], object] | None = None  # a frame to its control connection, while there is one
    lanes: dict[tuple[int, int], Session] = field(default_factory=dict)  # (group, number): further lanes
    parent: Session | None = None  # of a further lane: the session that it belongs to
    lane: tuple[int, int] | None = None  # its key there

    @property
    def fed(self) -> bool:
        """Its rows are fed in-process: its promises must stay behind them."""
        return self.kind != NETWORK

    @property
    def name(self) -> tuple[str, str]:
        return (self.kind, self.producer)

    def family(self) -> list[Session]:
        """The session, or its parent, with all lanes: they live and end together."""
        whole = self.parent or self
        return [whole, *whole.lanes.values()]


class SessionWorker(Protocol):
    """Who is told of sessions; `worker.Worker` in an engine."""

    def register_session(self, stream: int, slot: int, number: int) -> None: ...
    def end_session(self, stream: int, slot: int, except_groups: bytes | None = ..., *, fed: bool = ...) -> None: ...
    def session_idle(self, stream: int, slot: int, idle: bool) -> None: ...
    def free_session(self, stream: int, slot: int) -> None: ...
    def hold(self, stream: int, hold: bool) -> None: ...


class StreamSessions:
    """The sessions of one stream over all workers. Thread-safe.

    `begin_anew` is called before a session registers when all others have ended: what they said is worked off
    everywhere. `before_rows` is called before a session registers that commits nothing.
    """

    def __init__(
        self, index: int, workers: Sequence[SessionWorker], groups: int, max_sessions: int, expected_producers: int = 0,
        begin_anew: Callable[[], object] = lambda: None, before_rows: Callable[[], object] = lambda: None,
    ) -> None:  # fmt: skip
        self._index = index
        self._workers = workers
        self._groups = groups
        self._max = max_sessions
        self._begin_anew = begin_anew
        self._before_rows = before_rows
        self._lock = threading.RLock()
        self._by_name: dict[tuple[str, str], Session] = {}
        self._by_slot: dict[int, Session] = {}
        self._expected = expected_producers
        self._seen: set[tuple[str, str]] = set()
        self._numbers = 0
        self.expired = 0
        self.completed = 0
        if expected_producers > 0:
            for worker in workers:
                worker.hold(index, True)

    def register(
        self, producer: str, epoch: int, peer: str, control: object | None = None, *, kind: str = NETWORK,
        lanes_open: frozenset[int] = frozenset(),
    ) -> Session:  # fmt: skip
        """Register, or come back. Raises SessionRefused: stale epoch, no slot left.

        One that is ending, or has ended not long ago, may come back with its epoch: its ACKs may have been lost,
        and what it sends again is known here. With a later epoch it is a new life. Further lanes that are not among
        `lanes_open` are nobody's any more, and end.
        """
        with self._lock:
            session = self._by_name.get((kind, producer))
            if session is not None:
                _note_jump(session, epoch, peer)
            if session is not None and session.state == "ended" and epoch > session.epoch:
                self._free(session)
                session = None
            if session is None:
                session = self._new(producer, epoch, peer, kind)
            elif epoch < session.epoch:
                raise SessionRefused(
                    ErrorCode.STALE_EPOCH,
                    f"producer {producer} connected with epoch {epoch}, but epoch {session.epoch} is already here",
                    "another instance with this producer id has taken over",
                )
            self._saw(session)
            session.epoch = epoch
            session.peer = peer
            session.control = control
            session.speak = None
            session.broken_at = 0.0
            session.cut = False
            for (_, number), lane in list(session.lanes.items()):
                if number not in lanes_open:
                    self._disown(session, lane)
            if session.state not in ("ending", "ended"):
                self._wake(session)
            return session

    def _check_share(self, peer: str) -> None:
        """A quarter of the sessions, if they are many, is kept from any one address. Raises SessionRefused."""
        address = host_of(peer)
        if not address:
            return  # not of the network
        most = self._max - self._max // 16 * 4
        theirs = sum(s.state != "ended" and host_of(s.peer) == address for s in self._by_slot.values())
        if theirs >= most:
            raise SessionRefused(
                ErrorCode.TOO_MANY_SESSIONS,
                f"{address} already has {theirs} of the stream's {self._max} sessions",
                "raise max_sessions, or close producers that have finished; a further lane counts as a session",
            )

    def _free_slot(self) -> int | None:
        for slot in range(self._max):
            if slot not in self._by_slot:
                return slot
        ended = [session for session in self._by_slot.values() if session.state == "ended"]
        if not ended:
            return None
        oldest = min(ended, key=lambda session: session.ended_at)
        self._free(oldest)
        return oldest.slot

    def _free(self, session: Session) -> None:
        """Forget a session that has ended; workers forget its row sequences."""
        for lane in list(session.lanes.values()):
            self._free(lane)
        del self._by_slot[session.slot]
        if session.parent is None:
            del self._by_name[session.name]
        elif session.lane is not None:
            del session.parent.lanes[session.lane]
        for worker in self._workers:
            worker.free_session(self._index, session.slot)

    def lane(self, session: Session, group: int, number: int) -> Session:
        """A further lane of the session, registered when it is new. Raises SessionRefused: no slot, too many."""
        with self._lock:
            known = session.lanes.get((group, number))
            if known is not None:
                return known
            if session.state in ("ending", "ended") or self._by_slot.get(session.slot) is not session:
                raise SessionRefused(ErrorCode.REJECTED, f"no lane {number} of group {group}: the session is ending")
            live = sum(key[0] == group and lane.state == "live" for key, lane in session.lanes.items())
            if live >= MOST_LANES:
                raise SessionRefused(ErrorCode.REJECTED, f"group {group} already has {live} further lanes")
            self._check_share(session.peer)
            slot = self._free_slot()
            if slot is None:
                raise SessionRefused(
                    ErrorCode.TOO_MANY_SESSIONS, f"no session slot is free for lane {number}", "raise max_sessions"
                )
            lane = Session(session.producer, session.epoch, slot, session.peer, session.kind)
            lane.parent, lane.lane = session, (group, number)
            session.lanes[group, number] = lane
            self._by_slot[slot] = lane
            self._register(lane)
            # Behind all registrations: a group that moves between two workers is not counted at both.
            for worker in self._workers:
                if session.state == "idle":
                    worker.session_idle(self._index, slot, True)
                worker.end_session(self._index, slot, bitmap({group}, self._groups))
            return lane

    def _register(self, session: Session) -> None:
        self._numbers += 1
        session.number = self._numbers
        for worker in self._workers:
            worker.register_session(self._index, session.slot, session.number)

    def _disown(self, session: Session, lane: Session) -> None:
        """Its producer does not know it: it ends, and its number may be opened anew by the process that came."""
        self._end_lane(lane)
        assert lane.lane is not None
        del session.lanes[lane.lane]
        lane.lane = (lane.lane[0], -1 - lane.slot)
        session.lanes[lane.lane] = lane

    def _end_lane(self, lane: Session) -> None:
        if lane.state == "live":
            lane.state = "ending"
            for worker in self._workers:
                worker.end_session(self._index, lane.slot, None)

    def _new(self, producer: str, epoch: int, peer: str, kind: str) -> Session:
        self._check_share(peer)
        slot = self._free_slot()
        if slot is None:
            raise SessionRefused(
                ErrorCode.TOO_MANY_SESSIONS,
                f"all {self._max} sessions of the stream are in use",
                "raise max_sessions, or close producers that have finished",
            )
        if all(session.state == "ended" for session in self._by_slot.values()):
            self._begin_anew()
        if kind != SINK:
            self._before_rows()
        session = Session(producer, epoch, slot, peer, kind)
        self._by_name[session.name] = session
        self._by_slot[slot] = session
        self._register(session)
        return session

    def _saw(self, session: Session) -> None:
        self._seen.add(session.name)
        if self._expected and len(self._seen) >= self._expected:
            self._expected = 0
            for worker in self._workers:
                worker.hold(self._index, False)

    def wait_for(self, producer: str, epoch: int) -> None:
        """It was there before a restart: as one whose connection broke it holds windows until it is back, or too long
        away. Raises SessionRefused: no slot left."""
        with self._lock:
            if (NETWORK, producer) not in self._by_name:
                session = self._new(producer, epoch, BEFORE_RESTART, NETWORK)
                session.state = "broken"
                session.broken_at = time.monotonic()

    def registered(self, for_s: float = 0.0) -> list[tuple[str, int]]:
        """(producer, epoch) of the network producers that came so long ago and have not said their end."""
        before = time.monotonic() - for_s
        there = [s for s in self.all() if s.kind == NETWORK and s.state in ("live", "idle", "broken")]
        return [(s.producer, s.epoch) for s in there if s.since <= before]

    def _wake(self, session: Session) -> None:
        if session.state == "idle":
            for one in session.family():
                for worker in self._workers:
                    worker.session_idle(self._index, one.slot, False)
        session.state = "live"

    def find(self, producer: str, kind: str = NETWORK) -> Session | None:
        with self._lock:
            return self._by_name.get((kind, producer))

    def at(self, slot: int) -> Session | None:
        with self._lock:
            return self._by_slot.get(slot)

    def while_empty(self, call: Callable[[], object]) -> None:
        """Call it if all sessions have ended; none registers meanwhile."""
        with self._lock:
            if not self.all():
                call()

    def all(self) -> list[Session]:
        """The sessions that have not ended."""
        with self._lock:
            return [s for s in self._by_slot.values() if s.state != "ended" and s.parent is None]

    def end(self, session: Session, except_groups: bytes | None) -> None:
        """The session has ended for all groups but those in the bitmap, which end on their own connections."""
        with self._lock:
            if session.state == "ended" or self._by_slot.get(session.slot) is not session:
                return
            session.state = "ending"
            for worker in self._workers:
                worker.end_session(self._index, session.slot, except_groups, fed=session.fed)
            if except_groups is None:  # it will not come back
                for lane in session.lanes.values():
                    self._end_lane(lane)

    def remove(self, session: Session) -> object | None:
        """End it for good, by order: it holds nothing any more, and does not come back with its epoch.

        Returns its control connection, for the caller to close. It is remembered for as long as others that ended.
        """
        with self._lock:
            control, session.control, session.speak = session.control, None, None
            if session.kind == NETWORK:  # the others begin anew by themselves, with the next epoch
                session.epoch += 1
            session.broken_at = 0.0
            session.cut = True
            self.end(session, None)
            return control

    def broken(self, session: Session, control: object) -> None:
        """Its control connection is gone without an EOS. It goes on holding its groups until the time-out."""
        with self._lock:
            if session.control is not control or session.state not in ("live", "idle", "ending"):
                return
            session.broken_at = time.monotonic()
            session.speak = None
            if session.state != "ending":
                self._wake(session)
                session.state = "broken"

    def ended_in(self, slot: int, groups: int) -> None:
        """In so many more groups the session has ended and everything has fired."""
        with self._lock:
            session = self._by_slot.get(slot)
            if session is None or session.state == "ended":
                return
            session.ended_groups += groups
            whole = session.parent or session
            if session.ended_groups >= self._groups and session.parent is not None:
                session.state = "ended"
                session.ended_at = time.monotonic()
            lanes_live = any(lane.state != "ended" for lane in whole.lanes.values())
            if whole.state == "ended" or whole.ended_groups < self._groups or lanes_live:
                return
            whole.state = "ended"
            whole.ended_at = time.monotonic()
            self.completed += 1
        whole.ended.set()
        for notify in whole.on_ended:
            notify()

    def awake(self, slot: int) -> None:
        """A worker heard of an idle session: it counts again everywhere."""
        with self._lock:
            session = self._by_slot.get(slot)
            session = session.parent or session if session is not None else None
            if session is not None and session.state == "idle":
                self._wake(session)

    def set_idle(self, session: Session) -> None:
        with self._lock:
            if session.state == "live":
                session.state = "idle"
                for one in session.family():
                    for worker in self._workers:
                        worker.session_idle(self._index, one.slot, True)

    def expire(self, timeout_s: float) -> None:
        """End sessions that have been broken for longer than the time-out; forget those that ended so long ago."""
        with self._lock:
            now = time.monotonic()
            for session in list(self._by_slot.values()):
                if self._by_slot.get(session.slot) is not session:
                    continue  # went with its parent
                if session.state == "ended" and now - session.ended_at > timeout_s:
                    self._free(session)
                elif session.broken_at and session.state != "ended" and now - session.broken_at > timeout_s:
                    session.broken_at = 0.0
                    session.cut = True
                    self.expired += 1
                    fields = {"producer": session.producer, "epoch": session.epoch, "peer": session.peer}
                    log.warning("session_expired", extra={"fields": fields})
                    self.end(session, None)


def _note_jump(session: Session, epoch: int, peer: str) -> None:
    """A process that continues a session counts on by one; another who uses its name can only guess."""
    if session.kind == NETWORK and epoch > session.epoch + 1:
        fields = {"producer": session.producer, "epoch": session.epoch, "new_epoch": epoch}
        log.warning("epoch_jumped", extra={"fields": fields | {"peer": peer, "old_peer": session.peer}})
