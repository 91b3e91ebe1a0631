"""The control port: accepts HTTP connections, a bounded number of them, and ends those that ask for nothing.

A connection that has not made a request with the right token within FIRST_REQUEST_S is closed, and before that when a
new one needs its place. One address has three quarters of the places at most.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flexstream.addresses import join_address
from flexstream.errors import ConfigError

log = logging.getLogger("flexstream.http")
MOST_CONNECTIONS = 1024
FIRST_REQUEST_S = 10.0
IDLE_S = 75.0  # between two requests, and for a reply that is not read
SWEEP_S = 1.0
REST_S = 0.1  # when there are no descriptors left
ACCEPTS_AT_ONCE = 64
FLOOD_REST_S = 0.02  # between accepts while connections are dropped for want of room
_WHY = b'{"error": {"code": "too_many_connections", "message": "too many connections", "hint": "try later"}}'
REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(_WHY), _WHY)
)


@dataclass(eq=False)
class Connection:
    peer: str
    since: float  # accepted, or last asked for something
    transport: asyncio.Transport | None = None  # None: about to be made
    heard: bool = False  # has made a request that was let in
    requests: int = 0  # under way


class HttpPort:
    """The listening HTTP port and its connections. `protocol` makes a connection's protocol (aiohttp's server).

    All methods are for the event loop.
    """

    def __init__(self, protocol: Callable[[], Any], most: int = MOST_CONNECTIONS) -> None:
        self._protocol = protocol
        self._most = most
        self._listeners: list[socket.socket] = []
        self._open: dict[Connection, None] = {}  # the oldest first
        self._by_transport: dict[asyncio.Transport, Connection] = {}
        self._making: set[asyncio.Task[None]] = set()
        self._sweeper: asyncio.Task[None] | None = None
        self.closed: Counter[str] = Counter()
        self.address: tuple[str, int] = ("", 0)

    @property
    def open(self) -> int:
        return len(self._open)

    async def listen(self, host: str, port: int) -> None:
        """Raises ConfigError when it cannot."""
        try:
            self._listeners = await asyncio.to_thread(_listeners, host, port)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {join_address(host, port)} (HTTP): {error.strerror or error}",
                code="control_port",
                hint=f"`ss -ltnp sport = :{port}` shows who uses it; --control chooses another",
            ) from error
        self.address = self._listeners[0].getsockname()[:2]
        self._look()
        self._sweeper = asyncio.create_task(self._sweep())

    def close(self) -> None:
        """Accept no more. Open connections are the protocol's to end."""
        self._look_away()
        for listener in self._listeners:
            listener.close()
        self._listeners = []
        if self._sweeper is not None:
            self._sweeper.cancel()

    def begin(self, transport: asyncio.Transport | None) -> Connection | None:
        """A request was let in. Give what is returned to `end` when it has been answered."""
        connection = self._by_transport.get(transport) if transport is not None else None
        if connection is not None:
            connection.heard = True
            connection.requests += 1
        return connection

    def end(self, connection: Connection | None) -> None:
        if connection is not None:
            connection.requests -= 1
            connection.since = time.monotonic()

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        for listener in self._listeners:
            loop.add_reader(listener.fileno(), self._accept, listener)

    def _look_away(self) -> None:
        loop = asyncio.get_running_loop()
        for listener in self._listeners:
            loop.remove_reader(listener.fileno())

    def _accept(self, listener: socket.socket) -> None:
        before = self.closed["too_many"]
        for _ in range(ACCEPTS_AT_ONCE):
            try:
                sock, peer = listener.accept()
            except BlockingIOError:
                break
            except OSError as error:  # out of descriptors
                self.closed[f"accept: {os.strerror(error.errno or 0)}"] += 1
                self._rest(REST_S)
                return
            sock.setblocking(False)
            if not self._has_place(peer[0]):
                self._refuse(sock)
                continue
            connection = Connection(peer[0], time.monotonic())
            self._open[connection] = None
            task = asyncio.create_task(self._make(sock, connection))
            self._making.add(task)
            task.add_done_callback(self._making.discard)
        if self.closed["too_many"] > before:
            self._rest(FLOOD_REST_S)

    def _rest(self, seconds: float) -> None:
        self._look_away()
        asyncio.get_running_loop().call_later(seconds, self._look)

    async def _make(self, sock: socket.socket, connection: Connection) -> None:
        loop = asyncio.get_running_loop()
        try:
            transport, _ = await loop.connect_accepted_socket(self._protocol, sock)
        except OSError:
            sock.close()
            self._open.pop(connection, None)
            return
        connection.transport = transport
        self._by_transport[connection.transport] = connection

    def _has_place(self, peer: str) -> bool:
        """Whether one more of the peer may come; the oldest that never asked for anything may have to go."""
        self._forget_closed()
        theirs = [connection for connection in self._open if connection.peer == peer]
        if len(theirs) >= self._most - self._most // 4:
            return self._drop_silent(theirs)
        return len(self._open) < self._most or self._drop_silent(list(self._open))

    def _drop_silent(self, connections: list[Connection]) -> bool:
        silent = next((one for one in connections if not one.heard and one.transport is not None), None)
        if silent is not None:
            self._drop(silent, "too_many")
        return silent is not None

    def _drop(self, connection: Connection, why: str) -> None:
        self.closed[why] += 1
        self._forget(connection)
        if connection.transport is not None:
            connection.transport.abort()

    def _forget(self, connection: Connection) -> None:
        self._open.pop(connection, None)
        if connection.transport is not None:
            self._by_transport.pop(connection.transport, None)

    def _forget_closed(self) -> None:
        for connection in [one for one in self._open if one.transport is not None and one.transport.is_closing()]:
            self._forget(connection)

    def _refuse(self, sock: socket.socket) -> None:
        self.closed["too_many"] += 1
        with contextlib.suppress(OSError):
            sock.send(REFUSAL)
        sock.close()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            self.sweep(time.monotonic())

    def sweep(self, now: float) -> None:
        """End what has asked for nothing for too long."""
        self._forget_closed()
        for connection in list(self._open):
            limit = IDLE_S if connection.heard else FIRST_REQUEST_S
            if connection.requests == 0 and now - connection.since > limit and connection.transport is not None:
                self._drop(connection, "idle" if connection.heard else "no_request")


def _listeners(host: str, port: int) -> list[socket.socket]:
    """One for each address that the name has; of port 0 one in all, for they would differ."""
    found = dict.fromkeys(
        (family, address) for family, _, _, _, address in
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    )  # fmt: skip
    listeners: list[socket.socket] = []
    try:
        for family, address in list(found)[: 1 if port == 0 else None]:
            sock = socket.socket(family, socket.SOCK_STREAM)
            listeners.append(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.bind(address)
            sock.listen(1024)
            sock.setblocking(False)
    except OSError:
        for sock in listeners:
            sock.close()
        raise
    return listeners
