"""Clients that say too much or take too much: what is everybody's stays there for the others."""

import contextlib
import socket
import threading
from collections import Counter

import pytest

import flexstream as fs
from flexstream.wire.frames import RETRYABLE, ErrorCode, FrameType, frame
from tests.adversity.rig import (
    GROUPS,
    STREAM,
    RawClient,
    address,
    assert_results,
    bitmap,
    closed,
    expect_error,
    make_rows,
    read_frame,
    serving,
)
from tests.waiting import WAIT_S, wait_until

WATERMARKS = 20_000  # more than a mailbox holds


@contextlib.contextmanager
def nobody_reads_results(engine):
    """While it lasts the worker waits for somebody to take its results, and takes no orders."""
    go_on = threading.Event()
    reading = threading.Event()
    engine.on_results("q", lambda batch: reading.set() or go_on.wait(WAIT_S))

    def feed():
        for batch in range(10**6):
            if go_on.is_set():
                break
            engine.feed("s", make_rows(20_000, keys=5000, start=5000 * batch), wait=False)

    feeder = threading.Thread(target=feed, daemon=True)
    feeder.start()
    try:
        assert reading.wait(WAIT_S)
        looks = Counter()

        def waits():
            looks[bool(engine.workers[0].stats()["stalled"])] += 1
            if looks[False]:
                looks.clear()
            return looks[True] > 30

        wait_until(waits, "the worker to wait")
        yield
    finally:
        go_on.set()
        feeder.join(WAIT_S)


def watermarks(count, first=0):
    payload = bitmap(of=GROUPS)
    return b"".join(frame(FrameType.WATERMARK, value=first + n, payload=payload) for n in range(count))


def test_watermarks_for_a_worker_that_is_busy_keep_nobody_elses_hello_waiting():
    with serving(session_timeout_s=600.0) as engine, RawClient(engine) as greedy, RawClient(engine) as other:
        with nobody_reads_results(engine):
            control = greedy.open()
            control.sendall(watermarks(WATERMARKS) + b"noise" * 7)
            expect_error(control, ErrorCode.BAD_MAGIC)  # so it has read all of them
            other.open()
            assert engine.health()["problem"] is None
        wait_until(lambda: session_of(engine, greedy)["watermark"] == WATERMARKS - 1, "the last watermark")


def session_of(engine, client):
    return next(s for s in engine.status()["streams"]["s"]["sessions"] if s["producer"] == client.fields["producer"])


def test_watermarks_come_out_the_same_however_many_are_sent_at_once():
    """The latest counts; one that speaks for fewer groups does not hide what was said for the others before."""
    with serving() as engine, RawClient(engine) as client:
        control = client.open()
        control.sendall(
            watermarks(1000)
            + frame(FrameType.WATERMARK, value=5000, payload=bitmap(*range(4)))
            + frame(FrameType.WATERMARK, value=6000, payload=bitmap(*range(6)))
        )
        found = wait_until(
            lambda: (w := engine.running()[0][0].handles[0].watermarks()).get(7) == 6000 and w, "the last watermark"
        )
        assert found == {**dict.fromkeys(range(4), 999), 4: 5000, 5: 5000, 6: 6000, 7: 6000}


def test_rows_of_others_come_through_while_a_control_connection_never_stops_talking():
    rows = make_rows(4000)
    with serving() as engine, RawClient(engine) as greedy:
        control = greedy.open()
        enough = threading.Event()

        def talk():
            with contextlib.suppress(OSError):
                while not enough.is_set():
                    control.sendall(watermarks(500, first=-500))  # before all rows: they make nothing late

        talker = threading.Thread(target=talk, daemon=True)
        talker.start()
        try:
            with fs.Producer(address(engine), stream=STREAM, connect_timeout_s=WAIT_S) as producer:
                producer.send(rows)
            assert engine.health()["problem"] is None
        finally:
            enough.set()
            control.shutdown(socket.SHUT_RDWR)
            talker.join(WAIT_S)
        assert_results(engine, rows)


def test_one_address_cannot_take_all_sessions_of_a_stream():
    with serving(max_sessions=32) as engine, RawClient(engine) as greedy, RawClient(engine) as other:
        for number in range(24):
            greedy.open(producer=f"p{number}")
        sock = greedy.connect()
        sock.sendall(greedy.hello(producer="one more"))
        assert "127.0.0.1" in expect_error(sock, ErrorCode.TOO_MANY_SESSIONS)["message"]
        lane = greedy.connect()
        lane.sendall(greedy.hello(3, producer="p0", lane=1))
        expect_error(lane, ErrorCode.TOO_MANY_SESSIONS)
        assert closed(engine, "too_many_sessions") == 2
        elsewhere = socket.create_connection(engine.data_address, timeout=WAIT_S, source_address=("127.0.0.2", 0))
        other.socks.append(elsewhere)
        elsewhere.sendall(other.hello())
        assert read_frame(elsewhere)[0].type is FrameType.ACK
        assert len(engine.status()["streams"]["s"]["sessions"]) == 25


def test_a_worker_that_waits_for_room_is_not_ready_for_rows_but_not_ill(monkeypatch):
    monkeypatch.setattr("flexstream.engine.health.ANSWER_S", 0.2)
    with serving() as engine:
        assert engine.health() == {"state": "running", "problem": None, "not_ready": None}
        with nobody_reads_results(engine):
            found = engine.health()
            assert found["problem"] is None
            assert "worker 0 is waiting" in found["not_ready"]
        wait_until(lambda: engine.health()["not_ready"] is None, "room")


def test_peers_that_vanish_without_a_word_are_noticed_by_the_kernel():
    with serving() as engine, RawClient(engine) as client:
        client.open()
        control = engine.running()[0][0].sessions.find(client.fields["producer"]).control
        assert control.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert control.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60


def test_refused_connections_that_never_go_are_counted_and_bounded(monkeypatch):
    monkeypatch.setattr("flexstream.ingest.acceptor.MAX_LEAVING", 20)
    monkeypatch.setattr("flexstream.ingest.acceptor.LINGER_S", WAIT_S)
    with serving() as engine, RawClient(engine) as client:
        socks = [client.connect() for _ in range(60)]
        for sock in socks:
            sock.sendall(b"\0" * 32)
        wait_until(lambda: closed(engine, "bad_magic") == 60, "all to be refused")
        assert engine.status()["connections"]["leaving"] == 20
        for sock in socks:
            expect_error(sock, ErrorCode.BAD_MAGIC)
            sock.close()
        wait_until(lambda: engine.status()["connections"]["leaving"] == 0, "them to be gone")


def test_health_says_that_no_hello_would_be_answered_while_the_acceptor_hangs(monkeypatch):
    monkeypatch.setattr("flexstream.engine.health.ANSWER_S", 0.2)
    with serving() as engine:
        assert engine.health()["problem"] is None
        go_on = threading.Event()
        try:
            engine.acceptor._call(lambda: go_on.wait(WAIT_S))
            assert "data port" in engine.health()["problem"]
        finally:
            go_on.set()
        wait_until(lambda: engine.health()["problem"] is None, "the acceptor to answer again")


def test_health_waits_for_nobody_who_changes_streams_and_queries():
    with serving() as engine, engine._registry.changing, engine._registry.lock:
        found = []
        asking = threading.Thread(target=lambda: found.append(engine.health()))
        asking.start()
        asking.join(WAIT_S)
        assert found == [{"state": "running", "problem": None, "not_ready": None}]


class Worker:
    """As the real one, but for what a test makes of it."""

    def __init__(self, worker):
        self._worker = worker

    def __getattr__(self, name):
        return getattr(self._worker, name)


class Stuck(Worker):
    def knock(self):
        return self._worker.knock() + 1


class Full(Worker):
    mailbox_room = 0


def test_a_hello_that_finds_no_room_in_a_mailbox_is_refused_in_time_and_may_try_again():
    with serving(hello_timeout_s=0.3) as engine, RawClient(engine) as client:
        good = engine.workers[0]
        engine.workers[0] = Full(good)
        sock = client.connect()
        sock.sendall(client.hello())
        assert "not read its commands" in expect_error(sock, ErrorCode.TOO_MANY_PENDING)["message"]
        assert ErrorCode.TOO_MANY_PENDING in RETRYABLE
        engine.workers[0] = good
        client.open()


def test_health_names_a_worker_that_takes_no_orders(monkeypatch):
    monkeypatch.setattr("flexstream.engine.health.ANSWER_S", 0.2)
    with serving(workers=2) as engine:
        engine.workers[1] = Stuck(engine.workers[1])
        assert engine.health()["problem"] == "worker 1 has not read its commands for 0.2 s"


@pytest.mark.parametrize("state", ["draining", "stopped"])
def test_nobody_has_to_answer_in_an_engine_that_stops(state):
    with serving() as engine:
        engine.state = state
        assert engine.health() == {"state": state, "problem": None, "not_ready": None}
        engine.state = "running"
