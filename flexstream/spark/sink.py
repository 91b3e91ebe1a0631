"""Writing a DataFrame to a stream: tasks stage their rows, the driver's commit makes them count, once.

A task call stages under UUIDs of its own, so retries, speculation and calls that go on after an abort never meet. The
commit names the UUIDs that Spark chose; the daemon applies them together, and only if (sink id, query id, batch id) is
new to it. Commit and abort run on other objects than write, in other processes: all they know is in the messages.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from flexstream.errors import ConfigError, FlexStreamError
from flexstream.spark import types
from flexstream.spark.carried import Carried
from flexstream.spark.nodes import Target, persist
from flexstream.spark.options import DEFAULT_SINK, Options

QUERY_PROPERTY, BATCH_PROPERTY = "sql.streaming.queryId", "streaming.sql.batchId"  # Spark's internal names
NO_QUERY = ""
UNNAMED_S = 3600.0  # a job without a name comes again only while its commit is tried again


@dataclass
class Staged(WriterCommitMessage):
    """What a task call did: which query's batch it was for, and the receipt of each daemon."""

    query: str
    rows: int
    receipts: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass
class Writer:
    """What batch and streaming writers share. Made on the driver, sent to the tasks."""

    options: Options
    target: Target

    @classmethod
    def check(cls, options: Options, schema: StructType, overwrite: bool, *, patient: bool = False) -> Target:
        """Everything that can be known before a task starts. Raises FlexStreamError."""
        if overwrite:
            raise ConfigError(
                "a stream cannot be overwritten: you can only add rows to it", code="bad_mode", hint='.mode("append")'
            )
        target = Target.find(options, patient=patient)
        types.check_columns(target.stream, schema)
        return target

    def send(self, batches: Iterator[Any], prefix: str = "") -> Staged:
        from flexstream.spark import sending

        if TaskContext.get() is not None:
            sending.settle_worker()
        query, batch = _whose()
        if self.options.at_least_once:
            sent = sending.stream_rows(self.target, batches, f"{query}/{batch}", self.options.watermark)
        else:
            sent = sending.stage_rows(self.target, batches, prefix)
        return Staged(query, sent.rows, sent.receipts)

    def apply(self, messages: list[Any], query: str, batch: int, remember_s: float | None = None) -> bool:
        """Commit at every daemon; whether the batch was new to one of them. It may be repeated: a daemon that has
        the batch says so and does nothing.
        """
        if self.options.at_least_once:
            return True
        applied = False
        for endpoint in self.target.endpoints:
            stages = [message.receipts[endpoint] for message in messages if message is not None]
            body = {"sink": self.options.sink_id, "query": query, "batch": batch, "stages": stages}
            body["remember_s"] = remember_s or self.options.remember_s
            if self.options.end:
                body |= {"stream": self.options.stream, "end": True}
            applied |= self.commit(endpoint, body)
        return applied

    def apply_job(self, messages: list[Any], job: str) -> bool:
        """The same for a batch job, which is one batch. One without a name of its own is not known for long."""
        unnamed_s = UNNAMED_S + self.options.timeout_s
        return self.apply(messages, job, 0, self.options.remember_s if self.options.job else unnamed_s)

    def commit(self, endpoint: str, body: dict[str, Any]) -> bool:
        client = self.target.client(endpoint)
        answer = persist(lambda: client.post("/v1/commits", body), self.options.timeout_s)
        return bool(answer["applied"])

    def forget(self, messages: list[Any]) -> None:
        from flexstream.spark import sending

        for message in messages:
            if message is not None:
                stages = {endpoint: receipt["stage"] for endpoint, receipt in message.receipts.items()}
                sending.give_up(self.target, stages)


class BatchWriter(Carried, DataSourceArrowWriter):
    """`df.write`. A job has an identity of its own unless the option `job` gives it one, which makes it repeatable."""

    def __init__(self, options: Options, schema: StructType, overwrite: bool) -> None:
        self._writer = Writer(options, Writer.check(options, schema, overwrite))
        self._job = options.job or str(uuid.uuid4())

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        return self._writer.send(iterator)

    def commit(self, messages: list[Any]) -> None:
        self._writer.apply_job(messages, self._job)

    def abort(self, messages: list[Any]) -> None:
        self._writer.forget(messages)


class StreamWriter(Carried, DataSourceStreamArrowWriter):
    """`df.writeStream`. A batch is known by Spark's query id, which its checkpoint keeps, and its batch id.

    Spark makes one for the tasks of each batch, another for its commit and another for an abort: each waits for a
    daemon that is away.
    """

    def __init__(self, options: Options, schema: StructType, overwrite: bool) -> None:
        self._writer = Writer(options, Writer.check(options, schema, overwrite, patient=True))

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        if not _whose()[0]:
            raise FlexStreamError(
                f"Spark does not say which query this is ({QUERY_PROPERTY}): batches of two queries could be mixed up",
                code="no_query_id",
                hint="FlexStream does not support this Spark: please report its version",
            )
        return self._writer.send(iterator)

    def commit(self, messages: list[Any], batchId: int) -> None:
        queries = {message.query for message in messages if message is not None}
        if queries:  # none: the batch had no task
            (query,) = queries
            self._writer.apply(messages, query, batchId)

    def abort(self, messages: list[Any], batchId: int) -> None:
        self._writer.forget(messages)


def finish(endpoint: str, stream: str, *, sink_id: str = DEFAULT_SINK, token: str | None = None) -> None:
    """End of stream for a sink: windows no longer wait for rows from it. A later commit begins it anew."""
    options = Options.parse(
        {"endpoint": endpoint, "stream": stream, "sink_id": sink_id} | ({"token": token} if token else {})
    )
    target = Target.find(options)
    body: dict[str, Any] = {"sink": sink_id, "query": "", "batch": None, "stages": [], "stream": stream, "end": True}
    for node in target.endpoints:
        Writer(options, target).commit(node, body)


def _whose() -> tuple[str, str]:
    """(query id, batch id) of the task at hand."""
    context = TaskContext.get()
    query = context.getLocalProperty(QUERY_PROPERTY) if context is not None else None
    batch = context.getLocalProperty(BATCH_PROPERTY) if context is not None else None
    return query or NO_QUERY, batch or ""
