"""Where the results and the late rows of queries are kept."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path

from flexstream.errors import FlexStreamError
from flexstream.query.plan import BoundQuery
from flexstream.query.query import Query
from flexstream.results.late_log import LateLog
from flexstream.results.query_late import QueryLate
from flexstream.results.result_rows import LateRows, ResultRows
from flexstream.rows.stream import Stream
from flexstream.state.results.already_logged import last_ends
from flexstream.state.results.result_log import ResultLog

log = logging.getLogger("flexstream.results")
DEFAULT_LATE_BYTES = 256 << 20


class QueryLogs:
    """Opens the logs of an engine's queries: `results/<query>` and `late_rows/<stream>` in its data directory.

    `retention_bytes`, `retention_s`: of each; `late_bytes`: the most late rows of a stream, which any producer can send
    without end. The oldest go first.
    """

    def __init__(
        self, data_dir: Path | None, retention_bytes: int | None, retention_s: float | None, late_bytes: int | None
    ) -> None:
        self._data_dir = data_dir
        bounds = [most for most in (retention_bytes, late_bytes) if most is not None]
        self._retention_bytes = retention_bytes
        self._retention_s = retention_s
        self._late_bytes = min(bounds, default=None)
        self._late: dict[str, LateLog] = {}  # by stream

    def open(self, query: Query, rows: ResultRows) -> tuple[ResultLog, QueryLate]:
        """(results, late rows), to go on with. Raises ResultLogError: other columns, a damaged log, the disk."""
        plan = plan_of(query)
        results = ResultLog(
            self._folder("results", query.name), rows.schema, plan=plan,
            retention_bytes=self._retention_bytes, retention_s=self._retention_s,
        )  # fmt: skip
        try:
            late = self._late_log(query.stream)
            return results, late.open(query.name, plan, self._earlier_late(query, plan, late))
        except BaseException:
            results.close()
            raise

    def late_of(self, stream: str) -> LateLog | None:
        """None: no query has had the stream yet."""
        return self._late.get(stream)

    def close(self) -> None:
        for late in self._late.values():
            late.close()

    def _folder(self, kind: str, name: str) -> Path | None:
        return self._data_dir / kind / name if self._data_dir is not None else None

    def _late_log(self, stream: Stream) -> LateLog:
        if stream.name not in self._late:
            folder = self._folder("late_rows", stream.name)
            rows = LateRows(stream)
            self._late[stream.name] = LateLog(stream.name, rows, folder, self._late_bytes, self._retention_s)
        return self._late[stream.name]

    def _earlier_late(self, query: Query, plan: str, late: LateLog) -> ResultLog | None:
        """Earlier versions had a log of late rows per query: it is read, and never written again."""
        folder = self._folder("late", query.name)
        if folder is None or not any(folder.glob("*.arrow")):
            return None
        goes_on = None if late.knows(query.name) else plan
        return ResultLog(
            folder, late.rows.schema, plan=goes_on, retention_bytes=self._late_bytes, retention_s=self._retention_s
        )


def fired_before(log: ResultLog, bound: BoundQuery, groups: int, needed_from: int | None) -> dict[int, int]:
    """{group: the end of the last window that fired}, as the log of a query that goes on after a restart says.

    `needed_from`: the oldest row that will be applied again; windows that hold it, or later ones, are not over.
    """
    ends = last_ends(log, groups)
    if needed_from is None:
        return ends
    before = bound.windower.last_end_until(needed_from)
    return {group: min(end, before) for group, end in ends.items()}


def plan_of(query: Query) -> str:
    """What the query does, in a few letters: equal for equal plans, whatever they are called."""
    stream = query.stream
    parts = {key: value for key, value in query.to_dict().items() if key not in ("name", "stream", "version")}
    parts["stream"] = [stream.name, stream.schema.hash, list(stream.key), stream.time, stream.max_disorder]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def end(name: str, *logs: ResultLog | QueryLate) -> None:
    """The query was cancelled: who has its name next is another one."""
    for one in logs:
        try:
            one.end_generation()
        except FlexStreamError as error:
            log.error("generation_not_ended", extra={"fields": {"query": name, "error": str(error)}})
        one.close()
