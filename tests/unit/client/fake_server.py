"""A small threaded server that speaks wire protocol v1, keeps every row, and misbehaves on request."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections import defaultdict
from typing import Any

from flexstream.rows.stream import Stream
from flexstream.wire.frames import (
    CONTROL_GROUP,
    HEADER_BYTES,
    ErrorCode,
    Flags,
    FrameType,
    Header,
    bitmap_groups,
    error_frame,
    frame,
    frame_crc,
    json_frame,
    signed,
)


class FakeServer:
    """Rows are in `rows[group]` (packed bytes); what else came is in `events[group]`, in order."""

    def __init__(self, stream: Stream, *, groups: int = 8, rows_per_frame: int = 64, port: int = 0) -> None:
        self.stream = stream
        self.groups = groups
        self.rows_per_frame = rows_per_frame
        self.rows: dict[int, bytearray] = defaultdict(bytearray)
        self.events: dict[int, list[tuple[str, int]]] = defaultdict(list)
        self.hellos: list[dict[str, Any]] = []
        self.sessions: set[str] = set()
        self.next_row: dict[tuple[str, int], int] = defaultdict(int)
        self.opened: set[int] = set()
        self.ended: set[int] = set()
        self.errors: list[str] = []
        # Misbehaviour: change these at any time.
        self.refuse: ErrorCode | None = None  # answer to the next HELLOs
        self.refuse_data: ErrorCode | None = None  # on data connections only
        self.drop_after: dict[int, list[int]] = {}  # group: close after so many bytes of the connection, in turn
        self.ack = True
        self.reading = threading.Event()
        self.reading.set()
        self.final_ack = True
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", port), backlog=512)
        self.port = self._listener.getsockname()[1]
        self.address = f"tcp://127.0.0.1:{self.port}"
        self._closed = False
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> FakeServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening and cut every connection (a crash, as seen from outside)."""
        self._closed = True
        self.reading.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def cut(self) -> None:
        with self._lock:
            sockets, self._sockets = self._sockets, []
        for sock in sockets:
            try:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def forget(self) -> None:
        """A restart without memory: no sessions, no sequences."""
        with self._lock:
            self.sessions.clear()
            self.next_row.clear()

    def total_rows(self) -> int:
        with self._lock:
            return sum(len(data) for data in self.rows.values()) // self.stream.schema.row_bytes

    def watermarks(self, group: int) -> list[int]:
        return [value for kind, value in self.events[group] if kind == "watermark"]

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                self._sockets.append(sock)
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            with sock:
                _Connection(self, sock).run()
        except (OSError, EOFError):
            pass
        except Exception as error:
            self.errors.append(repr(error))


class _Connection:
    def __init__(self, server: FakeServer, sock: socket.socket) -> None:
        self.server = server
        self.sock = sock
        self.budget: int | None = None
        self.producer = ""
        self.crc = False
        self.greeted = False
        self.partial: Header | None = None

    def read(self, n: int) -> bytes:
        out = bytearray()
        while len(out) < n:
            if self.greeted:
                self.server.reading.wait()
            want = n - len(out)
            if self.budget is not None:
                want = min(want, self.budget)
                if want == 0:
                    self.keep_partial(out)
                    raise EOFError
            chunk = self.sock.recv(want)
            if not chunk:
                self.keep_partial(out)
                raise EOFError
            out += chunk
            if self.budget is not None:
                self.budget -= len(chunk)
        return bytes(out)

    def keep_partial(self, received: bytearray) -> None:
        """The whole rows of a frame that was cut in the middle count, unless it has a CRC."""
        header, self.partial = self.partial, None
        if header is not None and not self.crc:
            self.take(header, bytes(received))

    def take(self, header: Header, payload: bytes) -> None:
        size = self.server.stream.schema.row_bytes
        rows = len(payload) // size
        key = (self.producer, header.group)
        with self.server._lock:
            wanted = self.server.next_row[key]
            if header.sequence > wanted:
                self.server.errors.append(f"gap: group {header.group} wants {wanted}, got {header.sequence}")
                self.sock.sendall(error_frame(ErrorCode.SEQUENCE_GAP, "gap", group=header.group))
                raise EOFError
            skip = wanted - header.sequence
            if skip < rows:
                self.server.rows[header.group] += payload[skip * size : rows * size]
                self.server.next_row[key] = header.sequence + rows

    def run(self) -> None:
        server = self.server
        header = Header.unpack(self.read(HEADER_BYTES))
        assert header.type is FrameType.HELLO, header
        hello = json.loads(self.read(header.payload_bytes))
        server.hellos.append({"group": header.group, **hello})
        self.producer, self.crc = hello["producer"], hello.get("crc", False)
        control = header.group == CONTROL_GROUP
        refuse = server.refuse or (None if control else server.refuse_data)
        if refuse is None and not control and self.producer not in server.sessions:
            refuse = ErrorCode.NO_SESSION
        if refuse is not None:
            self.sock.sendall(error_frame(refuse, f"no: {refuse.code}", "try another", group=header.group))
            return
        document: dict[str, Any] = {
            "version": 1,
            "peer": self.sock.getpeername(),
            "local": self.sock.getsockname(),
        }
        if control:
            document |= {
                "stream": server.stream.to_dict(),
                "schema": server.stream.schema.hash,
                "groups": server.groups,
                "frame_bytes": 32768,
                "max_frame_bytes": 1 << 20,
                "epoch": hello["epoch"],
            }
        with server._lock:
            if control:
                server.sessions.add(self.producer)
            else:
                server.opened.add(header.group)
            wanted = server.next_row[(self.producer, header.group)] if not control else 0
        self.sock.sendall(
            json_frame(FrameType.ACK, header.group, document, value=server.rows_per_frame, sequence=wanted)
        )
        self.greeted = True
        drops = server.drop_after.get(header.group)
        self.budget = drops.pop(0) if drops else None
        while self.step(header.group):
            pass

    def step(self, group: int) -> bool:
        server = self.server
        header = Header.unpack(self.read(HEADER_BYTES))
        if header.group != group:
            server.errors.append(f"frame for {header.group} on the connection of {group}")
        self.partial = header if header.type is FrameType.DATA else None
        payload = self.read(header.payload_bytes)
        self.partial = None
        if header.type is FrameType.DATA:
            if header.payload_bytes != header.value * server.stream.schema.row_bytes:
                server.errors.append("bad_row_count")
            if self.crc and (header.flags != Flags.CRC or header.crc32c != frame_crc(header, payload)):
                server.errors.append("bad_crc")
            self.take(header, payload)
            server.events[group].append(("data", header.value))
        elif header.type is FrameType.WATERMARK:
            server.events[group].append(("watermark", signed(header.value)))
        else:
            server.events[group].append((header.type.name.lower(), header.value))
        if group == CONTROL_GROUP:
            return self.control(header, payload)
        if server.ack:
            with server._lock:
                wanted = server.next_row[(self.producer, group)]
            self.sock.sendall(frame(FrameType.ACK, group, sequence=wanted))
        if header.type is FrameType.EOS:
            server.ended.add(group)
            return False
        return True

    def control(self, header: Header, payload: bytes) -> bool:
        server = self.server
        if header.type is FrameType.EOS:
            waiting = bitmap_groups(payload, server.groups)
            server.events[CONTROL_GROUP].append(("bitmap", int.from_bytes(payload, "little")))
            while server.final_ack and not server._closed and not waiting <= server.ended:
                time.sleep(0.001)
            if server.final_ack:
                self.sock.sendall(frame(FrameType.ACK, CONTROL_GROUP))
            else:
                while not server._closed:
                    time.sleep(0.01)
            return False
        if header.type is FrameType.WATERMARK:
            server.events[CONTROL_GROUP].append(("bitmap", int.from_bytes(payload, "little")))
        return True
