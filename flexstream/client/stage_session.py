"""The sending half of staging: rows in blocks on one connection, a receipt at the end of each stage.

A stage lives and dies with its connection: when that breaks, the stage is lost and the caller sends the rows again
under a fresh UUID, which is what Spark does with a task that failed. Between stages a broken connection is replaced
without a word.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import time
from typing import Any

from flexstream.client.discovery import Address, find_data_port
from flexstream.client.handshake import Hello, Welcome, greet, refusal, retryable
from flexstream.errors import ConfigError, ConnectError, FlexStreamError, ProtocolError
from flexstream.rows.stream import Stream
from flexstream.wire import stage_block
from flexstream.wire.frames import HEADER_BYTES, STAGE_GROUP, FrameType, Header, WireError, frame, json_frame

FIRST_PAUSE_S = 0.05
ANSWER_S = 120.0  # how long the server may take to read a block, or to make a stage durable
MAX_ANSWER_BYTES = 1 << 22
IOV_MAX = 1024


class StageSession:
    """A staging producer's connection, and the stage that is open on it.

    Connects in the constructor. Raises ConnectError (nobody answers) or ProtocolError (the server refuses).
    """

    def __init__(
        self, address: Address, stream: str, token: str | None, producer_id: str, expected: Stream | None,
        connect_timeout_s: float,
    ) -> None:  # fmt: skip
        self._address = address
        self._token = token
        self._timeout_s = connect_timeout_s
        schema = expected.schema if expected is not None else None
        self._hello = Hello(
            stream, producer_id, 1, token, schema.row_bytes if schema else None, schema.hash if schema else None, True
        )
        self.stage: str | None = None
        self.state = "connecting"
        self.reconnects = 0
        self._sock: socket.socket | None = None
        self._totals = {"rows": 0, "bytes": 0, "frames": 0, "stages": 0, "waited_s": 0.0}
        document = self._connect()
        try:
            self.stream = Stream.from_dict(document["stream"])
            self.groups = int(document["groups"])
            wanted = int(document["block_bytes"])
        except (KeyError, TypeError, ValueError, FlexStreamError) as error:
            self.abort()
            raise ProtocolError(f"the ACK of {self.data} does not describe the stream: {error}") from error
        self._row_bytes = self.stream.schema.row_bytes
        self._rows = stage_block.row_pool(self.stream, self.groups, wanted)
        self._sent = 0  # rows of the stage

    # Connecting ---------------------------------------------------------------------------------------------

    def _connect(self) -> dict[str, Any]:
        deadline = time.monotonic() + self._timeout_s
        pause = FIRST_PAUSE_S
        while True:
            left = max(deadline - time.monotonic(), 0.05)
            try:
                welcome = self._greet(left)
                break
            except (OSError, FlexStreamError) as error:
                if not retryable(error):
                    raise
                if time.monotonic() + pause >= deadline:
                    reason = error.message if isinstance(error, FlexStreamError) else str(error)
                    raise ConnectError(
                        f"tried to reach {self._address} for {self._timeout_s:g} s (stream "
                        f"{self._hello.stream!r}, staging) and gave up; the last error: {reason}",
                        code="unreachable",
                        hint=getattr(error, "hint", None) or "is the daemon running at this address?",
                    ) from error
            time.sleep(pause)
            pause = min(pause * 2, 0.5)
        welcome.sock.setblocking(True)
        welcome.sock.settimeout(ANSWER_S)
        self._sock = welcome.sock
        self.state = "connected"
        return welcome.document

    def _greet(self, left: float) -> Welcome:
        address = self._address
        if not address.direct:
            address = find_data_port(address, self._hello.stream, self._token, left)
        self.data = address
        welcomes, errors = greet(address, self._hello, [STAGE_GROUP], left)
        if errors:
            raise errors[STAGE_GROUP]
        return welcomes[STAGE_GROUP]

    # Stages -------------------------------------------------------------------------------------------------

    def begin(self, stage: str) -> None:
        if self.stage is not None:
            raise ConfigError(f"stage {self.stage} is still open", code="stage_open", hint="call finish_stage() first")
        self._check_not_closed()
        try:
            self._begin(stage)
        except (OSError, EOFError, ConnectError):  # it broke since the last stage: nothing was on it
            self._disconnect()
            self.reconnects += 1
            self._check_schema(self._connect())
            try:
                self._begin(stage)
            except (OSError, EOFError) as error:
                raise self._lost(stage, error) from error
        self.stage = stage
        self._rows.reset()
        self._sent = 0

    def _begin(self, stage: str) -> None:
        if self._sock is None:
            raise ConnectionResetError("not connected")
        self._sock.sendall(json_frame(FrameType.STAGE, STAGE_GROUP, {"stage": stage}))
        self._answer()

    def _check_schema(self, document: dict[str, Any]) -> None:
        if (document.get("schema"), document.get("groups")) != (self.stream.schema.hash, self.groups):
            self.abort()
            raise ProtocolError(
                f"the schema of stream {self.stream.name!r} on {self.data} has changed",
                code="schema_mismatch",
                hint="make a new Producer",
            )

    def send(self, flat: stage_block.Bytes) -> None:
        """Packed rows, as bytes. They are copied; full blocks leave at once."""
        stage = self._open_stage()
        n, at = len(flat) // self._row_bytes, 0
        try:
            while (at := self._rows.put(flat, at)) < n:
                self._flush()
        except (OSError, EOFError) as error:
            raise self._lost(stage, error) from error

    def flush(self) -> None:
        """Send what was collected."""
        stage = self._open_stage()
        try:
            self._flush()
        except (OSError, EOFError) as error:
            raise self._lost(stage, error) from error

    def _has_come(self) -> bool:
        assert self._sock is not None
        waiting = select.poll()  # select() knows no descriptor past 1023
        waiting.register(self._sock, select.POLLIN)
        return bool(waiting.poll(0))

    def _flush(self) -> None:
        rows = self._rows.rows
        if rows == 0:
            return
        assert self._sock is not None
        if self._has_come():
            self._answer()  # nothing is due now: it is an ERROR, or the end
        pieces = stage_block.encode(self._rows, self._row_bytes, self._sent)
        began = time.monotonic()
        size = _send_all(self._sock, pieces)
        self._rows.reset()
        self._totals["waited_s"] += time.monotonic() - began
        self._sent += rows
        self._totals["rows"] += rows
        self._totals["bytes"] += size
        self._totals["frames"] += 1

    def finish(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Returns when the stage is durable: {"stage", "rows", "bytes", "groups": {group: rows}}."""
        stage = self._open_stage()
        try:
            self._flush()
            assert self._sock is not None
            self._sock.settimeout(ANSWER_S if timeout_s is None else timeout_s)
            self._sock.sendall(frame(FrameType.EOS, STAGE_GROUP, value=self._sent))
            receipt = self._answer()
        except (OSError, EOFError) as error:
            raise self._lost(stage, error) from error
        if receipt.get("stage") != stage or receipt.get("rows") != self._sent:
            self.abort()
            raise ProtocolError(f"the receipt {receipt!r:.200} does not belong to stage {stage}", code="bad_answer")
        self._sock.settimeout(ANSWER_S)
        self.stage = None
        self._totals["stages"] += 1
        return {**receipt, "groups": {int(group): rows for group, rows in receipt["groups"].items()}}

    def _open_stage(self) -> str:
        self._check_not_closed()
        if self.stage is None:
            raise ConfigError("no stage is open", code="no_stage", hint="call begin_stage(uuid) first")
        return self.stage

    def _check_not_closed(self) -> None:
        if self.state == "closed":
            raise ConnectError("the producer is closed", code="closed", hint="make a new Producer")

    def _answer(self) -> dict[str, Any]:
        """The next frame: the document of an ACK. An ERROR is raised as what it says."""
        header = Header.unpack(self._exactly(HEADER_BYTES))
        if header.payload_bytes > MAX_ANSWER_BYTES:
            raise ProtocolError(f"the server's answer of {header.payload_bytes} bytes is too large", code="bad_answer")
        payload = self._exactly(header.payload_bytes)
        if header.type is FrameType.ERROR:
            self.stage = None
            self._disconnect()
            raise refusal(header.value, payload)
        try:
            document = json.loads(payload)
        except ValueError:
            document = None
        if header.type is not FrameType.ACK or not isinstance(document, dict):
            raise ProtocolError(f"the server answered with a {header.type.name} frame", code="bad_answer")
        return document

    def _exactly(self, n: int) -> bytes:
        assert self._sock is not None
        data = b""
        while len(data) < n:
            part = self._sock.recv(n - len(data))
            if not part:
                raise EOFError("the server closed the connection")
            data += part
        return data

    def _lost(self, stage: str, error: BaseException) -> FlexStreamError:
        """The connection broke in mid-stage. An ERROR that the server managed to send says more than a reset."""
        self.stage = None
        said: FlexStreamError | None = None
        if self._sock is not None and not isinstance(error, EOFError):
            with contextlib.suppress(OSError, EOFError, WireError):
                self._sock.settimeout(1.0)
                try:
                    while True:
                        self._answer()
                except ProtocolError as refused:
                    said = refused
        self._disconnect()
        return said or ConnectError(
            f"the connection to {self.data} broke in the middle of stage {stage}: {error or type(error).__name__}",
            code="stage_lost",
            hint="send the rows again under a fresh UUID (Spark runs the task again)",
        )

    # The end ------------------------------------------------------------------------------------------------

    def _disconnect(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None
        if self.state != "closed":
            self.state = "waiting"

    def abort(self) -> None:
        """Close. A stage that is not finished is dropped by the server."""
        self._disconnect()
        self.stage = None
        self.state = "closed"

    def stats(self) -> dict[str, Any]:
        return {
            "state": self.state,
            "stream": self.stream.name,
            "producer": self._hello.producer,
            "data": str(self.data),
            "groups": self.groups,
            "stage": self.stage,
            "connections": 0 if self._sock is None else 1,
            "reconnects": self.reconnects,
            **self._totals,
        }


def _send_all(sock: socket.socket, pieces: list[Any]) -> int:
    """Send the pieces in few calls; returns their bytes."""
    left = [memoryview(piece) for piece in pieces]
    total = sum(map(len, left))
    while left:
        sent = sock.sendmsg(left[:IOV_MAX])
        done = 0
        while done < len(left) and sent >= len(left[done]):
            sent -= len(left[done])
            done += 1
        left = left[done:]
        if sent:
            left[0] = left[0][sent:]
    return total
