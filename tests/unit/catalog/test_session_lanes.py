"""Further lanes in the book of sessions, and what producers are asked for, with workers that only write down orders."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from flexstream.catalog.sessions import MOST_LANES, Session, SessionRefused, StreamSessions
from flexstream.ingest import hello
from flexstream.ingest.hello import Refused
from flexstream.ingest.lane_book import LaneBook
from flexstream.wire.frames import ErrorCode, Header, bitmap, lanes_of

GROUPS = 4


class Worker:
    def __init__(self) -> None:
        self.orders: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments, **options: self.orders.append((name, *arguments[1:]))

    def taken(self) -> list[tuple[Any, ...]]:
        orders, self.orders = self.orders, []
        return orders


class Book:
    def __init__(self, max_sessions: int = 8) -> None:
        self.workers = [Worker(), Worker()]
        self.sessions = StreamSessions(0, self.workers, GROUPS, max_sessions)
        self.session = self.sessions.register("p", 1, "peer")
        self.taken()

    def taken(self) -> list[tuple[Any, ...]]:
        first, second = (worker.taken() for worker in self.workers)
        assert first == second
        return first


def test_a_lane_is_a_session_that_has_ended_in_all_groups_but_one() -> None:
    book = Book()
    lane = book.sessions.lane(book.session, 2, 9)
    registered, ended = book.taken()
    assert registered[:2] == ("register_session", lane.slot)
    assert ended == ("end_session", lane.slot, bitmap({2}, GROUPS))
    assert lane.slot != book.session.slot
    assert book.sessions.lane(book.session, 2, 9) is lane
    assert book.taken() == []
    assert book.sessions.all() == [book.session]


def test_every_life_of_a_slot_has_a_higher_number() -> None:
    book = Book(max_sessions=2)
    lives = []
    for number in range(1, 4):
        lane = book.sessions.lane(book.session, 2, number)
        lives += [order[2] for order in book.taken() if order[0] == "register_session"]
        book.sessions.ended_in(lane.slot, GROUPS)
    assert lives == sorted(set(lives))


def test_a_session_has_ended_when_its_lanes_have() -> None:
    book = Book()
    lane = book.sessions.lane(book.session, 2, 9)
    book.sessions.ended_in(lane.slot, GROUPS - 1)
    book.sessions.end(book.session, bitmap({2}, GROUPS))
    book.sessions.ended_in(book.session.slot, GROUPS)
    assert not book.session.ended.is_set()
    book.sessions.ended_in(lane.slot, 1)
    assert book.session.ended.is_set()
    assert book.sessions.completed == 1


def test_a_session_that_ends_after_its_lanes_ends_once() -> None:
    book = Book()
    lane = book.sessions.lane(book.session, 2, 9)
    book.sessions.ended_in(lane.slot, GROUPS)
    assert (lane.state, book.session.state) == ("ended", "live")
    book.sessions.end(book.session, None)
    book.sessions.ended_in(book.session.slot, GROUPS)
    assert (book.session.state, book.sessions.completed) == ("ended", 1)


def test_lanes_that_a_new_control_connection_does_not_know_end_and_their_numbers_are_free() -> None:
    book = Book()
    kept, gone = book.sessions.lane(book.session, 2, 9), book.sessions.lane(book.session, 2, 10)
    book.taken()
    book.sessions.register("p", 1, "peer", lanes_open=frozenset({9}))
    assert book.taken() == [("end_session", gone.slot, None)]
    assert book.sessions.lane(book.session, 2, 9) is kept
    assert book.sessions.lane(book.session, 2, 10).slot not in (kept.slot, gone.slot)


def test_a_session_that_is_broken_for_too_long_ends_with_its_lanes() -> None:
    book = Book()
    control = object()
    book.sessions.register("p", 1, "peer", control)
    lane = book.sessions.lane(book.session, 2, 9)
    book.taken()
    book.sessions.broken(book.session, control)
    book.sessions.expire(-1.0)
    assert book.taken() == [("end_session", book.session.slot, None), ("end_session", lane.slot, None)]


def test_lanes_are_idle_and_awake_with_their_session() -> None:
    book = Book()
    lane = book.sessions.lane(book.session, 2, 9)
    book.taken()
    book.sessions.set_idle(book.session)
    assert book.taken() == [("session_idle", slot, True) for slot in (book.session.slot, lane.slot)]
    book.sessions.awake(lane.slot)
    assert book.taken() == [("session_idle", slot, False) for slot in (book.session.slot, lane.slot)]
    assert book.session.state == "live"


def test_lanes_are_freed_with_their_session() -> None:
    book = Book()
    lane = book.sessions.lane(book.session, 2, 9)
    for session in (lane, book.session):
        book.sessions.ended_in(session.slot, GROUPS)
    book.taken()
    book.sessions.expire(-1.0)
    assert {order[1] for order in book.taken()} == {book.session.slot, lane.slot}
    assert book.sessions.at(lane.slot) is None


def test_what_cannot_be_opened_is_refused() -> None:
    book = Book(max_sessions=2)
    book.sessions.lane(book.session, 2, 9)
    with pytest.raises(SessionRefused) as full:
        book.sessions.lane(book.session, 2, 10)
    assert full.value.code is ErrorCode.TOO_MANY_SESSIONS
    book = Book(max_sessions=MOST_LANES + 2)
    for number in range(1, MOST_LANES + 1):
        book.sessions.lane(book.session, 2, number)
    with pytest.raises(SessionRefused, match="has 64 further lanes"):
        book.sessions.lane(book.session, 2, MOST_LANES + 1)
    book.sessions.end(book.session, bitmap({2}, GROUPS))
    with pytest.raises(SessionRefused, match="the session is ending"):
        book.sessions.lane(book.session, 1, 99)
    assert book.sessions.lane(book.session, 2, 1)  # one that exists may come back to say its EOS


@pytest.mark.parametrize("said", [{"lane": -1}, {"lane": True}, {"lane": "1"}, {"lane": 2**32}, {"lane": 1.5}])
def test_a_bad_lane_number_is_refused(said: dict[str, Any]) -> None:
    with pytest.raises(Refused, match="lane must be an integer"):
        hello.lane(said)


@pytest.mark.parametrize("said", [{"lanes": -1}, {"lanes": 1, "lanes_open": {}}, {"lanes": 1, "lanes_open": ["x"]}])
def test_a_bad_offer_of_lanes_is_refused(said: dict[str, Any]) -> None:
    with pytest.raises(Refused, match="lanes"):
        hello.lanes(said)


def test_a_client_that_says_nothing_of_lanes_has_none() -> None:
    assert hello.lanes({}) == (0, frozenset())
    assert hello.lane({}) == 0


class Asked:
    """A session that writes down what it is asked for."""

    def __init__(self, sessions: StreamSessions, name: str, groups: list[int], most: int = 8) -> None:
        self.frames: list[bytes] = []
        self.session: Session = sessions.register(name, 1, "peer")
        self.session.most_lanes = most
        self.session.speak = self.frames.append if most else None
        self.session.groups.update(groups)

    def last(self) -> tuple[int, dict[int, int]]:
        data = self.frames[-1]
        return Header.unpack(data).value, lanes_of(data[32:])


def test_producers_with_a_connection_are_asked_for_a_lane_for_each_worker() -> None:
    sessions = StreamSessions(0, [Worker()], GROUPS, 8)
    running: Any = SimpleNamespace(index=5, sessions=sessions)
    book = LaneBook(lambda: [running], lambda: [0, 1, 2, 0])
    knows, old = Asked(sessions, "knows", [0]), Asked(sessions, "old", [0], most=0)
    assert book.can_open(0)
    assert not book.can_open(3)
    assert book.ask(0, [1, 2]) == 1
    group, lanes = knows.last()
    assert group == 0
    assert list(lanes.values()) == [1, 2]  # groups of these workers
    assert old.frames == []
    assert not book.ready(0)
    opened = [sessions.lane(knows.session, 0, number) for number in lanes]
    for lane in opened:
        lane.connections = 1
    assert book.ready(0)
    assert book.meant_for(0, 2) == [(5, opened[1].slot)]
    assert [book.arrives_as(0, number) for number in lanes] == [1, 2]
    assert book.arrives_as(0, 12345) == 0
    book.release(0)
    assert knows.last() == (0, {})
    assert book.meant_for(0, 2) == []
    book.release(0)
    assert len(knows.frames) == 2


def test_numbers_are_used_once() -> None:
    sessions = StreamSessions(0, [Worker()], GROUPS, 8)
    running: Any = SimpleNamespace(index=0, sessions=sessions)
    book = LaneBook(lambda: [running], lambda: [0, 1, 0, 1])
    asked = Asked(sessions, "p", [0, 1])
    seen: list[int] = []
    for group in (0, 1, 0):
        book.ask(group, [1])
        seen += asked.last()[1]
    assert len(set(seen)) == 3
