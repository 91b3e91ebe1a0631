"""A producer's life on a stream: registered on the control connection, through reconnects, to EOS.

One service thread per session owns everything that connects. Callers of `Producer.send` only fill lanes; a
lane that needs a connection, or has lost it, wakes this thread. All waiting is in native code without the
GIL.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from flexstream import durations
from flexstream.addresses import is_loopback
from flexstream.client.discovery import Address, find_data_port
from flexstream.client.handshake import Hello, Welcome, greet, greet_control, refusal, retryable
from flexstream.client.lane_requests import LaneKeeper
from flexstream.client.steering import Ports
from flexstream.cython_ext.produce import lanes
from flexstream.cython_ext.produce.further_lanes import MOST
from flexstream.cython_ext.produce.lane_facts import LaneFault
from flexstream.cython_ext.produce.sender import Sender
from flexstream.errors import ConnectError, FlexStreamError, ProtocolError
from flexstream.rows.stream import Stream
from flexstream.wire.frames import FRAME_BYTES, HEADER_BYTES, ErrorCode

log = logging.getLogger("flexstream.producer")

CONTROL = -1  # the control connection's number in the Sender
FIRST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 2.0
STEADY_S = 1.0  # a connection that lived this long ends a series of failures
DEFAULT_REPLAY_BYTES = 256 * 1024
MOST_AT_ONCE = 4  # full frames in one system call: more would save little
PACKET_BYTES = 65_483  # the loopback's largest TCP payload; other links cut into smaller ones anyhow


@dataclass(frozen=True, slots=True)
class Settings:
    """How a session behaves; immutable. See `Producer` for the meaning of each."""

    address: Address
    stream: str
    token: str | None
    producer_id: str
    epoch: int
    linger_ms: float
    frame_bytes: int | None
    crc: bool | None
    explicit_watermark: bool
    max_disorder_ns: int | None
    connect_timeout_s: float
    retry_s: float
    replay_bytes: int
    lanes: int = MOST


class Session:
    """A producer's life on a stream: its connections, and the thread that mends them.

    Connects in the constructor. Raises ConnectError (nobody answers) or ProtocolError (the server refuses).
    """

    def __init__(self, settings: Settings, expected: Stream | None = None) -> None:
        self.settings = settings
        self.state = "connecting"
        self.error: FlexStreamError | None = None
        self.reconnects = 0
        self.rows_lost_at_most = 0
        self._last_error: BaseException | None = None
        self._closing = False
        self._attempts = 0
        self._down_since: float | None = None
        self._steady_at = 0.0
        self._retry_at = 0.0
        self._ports = Ports()
        self._hello = Hello(
            settings.stream,
            settings.producer_id,
            settings.epoch,
            settings.token,
            expected.schema.row_bytes if expected else None,
            expected.schema.hash if expected else None,
            bool(settings.crc),
            ack_bytes=settings.replay_bytes // 4,
            lanes=min(settings.lanes, MOST),
        )
        welcome = self._first_contact()
        try:
            self.stream = Stream.from_dict(welcome.document["stream"])
            self.groups = int(welcome.document["groups"])
        except (KeyError, TypeError, ValueError, FlexStreamError) as error:
            welcome.sock.close()
            raise ProtocolError(f"the control ACK of {self.data} does not describe the stream: {error}") from error
        self._hello = replace(self._hello, row_bytes=self.stream.schema.row_bytes, schema=self.stream.schema.hash)
        self.sender = self._make_sender(welcome)
        self._lanes = LaneKeeper(self.sender, self.groups, settings.lanes)
        self._lanes.learn(welcome.document)
        self._ports.learn(welcome.document, welcome.sock)
        self.sender.attach(CONTROL, welcome.sock.detach(), 0)
        self.state = "connected"
        self._thread = threading.Thread(target=self._run, name=f"flexstream-{settings.stream}", daemon=True)
        self._thread.start()

    # ---- the beginning -------------------------------------------------------------------------------

    def _first_contact(self) -> Welcome:
        deadline = time.monotonic() + self.settings.connect_timeout_s
        pause = FIRST_PAUSE_S
        while True:
            left = max(deadline - time.monotonic(), 0.05)
            try:
                self.data = self._find(left)
                if self.settings.crc is None:
                    self._hello = replace(self._hello, crc=not is_loopback(self.data.host))
                welcome, self.data = greet_control(self.data, self._hello, left)
                return welcome
            except (OSError, FlexStreamError) as error:
                if not retryable(error):
                    raise
                if time.monotonic() + pause >= deadline:
                    raise self._unreachable(error, self.settings.connect_timeout_s) from error
            time.sleep(pause)
            pause = min(pause * 2, 0.5)

    def _find(self, timeout_s: float) -> Address:
        s = self.settings
        return s.address if s.address.direct else find_data_port(s.address, s.stream, s.token, timeout_s)

    def _unreachable(self, error: BaseException, tried_s: float) -> ConnectError:
        reason = error.message if isinstance(error, FlexStreamError) else str(error) or type(error).__name__
        where = getattr(self, "data", self.settings.address)
        return ConnectError(
            f"tried to reach {where} for {tried_s:g} s (stream {self.settings.stream!r}, "
            f"HELLO with back-off) and gave up; the last error: {reason}",
            code="unreachable",
            hint=getattr(error, "hint", None) or "is the daemon running at this address? Try `flexstream doctor`",
        )

    def _make_sender(self, welcome: Welcome) -> Sender:
        s = self.settings
        row_bytes = self.stream.schema.row_bytes
        server_frame = int(welcome.document.get("frame_bytes") or FRAME_BYTES)
        rows = welcome.rows_per_frame or server_frame // row_bytes
        if s.frame_bytes is None:
            # A row or two less than the server's block holds, when two frames and a watermark then fill one packet.
            two = (PACKET_BYTES - 3 * HEADER_BYTES) // 2 // row_bytes
            rows = two if two < rows <= FRAME_BYTES // row_bytes else rows
        else:
            limit = server_frame if self._hello.crc else int(welcome.document.get("max_frame_bytes") or server_frame)
            rows = min(s.frame_bytes, limit) // row_bytes
        rows = max(rows, 1)
        unit_ns = self.stream.unit_ns
        disorder = self.stream.max_disorder if s.max_disorder_ns is None else -(-s.max_disorder_ns // unit_ns)
        ring = max(s.replay_bytes // (rows * row_bytes), 4)
        at_once = ring // 4  # frames: a quarter is being filled, another sent, and two are on their way or acknowledged
        self._hello = replace(self._hello, ack_bytes=at_once * rows * row_bytes if s.replay_bytes else 0)
        return Sender(
            self.stream.key_hasher,
            groups=self.groups,
            row_bytes=row_bytes,
            rows_per_frame=rows,
            time_offset=self.stream.time_field.offset,
            ring=ring,
            linger_ns=int(s.linger_ms * 1e6),
            crc=self._hello.crc,
            acks=s.replay_bytes > 0,
            send_frames=min(at_once, MOST_AT_ONCE),
            auto_watermark=not s.explicit_watermark,
            max_disorder=disorder,
            max_future_ns=_future_ns(welcome.document),
            unit_ns=unit_ns,
        )

    # ---- the service thread --------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while True:
                pause_ms = int((self._retry_at - time.monotonic()) * 1000)
                watch = pause_ms <= 0
                reasons = self.sender.serve(500 if watch else pause_ms + 1, watch, watch)
                if reasons & lanes.STOPPED:
                    return
                if reasons & lanes.ASKED:
                    self._lanes.read_requests()
                if reasons & (lanes.WANTED | lanes.BROKEN) or not watch:
                    self._repair()
        except Exception as error:
            log.exception("the service thread of producer %s failed", self.settings.producer_id)
            self._fail(ConnectError(f"the producer's service thread failed: {error!r}", code="internal"))

    def _repair(self) -> None:
        """Connect what needs connecting. One attempt; a failure sets the time of the next."""
        faults = self.sender.faults()
        for fault in faults:
            if fault.value:
                error = refusal(fault.value, fault.payload)
                if not retryable(error):
                    self._fail(error)
                    return
        broken = [fault.lane for fault in faults]
        if broken and self._down_since is None:
            now = time.monotonic()
            if now >= self._steady_at:
                self._attempts = 0
            self._down_since = now
            self.state = "waiting"
            self._last_error = _describe(faults[0])
            log.warning("%d connection(s) to %s lost (%s); reconnecting", len(broken), self.data, self._last_error)
            if self._attempts:  # it broke again at once: do not spin
                self._postpone(self._last_error)
                return
        try:
            if CONTROL in broken:
                self.data = self._find(self.settings.connect_timeout_s)
                hello = replace(self._hello, lanes_open=self._lanes.open_numbers())
                welcome, self.data = greet_control(self.data, hello, self.settings.connect_timeout_s)
                self._ports.learn(welcome.document, welcome.sock)
                self.sender.attach(CONTROL, welcome.sock.detach(), 0)
                if not self._lanes.learn(welcome.document) and hello.lanes_open:
                    raise ProtocolError(
                        f"{self.data} asked for further lanes before, but does not know them any more; {self.unsent()}",
                        code="no_lanes",
                        hint="was the daemon replaced by an older one? Make a new Producer",
                    )
            groups = [group for group in broken if group != CONTROL] + self.sender.wanted_groups()
            errors = self._connect(groups)
        except (OSError, FlexStreamError) as error:
            errors = [error]
        if self.error is not None:
            return
        if errors:
            self._judge(errors)
        elif broken:
            self.reconnects += len(broken)
            self._attempts += 1
            self._down_since = None
            self._steady_at = time.monotonic() + STEADY_S
            self.state = "connected"
            log.info("reconnected to %s: %d connection(s)", self.data, len(broken))

    def _connect(self, groups: list[int]) -> list[Exception]:
        if not groups:
            return []
        names = self._lanes.names
        welcomes, errors = greet(self.data, self._hello, groups, self.settings.connect_timeout_s, self._ports, names)
        for index in [key for key, error in errors.items() if key in names and _is_refusal(error)]:
            where = self._lanes.describe(index)
            if self._lanes.refused(index):
                log.info("%s stays closed: %s", where, errors.pop(index))
        forgotten: dict[int, int] = {}
        for group, welcome in welcomes.items():
            self._ports.connected(welcome.document, welcome.promise)
            fd = welcome.sock.detach()
            lost = self.sender.attach(group, fd, welcome.next_row)
            if lost < 0:
                os.close(fd)
                self._fail(
                    ProtocolError(
                        f"{self._lanes.describe(group)}: the server wants row {welcome.next_row}, which was never sent",
                        code=ErrorCode.SEQUENCE_GAP.code,
                        hint="does another process use this producer_id?",
                    )
                )
            elif lost:
                forgotten[group] = lost
        if forgotten:
            self._report_forgotten(forgotten)
        self._lanes.settle()
        return list(errors.values())

    def _report_forgotten(self, rows: dict[int, int]) -> None:
        """The server does not know the session any more: of the rows that it had acknowledged those are lost whose
        windows had not fired yet, and which these are only the server could have told."""
        total = sum(rows.values())
        self.rows_lost_at_most += total
        promised = self.sender.stats()["watermark"]
        reached = None if promised is None else promised + self.stream.max_disorder
        until = "now" if reached is None else str(np.array([reached]).view(f"M8[{self.stream.time_unit}]")[0])
        log.error(
            "%s restarted and has forgotten this session. It had acknowledged %d rows in %d groups; rows of windows "
            "that had not fired are lost: send them again if you have them. From now on, results of windows that began "
            "before %s may be incomplete",
            self.data, total, len(rows), until,
        )  # fmt: skip

    def _judge(self, errors: list[Exception]) -> None:
        for error in errors:
            # A server that knew the stream and came back may not have it again yet.
            starting = isinstance(error, ProtocolError) and error.code == ErrorCode.UNKNOWN_STREAM.code
            if not retryable(error) and not starting:
                assert isinstance(error, FlexStreamError)
                self._fail(error)
                return
        if any(isinstance(error, ProtocolError) and error.code == "no_session" for error in errors):
            self.sender.sever(CONTROL)  # the server forgot us: register again
        self._postpone(errors[0])

    def _postpone(self, error: BaseException) -> None:
        now = time.monotonic()
        self.state = "waiting"
        self._last_error = error
        if self._down_since is None:
            self._down_since = now
        if now - self._down_since >= self.settings.retry_s:
            gone = self._unreachable(error, self.settings.retry_s)
            self._fail(ConnectError(f"{gone.message}; {self.unsent()}", code=gone.code, hint=gone.hint))
            return
        pause = min(FIRST_PAUSE_S * 2 ** min(self._attempts, 10), LONGEST_PAUSE_S)
        self._attempts += 1
        self._retry_at = now + pause * random.uniform(0.75, 1.25)

    def _fail(self, error: FlexStreamError) -> None:
        self.error = self.error or error
        self.state = "failed"
        if not self._closing:
            log.error("producer %s on %s failed: %s", self.settings.producer_id, self.data, error.message)
        self.sender.close_all()

    # ---- for Producer --------------------------------------------------------------------------------

    def unsent(self) -> str:
        """Names the rows that the server has not acknowledged."""
        pending = self.sender.pending()
        if not pending:
            return "the server has acknowledged every row"
        total = sum(end - first for first, end in pending.values())
        first = sorted(pending.items())[:4]
        named = ", ".join(f"{self._lanes.describe(g)}: rows {a}..{b - 1}" for g, (a, b) in first)
        more = f" and {len(pending) - 4} more groups" if len(pending) > 4 else ""
        return f"the server has not acknowledged {total} rows ({named}{more})"

    def check(self) -> None:
        """Raises the error that ended the session, if one did."""
        if self.error is not None:
            raise self.error
        if self.state == "closed":
            raise ConnectError("the producer is closed", code="closed", hint="make a new Producer")

    def flush(self, timeout_s: float | None) -> None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_ms = 100 if deadline is None else int(min((deadline - time.monotonic()) * 1000, 100))
            if self.sender.flush(max(left_ms, 0)):
                return
            self.check()
            if left_ms <= 0:
                raise ConnectError(f"after {timeout_s:g} s of flush {self.unsent()}", code="timeout", hint=self._why())

    def _why(self) -> str:
        if self.state == "waiting":
            return f"the server cannot be reached ({self._last_error}); the producer keeps trying"
        return "the server is slow: use a longer timeout"

    def end(self, timeout_s: float) -> None:
        """Flush, EOS everywhere, wait for the final ACK, close. ConnectError when that does not come."""
        if self.state in ("closed", "failed"):
            self.abort()
            return
        deadline = time.monotonic() + timeout_s
        try:
            while not self.sender.put_end():
                self._pause(deadline)
            self._closing = True
            while not self.sender.control_acks():
                self._pause(deadline)
            self.sender.flush(0)  # reads the last acknowledgements, for the statistics
        finally:
            self.abort()

    def _pause(self, deadline: float) -> None:
        self.check()
        if time.monotonic() >= deadline:
            raise ConnectError(
                f"close gave up: {self.data} sent no final ACK in time; {self.unsent()}",
                code="timeout",
                hint=self._why(),
            )
        time.sleep(0.001)

    def abort(self) -> None:
        """Close without a word; the server keeps the session's place until it times out, or EOS was said."""
        self._closing = True
        self.sender.close_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=self.settings.connect_timeout_s + 1)
        if self.state != "failed":
            self.state = "closed"

    def stats(self) -> dict[str, Any]:
        return {
            "state": self.state,
            "stream": self.stream.name,
            "producer": self.settings.producer_id,
            "epoch": self.settings.epoch,
            "data": str(self.data),
            "groups": self.groups,
            "crc": self._hello.crc,
            **self.sender.stats(),
            **self._ports.stats(),
            "reconnects": self.reconnects,
            "rows_lost_at_most": self.rows_lost_at_most,
            "last_error": None if self._last_error is None else str(self._last_error),
        }


def _is_refusal(error: Exception) -> bool:
    """The server has heard of the lane and does not have it: then it need not be seen through to its end."""
    return isinstance(error, ProtocolError) and error.code in (
        ErrorCode.TOO_MANY_SESSIONS.code, ErrorCode.REJECTED.code,
    )  # fmt: skip


def _describe(fault: LaneFault) -> BaseException:
    if fault.value:
        return refusal(fault.value, fault.payload)
    if fault.errno:
        return OSError(fault.errno, os.strerror(fault.errno))
    return ConnectionResetError("the server closed the connection")


def _future_ns(document: dict[str, Any]) -> int | None:
    """Rows further ahead of the clock are rejected there, and must not raise the watermark. None: they are not."""
    try:
        said = document.get("max_future")
        return None if said is None else durations.parse(said)
    except FlexStreamError:
        return None
