"""The data port: reads HELLO, answers it, and hands each socket to the worker that owns its group.

Runs an event loop in a thread of its own. It sees a data connection only until its HELLO is read; from then on the
worker owns the socket. Control connections (group 0xFFFF) stay on this loop (control_port.py); staging connections
(0xFFFE) go to a thread (stage_port.py). The loop waits for nobody: what a mailbox has no room for is posted later.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

from flexstream.addresses import host_of, join_address
from flexstream.catalog.entries import StreamPort
from flexstream.catalog.sessions import Session, SessionRefused
from flexstream.cython_ext.worker.reports import ConnectionClosed
from flexstream.cython_ext.worker.worker import WorkerEnded
from flexstream.errors import EngineError
from flexstream.ingest import hello
from flexstream.ingest.control_port import ControlPort, say
from flexstream.ingest.hello import Host, Refused
from flexstream.ingest.pace import Slowing
from flexstream.ingest.receive_room import make_room, room_for_one
from flexstream.nic.alignment import Arrival
from flexstream.wire.frames import (
    CONTROL_GROUP,
    HEADER_BYTES,
    MAX_FRAME_BYTES,
    STAGE_GROUP,
    ErrorCode,
    FrameType,
    Header,
    WireError,
    error_frame,
    json_frame,
)

log = logging.getLogger("flexstream.acceptor")

LINGER_S = 1.0  # a refused peer may read its ERROR frame for this long
MAX_LEAVING = 256  # so many at a time
STOP_LINGER_S = 0.3  # and for this long when the engine stops
REST_S = 0.1
FLOOD_REST_S = 0.02  # between accepts while connections are dropped for want of room
ACCEPTS_AT_ONCE = 64


class Acceptor:
    """Accepts on `listener`, which `listen` made, and serves with what `host` has."""

    def __init__(
        self, host: Host, listener: socket.socket, *, token: str | None, hello_timeout_s: float, max_pending: int
    ) -> None:
        self.host = host
        self._token = token
        self._hello_timeout_s = hello_timeout_s
        self._max_pending = max_pending
        self._pending: OrderedDict[asyncio.Task[Any], socket.socket] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()
        self._goodbyes: set[Any] = set()
        self._control = ControlPort(host, self._call)
        self._slowing = Slowing()
        self._session_of: dict[int, Session] = {}  # descriptor -> session, while a worker has it
        self._descriptors = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listeners = [listener]
        self._per_worker = False  # whether each listener is a worker's
        self.address: tuple[str, int] = self._listeners[0].getsockname()[:2]
        self._thread = threading.Thread(target=self._run, name="fs-acceptor", daemon=True)
        self._stopping = threading.Event()
        self.accepted = 0
        self.leaving = 0  # refused, and reading why
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
        if self._call(self._cancel_all):
            self._stopping.set()
            self._thread.join(timeout=5)

    @property
    def pending(self) -> int:
        return len(self._pending)

    def _call(self, what: Callable[[], None]) -> bool:
        """Have the loop do it. False: the loop has ended."""
        if self._loop is None or self._stopping.is_set():
            return False
        try:
            self._loop.call_soon_threadsafe(what)
        except RuntimeError:
            return False
        return True

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=_new_loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._finished = asyncio.Event()
        self._listening = True
        self._relisten()
        self._ready.set()
        await self._finished.wait()
        if self._goodbyes:
            await asyncio.wait(self._goodbyes, timeout=STOP_LINGER_S)
        for task in [*self._tasks]:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _close_listener(self) -> None:
        if self._listening:
            self._listening = False
            self._look_away()
            for listener in self._listeners:
                listener.close()

    def relisten(self) -> None:
        """Ask the NIC for listeners again. From any thread."""
        self._call(self._relisten)

    def _relisten(self) -> None:
        """At the start, and when another NIC implementation took over: one listener for all, or one per worker."""
        if not self._listening:
            return
        self._look_away()
        found = self.host.nic.listeners(self._listeners[0])
        self._per_worker = found is not None
        self._listeners += [listener for listener in found or [] if listener not in self._listeners]
        self._listen_again()

    def _look_away(self) -> None:
        assert self._loop is not None
        for listener in self._listeners:
            self._loop.remove_reader(listener.fileno())

    def _cancel_all(self) -> None:
        self._close_listener()
        self._finished.set()

    # -- connections

    def _accept(self, index: int) -> None:
        dropped = False
        for _ in range(ACCEPTS_AT_ONCE):
            try:
                sock, peer = self._listeners[index].accept()
            except BlockingIOError:
                break
            except OSError as error:  # out of descriptors: the oldest that never said HELLO makes room
                self._count(f"accept: {os.strerror(error.errno or 0)}")
                if not self._drop_oldest():
                    self._rest()
                return
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.accepted += 1
            if len(self._pending) >= self._max_pending:
                dropped = self._drop_oldest()
            task = self._spawn(self._greet(sock, peer[:2], index if self._per_worker else None))
            self._pending[task] = sock
        if dropped:
            self._rest(FLOOD_REST_S)

    def _rest(self, seconds: float = REST_S) -> None:
        """Look again in a while, not at once: a flood, or too few descriptors, must not take the workers' cores."""
        assert self._loop is not None
        self._look_away()
        self._loop.call_later(seconds, self._listen_again)

    def _listen_again(self) -> None:
        if self._listening and self._loop is not None:
            for index, listener in enumerate(self._listeners):
                self._loop.add_reader(listener.fileno(), self._accept, index)

    def _drop_oldest(self) -> bool:
        if not self._pending:
            return False
        task, sock = self._pending.popitem(last=False)
        self._count(ErrorCode.TOO_MANY_PENDING.code)
        _last_word(sock, ErrorCode.TOO_MANY_PENDING, "too many connections have not sent their HELLO yet")
        task.cancel()
        return True

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._pending.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("connection_handler_failed", exc_info=error)

    def _no_longer_pending(self) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._pending.pop(task, None)

    def _count(self, why: str) -> None:
        self.closed[why] += 1

    async def _greet(self, sock: socket.socket, peer: tuple[str, int], listener: int | None) -> None:
        """From accept to hand-over, for a control connection to its end. What goes wrong ends this one alone."""
        group = CONTROL_GROUP
        lost = "closed before hello"
        try:
            async with asyncio.timeout(self._hello_timeout_s):
                header, said = await self._read_hello(sock)
            group = header.group
            await self._room()
            self._no_longer_pending()
            _notice_death(sock)
            port, session = hello.check(header, said, self.host, self._token)
            if session is not None:
                self._hand_over(sock, peer, listener, port, session, header, said)
            elif group == STAGE_GROUP:
                self.host.adopt_stage(sock, peer, port.stream, said)
            else:
                lost = "control connection lost"
                await self._control.serve(sock, peer, port, said)
                sock.close()
        except TimeoutError:
            hint = f"send a whole HELLO within {self._hello_timeout_s:g} s"
            await self._refuse(
                sock, Refused(ErrorCode.HELLO_TIMEOUT, "the HELLO did not arrive in time", hint), group, peer
            )
        except asyncio.CancelledError:
            _last_word(sock, ErrorCode.SHUTTING_DOWN, hello.WHY[ErrorCode.SHUTTING_DOWN])
        except WireError as error:
            await self._refuse(sock, Refused(error.code, str(error)), group, peer)
        except SessionRefused as error:
            await self._refuse(sock, Refused(error.code, error.message, error.hint), group, peer)
        except Refused as error:
            await self._refuse(sock, error, group, peer)
        except WorkerEnded:
            await self._refuse(sock, Refused(ErrorCode.SHUTTING_DOWN), group, peer)
        except OSError:
            self._count(lost)
            sock.close()
        except Exception:
            sock.close()  # what it is, is told by whoever looks after the task
            raise

    async def _room(self) -> None:
        try:
            async with asyncio.timeout(self._hello_timeout_s):
                await self._control.room()
        except TimeoutError:
            raise Refused(
                ErrorCode.TOO_MANY_PENDING, "a worker has not read its commands for a while", "connect again later"
            ) from None

    def answers(self, within_s: float) -> bool:
        """Whether the loop would read a HELLO now. Not to be called on it."""
        heard = threading.Event()
        return self._call(heard.set) and heard.wait(within_s)

    async def _read_hello(self, sock: socket.socket) -> tuple[Header, dict[str, Any]]:
        header = Header.unpack(await self._exactly(sock, HEADER_BYTES))
        hello.check_first_header(header)
        return header, hello.parse(await self._exactly(sock, header.payload_bytes))

    async def _exactly(self, sock: socket.socket, n: int) -> bytes:
        loop = asyncio.get_running_loop()
        data = b""
        while len(data) < n:
            part = await loop.sock_recv(sock, n - len(data))
            if not part:
                raise ConnectionResetError("the peer closed the connection")
            data += part
        return data

    # -- data connections

    def _hand_over(
        self, sock: socket.socket, peer: tuple[str, int], listener: int | None, port: StreamPort, session: Session,
        header: Header, said: dict[str, Any],
    ) -> None:  # fmt: skip
        crc, ack_bytes = hello.data_options(said)
        promise = hello.promise(said)
        row_bytes = port.stream.schema.row_bytes
        placement = self.host.placement()
        owner, came_as = placement[header.group], header.group
        if lane := hello.lane(said):
            session = port.sessions.lane(session, header.group, lane)
            came_as = self.host.lanes.arrives_as(header.group, lane)
        local = sock.getsockname()[:2]
        make_room(sock, room_for_one(self.host.groups, len(self._session_of)))
        fd = sock.fileno()
        nic = self.host.nic
        home = host_of(session.peer) or None
        aligned, stale = nic.arrived(fd, Arrival(peer, local, came_as, placement[came_as], listener, promise, home))
        document = hello.addressed(sock, peer) | ({"lane": lane} if lane else {}) | {"aligned": aligned}
        if stale:  # it steered by an old key: give it the present one
            document["nic"] = self.host.nic.describe()
        rows = max(1, self.host.frame_bytes // row_bytes)
        ack = json_frame(FrameType.ACK, header.group, document, value=rows)
        self._count_connection(fd, session, header.group)
        try:
            self.host.workers[owner].add_connection(
                fd, port.handles[owner], header.group, session.slot, ack, crc, ack_bytes
            )
        except Exception:
            self._uncount_connection(fd, header.group)
            nic.forget(fd)
            raise
        sock.detach()

    def _count_connection(self, fd: int, session: Session, group: int) -> None:
        with self._descriptors:
            self._session_of[fd] = session
        session.connections += 1
        session.groups[group] += 1

    def _uncount_connection(self, fd: int, group: int) -> Session:
        """Of the session that it came with: by now another may have the slot."""
        with self._descriptors:  # who finds it there may use the descriptor: it is closed after this
            session = self._session_of.pop(fd)
        session.connections -= 1
        session.groups[group] -= 1
        return session

    def end_session(self, port: StreamPort, session: Session) -> None:
        """By order of an operator: its connections are closed, and its epoch is not taken again."""
        control = port.sessions.remove(session)
        family = session.family()
        with self._descriptors:
            for fd in [fd for fd, of in self._session_of.items() if of in family]:
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as sock:
                    sock.shutdown(socket.SHUT_RDWR)  # the worker sees its end, and gives it back
        if isinstance(control, socket.socket):
            word = error_frame(ErrorCode.FENCED, "an operator ended the session")
            self._call(lambda: say(control, word, then_close=True))

    def connection_closed(self, port: StreamPort, report: ConnectionClosed) -> None:
        """A worker gave a socket back (collector thread): tell the peer why, then close."""
        fd, group, why = report.fd, report.group, report.why
        self.host.nic.forget(fd)
        session = self._uncount_connection(fd, group)
        if why > 0:
            code = ErrorCode(why)
            self._count(code.code)
            fields = {"stream": port.stream.name, "group": group, "why": code.code}
            fields |= {"producer": session.producer, "peer": session.peer}
            log.warning("connection_refused", extra={"fields": fields})
            sock = socket.socket(fileno=fd)
            sock.setblocking(False)
            if not self._call(lambda: self._start_goodbye(sock, Refused(code), group)):
                _last_word(sock, code, hello.WHY[code])
        else:
            self._count("eos" if report.ended else "eof" if why == 0 else os.strerror(-why))
            os.close(fd)

    async def _refuse(self, sock: socket.socket, refused: Refused, group: int, peer: tuple[str, int]) -> None:
        self._no_longer_pending()
        self._count(refused.code.code)
        fields = {"why": refused.code.code, "message": refused.message, "peer": join_address(*peer)}
        log.warning("connection_refused", extra={"fields": fields})
        wait_s = self._slowing.failed(peer[0]) if refused.code is ErrorCode.BAD_TOKEN else 0.0
        await self._say_goodbye(sock, refused, group, wait_s)

    def _start_goodbye(self, sock: socket.socket, refused: Refused, group: int) -> None:
        self._goodbyes.add(self._spawn(self._say_goodbye(sock, refused, group)))

    async def _say_goodbye(self, sock: socket.socket, refused: Refused, group: int, wait_s: float = 0.0) -> None:
        """An ERROR frame, then a close that gives the peer time to read it (a close with unread data resets).

        With too many of them at a time it has to be quick: they are descriptors that nobody can use.
        """
        loop = asyncio.get_running_loop()
        if self.leaving >= MAX_LEAVING:
            self._goodbyes.discard(asyncio.current_task())
            _last_word(sock, refused.code, refused.message, refused.hint, group)
            return
        self.leaving += 1
        try:
            await asyncio.sleep(wait_s)
            async with asyncio.timeout(LINGER_S):
                await loop.sock_sendall(sock, error_frame(refused.code, refused.message, refused.hint, group))
                sock.shutdown(socket.SHUT_WR)
                left = 16 * MAX_FRAME_BYTES
                while left > 0 and (part := await loop.sock_recv(sock, 65536)):
                    left -= len(part)
        except (OSError, TimeoutError, asyncio.CancelledError):
            pass
        finally:
            sock.close()
            self.leaving -= 1
            self._goodbyes.discard(asyncio.current_task())


def _last_word(
    sock: socket.socket, code: ErrorCode, message: str, hint: str | None = None, group: int = CONTROL_GROUP
) -> None:
    """An ERROR frame if it can be sent at once, and close."""
    with contextlib.suppress(OSError):
        sock.send(error_frame(code, message, hint, group))
    sock.close()


def _notice_death(sock: socket.socket) -> None:
    """A peer that vanished without a word (power, cable) is gone after two minutes, and its places are free."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 15), (socket.TCP_KEEPCNT, 4)):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def listen(host: str, port: int) -> socket.socket:
    """A socket that peers may connect to from now on (port 0: any). Raises EngineError when there can be none."""
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
            f"cannot listen on {join_address(host, port)}: {error.strerror or error}",
            code="cannot_listen",
            hint="choose another port, or stop the process that uses it (`flexstream doctor`)",
        ) from error
    return sock
