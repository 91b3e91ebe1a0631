"""What the next start must know of windows that were open: kept in the catalog, told to the engine.

`live`: streams that have, or may have, rows which no commit keeps; marked before the first of them is taken, unmarked
when all producers have ended and every window has fired. `cut`: query -> windows that begin before it may lack rows,
written by a clean stop. After a crash there is no such bound for a live stream, and the engine finds one (cut.py).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any

from flexstream.daemon.catalog import Catalog
from flexstream.daemon.engine_api import EngineAPI
from flexstream.errors import ConfigError
from flexstream.query.query import Query
from flexstream.results.cut import Cut

log = logging.getLogger("flexstream.daemon")


class Continuity:
    """What a restart continues from. Thread-safe. `crashed`: the last daemon did not stop cleanly."""

    def __init__(self, catalog: Catalog, engine: EngineAPI, crashed: bool) -> None:
        self._catalog = catalog
        self._engine = engine
        self._lock = threading.Lock()
        self._crashed_streams = set()
        if crashed or not catalog.knows_cuts:
            self._crashed_streams = set(catalog.streams) if catalog.live is None else set(catalog.live)
        self._catalog.live = set(self._crashed_streams)

    def arguments(self, query: Query) -> dict[str, Any]:
        """For the engine's `submit` of a query that comes back."""
        said: dict[str, Any] = {}
        if query.name in self._catalog.cut:
            said["lost_until"] = self._catalog.cut[query.name]
        if query.stream.name in self._crashed_streams:
            said["after_crash"] = True
        if said:
            level = logging.WARNING if "after_crash" in said else logging.INFO
            log.log(level, "results_may_be_incomplete", extra={"fields": {"query": query.name, **said}})
        return said

    def rows_come(self, stream: str) -> None:
        """Before a producer without commits may send."""
        with self._lock:
            if self._catalog.live is None or stream in self._catalog.live:
                return
            self._catalog.live.add(stream)
            self._mark()

    def note_idle(self) -> None:
        """Streams whose producers have all ended and whose windows have all fired have nothing to lose."""
        streams, queries = self._engine.running()
        for running in streams:
            name = running.stream.name
            busy = any(q.stream is running and (_has_windows(q) or _cut_of(q).open) for q in queries)
            if name in (self._catalog.live or ()) and not busy:
                running.sessions.while_empty(lambda name=name: self._idle(name))

    def _idle(self, stream: str) -> None:
        with self._lock:
            if self._catalog.live is not None and stream in self._catalog.live:
                self._catalog.live.discard(stream)
                self._mark()

    def _mark(self) -> None:
        try:
            self._catalog.write(durable=False)
        except ConfigError as error:  # after a crash such a stream would be taken for one without rows
            log.error("catalog_not_marked", extra={"fields": {"error": error.message}})

    def stopped(self, windows: list[Any]) -> bool:
        """After a clean stop. False: for streams where no window fired after a crash it is still the crash that counts.

        Raises ConfigError: the next start must take it for a crash.
        """
        last_ends = {w["query"]: w["last_end"] for w in windows if isinstance(w, Mapping) and "last_end" in w}
        _, queries = self._engine.running()
        live = self._catalog.live or set()
        with self._lock:
            for running in queries:
                name, bound = running.query.name, running.query.bound()
                found = [self._catalog.cut.get(name), _cut_of(running).until]
                if name in last_ends and running.query.stream.name in live:
                    found.append(bound.windower.open_from(last_ends[name]))  # the last of them begins before it
                known = [until for until in found if until is not None]
                if known:
                    self._catalog.cut[name] = max(known)
            self._catalog.live = {q.query.stream.name for q in queries if _cut_of(q).open}
            self._catalog.write()
            return not self._catalog.live


def _cut_of(running: Any) -> Cut:
    cut: Cut = running.results.rows.cut
    return cut


def _has_windows(running: Any) -> bool:
    return any(state.counters()["open_windows"] for state in running.states)
