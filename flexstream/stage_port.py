"""Staging connections: a thread each, from the ACK of HELLO to the end. Blocks go to the stage as they come.

A connection carries one stage after the other: STAGE, DATA..., EOS, and again. Waiting for bytes, checking a CRC and
writing to the disk are without the GIL; Python runs once per block of some megabytes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
from typing import TYPE_CHECKING, Any

from flexstream import hello, stage_block
from flexstream.cython_ext.crc32c import crc32c
from flexstream.errors import StageError
from flexstream.stages import Stage, Stages
from flexstream.state.pages import Bytes, page_memory
from flexstream.wire import (
    HEADER_BYTES,
    MAX_HELLO_BYTES,
    MAX_STAGE_FRAME_BYTES,
    STAGE_GROUP,
    VERSION,
    ErrorCode,
    FrameType,
    Header,
    WireError,
    json_frame,
)

if TYPE_CHECKING:
    from flexstream.engine import Engine
    from flexstream.stream import Stream

log = logging.getLogger("flexstream.stages")

MAX_CONNECTIONS = 1024
BLOCK_BYTES = 8 << 20  # what producers are asked to send at a time
RECEIVE_BYTES = 256 << 10  # at a time
LINGER_S = 1.0


class StagePort:
    """Serves the staging connections of an engine."""

    def __init__(self, engine: Engine, stages: Stages) -> None:
        self._engine = engine
        self._stages = stages
        self._lock = threading.Lock()
        self._open: dict[socket.socket, threading.Thread] = {}
        self._stopped = False

    @property
    def connections(self) -> int:
        return len(self._open)

    def adopt(self, sock: socket.socket, peer: tuple[str, int], stream: Stream, said: dict[str, Any]) -> None:
        """Take over a socket whose HELLO was right. Raises hello.Refused; the socket is then still the caller's."""
        with self._lock:
            if self._stopped:
                raise hello.Refused(ErrorCode.SHUTTING_DOWN)
            if len(self._open) >= MAX_CONNECTIONS:
                raise hello.Refused(
                    ErrorCode.TOO_MANY_SESSIONS,
                    f"{MAX_CONNECTIONS} staging connections are open",
                    "use fewer executors",
                )
            mine = socket.socket(fileno=sock.detach())
            mine.setblocking(True)
            mine.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 15), (socket.TCP_KEEPCNT, 4)):
                mine.setsockopt(socket.IPPROTO_TCP, option, value)
            thread = threading.Thread(
                target=self._serve, args=(mine, peer, stream, str(said["producer"])), name="fs-stage", daemon=True
            )
            self._open[mine] = thread
            thread.start()

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            open_ = dict(self._open)
        for sock in open_:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RD)
        for thread in open_.values():
            thread.join(timeout=2 * LINGER_S)

    def _serve(self, sock: socket.socket, peer: tuple[str, int], stream: Stream, producer: str) -> None:
        about = {"producer": producer, "peer": f"{peer[0]}:{peer[1]}"}
        connection = _Connection(sock, stream, self._engine.groups, self._stages, about)
        try:
            sock.sendall(self._welcome(sock, peer, stream))
            connection.run()
        except WireError as error:
            connection.refuse(error.code, error.code.code, str(error), None)
        except StageError as error:
            code = ErrorCode.FENCED if error.code == "fenced" else ErrorCode.REJECTED
            connection.refuse(code, error.code, error.message, error.hint)
        except OSError:
            pass
        except Exception:
            log.exception("staging_connection_failed", extra={"fields": about})
            connection.refuse(ErrorCode.REJECTED, "internal", "the daemon failed; its log has the details", None)
        finally:
            connection.abandon()
            sock.close()
            with self._lock:
                self._open.pop(sock, None)

    def _welcome(self, sock: socket.socket, peer: tuple[str, int], stream: Stream) -> bytes:
        document = {
            "version": VERSION,
            "peer": list(peer),
            "local": list(sock.getsockname()[:2]),
            "stream": stream.to_dict(),
            "schema": stream.schema.hash,
            "groups": self._engine.groups,
            "block_bytes": BLOCK_BYTES,
            "max_frame_bytes": MAX_STAGE_FRAME_BYTES,
        }
        return json_frame(FrameType.ACK, STAGE_GROUP, document)


class _Connection:
    def __init__(self, sock: socket.socket, stream: Stream, groups: int, stages: Stages, about: dict[str, Any]) -> None:
        self._sock = sock
        self._stream = stream
        self._groups = groups
        self._stages = stages
        self._about = about
        self._stage: Stage | None = None
        self._pages = page_memory(HEADER_BYTES)  # a frame: its header, then its payload

    def run(self) -> None:
        """Until the peer closes. Raises WireError, StageError, OSError."""
        while True:
            header = Header.unpack(self._receive(0, HEADER_BYTES).tobytes())
            if header.group != STAGE_GROUP:
                raise WireError(ErrorCode.WRONG_GROUP, f"group {header.group} on a staging connection")
            if header.type is FrameType.DATA:
                self._data(header)
            elif header.type is FrameType.STAGE:
                self._begin(header)
            elif header.type is FrameType.EOS:
                self._finish(header)
            else:
                raise WireError(ErrorCode.BAD_TYPE, f"{header.type.name} on a staging connection")

    def _receive(self, start: int, n: int) -> Bytes:
        """`n` bytes into the frame's memory, valid until the next call. ConnectionResetError at the end."""
        found = self._room(start, n)
        self._fill(found.data)
        return found

    def _receive_checked(self, header: Header) -> tuple[Bytes, int]:
        """The payload, and the CRC32C of the frame: taken piece by piece, while the bytes are in the cache."""
        found = self._room(HEADER_BYTES, header.payload_bytes)
        view, crc = found.data, stage_block.crc_of_header(header)
        for at in range(0, len(view), RECEIVE_BYTES):
            piece = view[at : at + RECEIVE_BYTES]
            self._fill(piece)
            crc = crc32c(piece, crc)
        return found, crc

    def _room(self, start: int, n: int) -> Bytes:
        if len(self._pages) < start + n:
            larger = page_memory(start + n)
            larger[:start] = self._pages[:start]
            self._pages = larger
        return self._pages[start : start + n]

    def _fill(self, view: memoryview) -> None:
        at = 0
        while at < len(view):
            got = self._sock.recv_into(view[at:], len(view) - at, socket.MSG_WAITALL)
            if got == 0:
                raise ConnectionResetError("closed by the peer")
            at += got

    def _begin(self, header: Header) -> None:
        if self._stage is not None:
            raise WireError(ErrorCode.BAD_TYPE, f"STAGE while stage {self._stage.id} is open")
        if header.payload_bytes > MAX_HELLO_BYTES:
            raise WireError(ErrorCode.BAD_LENGTH, f"STAGE has {header.payload_bytes} bytes")
        try:
            said = json.loads(self._receive(HEADER_BYTES, header.payload_bytes).tobytes())
        except (ValueError, RecursionError) as error:
            raise StageError(f"the payload of STAGE is not JSON: {error}", code="bad_stage") from None
        stage_id = said.get("stage") if isinstance(said, dict) else None
        self._stage = self._stages.begin(stage_id, self._stream.name, self._about)
        self._sock.sendall(json_frame(FrameType.ACK, STAGE_GROUP, {"stage": stage_id}))

    def _open_stage(self) -> Stage:
        if self._stage is None:
            raise WireError(ErrorCode.BAD_TYPE, "no stage is open: STAGE comes first")
        return self._stage

    def _data(self, header: Header) -> None:
        stage = self._open_stage()
        stage_block.check_header(header)
        if header.sequence != stage.rows:
            raise WireError(ErrorCode.SEQUENCE_GAP, f"row {header.sequence} came, {stage.rows} was wanted")
        self._stages.wait_for_room(stage, header.payload_bytes)
        payload, crc = self._receive_checked(header)
        if crc != header.crc32c:
            raise WireError(ErrorCode.BAD_CRC, "the CRC32C of a block is wrong")
        block = stage_block.decode(header, payload, self._stream.schema.row_bytes, self._groups)
        stage_block.check_groups(block, self._stream, self._groups)
        span = stage_block.time_span(block, self._stream)
        self._stages.append(stage, block, span, self._pages, HEADER_BYTES + header.payload_bytes)

    def _finish(self, header: Header) -> None:
        stage = self._open_stage()
        if header.payload_bytes:
            raise WireError(ErrorCode.BAD_LENGTH, "EOS has a payload")
        receipt = self._stages.finish(stage, header.value)
        self._stage = None
        self._sock.sendall(json_frame(FrameType.ACK, STAGE_GROUP, receipt, sequence=stage.rows))

    def abandon(self) -> None:
        """The connection ends in the middle of a stage: nobody will ever name it."""
        if self._stage is not None:
            self._stages.drop(self._stage.id, "its connection was lost before it was finished")
            self._stage.file.discard()

    def refuse(self, code: ErrorCode, word: str, message: str, hint: str | None) -> None:
        """An ERROR frame, then a while for the peer to read it (a close with unread data resets)."""
        fields = {"why": word, "message": message, **self._about}
        log.warning("stage_refused", extra={"fields": fields})
        document = {"code": word, "message": message, "hint": hint}
        with contextlib.suppress(OSError):
            self._sock.settimeout(LINGER_S)
            self._sock.sendall(json_frame(FrameType.ERROR, STAGE_GROUP, document, value=int(code)))
            self._sock.shutdown(socket.SHUT_WR)
            left = 4 * MAX_STAGE_FRAME_BYTES
            while left > 0 and (got := self._sock.recv_into(self._pages.data)):
                left -= got
