"""HELLO and its answer, for many connections at once: a producer of 128 groups waits once, not 128 times."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import selectors
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from flexstream.client.discovery import Address
from flexstream.client.lane_requests import LaneName
from flexstream.client.steering import Ports
from flexstream.errors import ConnectError, FlexStreamError, ProtocolError
from flexstream.nic.rss.ports import Promise
from flexstream.wire.frames import (
    CONTROL_GROUP,
    HEADER_BYTES,
    RETRYABLE,
    VERSION,
    FrameType,
    Header,
    WireError,
    error_code,
    json_frame,
)

MAX_ANSWER_BYTES = 1 << 20
AT_ONCE = 64  # connections in the handshake together: well below the server's limit for pending HELLOs
_PORT_TAKEN = (errno.EADDRINUSE, errno.EADDRNOTAVAIL)  # a bound port whose connection still exists
_MOST_PORTS = 4  # ports tried that bind but do not connect
_RETRYABLE_CODES = frozenset(code.code for code in RETRYABLE)


@dataclass(frozen=True, slots=True)
class Hello:
    """Who we are. `row_bytes` and `schema` may be None on the control connection, which then teaches them."""

    stream: str
    producer: str
    epoch: int = 1
    token: str | None = None
    row_bytes: int | None = None
    schema: str | None = None
    crc: bool = False
    ack_bytes: int = 131_072
    lanes: int = 0  # further ones that we would open; for the control connection, as is
    lanes_open: tuple[int, ...] = ()

    def frame(self, group: int, promise: Promise | None = None, lane: int = 0) -> bytes:
        document: dict[str, Any] = {
            "versions": [VERSION],
            "stream": self.stream,
            "row_bytes": self.row_bytes,
            "schema": self.schema,
            "producer": self.producer,
            "epoch": self.epoch,
            "token": self.token,
            "crc": self.crc,
            "ack_bytes": self.ack_bytes,
        }
        for name in ("row_bytes", "schema"):
            if document[name] is None:
                del document[name]
        if group == CONTROL_GROUP and self.lanes:
            document |= {"lanes": self.lanes, "lanes_open": list(self.lanes_open)}
        if lane:
            document["lane"] = lane
        if promise is not None:
            document["steered"] = {"port": promise.port, "bucket": promise.bucket}
        return json_frame(FrameType.HELLO, group, document)


@dataclass(frozen=True, slots=True)
class Welcome:
    """A connection whose HELLO was accepted. The socket is non-blocking and the holder's to close."""

    group: int
    sock: socket.socket
    rows_per_frame: int
    next_row: int
    document: dict[str, Any]
    promise: Promise | None = None


@dataclass(slots=True)
class _Attempt:
    key: int
    group: int
    sock: socket.socket
    to_send: bytes
    promise: Promise | None = None
    received: bytearray = field(default_factory=bytearray)
    connected: bool = False

    def step(self) -> Welcome | None:
        """Go on as far as the socket lets us. Raises OSError or FlexStreamError."""
        if not self.connected:
            code = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise OSError(code, os.strerror(code))
            self.connected = True
        if self.to_send:
            self.to_send = self.to_send[self.sock.send(self.to_send) :]
            return None
        # Exactly one frame: what comes after it belongs to whoever takes the socket over.
        need = HEADER_BYTES
        if len(self.received) >= HEADER_BYTES:
            need += _header(self.received).payload_bytes
        chunk = self.sock.recv(need - len(self.received))
        if not chunk:
            raise ConnectionResetError(errno.ECONNRESET, "the server closed the connection before it answered HELLO")
        self.received += chunk
        if len(self.received) < HEADER_BYTES:
            return None
        header = _header(self.received)
        if len(self.received) < HEADER_BYTES + header.payload_bytes:
            return None
        return self._finish(header, bytes(self.received[HEADER_BYTES:]))

    def _finish(self, header: Header, payload: bytes) -> Welcome:
        if header.type is FrameType.ERROR:
            raise refusal(header.value, payload)
        try:
            document = json.loads(payload) if payload else {}
        except ValueError:
            document = None
        if header.type is not FrameType.ACK or header.group != self.group or not isinstance(document, dict):
            raise ProtocolError(
                f"the server answered HELLO with {header.type.name} for group {header.group}", code="bad_answer"
            )
        return Welcome(self.group, self.sock, header.value, header.sequence, document, self.promise)


def _header(data: bytearray) -> Header:
    try:
        header = Header.unpack(data)
    except WireError as error:
        raise ProtocolError(
            f"no FlexStream server answered HELLO: {error}",
            code="bad_answer",
            hint="is this a data port? Write the control port, which speaks HTTP, without tcp://",
        ) from error
    if header.payload_bytes > MAX_ANSWER_BYTES:
        raise ProtocolError(
            f"the answer to HELLO has {header.payload_bytes} bytes; the limit is {MAX_ANSWER_BYTES}", code="bad_answer"
        )
    return header


def refusal(value: int, payload: bytes) -> ProtocolError:
    """An ERROR frame as an exception."""
    known = error_code(value)
    document: Any = None
    with contextlib.suppress(ValueError):
        document = json.loads(payload)
    if not isinstance(document, dict):
        document = {}
    code = document.get("code") or (known.code if known else f"error_{value}")
    return ProtocolError(f"the server refused: {document.get('message') or code}", code=code, hint=document.get("hint"))


def retryable(error: BaseException) -> bool:
    """Whether another attempt may fare better: the network's errors, and refusals that pass with time."""
    if isinstance(error, ProtocolError):
        return error.code in _RETRYABLE_CODES
    return isinstance(error, OSError | ConnectError)


def _start(address: Address, hello: Hello, key: int, ports: Ports | None, lanes: Mapping[int, LaneName]) -> _Attempt:
    name = lanes.get(key)
    group, number, steer = (name.group, name.number, name.steer) if name is not None else (key, 0, key)
    family, kind, protocol, _, target = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
    for left in range(_MOST_PORTS, -1, -1):
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            promise = ports.bind(sock, steer) if ports is not None and left else None
            code = sock.connect_ex(target)
            if code in (0, errno.EINPROGRESS):
                return _Attempt(key, group, sock, hello.frame(group, promise, number), promise)
            if promise is None or code not in _PORT_TAKEN:
                raise OSError(code, os.strerror(code))
            sock.close()
        except OSError:
            sock.close()
            raise
    raise AssertionError("unreachable: the last attempt binds no port")


def _greet_some(
    address: Address,
    hello: Hello,
    keys: list[int],
    deadline: float,
    ports: Ports | None,
    lanes: Mapping[int, LaneName],
) -> tuple[dict[int, Welcome], dict[int, Exception]]:
    welcomes: dict[int, Welcome] = {}
    errors: dict[int, Exception] = {}
    with selectors.DefaultSelector() as selector:
        for name in keys:
            try:
                attempt = _start(address, hello, name, ports, lanes)
            except OSError as error:
                errors[name] = error
            else:
                selector.register(attempt.sock, selectors.EVENT_WRITE, attempt)
        while selector.get_map():
            left = deadline - time.monotonic()
            for key, _ in selector.select(left) if left > 0 else []:
                attempt = key.data
                try:
                    welcome = attempt.step()
                except BlockingIOError:
                    continue
                except (OSError, FlexStreamError) as error:
                    errors[attempt.key] = error
                    selector.unregister(attempt.sock)
                    attempt.sock.close()
                    continue
                if welcome is not None:
                    welcomes[attempt.key] = welcome
                    selector.unregister(attempt.sock)
                else:
                    selector.modify(
                        attempt.sock,
                        selectors.EVENT_WRITE if attempt.to_send else selectors.EVENT_READ,
                        attempt,
                    )
            if time.monotonic() >= deadline:
                for key in list(selector.get_map().values()):
                    what = "did not answer HELLO" if key.data.connected else "did not accept the connection"
                    errors[key.data.key] = TimeoutError(f"the server {what} in time")
                    selector.unregister(key.fileobj)
                    key.data.sock.close()
    return welcomes, errors


def greet(
    address: Address,
    hello: Hello,
    groups: Iterable[int],
    timeout_s: float,
    ports: Ports | None = None,
    lanes: Mapping[int, LaneName] = MappingProxyType({}),
) -> tuple[dict[int, Welcome], dict[int, Exception]]:
    """Connect and say HELLO for every group (CONTROL_GROUP: the control connection).

    Returns what was accepted and, per group, why the rest was not. The timeout is for each 64 of them. With `ports`
    each connection comes from a port that the server's NIC steers to the group, where one is to be had. `lanes` names
    the keys among the groups that stand for further lanes.
    """
    wanted = list(groups)
    welcomes: dict[int, Welcome] = {}
    errors: dict[int, Exception] = {}
    for start in range(0, len(wanted), AT_ONCE):
        deadline = time.monotonic() + timeout_s
        part = _greet_some(address, hello, wanted[start : start + AT_ONCE], deadline, ports, lanes)
        welcomes.update(part[0])
        errors.update(part[1])
        if part[1]:  # a server in trouble: the others would fare no better
            break
    return welcomes, errors


def greet_control(address: Address, hello: Hello, timeout_s: float) -> tuple[Welcome, Address]:
    """The control connection, and the address among those of the name that answered: data connections go there.

    Raises OSError or ProtocolError.
    """
    deadline = time.monotonic() + timeout_s
    found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    hosts = list(dict.fromkeys(str(info[4][0]) for info in found))
    error: Exception = OSError(f"{address.host} has no address")
    for host in hosts:
        numeric = replace(address, host=host)
        welcomes, errors = greet(numeric, hello, [CONTROL_GROUP], max(deadline - time.monotonic(), 0.05))
        if not errors:
            return welcomes[CONTROL_GROUP], numeric
        error = errors[CONTROL_GROUP]
        if isinstance(error, FlexStreamError):
            break  # somebody is there, and refuses
    raise error
