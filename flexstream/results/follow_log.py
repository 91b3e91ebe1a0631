"""Reading a result log as it grows."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from flexstream.state.results.result_log import ResultLog

if TYPE_CHECKING:
    import pyarrow as pa

POLL_S = 0.2


def read_log(
    log: ResultLog, offset: int, follow: bool, timeout: float | None
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
