"""What the tests of bad days share: a small stream, a raw client, and a good producer that must not notice."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import flexstream as fs
from flexstream.testing import run
from flexstream.wire.frames import CONTROL_GROUP, HEADER_BYTES, ErrorCode, FrameType, Header, frame, json_frame
from tests.property.checks import as_rows, assert_ledger, assert_same_results
from tests.waiting import WAIT_S

GROUPS = 8
FAR = 1_000_000  # event times of bad clients' rows: so late that no watermark of a good producer passes them
STREAM = fs.Stream(
    "s", {"t": "timestamp[ms]", "k": "i32", "x": "i64", "pad": "bytes[12]"}, key="k", time="t", max_disorder="5ms"
)
QUERY = STREAM.query("q").window(fs.tumbling("100ms")).agg(n=fs.count(), total=fs.sum("x"))
ROW_BYTES = STREAM.schema.row_bytes


def make_rows(n: int, *, seed: int = 1, keys: int = 50, start: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    rows = np.zeros(n, STREAM.schema.dtype)
    rows["t"] = start + np.arange(n) // 4
    rows["k"] = rng.integers(0, keys, n)
    rows["x"] = rng.integers(-1000, 1000, n)
    rows["pad"] = b"p"
    return rows


def rows_of_group(group: int, n: int, *, start: int = FAR, groups: int = GROUPS, seed: int = 5) -> np.ndarray:
    rows = make_rows(n * groups * 4, seed=seed, start=start)
    return rows[STREAM.group_of(rows, groups) == group][:n]


@contextlib.contextmanager
def serving(*queries: fs.Query, **options: Any) -> Iterator[fs.Engine]:
    """An engine with the stream and the query, on a free port, with short time-outs."""
    settings: dict[str, Any] = {"groups": GROUPS, "listen": "127.0.0.1:0", "session_timeout_s": 0.3, "pin": False}
    with fs.Engine(**settings | options) as engine:
        engine.add(STREAM)
        for query in queries or (QUERY,):
            engine.submit(query)
        yield engine


def address(engine: fs.Engine) -> str:
    host, port = engine.data_address
    return f"tcp://{host}:{port}"


def closed(engine: fs.Engine, why: str) -> int:
    return engine.status()["connections"]["closed"].get(why, 0)


def assert_results(engine: fs.Engine, *sent: np.ndarray, query: fs.Query = QUERY) -> None:
    """Every session has ended: each row sent is in the results exactly once."""
    engine.finish(timeout=WAIT_S)
    rows = np.concatenate(sent)
    assert_same_results(query, as_rows(engine.results(query.name)), run(query, rows).windows)
    assert_ledger(engine.status(), STREAM.name, len(rows))


class Company(threading.Thread):
    """A good producer that sends all the while. `rows` is what it has sent."""

    def __init__(self, engine: fs.Engine, **options: Any) -> None:
        super().__init__(name="good-producer", daemon=True)
        self._producer = fs.Producer(address(engine), stream=STREAM, linger_ms=1, **options)
        self._enough = threading.Event()
        self._sent: list[np.ndarray] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            with self._producer as producer:
                batch = 0
                while batch < 5 or not self._enough.is_set():
                    rows = make_rows(200, seed=batch, start=50 * batch)
                    producer.send(rows)
                    self._sent.append(rows)
                    batch += 1
                    time.sleep(0.005)
        except BaseException as error:
            self.error = error

    def finish(self) -> np.ndarray:
        self._enough.set()
        self.join(WAIT_S)
        assert not self.is_alive(), "the good producer hangs"
        assert self.error is None, f"the good producer failed: {self.error!r}"
        return self.rows

    @property
    def rows(self) -> np.ndarray:
        return np.concatenate(self._sent)


@contextlib.contextmanager
def company(engine: fs.Engine, *others: np.ndarray, query: fs.Query = QUERY) -> Iterator[Company]:
    """A good producer sends while the block runs; afterwards its rows, and `others`, are in the results once."""
    good = Company(engine)
    good.start()
    yield good
    assert_results(engine, good.finish(), *others, query=query)


@contextlib.contextmanager
def all_of_them() -> Iterator[Callable[[str], contextlib.AbstractContextManager[None]]]:
    """For tables of cases on one engine: every case is tried, and all that went wrong is told at the end."""
    wrong: dict[str, str] = {}

    @contextlib.contextmanager
    def each(name: str) -> Iterator[None]:
        try:
            yield
        except (AssertionError, EOFError, OSError) as error:
            wrong[name] = f"{type(error).__name__}: {error}"

    yield each
    assert not wrong, "\n".join(f"{name}: {what}" for name, what in wrong.items())


class RawClient:
    """A socket that says whatever it is told. Context manager."""

    def __init__(self, engine: fs.Engine, **hello: Any) -> None:
        self.engine = engine
        self.fields: dict[str, Any] = {
            "versions": [1], "stream": "s", "row_bytes": ROW_BYTES, "schema": STREAM.schema.hash,
            "producer": str(uuid.uuid4()), "epoch": 1, "token": None, "crc": False, "ack_bytes": 131072,
        } | hello  # fmt: skip
        self.socks: list[socket.socket] = []

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *exc: object) -> None:
        for sock in self.socks:
            sock.close()

    def connect(self) -> socket.socket:
        sock = socket.create_connection(self.engine.data_address, timeout=WAIT_S)
        self.socks.append(sock)
        return sock

    def hello(self, group: int = CONTROL_GROUP, **changes: Any) -> bytes:
        fields = {name: value for name, value in (self.fields | changes).items() if value is not ...}
        return json_frame(FrameType.HELLO, group, fields)

    def open(self, group: int = CONTROL_GROUP, **changes: Any) -> socket.socket:
        """Connects and says HELLO; the answer must be an ACK. Its header is in `ack`."""
        sock = self.connect()
        sock.sendall(self.hello(group, **changes))
        self.ack, self.ack_payload = read_frame(sock)
        assert self.ack.type is FrameType.ACK, self.ack_payload
        assert self.ack.group == group
        return sock


def read_exactly(sock: socket.socket, n: int) -> bytes:
    data = b""
    while len(data) < n:
        part = sock.recv(n - len(data))
        if not part:
            raise EOFError(f"closed after {len(data)} of {n} bytes")
        data += part
    return data


def read_frame(sock: socket.socket) -> tuple[Header, bytes]:
    header = Header.unpack(read_exactly(sock, HEADER_BYTES))
    return header, read_exactly(sock, header.payload_bytes)


def expect_error(sock: socket.socket, code: ErrorCode, *, then_eof: bool = True) -> dict[str, Any]:
    """The next frame that is not an ACK is this ERROR, and after it the connection ends."""
    header, payload = read_frame(sock)
    while header.type is FrameType.ACK:
        header, payload = read_frame(sock)
    assert header.type is FrameType.ERROR
    document = json.loads(payload)
    assert (header.value, document["code"]) == (int(code), code.code), document
    assert document["message"]
    if then_eof:
        assert sock.recv(1) == b""
    return document


def refused(engine: fs.Engine, client: RawClient, data: bytes, code: ErrorCode) -> dict[str, Any]:
    """A new connection that sends `data` gets this error, and it is counted."""
    before = closed(engine, code.code)
    sock = client.connect()
    sock.sendall(data)
    document = expect_error(sock, code)
    assert closed(engine, code.code) == before + 1
    return document


def data_frame(group: int, rows: np.ndarray, sequence: int = 0, *, crc: bool = False) -> bytes:
    return frame(FrameType.DATA, group, value=len(rows), sequence=sequence, payload=rows.tobytes(), crc=crc)


def bitmap(*groups: int, of: int = GROUPS) -> bytes:
    bits = bytearray((of + 7) // 8)
    for group in groups:
        bits[group >> 3] |= 1 << (group & 7)
    return bytes(bits)
