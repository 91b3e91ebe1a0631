"""Thousands of connections that never say HELLO: a bounded number is kept, and a good producer gets through."""

import os
import resource
import subprocess
import sys

import pytest

import flexstream as fs
from flexstream.wire.frames import ErrorCode
from tests.adversity.rig import (
    FAR,
    STREAM,
    RawClient,
    address,
    assert_results,
    closed,
    company,
    expect_error,
    make_rows,
    serving,
)
from tests.waiting import WAIT_S, wait_until

WANTED = 10_000

# Opens connections and holds them, opening again what is closed on it, until stdin ends.
# Says how many it has opened when it has reached the number for the first time.
FLOOD = """
import resource, selectors, socket, sys, time
host, port, wanted, part = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4].encode()
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
held, opened = [], 0
while opened < wanted:
    sock = socket.socket()
    sock.settimeout(60)
    try:
        sock.connect((host, port))
        if part:
            sock.sendall(part)
    except OSError:
        sock.close()
        time.sleep(0.01)
        continue
    held.append(sock)
    opened += 1
print(opened, flush=True)
sys.stdin.read()
"""


def affordable() -> int:
    """How many connections a child may hold; the engine's process keeps only max_pending_hello of them."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return WANTED if hard == resource.RLIM_INFINITY else min(WANTED, hard - 200)


class Flood:
    """A child process that floods the engine. Context manager; `held()` waits until all are open."""

    def __init__(self, engine: fs.Engine, connections: int, part: str = "") -> None:
        host, port = engine.data_address
        self._child = subprocess.Popen(
            [sys.executable, "-c", FLOOD, host, str(port), str(connections), part],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ,
        )

    def held(self) -> int:
        assert self._child.stdout is not None
        return int(self._child.stdout.readline())

    def __enter__(self) -> "Flood":
        return self

    def __exit__(self, *exc: object) -> None:
        self._child.kill()
        self._child.wait(WAIT_S)
        self._child.stdin.close()
        self._child.stdout.close()


@pytest.mark.time_limit(280)
@pytest.mark.parametrize(("most", "part"), [(WANTED, ""), (2000, "FS")], ids=["silent", "part of a header"])
def test_thousands_of_connections_before_hello_are_bounded_and_a_good_producer_gets_through(most, part):
    rows = make_rows(20_000, start=FAR)
    wanted = min(affordable(), most)
    with serving(max_pending_hello=512, hello_timeout_s=600.0) as engine, company(engine, rows):
        with Flood(engine, wanted, part) as flood:
            with fs.Producer(address(engine), stream=STREAM, connect_timeout_s=WAIT_S, retry_s=WAIT_S) as producer:
                for start in range(0, len(rows), 1000):
                    producer.send(rows[start : start + 1000])
            assert flood.held() == wanted
            wait_until(lambda: engine.status()["connections"]["accepted"] >= wanted, "all to be accepted")
            pending = engine.status()["connections"]["pending_hello"]
            assert pending <= 512
            wait_until(lambda: closed(engine, "too_many_pending") >= wanted - 512, "the rest to be dropped")
        wait_until(lambda: engine.status()["connections"]["pending_hello"] == 0, "the flood to be gone")


def test_the_oldest_silent_connection_makes_room_and_is_told_so():
    rows = make_rows(2000)
    with serving(max_pending_hello=3, hello_timeout_s=600.0) as engine, RawClient(engine) as client:
        socks = []
        for number in range(1, 4):
            socks.append(client.connect())
            wait_until(lambda n=number: engine.status()["connections"]["pending_hello"] == n, f"{number} pending")
        fourth = client.connect()
        expect_error(socks[0], ErrorCode.TOO_MANY_PENDING)
        wait_until(lambda: closed(engine, "too_many_pending") == 1, "the count")
        with fs.Producer(address(engine), stream=STREAM) as producer:
            producer.send(rows)
        fourth.close()
        assert_results(engine, rows)


def test_a_burst_over_a_small_limit_is_counted_to_the_last_connection():
    """Also those that were dropped in the moment they came."""
    burst = 300
    with serving(max_pending_hello=4, hello_timeout_s=600.0) as engine, RawClient(engine) as client:
        for _ in range(burst):
            client.connect()
        wait_until(lambda: engine.status()["connections"]["accepted"] == burst, "all to be accepted")
        pending = engine.status()["connections"]["pending_hello"]
        assert pending <= 4
        wait_until(
            lambda: closed(engine, "too_many_pending") == burst - pending,
            f"{burst - pending} to be counted, there are {engine.status()['connections']}",
        )


def test_results_are_right_after_a_flood_of_refused_connections():
    rows = make_rows(2000)
    with serving() as engine, RawClient(engine) as client:
        for _ in range(500):
            sock = client.connect()
            sock.sendall(b"\x00" * 40)
            sock.close()
        with fs.Producer(address(engine), stream=STREAM, connect_timeout_s=WAIT_S) as producer:
            producer.send(rows)
        wait_until(
            lambda: closed(engine, "bad_magic") + closed(engine, "closed before hello") == 500, "all to be counted"
        )
        assert_results(engine, rows)
