"""Where the results and the late rows of queries are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flexstream.state.result_log import ResultLog


class QueryLogs:
    """Opens the logs of an engine's queries: `results/<query>` and `late/<query>` in its data directory."""

    def __init__(self, data_dir: Path | None, retention_bytes: int | None, retention_s: float | None) -> None:
        self._data_dir = data_dir
        self._retention_bytes = retention_bytes
        self._retention_s = retention_s

    def results(self, name: str, rows: Any) -> ResultLog:
        return self._open("results", name, rows)

    def late(self, name: str, rows: Any) -> ResultLog:
        return self._open("late", name, rows)

    def _open(self, kind: str, name: str, rows: Any) -> ResultLog:
        directory = self._data_dir / kind / name if self._data_dir is not None else None
        return ResultLog(
            directory, rows.schema, retention_bytes=self._retention_bytes, retention_s=self._retention_s
        )
