"""Staging connections: a thread each, from the ACK of HELLO to the end. Blocks go to the stage as they come.

A connection carries one stage after the other: STAGE, DATA..., EOS, and again. Waiting for bytes, checking a CRC and
writing to the disk are without the GIL; Python runs once per block of some megabytes.

Nobody waits for ever, and nobody holds what others need: a frame that has begun goes on or is refused; so is a stage
that nobody goes on with; between stages a connection is closed when another one needs its place, or after a while. Its
client opens another when it has rows again. Memory for blocks is shared, and has a bound.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from flexstream.addresses import join_address
from flexstream.cython_ext.wire.crc32c import crc32c
from flexstream.errors import StageError
from flexstream.ingest import hello
from flexstream.rows.stream import TIME_LIMIT
from flexstream.staging.room import ROOM_WAIT_S
from flexstream.staging.stages import Stage, Stages
from flexstream.state.stage.direct_io import Bytes, SparePages, page_memory
from flexstream.wire import stage_block
from flexstream.wire.frames import (
    HEADER_BYTES,
    MAX_HELLO_BYTES,
    MAX_STAGE_FRAME_BYTES,
    STAGE_GROUP,
    ErrorCode,
    FrameType,
    Header,
    WireError,
    json_frame,
)

if TYPE_CHECKING:
    from flexstream.catalog.entries import RunningQuery, RunningStream, StreamPort
    from flexstream.rows.stream import Stream

log = logging.getLogger("flexstream.stages")

MAX_CONNECTIONS = 1024
BLOCK_BYTES = 8 << 20  # what producers are asked to send at a time
RECEIVE_BYTES = 256 << 10  # at a time
OWN_BYTES = 64 << 10  # frames up to so many are received into the connection's own memory
BLOCKS_BYTES = 512 << 20  # memory for larger ones, of all connections
LINGER_S = 1.0  # for a peer that was refused to read why, without a byte
MOST_LINGER_S = 5.0  # and however much it sends
LOOK_S = 5.0  # how often one that waits for bytes looks at the time
STALL_S = 60.0  # in the middle of a frame without a byte
FRAME_S = 300.0  # from the beginning of a frame to its end
STAGE_IDLE_S = 3600.0  # between the blocks of a stage
IDLE_S = 600.0  # between stages
SPARE_IDLE_S = 5.0  # the same when all places are taken
SEND_S = 30.0  # for an answer that the peer does not read


class BlockMemory:
    """Whole pages for the blocks that are under way. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._spare = SparePages()
        self.used_bytes = 0

    def take(self, n: int, wait_s: float = ROOM_WAIT_S) -> Bytes:
        """At least `n` bytes. StageError `stage_full` when others have all that there is for too long."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.used_bytes + n <= max(BLOCKS_BYTES, n), wait_s):
                raise StageError(
                    f"blocks under way take {self.used_bytes} bytes, and none was finished within {wait_s:g} s",
                    code="stage_full",
                    hint="run fewer tasks at a time, or send smaller blocks",
                )
            memory = self._spare.take(n)
            self.used_bytes += len(memory)
            return memory

    def give(self, memory: Bytes) -> None:
        with self._changed:
            self.used_bytes -= len(memory)
            self._spare.give(memory)
            self._changed.notify_all()


class Host(Protocol):
    """What staging needs to know of what runs; `catalog.registry.Registry` in an engine."""

    groups: int

    def port_of(self, stream: str) -> StreamPort | None: ...
    def running(self) -> tuple[list[RunningStream], list[RunningQuery]]: ...


class StagePort:
    """Serves the staging connections of an engine."""

    def __init__(self, catalog: Host, stages: Stages) -> None:
        self._catalog = catalog
        self._stages = stages
        self._memory = BlockMemory()
        self._lock = threading.Lock()
        self._open: dict[_Connection, threading.Thread] = {}
        self._stopped = False

    @property
    def connections(self) -> int:
        return len(self._open)

    @property
    def block_bytes(self) -> int:
        return self._memory.used_bytes

    def adopt(self, sock: socket.socket, peer: tuple[str, int], stream: Stream, said: dict[str, Any]) -> None:
        """Take over a socket whose HELLO was right. Raises hello.Refused; the socket is then still the caller's."""
        with self._lock:
            if self._stopped:
                raise hello.Refused(ErrorCode.SHUTTING_DOWN)
            if len(self._open) >= MAX_CONNECTIONS and not self._close_an_idle_one():
                raise hello.Refused(
                    ErrorCode.TOO_MANY_SESSIONS,
                    f"all {MAX_CONNECTIONS} staging connections are in use",
                    "run fewer executors",
                )
            mine = _adopted(sock)
            about = {"producer": str(said["producer"]), "peer": join_address(*peer)}
            port = self._catalog.port_of(stream.name)
            connection = _Connection(
                mine, stream, self._catalog.groups, self._stages, self._memory, self._lock, about,
                port.latest_time if port is not None else lambda: TIME_LIMIT,
            )  # fmt: skip
            more = {"block_bytes": BLOCK_BYTES, "max_frame_bytes": MAX_STAGE_FRAME_BYTES}
            welcome = hello.welcome(mine, peer, STAGE_GROUP, stream, self._catalog.groups, more)
            thread = threading.Thread(target=self._serve, args=(connection, welcome), name="fs-stage", daemon=True)
            self._open[connection] = thread
            thread.start()

    def _close_an_idle_one(self) -> bool:
        """The one that has been without a stage for longest, if that is long enough."""
        idle = [connection for connection in self._open if connection.idle_since is not None]
        longest = min(idle, key=lambda connection: connection.idle_since or 0.0, default=None)
        if longest is None or time.monotonic() - (longest.idle_since or 0.0) < SPARE_IDLE_S:
            return False
        longest.close_idle()
        del self._open[longest]
        return True

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            open_ = dict(self._open)
        for connection in open_:
            connection.stop_reading()
        for thread in open_.values():
            thread.join(timeout=2 * LINGER_S)

    def _serve(self, connection: _Connection, welcome: bytes) -> None:
        try:
            connection.say(welcome)
            connection.run()
        except WireError as error:
            connection.refuse(error.code, error.code.code, str(error), None)
        except StageError as error:
            code = ErrorCode.FENCED if error.code == "fenced" else ErrorCode.REJECTED
            connection.refuse(code, error.code, error.message, error.hint)
        except OSError:
            pass
        except Exception:
            log.exception("staging_connection_failed", extra={"fields": connection.about})
            connection.refuse(ErrorCode.REJECTED, "internal", "the daemon failed; its log has the details", None)
        finally:
            connection.end()
            with self._lock:
                self._open.pop(connection, None)


def _adopted(sock: socket.socket) -> socket.socket:
    """The same connection, whose calls wait in the kernel and not for ever."""
    mine = socket.socket(fileno=sock.detach())
    mine.setblocking(True)
    mine.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 15), (socket.TCP_KEEPCNT, 4)):
        mine.setsockopt(socket.IPPROTO_TCP, option, value)
    for option, seconds in ((socket.SO_RCVTIMEO, LOOK_S), (socket.SO_SNDTIMEO, SEND_S)):
        mine.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6)))
    return mine


class _Connection:
    def __init__(
        self, sock: socket.socket, stream: Stream, groups: int, stages: Stages, memory: BlockMemory,
        lock: threading.Lock, about: dict[str, Any], latest_time: Callable[[], int],
    ) -> None:  # fmt: skip
        self.about = about
        self.idle_since: float | None = time.monotonic()  # without a stage; guarded by `lock`
        self._sock = sock
        self._stream = stream
        self._groups = groups
        self._stages = stages
        self._memory = memory
        self._lock = lock
        self._closed = False
        self._stage: Stage | None = None
        self._latest_time = latest_time
        self._pages = page_memory(OWN_BYTES)  # a frame: its header, then its payload when that is small

    def say(self, data: bytes) -> None:
        self._sock.sendall(data)

    def run(self) -> None:
        """Until the peer closes. Raises WireError, StageError, OSError."""
        while True:
            header = Header.unpack(self._receive_header().tobytes())
            if header.group != STAGE_GROUP:
                raise WireError(ErrorCode.WRONG_GROUP, f"a staging connection takes no frame of group {header.group}")
            if header.type is FrameType.DATA:
                self._data(header)
            elif header.type is FrameType.STAGE:
                self._begin(header)
            elif header.type is FrameType.EOS:
                self._finish(header)
            else:
                raise WireError(ErrorCode.BAD_TYPE, f"a staging connection takes no {header.type.name} frame")

    # Bytes --------------------------------------------------------------------------------------------------

    def _receive_header(self) -> Bytes:
        """Into the connection's own memory. ConnectionResetError at the end, and when nobody needs the connection."""
        own = self._pages[:HEADER_BYTES]
        began = time.monotonic()
        while (got := self._receive_some(own.data)) == 0:
            silent_s = time.monotonic() - began
            if self._stage is None and silent_s >= IDLE_S:
                raise ConnectionResetError("idle")
            if self._stage is not None and silent_s >= STAGE_IDLE_S:
                raise _slow(f"no block of stage {self._stage.id} arrived for {silent_s:.0f} s")
        self._fill(own.data[got:], time.monotonic() + FRAME_S)
        return own

    def _receive_payload(self, header: Header) -> Bytes:
        """Into the connection's own memory, behind the header. For small frames."""
        found = self._pages[HEADER_BYTES : HEADER_BYTES + header.payload_bytes]
        self._fill(found.data, time.monotonic() + FRAME_S)
        return found

    def _receive_block(self, header: Header, memory: Bytes) -> tuple[Bytes, int]:
        """(the payload, the CRC32C of the frame): taken piece by piece, while the bytes are in the cache."""
        memory[:HEADER_BYTES] = self._pages[:HEADER_BYTES]
        found = memory[HEADER_BYTES : HEADER_BYTES + header.payload_bytes]
        view, crc = found.data, stage_block.crc_of_header(header)
        deadline = time.monotonic() + FRAME_S
        for at in range(0, len(view), RECEIVE_BYTES):
            piece = view[at : at + RECEIVE_BYTES]
            self._fill(piece, deadline)
            crc = crc32c(piece, crc)
        return found, crc

    def _fill(self, view: memoryview, deadline: float) -> None:
        at, heard = 0, time.monotonic()
        while at < len(view):
            got = self._receive_some(view[at:])
            now = time.monotonic()
            if got:
                at, heard = at + got, now
            elif now - heard >= STALL_S:
                raise _slow(f"no byte arrived for {now - heard:.0f} s in the middle of a frame")
            if now > deadline:
                raise _slow(f"a frame took longer than {FRAME_S:.0f} s")

    def _receive_some(self, view: memoryview) -> int:
        """As many bytes as come in a while, perhaps none. ConnectionResetError at the end."""
        try:
            got = self._sock.recv_into(view, len(view), socket.MSG_WAITALL)
        except BlockingIOError:
            return 0
        if got == 0:
            raise ConnectionResetError("the peer closed the connection")
        return got

    # Stages -------------------------------------------------------------------------------------------------

    def _now_busy(self) -> None:
        with self._lock:
            if self._closed:
                raise ConnectionResetError("another connection needed its place")
            self.idle_since = None

    def _now_idle(self) -> None:
        with self._lock:
            self.idle_since = time.monotonic()

    def _begin(self, header: Header) -> None:
        if self._stage is not None:
            raise WireError(ErrorCode.BAD_TYPE, f"a STAGE frame came while stage {self._stage.id} is open")
        if header.payload_bytes > MAX_HELLO_BYTES:
            raise WireError(ErrorCode.BAD_LENGTH, f"a STAGE frame cannot have {header.payload_bytes} bytes")
        try:
            said = json.loads(self._receive_payload(header).tobytes())
        except (ValueError, RecursionError) as error:
            raise StageError(f"the payload of STAGE is not JSON: {error}", code="bad_stage") from None
        stage_id = said.get("stage") if isinstance(said, dict) else None
        self._now_busy()
        self._stage = self._stages.begin(stage_id, self._stream.name, self.about)
        self.say(json_frame(FrameType.ACK, STAGE_GROUP, {"stage": stage_id}))

    def _open_stage(self) -> Stage:
        if self._stage is None:
            raise WireError(ErrorCode.BAD_TYPE, "no stage is open: send STAGE first")
        return self._stage

    def _data(self, header: Header) -> None:
        stage = self._open_stage()
        stage_block.check_header(header)
        if header.sequence != stage.rows:
            raise WireError(ErrorCode.SEQUENCE_GAP, f"the block begins with row {header.sequence}, not {stage.rows}")
        size = HEADER_BYTES + header.payload_bytes
        self._stages.wait_for_room(stage, size)
        if size <= OWN_BYTES:
            self._append(stage, header, self._pages)
            return
        memory = self._memory.take(size)
        try:
            self._append(stage, header, memory)
        finally:
            self._memory.give(memory)

    def _append(self, stage: Stage, header: Header, memory: Bytes) -> None:
        payload, crc = self._receive_block(header, memory)
        if crc != header.crc32c:
            raise WireError(ErrorCode.BAD_CRC, "the CRC32C of a block is wrong")
        block = stage_block.decode(header, payload, self._stream.schema.row_bytes, self._groups)
        stage_block.check_groups(block, self._stream, self._groups)
        span = stage_block.time_span(block, self._stream, self._latest_time())
        self._stages.append(stage, block, span, memory, HEADER_BYTES + header.payload_bytes)

    def _finish(self, header: Header) -> None:
        stage = self._open_stage()
        if header.payload_bytes:
            raise WireError(ErrorCode.BAD_LENGTH, "an EOS frame cannot have a payload")
        receipt = self._stages.finish(stage, header.value)
        self._stage = None
        self._now_idle()
        self.say(json_frame(FrameType.ACK, STAGE_GROUP, receipt, sequence=stage.rows))

    # The end ------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """When it ends in the middle of a stage, nobody will ever name that."""
        if self._stage is not None:
            self._stages.drop(self._stage.id, "its connection broke before it was finished")
            self._stage.file.discard()
        with self._lock:
            self._closed = True
            self._sock.close()

    def stop_reading(self) -> None:
        with self._lock, contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RD)

    def close_idle(self) -> None:
        """The lock is held. Its thread finds out."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def refuse(self, code: ErrorCode, word: str, message: str, hint: str | None) -> None:
        """An ERROR frame, then a while for the peer to read it (a close with unread data resets)."""
        fields = {"why": word, "message": message, **self.about}
        log.warning("stage_refused", extra={"fields": fields})
        document = {"code": word, "message": message, "hint": hint}
        with contextlib.suppress(OSError):
            self._sock.settimeout(LINGER_S)
            self._sock.sendall(json_frame(FrameType.ERROR, STAGE_GROUP, document, value=int(code)))
            self._sock.shutdown(socket.SHUT_WR)
            deadline = time.monotonic() + MOST_LINGER_S
            while time.monotonic() < deadline and self._sock.recv_into(self._pages.data):
                pass


def _slow(message: str) -> StageError:
    return StageError(message, code="stage_slow", hint="send the rows again under a fresh UUID")
