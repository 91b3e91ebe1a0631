"""Reading a result log as it grows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import pyarrow as pa

POLL_S = 0.2


class ReadableLog(Protocol):
    """What is read by offset: a ResultLog, or a query's late rows."""

    @property
    def schema(self) -> pa.Schema: ...

    @property
    def first_offset(self) -> int: ...

    @property
    def next_offset(self) -> int: ...

    @property
    def generation(self) -> int: ...

    @property
    def generation_offset(self) -> int: ...

    @property
    def closed(self) -> bool: ...

    def read(self, offset: int, max_rows: int = ...) -> list[pa.RecordBatch]: ...

    def wait(self, offset: int, timeout: float | None = None) -> bool: ...

    def add_listener(self, listener: Callable[[int], None]) -> Callable[[], None]: ...

    def enforce_retention(self) -> int: ...


def read_log(
    log: ReadableLog, offset: int, follow: bool, timeout: float | None
) -> Iterator[pa.RecordBatch]:
    quiet_since = time.monotonic()
    while True:
        batches = log.read(offset)
        for batch in batches:
            offset += batch.num_rows
            yield batch
        if batches:
            quiet_since = time.monotonic()
        elif not follow or log.closed or (timeout is not None and time.monotonic() - quiet_since >= timeout):
            return
        else:
            log.wait(offset, POLL_S)
