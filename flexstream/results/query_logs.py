"""Where the results and the late rows of queries are kept."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

from flexstream.errors import FlexStreamError
from flexstream.query.plan import version_1
from flexstream.query.plan.stages import BoundQuery
from flexstream.query.query import Query
from flexstream.state.results.already_logged import last_ends
from flexstream.state.results.result_log import ResultLog
from flexstream.state.results.room import Room

log = logging.getLogger("flexstream.results")
DEFAULT_LATE_BYTES = 256 << 20


class QueryLogs:
    """Opens the logs of an engine's queries: `results/<query>` and `late/<query>` in its data directory.

    `retention_bytes`, `retention_s`: of each; `late_bytes`: the most of late rows, which any producer can send without
    end, of all queries of a stream together. The oldest go first.
    """

    def __init__(
        self, data_dir: Path | None, retention_bytes: int | None, retention_s: float | None, late_bytes: int | None
    ) -> None:
        self._data_dir = data_dir
        self._retention_bytes = retention_bytes
        self._retention_s = retention_s
        self._late_bytes = late_bytes
        self._late_rooms: dict[str, Room] = {}  # by stream

    def open(self, query: Query, rows: Any, late_rows: Any) -> tuple[ResultLog, ResultLog]:
        """(results, late rows), to go on with. Raises ResultLogError: other columns, a damaged log, the disk."""
        results = self._open("results", query, rows)
        try:
            return results, self._open("late", query, late_rows, self._late_room(query.stream.name))
        except BaseException:
            results.close()
            raise

    def _late_room(self, stream: str) -> Room | None:
        if self._late_bytes is None:
            return None
        return self._late_rooms.setdefault(stream, Room(self._late_bytes))

    def _open(self, kind: str, query: Query, rows: Any, room: Room | None = None) -> ResultLog:
        directory = self._data_dir / kind / query.name if self._data_dir is not None else None
        return ResultLog(
            directory, rows.schema, plan=plan_of(query),
            retention_bytes=self._retention_bytes, retention_s=self._retention_s, room=room,
        )  # fmt: skip


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
    parts = version_1.identity(query.root)
    parts["stream"] = [stream.name, stream.schema.hash, list(stream.key), stream.time, stream.max_disorder]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def end(name: str, *logs: ResultLog) -> None:
    """The query was cancelled: who has its name next is another one."""
    for one in logs:
        try:
            one.end_generation()
        except FlexStreamError as error:
            log.error("generation_not_ended", extra={"fields": {"query": name, "error": str(error)}})
        one.close()
