"""Producers that die, stall, come back or find nobody: rows count once, windows fire, nothing hangs."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import flexstream as fs
from flexstream.errors import ConnectError, FlexStreamError
from flexstream.testing import run
from flexstream.testing.fault_proxy import FaultProxy, Faults
from flexstream.wire.frames import ErrorCode, FrameType, frame
from tests.adversity.rig import (
    FAR,
    GROUPS,
    QUERY,
    ROW_BYTES,
    STREAM,
    RawClient,
    address,
    assert_results,
    bitmap,
    closed,
    company,
    data_frame,
    expect_error,
    make_rows,
    read_frame,
    rows_of_group,
    serving,
)
from tests.ports import quiet_port
from tests.property.checks import assert_ledger, assert_same_results
from tests.waiting import WAIT_S, wait_until

# A producer that gives half a frame and then waits to be killed. Says on stdout when the bytes are away.
DOOMED = """
import sys, time
import numpy as np
from tests.adversity.rig import RawClient, data_frame, rows_of_group
class Engine:
    data_address = (sys.argv[1], int(sys.argv[2]))
with RawClient(Engine, producer="doomed") as client:
    client.open()
    sock = client.open(3)
    frame = data_frame(3, rows_of_group(3, 100))
    sock.sendall(frame[:int(sys.argv[3])])
    print("sent", flush=True)
    time.sleep(600)
"""


def sessions(engine):
    return {s["producer"]: s for s in engine.status()["streams"]["s"]["sessions"]}


def test_a_producer_killed_in_mid_frame_counts_once_and_lets_windows_fire_after_the_time_out():
    whole_rows = 57
    arrived = rows_of_group(3, 100)[:whole_rows]
    with serving(session_timeout_s=0.5) as engine, company(engine, arrived):
        host, port = engine.data_address
        cut = 32 + whole_rows * ROW_BYTES + ROW_BYTES // 2
        child = subprocess.Popen(
            [sys.executable, "-c", DOOMED, host, str(port), str(cut)],
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.getcwd()},
        )
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == b"sent\n"
            child.send_signal(signal.SIGKILL)
        finally:
            child.kill()
            child.wait(WAIT_S)
            child.stdout.close()
        wait_until(lambda: "doomed" not in sessions(engine), "the session's time-out")
        assert closed(engine, "eof") + closed(engine, os.strerror(104)) >= 1
        assert engine.status()["streams"]["s"]["sessions_expired"] == 1


def test_a_broken_session_holds_the_watermark_until_it_returns():
    rows = rows_of_group(3, 40)
    with serving(session_timeout_s=30.0) as engine, company(engine, rows), RawClient(engine) as client:
        client.open().close()
        name = client.fields["producer"]
        wait_until(lambda: sessions(engine)[name]["state"] == "broken", "the loss")
        held = engine.status()["streams"]["s"]["held_by"]
        assert name in [h["producer"] for h in held]
        control = client.open()
        assert sessions(engine)[name]["state"] == "live"
        sock = client.open(3)
        sock.sendall(data_frame(3, rows) + frame(FrameType.EOS, 3))
        control.sendall(frame(FrameType.EOS, payload=bitmap(3)))
        assert read_frame(control)[0].type is FrameType.ACK


def test_an_idle_producer_stops_holding_the_watermark_and_is_named():
    rows = make_rows(2000)
    with serving(idle_timeout_s=0.4) as engine, RawClient(engine, producer="silent") as silent:
        control = silent.open()
        with fs.Producer(address(engine), stream=STREAM, producer_id="busy") as producer:
            for start in range(0, len(rows), 200):
                producer.send(rows[start : start + 200])
                time.sleep(0.1)
            wait_until(lambda: sessions(engine)["silent"]["state"] == "idle", "the silent one to be idle")
            wait_until(lambda: engine.status()["queries"]["q"]["windows_fired"] > 0, "windows")

            def is_live() -> bool:
                control.sendall(frame(FrameType.WATERMARK, value=0, payload=bitmap()))
                return bool(sessions(engine)["silent"]["state"] == "live")

            wait_until(is_live, "the silent one to count again")  # for as long as it is not silent again
        control.sendall(frame(FrameType.EOS, payload=bitmap()))
        assert read_frame(control)[0].type is FrameType.ACK
        assert_results(engine, rows)


def test_feeding_again_after_a_long_pause_moves_the_watermark():
    rows = make_rows(4000)
    with fs.Engine(groups=GROUPS, idle_timeout_s=0.2, pin=False) as engine:
        engine.submit(QUERY)
        engine.feed("s", rows[:1000])
        wait_until(lambda: sessions(engine)["feed"]["state"] == "idle", "the pause to be seen")
        engine.feed("s", rows[1000:])
        expected = int(rows["t"].max()) - STREAM.max_disorder
        wait_until(lambda: engine.status()["streams"]["s"]["watermark"]["min"] == expected, "the watermark")
        assert_results(engine, rows)


def test_the_producer_that_stalls_is_named_as_the_one_that_holds_the_others():
    rows = make_rows(2000)
    with serving() as engine, RawClient(engine, producer="stalled") as stalled:
        control = stalled.open()
        control.sendall(frame(FrameType.WATERMARK, value=7, payload=bitmap()))
        with fs.Producer(address(engine), stream=STREAM, producer_id="fast") as fast:
            fast.send(rows)
            fast.flush(WAIT_S)
            wait_until(lambda: (sessions(engine)["fast"]["watermark"] or 0) > 7, "the fast one's watermark")
            status = engine.status()["streams"]["s"]
            assert [h["producer"] for h in status["held_by"]] == ["stalled"]
            assert status["held_by"][0]["watermark"] == 7
            assert status["held_by"][0]["peer"].startswith("127.0.0.1:")
            assert status["watermark"]["max"] == 7
            assert engine.status()["queries"]["q"]["windows_fired"] == 0
        control.sendall(frame(FrameType.EOS, payload=bitmap()))
        assert read_frame(control)[0].type is FrameType.ACK
        assert_results(engine, rows)


def test_nothing_fires_before_the_expected_producers_have_come():
    first, second = make_rows(1000), make_rows(1000, seed=2)
    with serving(expected_producers=2) as engine:
        with fs.Producer(address(engine), stream=STREAM) as producer:
            producer.send(first)
        assert engine.status()["queries"]["q"]["windows_fired"] == 0
        with fs.Producer(address(engine), stream=STREAM) as producer:
            producer.send(second)
        assert_results(engine, first, second)


def test_connections_of_a_session_are_counted_right_when_slots_are_used_again():
    with serving() as engine:
        sent = []
        for turn in range(5):
            rows = make_rows(300, seed=turn, start=100 * turn)
            with fs.Producer(address(engine), stream=STREAM) as producer:
                producer.send(rows)
                producer.flush(WAIT_S)
                (session,) = wait_until(lambda: engine.status()["streams"]["s"]["sessions"], "the session")
                wait_until(
                    lambda s=session: engine.status()["streams"]["s"]["sessions"][0]["connections"] == GROUPS,
                    f"{GROUPS} connections in turn {turn}: {session}",
                )
            sent.append(rows)
        # Each producer came after the last had ended, so the watermark was at infinity: rows are not lost.
        assert_ledger(engine.status(), "s", sum(map(len, sent)))


# -- behind the fault proxy


def send_through(proxy: FaultProxy, rows: np.ndarray, seed: int, **options) -> None:
    rng = np.random.default_rng(seed)
    with fs.Producer(f"tcp://{proxy.host}:{proxy.port}", stream=STREAM, linger_ms=1, **options) as producer:
        at = 0
        while at < len(rows):
            n = int(rng.integers(1, 400))
            producer.send(rows[at : at + n])
            at += n
        producer.close(timeout=WAIT_S * 2)


@pytest.mark.parametrize("seed", range(5))
def test_resets_at_random_bytes_lose_no_row_and_repeat_none(seed):
    rows = make_rows(20_000, seed=seed, start=FAR)
    faults = Faults(cut="reset", cut_after=(200, 60_000), count=24)
    with (
        serving(session_timeout_s=WAIT_S) as engine,
        company(engine, rows),
        FaultProxy(engine.data_address, faults, seed=seed) as proxy,
    ):
        send_through(proxy, rows, seed, replay_bytes=64 * 1024)
        assert proxy.cuts > 0


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("cut", ["close", "half_close"])
def test_closes_in_mid_frame_lose_no_row_and_repeat_none(cut, seed):
    rows = make_rows(10_000, seed=seed, start=FAR)
    faults = Faults(cut=cut, cut_after=(200, 40_000), count=25)
    with (
        serving(session_timeout_s=WAIT_S) as engine,
        company(engine, rows),
        FaultProxy(engine.data_address, faults, seed=seed) as proxy,
    ):
        send_through(proxy, rows, seed)
        assert proxy.cuts > 0


def test_bytes_in_tiny_pieces_give_the_same_results():
    rows = make_rows(600, start=FAR)
    with (
        serving() as engine,
        company(engine, rows),
        FaultProxy(engine.data_address, Faults(piece_bytes=7), seed=3) as proxy,
    ):
        send_through(proxy, rows, 3)


def test_a_slow_and_split_line_gives_the_same_results():
    rows = make_rows(300, start=FAR)
    with (
        serving() as engine,
        company(engine, rows),
        FaultProxy(engine.data_address, Faults(delay_s=0.002, piece_bytes=200), seed=4) as proxy,
    ):
        send_through(proxy, rows, 4)


def test_a_pause_of_the_line_is_waited_out():
    rows = make_rows(4000, start=FAR)
    with (
        serving() as engine,
        company(engine, rows),
        FaultProxy(engine.data_address) as proxy,
        fs.Producer(f"tcp://{proxy.host}:{proxy.port}", stream=STREAM) as producer,
    ):
        producer.send(rows[:2000])
        proxy.pause()
        producer.send(rows[2000:])
        with pytest.raises(ConnectError) as caught:
            producer.flush(0.2)
        assert caught.value.code == "timeout"
        proxy.resume()


@pytest.mark.parametrize("seed", range(3))
def test_damaged_bytes_are_caught_by_the_crc_and_sent_again(seed):
    """The flips fall behind HELLO, on data connections only."""
    rows = make_rows(20_000, seed=seed, start=FAR)
    faults = Faults(flip_after=(1500, 20_000), first=1, count=10)
    with (
        serving(session_timeout_s=WAIT_S) as engine,
        company(engine, rows),
        FaultProxy(engine.data_address, faults, seed=seed) as proxy,
    ):
        send_through(proxy, rows, seed, crc=True)
        assert proxy.flips > 0


def test_every_connection_broken_again_and_again_while_closing():
    """The final ACK may be lost on the way: closing again must not send rows twice."""
    rows = make_rows(3000, start=FAR)
    for seed in range(8):
        with serving(session_timeout_s=WAIT_S) as engine, FaultProxy(engine.data_address, seed=seed) as proxy:
            producer = fs.Producer(f"tcp://{proxy.host}:{proxy.port}", stream=STREAM, linger_ms=1, retry_s=WAIT_S)
            producer.send(rows)
            done = threading.Event()

            def breaking(proxy=proxy, done=done, seed=seed):
                rng = np.random.default_rng(seed)
                for _ in range(4):
                    if done.wait(float(rng.uniform(0, 0.01))):
                        return
                    proxy.break_all()

            breaker = threading.Thread(target=breaking)
            breaker.start()
            producer.close(timeout=WAIT_S)
            done.set()
            breaker.join(WAIT_S)
            assert_results(engine, rows)


def test_a_control_connection_lost_after_it_said_the_end_can_come_back():
    rows = rows_of_group(3, 40)
    with serving(session_timeout_s=WAIT_S) as engine, company(engine, rows), RawClient(engine) as client:
        control = client.open()
        sock = client.open(3)
        control.sendall(frame(FrameType.EOS, payload=bitmap(3)))
        wait_until(lambda: sessions(engine)[client.fields["producer"]]["state"] == "ending", "the end to be read")
        control.close()
        control = client.open()
        control.sendall(frame(FrameType.EOS, payload=bitmap(3)))
        sock.sendall(data_frame(3, rows) + frame(FrameType.EOS, 3))
        assert read_frame(control)[0].type is FrameType.ACK


def test_rows_are_not_repeated_when_every_acknowledgement_of_a_finished_session_was_lost():
    rows = make_rows(2000)
    with serving(session_timeout_s=WAIT_S) as engine, FaultProxy(engine.data_address) as proxy:
        producer = fs.Producer(f"tcp://{proxy.host}:{proxy.port}", stream=STREAM, linger_ms=1)
        producer.send(rows[:1000])
        producer.flush(WAIT_S)  # the connections are there: what follows needs no answer
        proxy.pause(only_answers=True)
        producer.send(rows[1000:])
        closing = threading.Thread(target=producer.close, kwargs={"timeout": WAIT_S}, daemon=True)
        closing.start()
        wait_until(lambda: engine.status()["streams"]["s"]["sessions_ended"] == 1, "the session to end")
        proxy.break_all()
        proxy.resume()
        closing.join(WAIT_S + 5)
        assert not closing.is_alive()
        assert engine.status()["streams"]["s"]["ledger"]["received"] == len(rows)
        assert producer.stats()["rows_lost_at_most"] == 0
        assert_results(engine, rows)


# -- engines that stop and come back


def test_an_engine_that_drains_while_producers_send_returns_and_producers_know():
    producer = None
    with serving() as engine:
        producer = fs.Producer(address(engine), stream=STREAM, retry_s=0.5, linger_ms=1)
        stop = threading.Event()
        errors: list[BaseException] = []

        def send():
            batch = 0
            try:
                while not stop.is_set():
                    producer.send(make_rows(500, seed=batch, start=batch * 125))
                    batch += 1
                    time.sleep(0.002)
            except FlexStreamError as error:
                errors.append(error)

        thread = threading.Thread(target=send)
        thread.start()
        try:
            wait_until(lambda: engine.status()["streams"]["s"]["ledger"]["received"] > 5000, "rows")
            open_windows = engine.drain(timeout=WAIT_S)
            assert open_windows
            assert open_windows[0]["query"] == "q"
            status = engine.status()
            assert_ledger(status, "s", status["streams"]["s"]["ledger"]["received"])
            wait_until(lambda: producer.state in ("waiting", "failed"), "the producer to notice")
            thread.join(WAIT_S)
            assert not thread.is_alive(), f"send() hangs in state {producer.state}"
            assert errors
            assert isinstance(errors[0], ConnectError)
            assert "not acknowledged" in str(errors[0])
        finally:
            stop.set()
            thread.join(WAIT_S)
            with pytest.raises(FlexStreamError):
                producer.close(timeout=1)


def test_connections_get_a_word_or_an_end_when_the_engine_stops():
    with serving() as engine, RawClient(engine) as client:
        control = client.open()
        sock = client.open(3)
        sock.sendall(data_frame(3, rows_of_group(3, 10)))
        while read_frame(sock)[0].sequence < 10:
            pass
        engine.drain(timeout=WAIT_S)
        for each in (control, sock):
            each.settimeout(WAIT_S)
            expect_error(each, ErrorCode.SHUTTING_DOWN)
        fresh = socket.socket()
        with fresh, pytest.raises(ConnectionRefusedError):
            fresh.connect(engine.data_address)


def test_a_producer_goes_on_with_an_engine_that_came_back_on_the_same_port():
    rows = make_rows(2000)
    with serving(listen=f"127.0.0.1:{quiet_port()}") as engine:
        host, port = engine.data_address
        producer = fs.Producer(address(engine), stream=STREAM, producer_id="p", retry_s=WAIT_S)
        producer.send(rows[:1000])
        producer.flush(WAIT_S)
    assert wait_until(lambda: producer.state == "waiting", "the loss to be seen")
    with fs.Engine(groups=GROUPS, listen=f"{host}:{port}", pin=False) as engine:
        wait_until(lambda: closed(engine, "unknown_stream"), "the producer to come back too early")
        engine.add(STREAM)
        engine.submit(QUERY)
        wait_until(lambda: producer.state == "connected", "the reconnect")
        producer.send(rows[1000:])
        producer.close(timeout=WAIT_S)
        # What the first engine had acknowledged is gone with it (no checkpoints); the rest is here, once.
        assert producer.stats()["rows_lost_at_most"] == 1000
        assert_results(engine, rows[1000:])


SERVER = """
import sys, time
from tests.adversity.rig import as_rows, serving
import json
with serving(listen=sys.argv[1]) as engine:
    print(engine.data_address[1], flush=True)
    sys.stdin.readline()
    engine.finish(timeout=60)
    print(json.dumps(as_rows(engine.results("q"))), flush=True)
"""


def start_server(listen: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SERVER, listen],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.getcwd()},
    )


def test_a_producer_goes_on_when_the_engines_process_was_killed_and_started_again():
    rows = make_rows(2000)
    servers = [start_server(f"127.0.0.1:{quiet_port()}")]
    try:
        port = int(servers[0].stdout.readline())
        producer = fs.Producer(f"tcp://127.0.0.1:{port}", stream=STREAM, retry_s=WAIT_S)
        producer.send(rows[:1000])
        producer.flush(WAIT_S)
        servers[0].kill()
        servers[0].wait(WAIT_S)
        wait_until(lambda: producer.state == "waiting", "the loss to be seen")
        servers.append(start_server(f"127.0.0.1:{port}"))
        assert int(servers[1].stdout.readline()) == port
        producer.send(rows[1000:])
        producer.close(timeout=WAIT_S)
        assert producer.stats()["rows_lost_at_most"] == 1000
        found = json.loads(servers[1].communicate("\n", timeout=WAIT_S)[0])
        assert_same_results(QUERY, found, run(QUERY, rows[1000:]).windows)
    finally:
        for server in servers:
            server.kill()
            server.wait(WAIT_S)
            server.stdin.close()
            server.stdout.close()


def test_a_producer_of_an_engine_that_stays_away_fails_with_a_clear_error():
    with serving() as engine:
        producer = fs.Producer(address(engine), stream=STREAM, retry_s=0.5)
        producer.send(make_rows(100))
        producer.flush(WAIT_S)
    wait_until(lambda: producer.state == "failed", "the producer to give up")
    with pytest.raises(ConnectError, match=r"tried to reach .* and gave up") as caught:
        producer.send(make_rows(100))
    assert caught.value.hint
    with pytest.raises(ConnectError):
        producer.close(timeout=1)


def test_nobody_there_is_a_connect_error_in_time():
    with socket.socket() as taken:  # and nobody else can have the port meanwhile
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(ConnectError, match=r"tried to reach .* and gave up"):
            fs.Producer(f"tcp://127.0.0.1:{port}", stream=STREAM, connect_timeout_s=0.3)


def test_somebody_who_never_answers_is_a_connect_error_in_time():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConnectError):
            fs.Producer(f"tcp://127.0.0.1:{port}", stream=STREAM, connect_timeout_s=0.3)


def test_a_producer_of_an_unknown_stream_or_with_another_schema_is_told_so():
    other = fs.Stream("s", {"t": "timestamp[ms]", "k": "i64"}, key="k", time="t")
    with serving() as engine, company(engine):
        with pytest.raises(fs.ProtocolError) as caught:
            fs.Producer(address(engine), stream="nowhere")
        assert caught.value.code == "unknown_stream"
        with pytest.raises(fs.FlexStreamError) as caught:
            fs.Producer(address(engine), stream=other)
        assert caught.value.code == "schema_mismatch"
    assert QUERY.name == "q"
