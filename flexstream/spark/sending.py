"""The producers of one Python worker process: made once, used by task after task.

Spark keeps its Python workers; opening connections for each task of each micro-batch would cost more than a small
batch. A task has the process for itself, so nothing here is shared between threads.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flexstream.client.producer import Producer
from flexstream.errors import FlexStreamError
from flexstream.rows.stream import Stream
from flexstream.spark.nodes import Rows, Target, split

NO_TIME = -(2**63)
PIECE_BYTES = 256 << 10  # packed at a time: in the cache while it is grouped
MOST_PRODUCERS = 4  # kept in a worker: each that is not staged has a connection for every group


@dataclass
class Sent:
    """What one task call has sent: rows, their largest event time (when not staged), and each daemon's receipt."""

    rows: int = 0
    last_time: int = NO_TIME
    receipts: dict[str, dict[str, Any]] = field(default_factory=dict)


class _Pool:
    """Producers by what they are for. A forked child begins with none: sockets of the parent are not its own."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._producers: dict[tuple[Any, ...], Producer] = {}

    def get(self, key: tuple[Any, ...]) -> Producer | None:
        if self._pid != os.getpid():
            self._pid, self._producers = os.getpid(), {}
        producer = self._producers.get(key)
        if producer is None:
            return None
        del self._producers[key]
        if producer.state in ("closed", "failed"):
            return None
        self._producers[key] = producer  # as the one used last
        return producer

    def put(self, key: tuple[Any, ...], producer: Producer, endpoints: int) -> None:
        """A task uses one for each endpoint; those that none has used for longest make room."""
        self._producers[key] = producer
        while len(self._producers) > max(MOST_PRODUCERS, endpoints):
            self.drop(next(iter(self._producers)))

    def drop(self, key: tuple[Any, ...]) -> None:
        producer = self._producers.pop(key, None)
        if producer is not None:
            with contextlib.suppress(FlexStreamError, OSError):
                producer.close(timeout=0.1)

    def close(self) -> None:
        if self._pid == os.getpid():
            for key in list(self._producers):
                self.drop(key)


_settled_pid = 0


def settle_worker() -> None:
    """Spark collects a worker's garbage after each task, which with our modules and its own in memory takes as long as
    a small task. What was imported never is garbage: it is put where the collector does not look, once per process.
    """
    global _settled_pid
    if _settled_pid != os.getpid():
        _settled_pid = os.getpid()
        import pyarrow.parquet  # noqa: F401  # what a task may import yet

        gc.collect()
        gc.freeze()


_pool = _Pool()
atexit.register(_pool.close)
_promised: dict[tuple[Any, ...], tuple[str, int]] = {}  # at_least_once: the batch at hand, the time before it


def _key(kind: str, target: Target, endpoint: str) -> tuple[Any, ...]:
    return kind, endpoint, target.stream.schema.hash, target.definition["name"], target.token


def stage_rows(target: Target, batches: Iterable[Any], prefix: str = "") -> Sent:
    """Stage the rows at their daemons, under fresh UUIDs. When it returns they are durable there, and invisible.

    Whatever goes wrong, the stages begun are given up and the error is raised: Spark runs the task again.
    """
    sent, stream = Sent(), target.stream
    stages: dict[str, Producer] = {}
    names: dict[str, str] = {}
    try:
        for endpoint in target.endpoints:
            names[endpoint] = f"{prefix}{uuid.uuid4()}"
            stages[endpoint] = _begin(target, endpoint, names[endpoint])
        for rows in _packed_pieces(stream, batches):
            sent.rows += len(rows)
            for producer, part in zip(stages.values(), split(stream, target.groups, len(stages), rows), strict=True):
                producer.send_packed(part)
        for endpoint, producer in stages.items():
            receipt = producer.finish_stage(timeout=target.timeout_s)
            sent.receipts[endpoint] = {name: receipt[name] for name in ("stage", "rows", "bytes")}  # commits stay small
    except BaseException:
        for endpoint in stages:
            _pool.drop(_key("stage", target, endpoint))
        give_up(target, names)
        raise
    return sent


def _begin(target: Target, endpoint: str, stage: str) -> Producer:
    key = _key("stage", target, endpoint)
    producer = _pool.get(key)
    if producer is not None:
        try:
            producer.begin_stage(stage)
            return producer
        except FlexStreamError:  # it rested too long, or the daemon restarted: a new one will tell
            _pool.drop(key)
    producer = Producer(
        endpoint, stream=target.stream, token=target.token, stage=stage, connect_timeout_s=target.timeout_s
    )
    _pool.put(key, producer, len(target.endpoints))
    return producer


def give_up(target: Target, stages: dict[str, str]) -> None:
    """Fence and drop stages, endpoint -> UUID. What cannot be reached now expires there by itself."""
    for endpoint, stage in stages.items():
        with contextlib.suppress(FlexStreamError, OSError):
            target.client(endpoint).delete(f"/v1/stages/{stage}")


def give_up_all(target: Target, prefix: str) -> None:
    """The same for all stages whose names begin so: for a job that has failed without telling which it began."""
    for endpoint in target.endpoints:
        with contextlib.suppress(FlexStreamError, OSError):
            stages = [stage["stage"] for stage in target.client(endpoint).get("/v1/stages")["stages"]]
            for stage in stages:
                if stage.startswith(prefix):
                    give_up(target, {endpoint: stage})


def stream_rows(target: Target, batches: Iterable[Any], batch: str, watermark: str) -> Sent:
    """Send the rows straight to the queries; when it returns the daemons have them. A retried task sends them again.

    With watermark "batch" a producer promises, when a new batch begins, that nothing older than the rows of the
    batches before it will come; with "rows" it promises so after every Arrow batch.
    """
    sent, stream = Sent(), target.stream
    producers = [_live(target, endpoint, watermark) for endpoint in target.endpoints]
    keys = [_key(watermark, target, endpoint) for endpoint in target.endpoints]
    try:
        if watermark == "batch":
            for key, producer in zip(keys, producers, strict=True):
                known, last_time = _promised.get(key, (batch, NO_TIME))
                if known != batch and last_time != NO_TIME:
                    producer.watermark(last_time - stream.max_disorder)
        for rows in _packed(stream, batches):
            sent.rows += len(rows)
            sent.last_time = max(sent.last_time, int(rows[stream.time].max(initial=NO_TIME)))
            for producer, part in zip(producers, split(stream, target.groups, len(producers), rows), strict=True):
                producer.send_packed(part)
        for producer in producers:
            producer.flush(target.timeout_s)
    except BaseException:
        for key in keys:
            _pool.drop(key)
        raise
    for key in keys:
        _promised[key] = batch, max(sent.last_time, _promised.get(key, ("", NO_TIME))[1])
    return sent


def _live(target: Target, endpoint: str, watermark: str) -> Producer:
    key = _key(watermark, target, endpoint)
    producer = _pool.get(key)
    if producer is None:
        mode: Any = "explicit" if watermark == "batch" else "auto"
        producer = Producer(
            endpoint,
            stream=target.stream,
            token=target.token,
            watermark=mode,
            connect_timeout_s=target.timeout_s,
        )
        _pool.put(key, producer, len(target.endpoints))
    return producer


def _packed(stream: Stream, batches: Iterable[Any]) -> Iterable[Rows]:
    for batch in batches:
        yield stream.schema.pack(_without_decimals(batch)) if batch.num_rows else np.zeros(0, stream.schema.dtype)


def _packed_pieces(stream: Stream, batches: Iterable[Any]) -> Iterable[Rows]:
    """The same in pieces that fit the cache, each valid until the next: for producers that copy what they send."""
    from flexstream.rows.from_arrow import packed_pieces

    memory = np.empty(max(1, PIECE_BYTES // stream.schema.row_bytes), stream.schema.dtype)
    for batch in batches:
        yield from packed_pieces(stream.schema, _without_decimals(batch), memory)


def _without_decimals(batch: Any) -> Any:
    """decimal(20,0) is how Spark holds what a u64 field holds."""
    import pyarrow as pa

    for i, column in enumerate(batch.schema):
        if pa.types.is_decimal(column.type):
            whole = pa.field(column.name, pa.uint64(), column.nullable)
            batch = batch.set_column(i, whole, batch.column(i).cast(pa.uint64()))
    return batch
