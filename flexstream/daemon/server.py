"""The daemon's life: bring back the catalog, serve, drain, say what was left open."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any

from aiohttp import web

import flexstream
from flexstream.addresses import join_address
from flexstream.daemon import problems
from flexstream.daemon.access import Access, add_headers
from flexstream.daemon.catalog import Catalog
from flexstream.daemon.continuity import Continuity
from flexstream.daemon.engine_api import EngineAPI
from flexstream.daemon.http_port import IDLE_S, HttpPort
from flexstream.daemon.notify import notify, watchdog_interval_s
from flexstream.daemon.problems import ApiError
from flexstream.daemon.results import Readers
from flexstream.daemon.routes import Routes
from flexstream.daemon.stages import StageRoutes
from flexstream.daemon.threads import Threads
from flexstream.errors import ConfigError, FlexStreamError
from flexstream.query.query import Query
from flexstream.rows.stream import Stream

log = logging.getLogger("flexstream.daemon")
SESSIONS_EVERY_S = 0.5  # at most so often the catalog is written because producers came or went
SESSION_SETTLED_S = 2.0  # and not for those that are gone at once
RETENTION_EVERY_S = 30.0
IDLE_EVERY_S = 2.0  # how soon a stream without producers and open windows is known to have nothing to lose
HEALTH_TIMEOUT_S = 12.0
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Daemon:
    """One engine behind HTTP. `start()`, then `stop()`; or `run()`, which lives until SIGTERM or SIGINT.

    `catalog` None keeps nothing across restarts. The engine is closed by `stop()`.
    Assumes: all methods are called on the event loop; the engine's own are called off it.
    """

    def __init__(
        self,
        engine: EngineAPI,
        *,
        control: tuple[str, int] = ("127.0.0.1", 0),
        token: str | None = None,
        catalog: Catalog | None = None,
        crashed: bool = False,
        drain_timeout_s: float = 30.0,
        max_body_bytes: int = 1 << 20,
        suppressed: Callable[[], int] = lambda: 0,
    ) -> None:
        self.engine = engine
        self.readers = Readers()
        self.not_ready: str | None = "the daemon is reading its catalog"
        self.catalog_failed: dict[str, str] = {}
        self.drained = False  # True after a stop that processed all that had been received
        self.control_address: tuple[str, int] | None = None
        self._control = control
        self.access = Access(token)
        self._catalog = catalog
        self._continuity = Continuity(catalog, engine, crashed) if catalog is not None else None
        self.clean = False  # True when the next start knows all about the windows that were open
        self._drain_timeout_s = drain_timeout_s
        self._suppressed = suppressed
        self._requests: Counter[tuple[str, str, int]] = Counter()
        self._looking = threading.Lock()
        self._last_status: dict[str, Any] | None = None
        self._health: asyncio.Future[dict[str, Any]] | None = None
        self.threads = Threads()
        self._changing = asyncio.Lock()  # one change of streams and queries at a time
        self._tasks: list[asyncio.Task[None]] = []
        self._started = time.time()
        self.app = web.Application(middlewares=[self._guard], client_max_size=max_body_bytes)
        self.app.on_response_prepare.append(add_headers)
        self.app.add_routes([*Routes(self).table(), *StageRoutes(self).table()])
        self._runner = web.AppRunner(self.app, access_log=None, keepalive_timeout=IDLE_S, shutdown_timeout=2)
        self.port = HttpPort(lambda: self._protocol())

    # Requests -----------------------------------------------------------------------------------------------

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """May it ask? Then the handler; every failure becomes JSON with a status and is counted."""
        response: web.StreamResponse
        connection = None
        try:
            await self.access.check(request)
            connection = self.port.begin(request.transport)
            response = await handler(request)
        except FlexStreamError as error:
            response = problems.reply(error)
        except web.HTTPException as error:
            response = problems.from_http(error, request)
        except (asyncio.CancelledError, ConnectionResetError):
            raise
        except Exception as error:
            fields = {"method": request.method, "path": request.path}
            log.exception("request_failed", extra={"fields": fields})
            problem = ApiError(
                f"the daemon failed to answer this request: {type(error).__name__}: {error}",
                code="internal",
                hint="its log has the details; please report it",
            )
            response = problems.reply(problem, 500)
        finally:
            self.port.end(connection)
        resource = request.match_info.route.resource
        path = resource.canonical if resource is not None else "other"
        method = request.method if request.method in ("GET", "POST", "DELETE") else "other"
        self._requests[method, path, response.status] += 1
        return response

    # Changes ------------------------------------------------------------------------------------------------

    async def add_stream(self, stream: Stream) -> None:
        await asyncio.shield(self._change(lambda: self.engine.add(stream), None))
        log.info("stream_added", extra={"fields": {"stream": stream.name, "key": ",".join(stream.key)}})

    async def submit_query(self, query: Query) -> None:
        """Submit, with its stream if that is new; undone if the catalog cannot be written."""

        def submit() -> None:
            if query.stream.name not in self.engine.streams:
                self.engine.add(query.stream)
            self.engine.submit(query)

        await asyncio.shield(self._change(submit, lambda: self.engine.cancel(query.name)))
        log.info("query_submitted", extra={"fields": {"query": query.name, "stream": query.stream.name}})

    async def cancel_query(self, name: str) -> None:
        await asyncio.shield(self._change(lambda: self.engine.cancel(name), None))
        log.info("query_cancelled", extra={"fields": {"query": name}})

    async def _change(self, apply: Callable[[], Any], undo: Callable[[], Any] | None) -> None:
        async with self._changing:
            if self.readers.stopping.is_set():
                raise ApiError(
                    "the daemon is stopping", code="shutting_down", hint="try again after its restart"
                )
            await self.threads.run("changes", apply)
            try:
                await self.threads.run("changes", self._save)
            except ConfigError:
                if undo is not None:
                    await self.threads.run("changes", undo)
                raise

    def _save(self, sessions_for_s: float = SESSION_SETTLED_S) -> None:
        if self._catalog is not None:
            # What did not come back this time stays in the catalog for the next.
            streams = {
                name: s
                for name, s in self._catalog.streams.items()
                if f"stream {name}" in self.catalog_failed
            }
            queries = {
                name: q for name, q in self._catalog.queries.items() if f"query {name}" in self.catalog_failed
            }
            sessions = self.engine.registered_sessions(sessions_for_s)
            self._catalog.save({**streams, **self.engine.streams}, {**queries, **self.engine.queries}, sessions)

    def _save_sessions(self, for_s: float = SESSION_SETTLED_S) -> None:
        """Who is there, if that has changed: after a restart windows wait for them."""
        if self._catalog is not None and self.engine.registered_sessions(for_s) != self._catalog.sessions:
            self._save(for_s)

    async def _keep_sessions(self) -> None:
        while True:
            await asyncio.sleep(SESSIONS_EVERY_S)
            try:
                async with self._changing:
                    await asyncio.to_thread(self._save_sessions)
            except ConfigError as error:
                log.warning("catalog_failed", extra={"fields": {"error": error.message}})

    def _restore(self) -> None:
        continuity = self._continuity
        if self._catalog is None or continuity is None:
            return
        self.engine.call_before_rows(continuity.rows_come)
        for name, stream in self._catalog.streams.items():
            if name not in self.engine.streams:
                self.engine.expect_sessions(name, self._catalog.sessions.get(name, ()))
                self._bring_back(f"stream {name}", partial(self.engine.add, stream))
        left = {name: query for name, query in self._catalog.queries.items() if name not in self.engine.queries}

        def submit(names: list[str]) -> None:
            notify("STATUS=applying committed batches again", "EXTEND_TIMEOUT_USEC=60000000")
            for name in names:
                if name in left:
                    query = left.pop(name)
                    self._bring_back(f"query {name}", partial(self.engine.submit, query, **continuity.arguments(query)))

        staging = getattr(self.engine, "staging", None)
        if staging is not None:
            staging.replay(submit)  # batches that are applied again are for the queries that saw them, no others
        submit(list(left))
        if staging is not None:
            staging.only_queries({*self.engine.queries, *self._catalog.queries})

    def _bring_back(self, what: str, apply: Callable[[], Any]) -> None:
        """One entry that fails must not keep the others, and the daemon, away."""
        try:
            apply()
        except FlexStreamError as error:
            self.catalog_failed[what] = str(error)
            log.error("catalog_entry_failed", extra={"fields": {"entry": what, "error": error}})

    async def engine_status(self) -> dict[str, Any]:
        """The engine's status; once it drains, the last one before that: its workers are being taken down."""
        return await self.threads.run("status", self._engine_status)

    def _engine_status(self) -> dict[str, Any]:
        with self._looking:
            return self._last_status if self._last_status is not None else self.engine.status()

    def _freeze_status(self) -> None:
        with self._looking:
            last: dict[str, Any] = {}
            try:
                last = self.engine.status()
            except Exception:  # a stop goes on without it
                log.exception("status_failed")
            self._last_status = {**last, "state": "draining"}

    async def health(self) -> dict[str, Any]:
        """The engine's, from a thread of its own: whatever else is slow, this answers. All who ask share it."""
        if self._health is None or self._health.done():
            self._health = self.threads.run("health", self.engine.health)
        try:
            return await asyncio.wait_for(asyncio.shield(self._health), HEALTH_TIMEOUT_S)
        except TimeoutError:
            problem = f"the engine has not answered for {HEALTH_TIMEOUT_S:g} s"
        except Exception as error:
            log.exception("health_failed")
            problem = f"the health check failed: {type(error).__name__}: {error}"
        return {"state": "unknown", "problem": problem, "not_ready": None}

    async def status(self) -> dict[str, Any]:
        """The engine's status and, under "daemon", the daemon's own."""
        status = dict(await self.engine_status())
        data = self.engine.data_address
        status["daemon"] = {
            "version": flexstream.__version__,
            "pid": os.getpid(),
            "started": self._started,
            "control": join_address(*self.control_address) if self.control_address else None,
            "data": join_address(*data) if data else None,
            "not_ready": self.not_ready,
            "catalog_failed": self.catalog_failed,
            "authentication_failures": self.access.failures,
            "result_readers": self.readers.open,
            "result_readers_cut": self.readers.cut,
            "http_connections": self.port.open,
            "http_connections_closed": dict(self.port.closed),
            "log_lines_suppressed": self._suppressed(),
            "http_requests": [
                [{"method": method, "path": path, "status": code}, count]
                for (method, path, code), count in sorted(self._requests.items())
            ],
        }
        return status

    # Life ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Bring back the catalog, then listen. Raises ConfigError when the port is taken."""
        await asyncio.to_thread(self._restore)
        await self._runner.setup()
        assert self._runner.server is not None
        self._protocol = self._runner.server
        try:
            await self.port.listen(*self._control)
        except ConfigError:
            await self._runner.cleanup()
            raise
        self.control_address = self.port.address
        self.not_ready = None
        tasks = (self._watchdog, self._trim, self._keep_sessions, self._note_idle)
        self._tasks = [asyncio.create_task(task()) for task in tasks]

    async def stop(self) -> list[Any]:
        """Stop accepting, work off what was received, flush, close; returns the windows still open."""
        self.not_ready = "the daemon is stopping"
        notify(
            "STOPPING=1", "STATUS=draining", f"EXTEND_TIMEOUT_USEC={int((self._drain_timeout_s + 10) * 1e6)}"
        )
        async with self._changing:
            await asyncio.to_thread(self._freeze_status)
            try:
                await asyncio.to_thread(self._save_sessions, 0.0)  # before the drain, which ends all connections
            except ConfigError as error:  # a stop goes on without it
                log.warning("catalog_failed", extra={"fields": {"error": error.message}})
            began = time.monotonic()
            open_windows = await asyncio.to_thread(self.engine.drain, self._drain_timeout_s)
            self.drained = time.monotonic() - began < self._drain_timeout_s
            self.clean = await asyncio.to_thread(self._note_stop, list(open_windows or []))
            self.readers.stopping.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for _ in range(40):  # followers notice within a second and end their replies properly
            if self.readers.open == 0:
                break
            await asyncio.sleep(0.05)
        self.port.close()
        await self._runner.cleanup()
        await asyncio.to_thread(self.engine.close)
        self.threads.stop()
        return list(open_windows or [])

    def _note_stop(self, windows: list[Any]) -> bool:
        if not self.drained:
            return False
        try:
            return self._continuity is None or self._continuity.stopped(windows)
        except ConfigError as error:
            log.error("open_windows_not_noted", extra={"fields": {"error": error.message}})
            return False

    async def run(self, on_ready: Callable[[Daemon], None], on_stopped: Callable[[list[Any]], None]) -> None:
        """Start, live until SIGTERM or SIGINT, stop. A second signal while draining kills as usual."""
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, ended.set)
        await self.start()
        on_ready(self)
        notify("READY=1", f"STATUS={len(self.engine.streams)} streams, {len(self.engine.queries)} queries")
        await ended.wait()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)
        log.info("stopping", extra={"fields": {"drain_timeout_s": self._drain_timeout_s}})
        on_stopped(await self.stop())

    async def _watchdog(self) -> None:
        """Tell systemd that we live, as long as the engine answers and has not failed."""
        interval_s = watchdog_interval_s()
        if interval_s is None:
            return
        while True:
            with suppress(TimeoutError):
                if (health := await asyncio.wait_for(self.health(), interval_s))["problem"] is None:
                    notify("WATCHDOG=1")
                else:
                    log.error("not_healthy", extra={"fields": {"problem": health["problem"]}})
            await asyncio.sleep(interval_s / 2)

    async def _note_idle(self) -> None:
        while self._continuity is not None:
            await asyncio.sleep(IDLE_EVERY_S)
            with suppress(FlexStreamError):
                await asyncio.to_thread(self._continuity.note_idle)

    def _enforce_retention(self, name: str) -> None:
        self.engine.result_log(name).enforce_retention()
        self.engine.late_log(name).enforce_retention()

    async def _trim(self) -> None:
        """Retention for logs that get no rows: an append does it for the others."""
        while True:
            await asyncio.sleep(RETENTION_EVERY_S)
            for name in list(self.engine.queries):
                try:
                    await asyncio.to_thread(self._enforce_retention, name)
                except FlexStreamError as error:
                    log.warning("retention_failed", extra={"fields": {"query": name, "error": error.message}})
