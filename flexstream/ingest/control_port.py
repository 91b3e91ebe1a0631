"""Control connections: a session's registration, its watermark for groups that it has not opened, and its end.

Runs on the acceptor's loop, which everybody shares. So nothing here waits for a worker: an order is posted when the
mailboxes have room. Of watermarks that came meanwhile the latest is posted, and how often one connection, and all of
one peer, may post is limited: what they send faster costs them delay and nobody else anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

from flexstream import durations
from flexstream.addresses import join_address
from flexstream.catalog.entries import StreamPort
from flexstream.catalog.sessions import Session
from flexstream.ingest import hello
from flexstream.ingest.hello import Host, Refused
from flexstream.ingest.pace import Pace
from flexstream.wire.frames import (
    CONTROL_GROUP,
    HEADER_BYTES,
    MAX_FRAME_BYTES,
    ErrorCode,
    FrameType,
    Header,
    WireError,
    check_crc,
    frame,
    lanes_frame,
    signed,
)

READ_BYTES = 4096  # of one connection at a time
TURNS_A_SECOND = 1000.0  # of one connection: reads, each with what it makes the workers do
TURNS_OF_A_PEER = 4000.0  # of all control connections of one address
ROOM_FOR_ALL = 512  # orders that must fit into each mailbox before a HELLO or an end is passed on
ROOM_FOR_WATERMARKS = 4096  # and before a watermark is: half a mailbox stays free of them
LOOK_S = 0.005
Address = tuple[str, int]


class ControlPort:
    """Serves control connections. `call` has the loop do something, from any thread."""

    def __init__(self, host: Host, call: Callable[[Callable[[], None]], bool]) -> None:
        self._host = host
        self._call = call
        self._waiting = 0
        self._paces: WeakValueDictionary[str, Pace] = WeakValueDictionary()  # by peer, while it is connected

    async def room(self, orders: int = ROOM_FOR_ALL) -> None:
        """Until every worker's mailbox takes so many orders. The others of this loop go on meanwhile.

        The more wait, the less often each looks: together they never take the loop.
        """
        while any(worker.mailbox_room < orders and not worker.ended for worker in self._host.workers):
            self._waiting += 1
            try:
                await asyncio.sleep(LOOK_S * (1 + self._waiting // 16))
            finally:
                self._waiting -= 1

    async def serve(self, sock: socket.socket, peer: Address, port: StreamPort, said: dict[str, Any]) -> None:
        most, lanes_open = hello.lanes(said)
        session = port.sessions.register(
            said["producer"], said.get("epoch", 0), join_address(*peer), control=sock, lanes_open=lanes_open
        )
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_sendall(sock, self._ack(sock, peer, port, session))
            if most and session.control is sock:
                session.speak = lambda data: self._call(lambda: say(sock, data))
                session.most_lanes = most
                for group, lanes in self._host.lanes.all_wanted().items():  # asked for since the ACK was made
                    say(sock, lanes_frame(group, lanes))
            await _Control(self, self._host, sock, port, session).run(self._pace_of(peer[0]))
        finally:
            port.sessions.broken(session, sock)

    def _pace_of(self, peer: str) -> Pace:
        pace = self._paces.get(peer)
        if pace is None:
            pace = self._paces[peer] = Pace(TURNS_OF_A_PEER, TURNS_OF_A_PEER)
        return pace

    def _ack(self, sock: socket.socket, peer: Address, port: StreamPort, session: Session) -> bytes:
        stream = port.stream
        more = {
            "placement": self._host.placement(),
            "nic": self._host.nic.describe(),
            "frame_bytes": self._host.frame_bytes,
            "max_frame_bytes": MAX_FRAME_BYTES,
            "epoch": session.epoch,
            "max_future": None if port.max_future_ns is None else durations.format(port.max_future_ns),
            "lanes": {str(g): list(lanes.items()) for g, lanes in self._host.lanes.all_wanted().items()},
        }
        rows = max(1, self._host.frame_bytes // stream.schema.row_bytes)
        return hello.welcome(sock, peer, CONTROL_GROUP, stream, self._host.groups, more, value=rows)

    async def end(self, sock: socket.socket, port: StreamPort, session: Session, opened: bytes) -> None:
        """Answer with an ACK when every worker has worked off all of the session. Raises Refused: it was cut short."""
        await self.room()
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        session.on_ended.append(lambda: self._call(ended.set))
        port.sessions.end(session, opened)
        if session.ended.is_set():
            ended.set()
        peer = loop.create_task(loop.sock_recv(sock, 1))
        done = loop.create_task(ended.wait())
        try:
            await asyncio.wait({peer, done}, return_when=asyncio.FIRST_COMPLETED)
            if not done.done():  # half-closed, or gone: the clock for broken sessions runs from here
                peer.result()
                port.sessions.broken(session, sock)
                await done
        finally:
            peer.cancel()
            done.cancel()
        if session.cut:
            why = "the session ended before every group that its EOS named: rows may be missing"
            raise Refused(ErrorCode.NO_SESSION, why, "reconnect, and send the rows that have no ACK yet")
        await loop.sock_sendall(sock, frame(FrameType.ACK, CONTROL_GROUP))


class _Control:
    """One connection, from its ACK to its EOS."""

    def __init__(
        self, port: ControlPort, host: Host, sock: socket.socket, stream: StreamPort, session: Session
    ) -> None:
        self._port, self._host, self._sock, self._stream, self._session = port, host, sock, stream, session
        self._bitmap_bytes = (host.groups + 7) // 8
        self._data = bytearray()
        self._latest: tuple[int, bytes] | None = None  # a watermark not yet posted, and the groups that it leaves out

    async def run(self, peer: Pace) -> None:
        """Raises WireError, Refused, OSError."""
        own = Pace(TURNS_A_SECOND, TURNS_A_SECOND / 10)
        while True:
            if await self._work_off():
                return
            await self._post()
            await asyncio.sleep(max(own.take(), peer.take()))
            part = await asyncio.get_running_loop().sock_recv(self._sock, READ_BYTES)
            if not part:
                raise ConnectionResetError("the peer closed the connection")
            self._data += part
            self._check_fence()

    async def _work_off(self) -> bool:
        """The whole frames that have come. True: the last one was the end, and it has been answered."""
        while (found := await self._next()) is not None:
            kind, value, opened = found
            if kind is FrameType.WATERMARK:
                if self._latest is not None and self._latest[1] != opened:
                    await self._post()
                self._latest = max(value, self._latest[0] if self._latest else value), opened
            elif kind is FrameType.EOS:
                await self._post()
                self._check_fence()
                await self._port.end(self._sock, self._stream, self._session, opened)
                return True
        return False

    async def _next(self) -> tuple[FrameType, int, bytes] | None:
        """The next frame; None: not all of it is there. Before it raises, what came before is posted."""
        if len(self._data) < HEADER_BYTES:
            return None
        try:
            header = Header.unpack(self._data)
            self._check(header)
            size = HEADER_BYTES + header.payload_bytes
            if len(self._data) < size:
                return None
            opened = bytes(self._data[HEADER_BYTES:size])
            check_crc(header, opened)
        except WireError:
            await self._post()
            raise
        del self._data[:size]
        return header.type, signed(header.value), opened

    def _check(self, header: Header) -> None:
        if header.group != CONTROL_GROUP:
            raise WireError(ErrorCode.WRONG_GROUP, "a control connection speaks for group 65535 only")
        if header.type not in (FrameType.WATERMARK, FrameType.EOS, FrameType.MARKER, FrameType.BARRIER):
            raise WireError(ErrorCode.BAD_TYPE, f"a control connection takes no {header.type.name} frame")
        has_bitmap = header.type in (FrameType.WATERMARK, FrameType.EOS)
        if header.payload_bytes != (self._bitmap_bytes if has_bitmap else 0):
            raise WireError(
                ErrorCode.BAD_LENGTH, f"a {header.type.name} frame cannot have {header.payload_bytes} bytes of payload"
            )

    def _check_fence(self) -> None:
        if self._session.control is not self._sock or self._stream.sessions.at(self._session.slot) is not self._session:
            raise Refused(ErrorCode.FENCED)

    async def _post(self) -> None:
        if self._latest is None:
            return
        await self._port.room(ROOM_FOR_WATERMARKS)
        self._check_fence()
        watermark, opened = self._latest
        self._latest = None
        for worker in self._host.workers:
            worker.session_watermark(self._stream.index, self._session.slot, watermark, opened)


def say(sock: socket.socket, data: bytes, *, then_close: bool = False) -> None:
    """A frame that nobody waits for. What does not fit ends the connection: the next one is told everything anew."""
    with contextlib.suppress(OSError):
        try:
            whole = sock.send(data) == len(data)
        except BlockingIOError:
            whole = False
        if not whole or then_close:
            sock.shutdown(socket.SHUT_RDWR)
