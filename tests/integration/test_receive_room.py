"""What a data connection's socket may hold: more than the kernel starts with, less the more there are."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

import flexstream as fs
from flexstream.ingest.receive_room import MOST_BYTES, ROOM_BYTES, make_room, room_for_one
from tests.integration.small_engine import STREAM, counting, counts, row
from tests.property.checks import FINISH_S
from tests.waiting import wait_until

KERNELS_MOST = int(Path("/proc/sys/net/ipv4/tcp_rmem").read_text().split()[2])


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A TCP connection: who sends, who receives."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname(), timeout=30) as sender,
        listener.accept()[0] as receiver,
    ):
        receiver.settimeout(30)
        yield sender, receiver


def room(sock: socket.socket) -> int:
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)


def received_by(engine: fs.Engine) -> list[socket.socket]:
    """Copies of this process's sockets that were accepted by the engine's data port."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            sock = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        try:
            sock.getpeername()
            ours = sock.getsockname() == engine.data_address
        except OSError:
            ours = False
        if ours:
            found.append(sock)
        else:
            sock.close()
    return found


def test_a_connection_gets_less_the_more_there_are():
    assert room_for_one(1, 0) == room_for_one(16, 0) == MOST_BYTES
    for groups, connections in ((64, 0), (128, 0), (128, 128), (128, 100_000), (4096, 3), (0, 0)):
        share = room_for_one(groups, connections)
        assert 0 < share <= MOST_BYTES
        assert share * max(groups, connections) <= ROOM_BYTES


def test_a_socket_is_given_the_room_that_was_asked_for(ends):
    _, receiver = ends
    size = min(MOST_BYTES, KERNELS_MOST // 2)
    make_room(receiver, size)
    assert room(receiver) >= size


def test_room_is_never_taken_away(ends):
    _, receiver = ends
    make_room(receiver, min(MOST_BYTES, KERNELS_MOST // 2))
    before = room(receiver)
    make_room(receiver, 1)
    assert room(receiver) == before


def test_a_single_byte_is_still_readable_at_once(ends):
    sender, receiver = ends
    make_room(receiver, MOST_BYTES)
    sender.sendall(b"x")
    assert receiver.recv(10) == b"x"
    assert receiver.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1


def test_data_connections_of_an_engine_have_room_and_lose_nothing():
    with fs.Engine(groups=4, pin=False, listen="127.0.0.1:0") as engine:
        engine.add(STREAM)
        engine.submit(counting())
        host, port = engine.data_address or ("", 0)
        with fs.Producer(f"tcp://{host}:{port}", stream="s") as producer:
            producer.send([row(1, k) for k in range(50)])
            producer.flush()
            sockets = wait_until(lambda: received_by(engine), "the engine's data connections")
            try:
                rooms = sorted(room(sock) for sock in sockets)
            finally:
                for sock in sockets:
                    sock.close()
        wanted = min(room_for_one(4, 0), KERNELS_MOST // 2)
        assert sum(each >= wanted for each in rooms) == 4, f"four groups, the control connection beside them: {rooms}"
        engine.finish(timeout=FINISH_S)
        assert sum(n for _, _, n in counts(engine)) == 50
