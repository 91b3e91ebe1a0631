"""The data port: reads HELLO, answers it, and hands each socket to the worker that owns its group.

Runs an event loop in a thread of its own. It sees a data connection only until its HELLO is read; from then on the
worker owns the socket. Control connections (group 0xFFFF) stay here: they carry a session's registration, its
watermark for groups that it has not opened, and its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import os
import socket
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from flexstream.errors import EngineError
from flexstream.sessions import Session, SessionRefused, StreamSessions
from flexstream.stream import Stream
from flexstream.wire import (
    CONTROL_GROUP,
    HEADER_BYTES,
    MAX_FRAME_BYTES,
    MAX_HELLO_BYTES,
    VERSION,
    ErrorCode,
    FrameType,
    Header,
    WireError,
    error_frame,
    frame,
    json_frame,
    signed,
)

log = logging.getLogger("flexstream.acceptor")

LINGER_S = 1.0  # a refused peer may read its ERROR frame for this long
DEFAULT_ACK_BYTES = 128 * 1024

WHY = {
    ErrorCode.BAD_MAGIC: "the bytes are not a frame: the magic is wrong",
    ErrorCode.BAD_VERSION: f"only protocol version {VERSION} is spoken here",
    ErrorCode.BAD_TYPE: "a frame of that type has no place here",
    ErrorCode.BAD_LENGTH: "the payload is longer than the cap, or a frame without payload has one",
    ErrorCode.BAD_CRC: "the CRC32C of a frame is wrong or its flag does not match the HELLO",
    ErrorCode.WRONG_GROUP: "a row's key, or a frame's group, is not of the group that the connection was opened for",
    ErrorCode.SEQUENCE_GAP: "a DATA frame begins after the next row wanted: rows in between are missing",
    ErrorCode.BAD_ROW_COUNT: "a DATA frame's payload is not `value` whole rows",
    ErrorCode.FENCED: "a newer connection of the same session and group took over",
    ErrorCode.NO_SESSION: "the session has ended or was never registered",
    ErrorCode.SHUTTING_DOWN: "the daemon is stopping",
}
HINTS = {
    ErrorCode.WRONG_GROUP: "group = pmod(murmur3_32(key, seed 42), G); see docs/protocol.md",
    ErrorCode.SEQUENCE_GAP: "reconnect and resume at the sequence in the ACK",
    ErrorCode.BAD_LENGTH: "the ACK to HELLO tells how many rows fill a frame",
    ErrorCode.NO_SESSION: "open the control connection (group 65535) first",
}


@dataclass(frozen=True, slots=True)
class StreamPort:
    """What the acceptor needs to know of a stream."""

    stream: Stream
    index: int
    sessions: StreamSessions
    handles: list[Any]  # the stream's state on each worker


class Host(Protocol):
    """What the acceptor needs of an engine."""

    groups: int
    frame_bytes: int
    workers: list[Any]

    def port_of(self, stream: str) -> StreamPort | None: ...
    def placement(self) -> list[int]: ...
    def nic_facts(self) -> dict[str, Any]: ...


class _Refused(Exception):
    def __init__(self, code: ErrorCode, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.hint = code, message, hint


class Acceptor:
    """Listens on `host:port` (port 0: any). `start` raises EngineError when it cannot."""

    def __init__(
        self, engine: Host, host: str, port: int, *, token: str | None, hello_timeout_s: float, max_pending: int
    ) -> None:
        self._engine = engine
        self._token = token
        self._hello_timeout_s = hello_timeout_s
        self._max_pending = max_pending
        self._pending: OrderedDict[asyncio.Task[None], None] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listener = _listen(host, port)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._thread = threading.Thread(target=self._run, name="fs-acceptor", daemon=True)
        self._stopping = threading.Event()
        self.accepted = 0
        self.misaligned = 0
        self.closed: Counter[str] = Counter()

    # -- life

    def start(self) -> None:
        ready = threading.Event()
        self._ready = ready
        self._thread.start()
        ready.wait()

    def stop_accepting(self) -> None:
        self._call(self._close_listener)

    def stop(self) -> None:
        if self._loop is not None and not self._stopping.is_set():
            self._stopping.set()
            self._call(self._cancel_all)
            self._thread.join(timeout=5)

    @property
    def pending(self) -> int:
        return len(self._pending)

    def _call(self, what: Callable[[], None]) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has closed meanwhile
                self._loop.call_soon_threadsafe(what)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=_new_loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._finished = asyncio.Event()
        self._listening = True
        self._loop.add_reader(self._listener.fileno(), self._accept)
        self._ready.set()
        await self._finished.wait()
        for task in [*self._tasks]:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _close_listener(self) -> None:
        if self._listening and self._loop is not None:
            self._listening = False
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()

    def _cancel_all(self) -> None:
        self._close_listener()
        self._finished.set()

    # -- connections

    def _accept(self) -> None:
        for _ in range(64):
            try:
                sock, peer = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:  # out of descriptors: the oldest that never said HELLO makes room
                self._count(f"accept: {os.strerror(error.errno or 0)}")
                self._drop_oldest()
                return
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.accepted += 1
            if len(self._pending) >= self._max_pending:
                self._drop_oldest()
            self._spawn(self._greet(sock, peer[:2]), pending=True)

    def _drop_oldest(self) -> None:
        if self._pending:
            task, _ = self._pending.popitem(last=False)
            task.cancel("too many pending")

    def _spawn(self, work: Any, *, pending: bool = False) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        if pending:
            self._pending[task] = None
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._pending.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("connection_handler_failed", exc_info=error)

    def _count(self, why: str) -> None:
        self.closed[why] += 1

    async def _greet(self, sock: socket.socket, peer: tuple[str, int]) -> None:
        """From accept to hand-over. Whatever goes wrong ends this one connection."""
        group = CONTROL_GROUP
        try:
            async with asyncio.timeout(self._hello_timeout_s):
                header, hello = await self._read_hello(sock)
            group = header.group
            port, session = self._check(header, hello, peer)
            if group == CONTROL_GROUP:
                self._pending.pop(asyncio.current_task(), None)  # type: ignore[arg-type]
                await self._control(sock, peer, port, hello)
            elif session is not None:
                self._hand_over(sock, peer, port, session, header, hello)
        except TimeoutError:
            hint = f"a HELLO must come within {self._hello_timeout_s:g} s"
            await self._refuse(sock, ErrorCode.HELLO_TIMEOUT, "no whole HELLO came in time", hint, group)
        except asyncio.CancelledError:
            if not self._stopping.is_set():
                self._count(ErrorCode.TOO_MANY_PENDING.code)
            with contextlib.suppress(OSError):
                sock.send(error_frame(ErrorCode.TOO_MANY_PENDING, "too many connections wait with their HELLO"))
            sock.close()
        except WireError as error:
            await self._refuse(sock, error.code, str(error), HINTS.get(error.code), group)
        except (_Refused, SessionRefused) as error:
            await self._refuse(sock, error.code, error.message, error.hint, group)
        except (ConnectionError, asyncio.IncompleteReadError, OSError):
            self._count("closed before hello")
            sock.close()

    async def _read_hello(self, sock: socket.socket) -> tuple[Header, dict[str, Any]]:
        header = Header.unpack(await self._exactly(sock, HEADER_BYTES))
        if header.type is not FrameType.HELLO:
            raise _Refused(ErrorCode.BAD_TYPE, f"the first frame is {header.type.name}, not HELLO")
        if header.payload_bytes > MAX_HELLO_BYTES:
            raise _Refused(
                ErrorCode.BAD_LENGTH, f"a HELLO of {header.payload_bytes} bytes; at most {MAX_HELLO_BYTES} are read"
            )
        try:
            hello = json.loads(await self._exactly(sock, header.payload_bytes))
        except (ValueError, RecursionError) as error:
            raise _Refused(ErrorCode.BAD_HELLO, f"the HELLO payload is not JSON: {error}") from None
        if not isinstance(hello, dict):
            raise _Refused(ErrorCode.BAD_HELLO, "the HELLO payload is not a JSON object")
        return header, hello

    async def _exactly(self, sock: socket.socket, n: int) -> bytes:
        loop = asyncio.get_running_loop()
        data = b""
        while len(data) < n:
            part = await loop.sock_recv(sock, n - len(data))
            if not part:
                raise ConnectionResetError("closed by the peer")
            data += part
        return data

    def _check(
        self, header: Header, hello: dict[str, Any], peer: tuple[str, int]
    ) -> tuple[StreamPort, Session | None]:
        given = hello.get("token")
        if self._token is not None and not (
            isinstance(given, str) and hmac.compare_digest(given.encode(), self._token.encode())
        ):
            raise _Refused(ErrorCode.BAD_TOKEN, "the token is missing or wrong", "give the producer token=...")
        versions = hello.get("versions")
        if not isinstance(versions, list) or VERSION not in versions:
            raise _Refused(ErrorCode.BAD_VERSION, f"no common version: here {[VERSION]}, there {versions!r:.80}")
        name = hello.get("stream")
        port = self._engine.port_of(name) if isinstance(name, str) else None
        if port is None:
            raise _Refused(ErrorCode.UNKNOWN_STREAM, f"no stream {name!r:.80}", "`flexstream streams` lists them")
        producer, epoch = hello.get("producer"), hello.get("epoch", 0)
        if not isinstance(producer, str) or not 1 <= len(producer) <= 64:
            raise _Refused(ErrorCode.BAD_HELLO, f"producer must be 1 to 64 characters, not {producer!r:.80}")
        if not isinstance(epoch, int) or isinstance(epoch, bool) or not 0 <= epoch < 1 << 63:
            raise _Refused(ErrorCode.BAD_HELLO, f"epoch must be an integer from 0, not {epoch!r:.80}")
        self._check_schema(port.stream, header, hello)
        if header.group == CONTROL_GROUP:
            return port, None
        if header.group >= self._engine.groups:
            raise _Refused(ErrorCode.WRONG_GROUP, f"group {header.group} of {self._engine.groups}")
        session = port.sessions.find(producer)
        if session is None or (session.state in ("ending", "ended") and session.epoch != epoch):
            raise _Refused(
                ErrorCode.NO_SESSION, f"producer {producer} has no session", HINTS[ErrorCode.NO_SESSION]
            )
        if epoch < session.epoch:
            raise _Refused(ErrorCode.STALE_EPOCH, f"epoch {epoch}, but {session.epoch} is known")
        return port, session

    def _check_schema(self, stream: Stream, header: Header, hello: dict[str, Any]) -> None:
        expected = {"row_bytes": stream.schema.row_bytes, "schema": stream.schema.hash}
        for name, value in expected.items():
            given = hello.get(name)
            if given is None and header.group == CONTROL_GROUP:
                continue
            if given != value:
                raise _Refused(
                    ErrorCode.SCHEMA_MISMATCH,
                    f"{name} of stream {stream.name!r} is {value!r}, not {given!r:.80}",
                    "the control connection's ACK tells the schema",
                )

    # -- data connections

    def _hand_over(
        self, sock: socket.socket, peer: tuple[str, int], port: StreamPort, session: Session,
        header: Header, hello: dict[str, Any],
    ) -> None:  # fmt: skip
        crc, ack_bytes = hello.get("crc", False), hello.get("ack_bytes", DEFAULT_ACK_BYTES)
        if not isinstance(crc, bool) or not isinstance(ack_bytes, int) or ack_bytes < 0:
            raise _Refused(ErrorCode.BAD_HELLO, "crc must be true or false, ack_bytes an integer from 0")
        row_bytes = port.stream.schema.row_bytes
        ack = json_frame(
            FrameType.ACK,
            header.group,
            {"version": VERSION, "peer": list(peer), "local": list(sock.getsockname()[:2])},
            value=max(1, self._engine.frame_bytes // row_bytes),
        )
        owner = self._engine.placement()[header.group]
        self.misaligned += 1  # no table puts connections where they belong yet: every one is handed over
        session.connections += 1
        self._engine.workers[owner].add_connection(
            sock.detach(), port.handles[owner], header.group, session.slot, ack, crc, ack_bytes
        )

    def connection_closed(
        self, port: StreamPort, fd: int, group: int, slot: int, why: int, ended: bool
    ) -> None:
        """A worker gave a socket back (collector thread): tell the peer why, then close."""
        session = port.sessions.at(slot)
        if session is not None:
            session.connections -= 1
        if why > 0:
            code = ErrorCode(why)
            self._count(code.code)
            fields = {"stream": port.stream.name, "group": group, "why": code.code}
            if session is not None:
                fields |= {"producer": session.producer, "peer": session.peer}
            log.warning("connection_refused", extra={"fields": fields})
            sock = socket.socket(fileno=fd)
            sock.setblocking(False)
            self._call(lambda: self._spawn(self._say_goodbye(sock, code, WHY[code], HINTS.get(code), group)))
        else:
            self._count("eos" if ended else "eof" if why == 0 else os.strerror(-why))
            os.close(fd)

    async def _refuse(
        self, sock: socket.socket, code: ErrorCode, message: str, hint: str | None, group: int
    ) -> None:
        self._count(code.code)
        log.warning("connection_refused", extra={"fields": {"why": code.code, "message": message}})
        await self._say_goodbye(sock, code, message, hint, group)

    async def _say_goodbye(
        self, sock: socket.socket, code: ErrorCode, message: str, hint: str | None, group: int
    ) -> None:
        """An ERROR frame, then a close that gives the peer time to read it (a close with unread data resets)."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(LINGER_S):
                await loop.sock_sendall(sock, error_frame(code, message, hint, group))
                sock.shutdown(socket.SHUT_WR)
                left = 16 * MAX_FRAME_BYTES
                while left > 0 and (part := await loop.sock_recv(sock, 65536)):
                    left -= len(part)
        except (OSError, TimeoutError, asyncio.CancelledError):
            pass
        finally:
            sock.close()

    # -- control connections

    async def _control(
        self, sock: socket.socket, peer: tuple[str, int], port: StreamPort, hello: dict[str, Any]
    ) -> None:
        session = port.sessions.register(
            hello["producer"], hello.get("epoch", 0), f"{peer[0]}:{peer[1]}", control=sock
        )
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_sendall(sock, self._control_ack(sock, peer, port, session))
            await self._control_frames(sock, port, session)
        finally:
            port.sessions.broken(session, sock)
            sock.close()

    def _control_ack(
        self, sock: socket.socket, peer: tuple[str, int], port: StreamPort, session: Session
    ) -> bytes:
        stream = port.stream
        document = {
            "version": VERSION,
            "peer": list(peer),
            "local": list(sock.getsockname()[:2]),
            "stream": stream.to_dict(),
            "schema": stream.schema.hash,
            "groups": self._engine.groups,
            "placement": self._engine.placement(),
            "nic": self._engine.nic_facts(),
            "frame_bytes": self._engine.frame_bytes,
            "max_frame_bytes": MAX_FRAME_BYTES,
            "epoch": session.epoch,
        }
        rows = max(1, self._engine.frame_bytes // stream.schema.row_bytes)
        return json_frame(FrameType.ACK, CONTROL_GROUP, document, value=rows)

    async def _control_frames(self, sock: socket.socket, port: StreamPort, session: Session) -> None:
        bitmap_bytes = (self._engine.groups + 7) // 8
        while True:
            header = Header.unpack(await self._exactly(sock, HEADER_BYTES))
            if header.group != CONTROL_GROUP:
                raise WireError(ErrorCode.WRONG_GROUP, "a control connection speaks for group 65535 only")
            if header.type not in (FrameType.WATERMARK, FrameType.EOS, FrameType.MARKER, FrameType.BARRIER):
                raise WireError(ErrorCode.BAD_TYPE, f"{header.type.name} on a control connection")
            has_bitmap = header.type in (FrameType.WATERMARK, FrameType.EOS)
            if header.payload_bytes != (bitmap_bytes if has_bitmap else 0):
                raise WireError(
                    ErrorCode.BAD_LENGTH, f"{header.type.name} has {header.payload_bytes} bytes of payload"
                )
            opened = await self._exactly(sock, header.payload_bytes)
            if session.control is not sock:
                raise _Refused(ErrorCode.FENCED, WHY[ErrorCode.FENCED])
            if header.type is FrameType.WATERMARK:
                for worker in self._engine.workers:
                    worker.session_watermark(port.index, session.slot, signed(header.value), opened)
            elif header.type is FrameType.EOS:
                await self._end(sock, port, session, opened)
                return

    async def _end(self, sock: socket.socket, port: StreamPort, session: Session, opened: bytes) -> None:
        """Answer with an ACK when every worker has worked off all of the session."""
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        session.on_ended.append(lambda: self._call(ended.set))
        port.sessions.end(session, opened)
        if session.ended.is_set():
            ended.set()
        closed = loop.create_task(loop.sock_recv(sock, 1))
        done = loop.create_task(ended.wait())
        await asyncio.wait({closed, done}, return_when=asyncio.FIRST_COMPLETED)
        closed.cancel()
        done.cancel()
        if ended.is_set():
            await loop.sock_sendall(sock, frame(FrameType.ACK, CONTROL_GROUP))


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(4096)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise EngineError(
            f"cannot listen on {host}:{port}: {error.strerror or error}",
            code="cannot_listen",
            hint="choose another port, or end the process that has it (`flexstream doctor`)",
        ) from error
    return sock
