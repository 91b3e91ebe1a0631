"""What a log holds already: results that come again after a restart are not written again.

Identity of a result: (query, window, group, key, revision). Late rows have none, so of equal ones as many are left out
as the log has.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from flexstream.state.results.result_log import ResultLog

READ_ROWS = 1 << 18


class KnownResults:
    """The results in `log` of windows that end after `since`. `dtype`: of the rows that workers write."""

    def __init__(self, log: ResultLog, dtype: np.dtype[Any], identity: list[str], since: int) -> None:
        self._dtype = dtype
        self._identity = identity
        parts = []
        offset = log.first_offset
        while batches := log.read(offset, READ_ROWS):
            for batch in batches:
                offset += batch.num_rows
                keep = column(batch.column("window_end"), np.dtype("<i8")) > since
                values = {name: column(batch.column(name), dtype[name])[keep] for name in identity}
                parts.append(self._names(values, int(keep.sum())))
        self._known = np.unique(np.concatenate(parts)) if parts else np.empty(0, "S1")
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._known)

    def _names(self, values: Any, n: int) -> np.ndarray[Any, Any]:
        """One string of bytes per row; all have one length, so that equal ones are equal."""
        packed = np.zeros(n, np.dtype([(name, self._dtype[name]) for name in self._identity]))
        for name in self._identity:
            packed[name] = values[name]
        return packed.view(f"S{packed.dtype.itemsize}").reshape(-1)

    def without(self, data: bytes) -> bytes:
        """The rows that the log does not have."""
        if not len(self._known):
            return data
        rows = np.frombuffer(data, self._dtype)
        names = self._names(rows, len(rows))
        at = np.minimum(np.searchsorted(self._known, names), len(self._known) - 1)
        fresh = self._known[at] != names
        self.dropped += len(rows) - int(fresh.sum())
        return data if fresh.all() else rows[fresh].tobytes()


class LateRowsLog(Protocol):
    @property
    def first_offset(self) -> int: ...

    def read(self, offset: int, max_rows: int = ...) -> list[pa.RecordBatch]: ...


class KnownLate:
    """A query's late rows in `log` from `offset` on, each left out once. `dtype`: of (row, watermark)."""

    def __init__(self, log: LateRowsLog, dtype: np.dtype[Any], offset: int) -> None:
        self._left: Counter[bytes] = Counter()
        offset = max(offset, log.first_offset)
        while batches := log.read(offset, READ_ROWS):
            for batch in batches:
                offset += batch.num_rows
                rows = np.zeros(batch.num_rows, dtype)
                for name in dtype["row"].names or ():
                    rows["row"][name] = column(batch.column(name), dtype["row"][name])
                rows["watermark"] = column(batch.column("watermark"), np.dtype("<i8"))
                self._left.update(_split(rows.tobytes(), dtype.itemsize))
        self.dropped = 0

    def fresh(self, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Which of the rows the log does not have."""
        found = np.ones(len(rows), np.bool_)
        for at, row in enumerate(_split(rows.tobytes(), rows.dtype.itemsize)):
            if self._left[row] > 0:
                self._left[row] -= 1
                self.dropped += 1
                found[at] = False
        return found


def last_ends(log: ResultLog, groups: int) -> dict[int, int]:
    """{group: the latest end of a window} of the results of the log's newest generation.

    Windows of a group fire in order, but for revisions: read from the end, until each group has a first firing.
    """
    latest = np.full(groups, np.iinfo(np.int64).min)
    waiting = np.ones(groups, np.bool_)
    for batch in log.newest_first():
        group = column(batch.column("group"), np.dtype("<i4"))
        np.maximum.at(latest, group, column(batch.column("window_end"), np.dtype("<i8")))
        waiting[group[column(batch.column("revision"), np.dtype("<i4")) == 0]] = False
        if not waiting.any():
            break
    return {int(group): int(latest[group]) for group in np.flatnonzero(latest > np.iinfo(np.int64).min)}


def _split(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


def column(values: pa.Array, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """A column without nulls, as workers write it. Buffers, not to_numpy(): that would import pandas."""
    n, offset = len(values), values.offset
    data = values.buffers()[1]
    if n == 0 or data is None:
        return np.zeros(n, dtype)
    if pa.types.is_boolean(values.type):
        bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little", count=offset + n)
        return bits[offset:].astype(dtype)
    return np.frombuffer(data, dtype, count=offset + n)[offset:]
