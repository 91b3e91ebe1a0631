"""From native result rows to a query's log."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from flexstream.errors import FlexStreamError

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger("flexstream.collector")


class Sink(Protocol):
    """Where rows of one query go."""

    def append(self, batch: pa.RecordBatch) -> Any: ...


class Known(Protocol):
    """Rows that a log holds already."""

    def without(self, data: bytes) -> bytes: ...


class ResultWriter:
    """Writes native rows to one log. What the log refuses is kept, in order, for another try."""

    def __init__(self, name: str, rows: Any, log: Sink) -> None:
        self.name = name
        self.rows = rows
        self.log = log
        self.held: list[pa.RecordBatch] = []
        self.held_bytes = 0
        self.error: str | None = None
        self.callbacks: list[Callable[[pa.RecordBatch], None]] = []
        self.known: Known | None = None  # what the log held before a restart, and must not get again

    @property
    def what(self) -> str:
        return f"results of query {self.name}"

    def write(self, data: bytes) -> None:
        if self.known is not None:
            data = self.known.without(data)
            if not data:
                return
        self.held.append(self.rows.batch(data))
        self.held_bytes += len(data)
        self.flush()

    def flush(self) -> None:
        """Append what is held, in order. A refusal is kept in `error` and tried again later."""
        while self.held:
            batch = self.held[0]
            try:
                self.log.append(batch)
            except FlexStreamError as error:
                if self.error is None:
                    log.error("results_not_written", extra={"fields": {"query": self.name, "error": str(error)}})
                self.error = str(error)
                return
            self.held.pop(0)
            self.error = None
            for callback in self.callbacks:
                try:
                    callback(batch)
                except Exception:
                    log.exception("results_callback_failed", extra={"fields": {"query": self.name}})
        self.held_bytes = 0
