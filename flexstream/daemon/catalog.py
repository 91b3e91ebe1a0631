"""The data directory: one daemon at a time, and a catalog of streams and queries that survives restarts."""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
import threading
from pathlib import Path
from typing import Any

from flexstream.errors import ConfigError, FlexStreamError
from flexstream.query.query import Query
from flexstream.rows.stream import Stream
from flexstream.state.results.segments import sync_directory

CATALOG_VERSION = 1
Sessions = dict[str, list[tuple[str, int]]]  # of each stream


class DataDirLock:
    """Holds `data_dir/lock` for as long as this process lives (the kernel lets go of it after a crash)."""

    def __init__(self, data_dir: Path) -> None:
        """Make the directory and take the lock. ConfigError names the process that has it already."""
        try:
            data_dir.mkdir(parents=True, exist_ok=True, mode=0o750)
            self._fd = os.open(data_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
        except OSError as error:
            raise ConfigError(
                f"cannot use data_dir {data_dir}: {error.strerror or error}",
                code="bad_data_dir",
                hint="give --data-dir a directory that this user may write to",
            ) from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.pread(self._fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(self._fd)
            raise ConfigError(
                f"another daemon (pid {owner}) uses data_dir {data_dir}",
                code="data_dir_locked",
                hint=f"stop it (kill {owner}), or give this one its own --data-dir and ports",
            ) from error
        self.crashed = os.fstat(self._fd).st_size > 0  # the daemon before this one left its pid
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def release(self, *, clean: bool = True) -> None:
        """Let go. Not clean: the next daemon is to know that open windows were lost."""
        if self._fd >= 0:
            if clean:
                os.ftruncate(self._fd, 0)
            os.close(self._fd)
            self._fd = -1


class Catalog:
    """`catalog.json`, written whole and atomically: beside, fsynced, renamed. Thread-safe.

    `live` and `cut`: see continuity.py; `live` None: the file is of a version that did not note it.
    Assumes: the caller holds the DataDirLock.
    """

    def __init__(self, data_dir: Path) -> None:
        """Read the catalog. Raises ConfigError when it cannot be understood; it is then left untouched."""
        self.path = data_dir / "catalog.json"
        self.groups: int | None = None
        self.streams: dict[str, Stream] = {}
        self.queries: dict[str, Query] = {}
        self.sessions: Sessions = {}  # (producer, epoch) of those that were there
        self.live: set[str] | None = set()
        self.cut: dict[str, int] = {}
        self.knows_cuts = True
        self._writing = threading.RLock()
        try:
            body = json.loads(self.path.read_bytes())
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            raise self._bad(str(error)) from error
        self._read(body)

    def _read(self, body: Any) -> None:
        if not isinstance(body, dict) or body.get("version") != CATALOG_VERSION:
            version = body.get("version") if isinstance(body, dict) else None
            raise self._bad(f"it has version {version!r}, and this daemon reads version {CATALOG_VERSION}")
        try:
            self.groups = body["groups"]
            for item in body["streams"]:
                stream = Stream.from_dict(item)
                self.streams[stream.name] = stream
            for item in body["queries"]:
                query = Query.from_dict(item)
                self.queries[query.name] = query
            for name, known in body.get("sessions", {}).items():
                self.sessions[name] = [(str(one["producer"]), int(one["epoch"])) for one in known]
            self.knows_cuts = "cut" in body
            self.live = set(map(str, body["live"])) if "live" in body else None
            self.cut = {str(name): int(until) for name, until in body.get("cut", {}).items()}
        except (FlexStreamError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise self._bad(str(error)) from error

    def _bad(self, reason: str) -> ConfigError:
        return ConfigError(
            f"cannot read the catalog {self.path}: {reason}",
            code="bad_catalog",
            hint="restore it from a backup, or move it away to start without streams and queries",
        )

    def check_groups(self, groups: int) -> None:
        """Results and sessions are defined by the number of groups: it cannot change under them."""
        if self.streams and self.groups is not None and self.groups != groups:
            raise ConfigError(
                f"{self.path} was made with groups = {self.groups}, but the configuration says {groups}",
                code="groups_changed",
                hint=f"set groups = {self.groups}, or use another data_dir",
            )
        self.groups = groups

    def save(
        self, streams: dict[str, Stream], queries: dict[str, Query], sessions: Sessions | None = None
    ) -> None:
        """Replace the catalog. On an error (ConfigError `catalog_io`) the file is the old one, whole."""
        with self._writing:
            before = self.streams, self.queries, self.sessions
            self.streams, self.queries, self.sessions = dict(streams), dict(queries), dict(sessions or {})
            try:
                self.write()
            except ConfigError:
                self.streams, self.queries, self.sessions = before
                raise

    def write(self, *, durable: bool = True) -> None:
        """The file anew, as all of this says. Not durable: it survives the process, a power cut perhaps not."""
        with self._writing:
            body = {
                "version": CATALOG_VERSION,
                "groups": self.groups,
                "streams": [stream.to_dict() for stream in self.streams.values()],
                "queries": [json.loads(query.to_json()) for query in self.queries.values()],
                "sessions": {
                    name: [{"producer": producer, "epoch": epoch} for producer, epoch in known]
                    for name, known in self.sessions.items()
                },
                "live": sorted(self.live or ()),
                "cut": {name: until for name, until in self.cut.items() if name in self.queries},
            }
            self._replace(body, durable)

    def _replace(self, body: dict[str, Any], durable: bool) -> None:
        temporary = None
        try:
            fd, temporary = tempfile.mkstemp(prefix=".catalog-", dir=self.path.parent)
            with os.fdopen(fd, "w", encoding="utf-8") as stream:
                json.dump(body, stream, indent=1)
                stream.write("\n")
                stream.flush()
                if durable:
                    os.fsync(stream.fileno())
            os.replace(temporary, self.path)
            if durable:
                sync_directory(self.path.parent)
        except OSError as error:
            if temporary is not None:
                Path(temporary).unlink(missing_ok=True)
            raise ConfigError(
                f"cannot write the catalog {self.path}: {error.strerror or error}",
                code="catalog_io",
                hint="free some space or repair the directory, then send the request again",
            ) from error
