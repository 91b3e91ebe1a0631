"""Slots that the next session has already, while one worker still speaks of the last one.

A worker obeys what the book of sessions posts a little later than another: here it does so when the test says it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import flexstream as fs
from flexstream.balance.splits import NoLanes
from flexstream.wire.frames import FrameType, frame
from tests.adversity import rig
from tests.waiting import wait_until

GROUP = 3
OWNED_ELSEWHERE = 10_000_000  # a watermark that holds nothing

pytestmark = pytest.mark.time_limit(120)


class Slow:
    """A worker whose orders are posted when it catches up."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._waiting: list[Callable[[], object]] = []
        self._caught_up = False

    def __getattr__(self, name: str) -> Any:
        order = getattr(self._worker, name)
        if self._caught_up:
            return order
        return lambda *args, **options: self._waiting.append(lambda: order(*args, **options))

    def catch_up(self) -> None:
        self._caught_up = True
        for post in self._waiting:
            post()


class Meant(NoLanes):
    """These slots are for the borrower."""

    def __init__(self, *slots: int) -> None:
        self._slots = slots

    def meant_for(self, group: int, worker: int) -> list[tuple[int, int]]:
        return [(0, slot) for slot in self._slots]


class Peer:
    """A producer with a control connection and one of the group, whose other groups hold nothing."""

    def __init__(self, engine: fs.Engine) -> None:
        self.client = rig.RawClient(engine)
        self.control = self.client.open()
        session = engine.running()[0][0].sessions.find(self.client.fields["producer"])
        assert session is not None
        self.slot = session.slot
        self.control.sendall(frame(FrameType.WATERMARK, value=OWNED_ELSEWHERE, payload=rig.bitmap(GROUP)))
        self.open()

    def open(self) -> int:
        self.data = self.client.open(GROUP)
        return self.client.ack.sequence

    def send(self, rows: np.ndarray) -> None:
        self.data.sendall(rig.data_frame(GROUP, rows))

    def promise(self, watermark: int) -> None:
        self.data.sendall(frame(FrameType.WATERMARK, GROUP, value=watermark))

    def end(self) -> None:
        self.data.sendall(frame(FrameType.EOS, GROUP))
        self.control.sendall(frame(FrameType.EOS, payload=rig.bitmap(GROUP)))

    def wait_until_ended(self) -> None:
        assert rig.read_frame(self.control)[0].type is FrameType.ACK


@dataclass
class Stage:
    """A group whose first two connections are lent; the first has ended, and the next session has its slot."""

    engine: fs.Engine
    owner: int
    slow: Slow
    ended: Peer
    other: Peer  # lent too
    kept: Peer  # at the owner
    next: Peer

    def owner_knows(self, peer: Peer, watermark: int) -> bool:
        known: int | None = self.engine.running()[0][0].handles[self.owner].session_watermark(peer.slot)
        return known == watermark

    def received(self) -> int:
        count: int = self.engine.status()["streams"]["s"]["ledger"]["received"]
        return count


def rows_at(time: int, n: int) -> np.ndarray:
    return rig.rows_of_group(GROUP, n, start=time)


@contextmanager
def a_slot_used_again(monkeypatch: pytest.MonkeyPatch, rows: np.ndarray) -> Iterator[Stage]:
    with rig.serving(workers=2, max_sessions=3, session_timeout_s=60.0, balance="off") as engine:
        owner = engine.placement()[GROUP]
        ended, other, kept = (Peer(engine) for _ in range(3))
        ended.send(rows)
        wait_until(lambda: engine.status()["streams"]["s"]["ledger"]["received"] == len(rows), "the rows")
        engine.mover.shared.lanes = Meant(ended.slot, other.slot)
        assert engine.mover.split(GROUP, 1 - owner).lent == {1 - owner: 2}
        ended.end()
        other.promise(1)  # what was borrowed has news: a share tells the owner of the end
        ended.wait_until_ended()
        slow = Slow(engine.workers[1 - owner])
        workers = [slow if w == 1 - owner else engine.workers[w] for w in range(2)]
        monkeypatch.setattr(engine.running()[0][0].sessions, "_workers", workers)
        successor = Peer(engine)
        assert successor.slot == ended.slot
        try:
            yield Stage(engine, owner, slow, ended, other, kept, successor)
        finally:
            for peer in (ended, other, kept, successor):
                peer.client.__exit__()


def finish(stage: Stage, *sent: np.ndarray) -> None:
    """Everybody ends; each row is in the results once."""
    for peer in (stage.other, stage.kept, stage.next):
        peer.end()
    for peer in (stage.other, stage.kept, stage.next):
        peer.wait_until_ended()
    rig.assert_results(stage.engine, *sent)


def test_a_share_that_speaks_of_the_last_session_of_a_slot_does_not_end_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, late_comers = rows_at(1_000, 4), rows_at(1_050, 4)
    with a_slot_used_again(monkeypatch, first) as stage:
        stage.kept.promise(5_000)
        stage.other.promise(5_000)  # the borrower's share has the slot that it has not heard of: ended
        wait_until(lambda: stage.owner_knows(stage.other, 5_000), "what the owner knows of the lent one")
        wait_until(lambda: stage.owner_knows(stage.kept, 5_000), "what the owner knows of its own")
        stage.next.send(late_comers)  # not late: this session has promised nothing
        wait_until(lambda: stage.received() == len(first) + len(late_comers), "the rows")
        assert [query["late"] for query in stage.engine.status()["queries"].values()] == [0]
        stage.slow.catch_up()
        finish(stage, first, late_comers)


def test_a_connection_of_the_last_session_that_is_given_back_does_not_take_the_next_ones_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its row numbers are not those of the next session, whose connection goes on and moves with the group."""
    first, second, third = rows_at(1_000, 30), rows_at(1_050, 4), rows_at(1_060, 4)
    with a_slot_used_again(monkeypatch, first) as stage:
        stage.next.send(second)
        wait_until(lambda: stage.received() == len(first) + len(second), "the rows")
        stage.engine.mover.unsplit(GROUP)
        stage.slow.catch_up()
        stage.ended.data.close()
        wait_until(lambda: stage.engine.status()["connections"]["open"] == 3, "the connections")
        stage.engine.move({GROUP: 1 - stage.owner})
        stage.next.data.close()
        wait_until(lambda: stage.engine.status()["connections"]["open"] == 2, "the connections")
        assert stage.next.open() == len(second)
        stage.next.data.sendall(rig.data_frame(GROUP, third, sequence=len(second)))
        wait_until(lambda: stage.received() == len(first) + len(second) + len(third), "the rows")
        finish(stage, first, second, third)


def test_a_connection_that_closes_late_is_not_counted_off_the_next_session() -> None:
    with rig.serving(workers=1, max_sessions=1, balance="off") as engine:
        ended = Peer(engine)
        ended.end()
        ended.wait_until_ended()
        successor = Peer(engine)
        assert successor.slot == ended.slot
        wait_until(lambda: engine.status()["connections"]["open"] == 2, "the connections")
        ended.data.close()
        wait_until(lambda: engine.status()["connections"]["open"] == 1, "the connections")
        (session,) = engine.status()["streams"]["s"]["sessions"]
        assert (session["producer"], session["connections"]) == (successor.client.fields["producer"], 1)
        successor.end()
        successor.wait_until_ended()
        for peer in (ended, successor):
            peer.client.__exit__()
