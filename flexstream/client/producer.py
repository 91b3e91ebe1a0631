"""Sending rows from Python: partitioned, framed and sent by native code while other Python threads run."""

from __future__ import annotations

import threading
import uuid
import warnings
from types import TracebackType
from typing import Any, Literal

import numpy as np

from flexstream import durations
from flexstream.client.discovery import Address
from flexstream.client.session import DEFAULT_REPLAY_BYTES, Session, Settings
from flexstream.client.stage_session import StageSession
from flexstream.cython_ext.produce import sender as native
from flexstream.cython_ext.produce.further_lanes import MOST as MOST_LANES
from flexstream.durations import Duration
from flexstream.errors import BackPressure, ConfigError, ConnectError, FlexStreamError
from flexstream.rows.stream import TIME_LIMIT, Stream, event_time


class RingFull(BackPressure):
    """The replay buffer is full, and `on_full` is "raise". The call took `accepted` rows: send the rest again."""

    default_code = "ring_full"
    accepted: int = 0


class Producer:
    """A session on a stream: rows in, one connection per key group out.

    `address` is the daemon's control port, `"host:port"`, or its data port, `"tcp://host:port"`. `stream` is
    a name, or a Stream whose schema the server must have too.

    A row that `send` has taken is kept until the server has acknowledged it, and sent again after a
    reconnect: at most `replay_bytes` per group, then `send` waits (`on_full="block"`) or raises RingFull
    (`"raise"`). Frames leave when they are full or `linger_ms` old. With `watermark="auto"` the session's
    watermark is the largest event time of completed `send` calls minus `max_disorder`; rows within one call
    may come in any order.

    A group that is hotter than a core is served by several cores; for that the server asks for further connections of
    it, at most `lanes` at a time (0: none). Nothing else changes: rows of a group then arrive on several connections.

    Several threads may call `send`; their calls are served one at a time. Used as a context manager it ends
    the stream properly: without `close()` the server waits for this session until it times out.

    Raises ConnectError when nobody answers within `connect_timeout_s`, ProtocolError when the server refuses.
    A connection that breaks later is mended in the background for up to `retry_s` (`state` is then
    "waiting"); after that every call raises ConnectError with the rows that are not acknowledged.

    With `stage`, a fresh UUID, rows are not for queries yet: they wait at the daemon until a commit (POST
    /v1/commits) names the receipt of `finish_stage()`. `begin_stage()` starts the next one on the same connection;
    stage=True starts without one. Such a producer holds no watermark, and a stage whose connection breaks is lost:
    the call raises, and its rows go into a new one.
    """

    def __init__(
        self,
        address: str,
        *,
        stream: str | Stream,
        token: str | None = None,
        producer_id: str | None = None,
        epoch: int = 1,
        linger_ms: float = 5,
        frame_bytes: int | None = None,
        crc: bool | None = None,
        watermark: Literal["auto", "explicit"] = "auto",
        max_disorder: Duration | None = None,
        on_full: Literal["block", "raise"] = "block",
        connect_timeout_s: float = 5,
        retry_s: float = 30,
        replay_bytes: int = DEFAULT_REPLAY_BYTES,
        lanes: int = MOST_LANES,
        stage: str | Literal[True] | None = None,
    ) -> None:
        self._session: Session | None = None
        self._stages: StageSession | None = None
        _one_of("watermark", watermark, ("auto", "explicit"))
        _one_of("on_full", on_full, ("block", "raise"))
        _not_negative(linger_ms=linger_ms, retry_s=retry_s, replay_bytes=replay_bytes, lanes=lanes)
        self._blocking = on_full == "block"
        self._explicit = watermark == "explicit"
        self._send_lock = threading.Lock()
        name = stream if isinstance(stream, str) else stream.name
        expected = stream if isinstance(stream, Stream) else None
        producer_id = producer_id or str(uuid.uuid4())
        if stage is not None:
            where = Address.parse(address)
            self._stages = StageSession(where, name, token, producer_id, expected, connect_timeout_s)
            self._pack = self._stages.stream.schema.pack
            if stage is not True:
                self.begin_stage(stage)
            return
        settings = Settings(
            address=Address.parse(address),
            stream=name,
            token=token,
            producer_id=producer_id,
            epoch=epoch,
            linger_ms=linger_ms,
            frame_bytes=frame_bytes,
            crc=crc,
            explicit_watermark=self._explicit,
            max_disorder_ns=None if max_disorder is None else durations.parse(max_disorder),
            connect_timeout_s=connect_timeout_s,
            retry_s=retry_s,
            replay_bytes=replay_bytes,
            lanes=lanes,
        )
        self._session = session = Session(settings, expected)
        self._pack = session.stream.schema.pack
        self._sender = session.sender

    @property
    def _live(self) -> Session:
        if self._session is None:
            raise ConfigError("a staging producer has no session", code="staging", hint="leave out stage=")
        return self._session

    @property
    def _either(self) -> Session | StageSession:
        return self._stages if self._stages is not None else self._live

    @property
    def stream(self) -> Stream:
        """The stream as the server has it."""
        return self._either.stream

    @property
    def groups(self) -> int:
        """How many key groups the server has: the most connections that this producer will open."""
        return self._either.groups

    @property
    def state(self) -> str:
        """connecting, connected, waiting (the server is away; reconnecting), closed, failed."""
        return self._either.state

    def send(self, rows: Any, *, missing: Any = None) -> int:
        """Take rows: a numpy structured array, Arrow batch or table, pandas or polars frame, or (slow) dicts.

        Returns how many. They are on their way when it returns, not yet received: see `flush`. Raises
        SchemaError for rows that do not fit (then none is taken), RingFull, or what ended the session.
        Missing values are refused, unless `missing` says otherwise: "drop" leaves their rows out, a value takes their
        place, {field: either} chooses by field.
        """
        return self.send_packed(self._pack(rows, missing))

    def send_packed(self, packed: np.ndarray[Any, np.dtype[Any]]) -> int:
        """`send` for an array that `stream.schema.pack` made."""
        view = np.ascontiguousarray(packed).view(np.uint8)
        if self._stages is not None:
            with self._send_lock:
                self._stages.send(view.reshape(-1))
            return len(packed)
        session = self._live
        position = 0
        with self._send_lock:
            session.check()
            while len(packed):
                status, position = self._sender.send(view, position, self._blocking)
                if status == native.DONE:
                    break
                session.check()
                if not self._blocking:
                    raise self._full(position, len(packed))
        return len(packed)

    def _full(self, accepted: int, total: int) -> RingFull:
        waiting = "cannot be reached" if self.state == "waiting" else "does not keep up"
        error = RingFull(
            f"the replay buffer of a group is full: it took {accepted} of {total} rows, and the server {waiting}",
            hint='send rows[error.accepted:] later, use on_full="block", or raise replay_bytes',
        )
        error.accepted = accepted
        return error

    def watermark(self, time: Any) -> None:
        """Promise that no later row is older than `time`: an int in the stream's unit, or a datetime64.

        It takes its place behind every row sent so far. Lower than before: ignored. A promise that is not
        kept makes rows late. Only with `watermark="explicit"`.
        """
        if not self._explicit:
            raise ConfigError(
                "this producer makes its own watermarks, from the rows",
                code="bad_watermark",
                hint='Producer(..., watermark="explicit")',
            )
        if isinstance(time, np.datetime64):
            time = time.astype(f"datetime64[{self.stream.time_unit}]").astype(np.int64)
        time = event_time("watermark()", time)
        with self._send_lock:
            self._live.check()
            self._sender.put_watermark(max(-TIME_LIMIT, min(time, TIME_LIMIT)))

    def marker(self) -> int:
        """Send a latency probe behind the rows of every open connection. Returns on how many connections."""
        with self._send_lock:
            self._live.check()
            return self._sender.put_marker()

    def begin_stage(self, stage: str) -> None:
        """Rows from now on belong to the stage of this UUID. Only for a producer made with `stage`."""
        with self._send_lock:
            self._staging.begin(stage)

    def finish_stage(self, timeout: float | None = None) -> dict[str, Any]:
        """End the stage; returns its receipt when the daemon has made it durable, within `timeout` seconds.

        {"stage", "rows", "bytes", "groups": {group: rows}}: what a commit must name. Raises ConnectError
        (`stage_lost`) or the daemon's refusal (`stage_full`, `disk_full`, `fenced`): the stage is gone then.
        """
        with self._send_lock:
            return self._staging.finish(timeout)

    @property
    def _staging(self) -> StageSession:
        if self._stages is None:
            raise ConfigError("this producer does not stage rows", code="no_stage", hint="Producer(..., stage=uuid)")
        return self._stages

    def flush(self, timeout: float | None = None) -> None:
        """Send what is buffered; wait until the server has all of it. ConnectError after `timeout` seconds."""
        if self._stages is not None:
            with self._send_lock:
                self._stages.flush()
            return
        self._live.check()
        self._live.flush(timeout)

    def close(self, timeout: float = 30.0) -> None:
        """End of stream: flush, EOS, and wait until the server has processed every row; then disconnect.

        Raises ConnectError when that takes longer than `timeout`, or what ended the session before if rows
        were left over. Closing twice is fine. A stage that was not finished is dropped.
        """
        if self._stages is not None:
            self._stages.abort()
            return
        session = self._live
        with self._send_lock:
            if session.state == "closed":
                return
            session.end(timeout)
        if session.error is not None:
            error, session.state = session.error, "closed"
            raise error

    def stats(self) -> dict[str, Any]:
        """Counters: rows, rows_acked, frames, bytes, watermarks, connections, reconnects, waited_s, ..."""
        return self._either.stats()

    def __enter__(self) -> Producer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close(timeout=5.0)
        except FlexStreamError as second:
            error.add_note(f"closing the producer failed as well: {second.message}")

    def __del__(self) -> None:
        stages = getattr(self, "_stages", None)
        if stages is not None:
            stages.abort()
        session = getattr(self, "_session", None)
        if session is not None and session.state not in ("closed", "failed"):
            warnings.warn(f"{self!r} was not closed: its last rows may be lost", ResourceWarning, stacklevel=2)
            session.abort()

    def __repr__(self) -> str:
        session = self._stages or self._session
        if session is None:
            return "Producer(connecting)"
        return f"Producer({str(session.data)!r}, stream={session.stream.name!r}, state={session.state!r})"


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name}={value!r} must be one of {', '.join(map(repr, allowed))}", code=f"bad_{name}")


def _not_negative(**values: float) -> None:
    for name, value in values.items():
        if value < 0:
            raise ConfigError(f"{name}={value!r} must not be negative", code=f"bad_{name}")


__all__ = ["ConnectError", "Producer", "RingFull"]
