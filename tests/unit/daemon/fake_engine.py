"""An engine with the real one's API and status, and no data path: results appear when a test emits them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import flexstream as fs
from flexstream import col
from flexstream.errors import EngineError
from flexstream.state.results.result_log import ResultLog

ADS = fs.Stream(
    "ads",
    {"event_time": "timestamp[ms]", "campaign_id": "i64", "event_type": "bytes[8]"},
    key="campaign_id",
    time="event_time",
)
VIEWS = ADS.query("ysb").filter(col("event_type") == b"view").window(fs.tumbling("10s")).agg(n=fs.count())


def result_batch(query: fs.Query, first: int, count: int) -> pa.RecordBatch:
    """Rows of an `n=count()` query over ADS whose campaign_id counts up from `first`."""
    schema = query.result_schema()
    numbers = np.arange(first, first + count, dtype=np.int64)
    arrays = []
    for field in schema:
        if pa.types.is_boolean(field.type):
            arrays.append(pa.Array.from_buffers(field.type, count, [None, pa.py_buffer(b"\xff" * (count // 8 + 1))]))
            continue
        width = field.type.bit_width // 8
        values = numbers.astype(f"<i{width}")
        arrays.append(pa.Array.from_buffers(field.type, count, [None, pa.py_buffer(values)]))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


class FakeEngine:
    def __init__(
        self, data_dir: Path | None = None, *, groups: int = 8, listen: str | None = "127.0.0.1:7400"
    ) -> None:
        self.groups = groups
        self.data_dir = data_dir
        self.state = "running"
        self.not_ready: str | None = None
        self.calls: list[str] = []
        self.registered: list[tuple[str, int]] = []
        self.expected: dict[str, list[tuple[str, int]]] = {}
        self.open_windows: list[Any] = []
        self.before_rows: Callable[[str], object] = lambda stream: None
        self.before_drain: Callable[[], object] = lambda: None
        self._late: dict[str, ResultLog] = {}
        self.log_options: dict[str, Any] = {}
        self._streams: dict[str, fs.Stream] = {}
        self._queries: dict[str, fs.Query] = {}
        self._logs: dict[str, ResultLog] = {}
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self.data_address = None if listen is None else ("127.0.0.1", int(listen.rpartition(":")[2]))

    def call_before_rows(self, call: Callable[[str], object]) -> None:
        self.before_rows = call

    @property
    def streams(self) -> dict[str, fs.Stream]:
        return dict(self._streams)

    @property
    def queries(self) -> dict[str, fs.Query]:
        return dict(self._queries)

    def add(self, stream: fs.Stream) -> None:
        self.calls.append(f"add {stream.name}")
        with self._lock:
            self._streams[stream.name] = stream

    def running(self) -> tuple[list[Any], list[Any]]:
        return [], []

    def submit(self, query: fs.Query, *, lost_until: int | None = None, after_crash: bool = False) -> None:
        self.calls.append(f"submit {query.name}")
        if query.stream.name not in self._streams:
            raise EngineError(f"no stream {query.stream.name}", code="unknown_stream", hint="add it first")
        directory = self.data_dir / "results" / query.name if self.data_dir else None
        result_log = ResultLog(directory, query.result_schema(), **self.log_options)
        with self._lock:
            self._queries[query.name] = query
            self._logs[query.name] = result_log
            late = query.stream.schema.to_arrow().append(pa.field("watermark", pa.timestamp("ms")))
            self._late[query.name] = ResultLog(None, late)

    def cancel(self, name: str) -> None:
        self.calls.append(f"cancel {name}")
        with self._lock:
            del self._queries[name]
            self._logs.pop(name).close()

    def result_log(self, name: str) -> ResultLog:
        return self._logs[name]

    def emit(self, name: str, count: int) -> None:
        """As if windows had fired: `count` result rows."""
        result_log = self._logs[name]
        result_log.append(result_batch(self._queries[name], result_log.next_offset, count))

    def late_log(self, name: str) -> ResultLog:
        return self._late[name]

    def emit_late(self, name: str, campaigns: list[int]) -> None:
        """As if rows of these campaigns had come too late."""
        ids = np.array(campaigns, np.int64)
        columns = [np.zeros(len(ids), np.int64), ids, np.full(len(ids), b"view", "S8"), ids]
        schema = self._late[name].schema
        arrays = [
            pa.Array.from_buffers(field.type, len(ids), [None, pa.py_buffer(column)])
            for field, column in zip(schema, columns, strict=True)
        ]
        self._late[name].append(pa.RecordBatch.from_arrays(arrays, schema=schema))

    def drain(self, timeout: float | None = None) -> list[Any]:
        self.calls.append("drain")
        self.before_drain()
        self.state = "draining"
        for result_log in self._logs.values():
            result_log.close()
        return self.open_windows

    def close(self) -> None:
        self.calls.append("close")
        for result_log in self._logs.values():
            result_log.close()

    def health(self) -> dict[str, Any]:
        problem = "the engine failed" if self.state == "failed" else None
        return {"state": self.state, "problem": problem, "not_ready": self.not_ready}

    def registered_sessions(self, for_s: float = 0.0) -> dict[str, list[tuple[str, int]]]:
        return {name: list(self.registered) for name in self._streams if self.registered}

    def expect_sessions(self, stream: str, known: Iterable[tuple[str, int]]) -> None:
        self.expected[stream] = list(known)

    def sessions(self, stream: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.status()["streams"][stream]["sessions"]
        return found

    def end_session(self, stream: str, producer: str, kind: str | None = None) -> dict[str, Any]:
        if producer != "p1":
            raise EngineError(f"no session {producer!r}", code="unknown_session")
        self.calls.append(f"end_session {stream} {producer} {kind}")
        return {"stream": stream, "producer": producer, "kind": kind or "network", "ended": True}

    def status(self) -> dict[str, Any]:
        return {
            "uptime_s": time.monotonic() - self._began,
            "groups": self.groups,
            "state": self.state,
            "nic": {"kind": "user", "aligned": False, "reason": "no table in user space"},
            "placement": [group % 2 for group in range(self.groups)],
            "workers": [
                {"worker": worker, "cpu": worker, "pinned": True, "pin_reason": None, "rows": 1000 + worker,
                 "bytes": 78000, "receive_calls": 12, "busy_share": 0.25, "connections": 4,
                 "cpu_seconds": 1.5, "stalled": None, "state_bytes": 4096, "arena_bytes": 8192}
                for worker in range(2)
            ],
            "streams": {
                name: {
                    "ledger": {"received": 10, "accepted": 10, "rejected": 0, "staged": 0, "in_flight": 0},
                    "unqueried": 0,
                    "groups": [3] * self.groups,
                    "sessions_ended": 6,
                    "sessions_expired": 1,
                    "watermark": {"min": 100, "max": 200},
                    "held_by": [{"producer": "p1", "peer": "127.0.0.1:5", "watermark": 100, "idle": False}],
                    "sessions": [{"producer": "p1", "epoch": 1, "state": "live", "peer": "127.0.0.1:5",
                                  "watermark": 100, "connections": 4}],
                }
                for name in self._streams
            },
            "queries": {
                name: {
                    "stream": query.stream.name, "state": "running", "error": None, "variant": "generic",
                    "rows": 10, "filtered": 3, "late": 1, "rejected": {"overflow": 2}, "windows_fired": 4,
                    "ledger": {"accepted": 10, "applied": 4, "filtered": 3, "late": 1, "rejected": 2, "in_flight": 0},
                    "results": self._logs[name].next_offset, "open_windows": 1, "output_bytes": 4096,
                    "log": {"first_offset": self._logs[name].first_offset,
                            "next_offset": self._logs[name].next_offset,
                            "bytes": self._logs[name].bytes, "error": None},
                }
                for name, query in self._queries.items()
            },
            "connections": {"open": 5, "accepted": 9, "pending_hello": 1, "leaving": 7, "misaligned": 2,
                            "closed": {"eos": 3}},
            "stages": {
                "limit_bytes": 1 << 30, "open": 1, "finished": 2, "committed": 3, "bytes": 4096, "kept_batches": 1,
                "expired": 0, "connections": 2, "failed": {},
            },
            "latency": {"count": 11, "p50_ms": 0.5, "p99_ms": 2.5, "max_ms": 3.5},
        }  # fmt: skip
