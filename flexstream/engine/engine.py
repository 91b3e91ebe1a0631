"""The engine: streams and queries in, native workers underneath, results out. Embedded here, served by the daemon.

    with Engine(workers=2) as engine:
        engine.add(stream)
        engine.submit(query)
        engine.feed("ads", rows)
        engine.finish()
        for batch in engine.results("ysb"): ...
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexstream import durations
from flexstream.balance.door import ASKED_FOR, Balance
from flexstream.balance.mover import GroupMove
from flexstream.catalog.entries import RunningQuery, RunningStream, StreamPort
from flexstream.catalog.expected_sessions import ExpectedSessions
from flexstream.catalog.sessions import StreamSessions
from flexstream.compile.codegen import generate
from flexstream.compile.lowering import lower
from flexstream.cython_ext.operators.queries import QueryState
from flexstream.durations import Duration
from flexstream.engine.health import health
from flexstream.engine.options import balances, check_data_dir, check_sizes, data_address, worker_cores
from flexstream.engine.status import engine_status, open_windows, sessions_of
from flexstream.engine.wiring import Settings, start, wire
from flexstream.errors import EngineError
from flexstream.ingest.session_end import end_session
from flexstream.query.optimise import optimise
from flexstream.query.query import Query
from flexstream.results import query_logs
from flexstream.results.cut import Cut
from flexstream.results.follow_log import read_log
from flexstream.results.late_log import LateLog
from flexstream.results.query_late import QueryLate
from flexstream.results.result_rows import ResultRows
from flexstream.results.result_writer import ResultWriter
from flexstream.rows.stream import Stream
from flexstream.staging.service import DEFAULT_TIMEOUT_S
from flexstream.state.results.result_log import ResultLog

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger("flexstream.engine")
DEFAULT_STATE_BYTES = 4 << 30


class Engine:
    """Runs queries over streams on native workers, one per core.

    workers: how many, or the list of cores to pin them to. groups: G, the number of key groups. data_dir: where
    result logs live (None: in memory). listen: "host:port" of the data port (port 0: any; None: no port); other
    hosts than loopback need `token`. idle_timeout_s: a producer silent for so long stops holding the watermark.
    session_timeout_s: a producer whose connection broke is waited for so long. state_memory_bytes: cap on window
    state over all workers; rows that need a new key past it are rejected and counted. pin=False leaves the
    threads to the scheduler. expected_producers: nothing fires before so many have registered. compile: "auto"
    compiles queries to native code in the background, "off" does not, "require" makes submit() wait and raise.
    late_bytes: the most late rows that are kept of a stream, the oldest go first (None: all).
    stage_limit_bytes, stage_timeout_s: bound on staged rows, and on how long they wait for a commit.
    balance: "auto" (the default with several workers) moves groups as the load asks for it, "off" when told to.
    max_future: rows further ahead of the clock are rejected, unless their stream says otherwise (None: no bound).

    All methods are thread-safe. Raises EngineError: cores that do not exist, ports in use, unknown names.
    """

    def __init__(
        self,
        workers: int | list[int] = 1,
        *,
        groups: int = 128,
        data_dir: str | Path | None = None,
        listen: str | None = None,
        nic: str = "user",
        token: str | None = None,
        idle_timeout_s: float = 30.0,
        session_timeout_s: float = 60.0,
        hello_timeout_s: float = 5.0,
        max_pending_hello: int = 1024,
        max_sessions: int = 256,
        frame_bytes: int = 32768,
        state_memory_bytes: int = DEFAULT_STATE_BYTES,
        busy_poll: bool = False,
        pin: bool = True,
        retention_bytes: int | None = None,
        retention_s: float | None = None,
        late_bytes: int | None = query_logs.DEFAULT_LATE_BYTES,
        expected_producers: int = 0,
        compile: str = "auto",
        stage_limit_bytes: int | None = None,
        stage_timeout_s: float = DEFAULT_TIMEOUT_S,
        balance: str | None = None,
        max_future: Duration | None = None,
    ) -> None:
        cpus = worker_cores(workers)
        auto = balances(balance, len(cpus))
        check_sizes(groups, frame_bytes, max_sessions, nic, compile, state_memory_bytes // len(cpus))
        folder = check_data_dir(data_dir)
        self.groups = groups
        self.frame_bytes = frame_bytes
        self.state = "running"
        self.started_at = time.monotonic()
        self._logs = query_logs.QueryLogs(folder, retention_bytes, retention_s, late_bytes)
        self._max_sessions = max_sessions
        self._expected_producers = expected_producers
        self._max_future_ns = None if max_future is None else durations.parse(max_future)
        self._expected_sessions = ExpectedSessions()
        self._before_rows: Callable[[str], object] = lambda stream: None
        given = Settings(
            cpus=cpus, pin=pin, groups=groups, address=data_address(listen, token) if listen is not None else None,
            token=token, nic=nic, data_dir=folder, frame_bytes=frame_bytes, state_memory_bytes=state_memory_bytes,
            busy_poll=busy_poll, max_sessions=max_sessions, max_pending_hello=max_pending_hello,
            hello_timeout_s=hello_timeout_s, idle_timeout_s=idle_timeout_s, session_timeout_s=session_timeout_s,
            stage_limit_bytes=stage_limit_bytes, stage_timeout_s=stage_timeout_s, compile=compile, auto=auto,
        )  # fmt: skip
        parts = self._parts = wire(given)
        self._registry = parts.registry
        self.workers = parts.workers
        self.nic = parts.nic
        self.collector = parts.collector
        self.lanes = parts.lanes
        self.mover = parts.mover
        self.balance = parts.balance
        self.staging = parts.staging
        self.acceptor = parts.acceptor
        start(parts, given)

    # -- streams and queries

    def add(self, stream: Stream) -> None:
        """Make a stream known. Adding an equal one again does nothing."""
        registry = self._registry
        with registry.changing, registry.lock:
            registry.check_open()
            known = registry.streams.get(stream.name)
            if known is not None:
                if known.stream == stream:
                    return
                raise EngineError(
                    f"stream {stream.name!r} exists with another definition",
                    code="stream_exists",
                    hint="give the new one another name",
                )
            if len(registry.streams) == 64:
                raise EngineError("an engine has at most 64 streams", code="too_many_streams")
            index = len(registry.streams)
            placement = self.placement()
            future_ns = stream.future_ns(self._max_future_ns)
            handles = [w.add_stream(stream, index, placement, self._max_sessions, future_ns) for w in self.workers]
            sessions = StreamSessions(
                index, self.workers, self.groups, self._max_sessions, self._expected_producers,
                begin_anew=lambda: self._close_fired_windows(index),
                before_rows=lambda: self._before_rows(stream.name),
            )  # fmt: skip
            running = RunningStream(stream, index, handles, sessions, max_future_ns=future_ns)
            self._expected_sessions.hold(running)
            registry.add_stream(running)

    def submit(self, query: Query, *, lost_until: int | None = None, after_crash: bool = False) -> None:
        """Start a query; it sees the rows that come from now on. Its stream is added if it is not known yet.

        For one that comes back after a restart: windows that began before `lost_until`, or after a crash before what
        producers have reached when the first window fires, may lack rows, and their results say so (`complete`).
        """
        bound = optimise(query.bound())
        lowered = lower(bound)
        registry = self._registry
        with self.collector.reading_on(), self.mover.without_splits(), registry.lock:
            registry.check_open()
            if query.name in registry.queries:
                raise EngineError(
                    f"query {query.name!r} is running already",
                    code="query_exists",
                    hint="cancel it first, or give this one another name",
                )
            self.add(query.stream)
            stream = registry.streams[query.stream.name]
            if sum(q.stream is stream for q in registry.queries.values()) >= 64:
                raise EngineError("a stream has at most 64 queries", code="too_many_queries")
            number = registry.next_number()
            states = [QueryState(number, bound, lowered, self.groups, self._parts.allocator) for _ in self.workers]
            cut = Cut(query.name, lost_until, stream.reached if after_crash else None)
            rows = ResultRows(bound, cut)
            log, late_log = self._logs.open(query, rows)
            ends = query_logs.fired_before(log, bound, self.groups, self.staging.needed_from(query.name))
            for state in states:
                state.restore(ends)
            running = RunningQuery(
                query, number, stream, states, ResultWriter(query.name, rows, log), log, late_log
            )
            self.collector.add_query(number, stream.index, running.results, late_log)
            registry.add_query(running)
            for worker, state in zip(self.workers, states, strict=True):
                worker.add_query(stream.index, state)
            registry.told_workers()
        if not self._parts.variants.start(running, lambda: generate(bound)):
            self.cancel(query.name)
            raise EngineError(
                f"query {query.name!r} was not compiled: {running.variant_reason}",
                code="not_compiled",
                hint="use compile='auto' to run it without",
            )

    def _close_fired_windows(self, stream: int) -> None:
        """A window that fired at the end of the stream in one group is closed in all, before a new session begins."""
        for running in list(self._registry.queries.values()):
            ends = [end for state in running.states if (end := state.ended_until) is not None]
            if running.stream.index == stream and ends:
                for worker in self.workers:
                    worker.close_windows(stream, running.number, max(ends))

    def cancel(self, name: str) -> None:
        """Stop a query. Windows that have not fired are dropped; its result log stays on disk."""
        registry = self._registry
        for state in registry.query(name).states:
            state.cancel()  # first: what is ordered below waits for the workers, and so for what they are firing
        self.staging.query_gone(name)
        with self.collector.reading_on(), self.mover.without_splits(), registry.lock:
            registry.check_open()
            running = registry.query(name)
            del registry.queries[name]
            for worker, state in zip(self.workers, running.states, strict=True):
                worker.drop_query(running.stream.index, state)
            registry.told_workers()
        in_callback = threading.current_thread() is self.collector  # there it would wait for itself
        if not in_callback and not running.dropped.wait(10):
            fields = {"query": name, "until": "workers are less busy"}
            log.warning("cancelled_query_keeps_memory", extra={"fields": fields})
        self.collector.remove_query(running.number)
        query_logs.end(name, running.log, running.late_log)

    @property
    def streams(self) -> dict[str, Stream]:
        return {running.stream.name: running.stream for running in self._registry.running()[0]}

    @property
    def queries(self) -> dict[str, Query]:
        return {running.query.name: running.query for running in self._registry.running()[1]}

    # -- rows in

    def feed(
        self,
        stream: str,
        rows: Any,
        *,
        group: int | None = None,
        watermark: int | bool | None = None,
        wait: bool = True,
        missing: Any = None,
    ) -> None:
        """Rows without a socket: a numpy structured array, an Arrow batch, a data frame, a list of dicts.

        They are copied and grouped by key; blocks when the workers are behind. With `group` all rows must be of
        that group: they are then read in place, and the call returns when they have been processed, or at once
        with wait=False; then do not change them before `flush()`. The watermark follows the largest event time
        minus the stream's max_disorder, unless `watermark` gives one, in units of the time field (False: leave it
        as it is). Missing values are refused, unless `missing` says otherwise, as in `Producer.send`.
        """
        self._registry.check_open()
        self._parts.feeder.feed(self._registry.stream(stream), rows, group, watermark, wait, missing)

    def flush(self) -> None:
        """Wait until all that was fed has been processed."""
        self._parts.feeder.flush()

    def finish(self, timeout: float | None = None) -> None:
        """End of stream for what was fed: waits until every session has ended and every window has fired.

        Raises EngineError when `timeout` seconds pass first; it names the producers that are still there.
        """
        registry, feeder = self._registry, self._parts.feeder
        deadline = None if timeout is None else time.monotonic() + timeout
        feeder.end(registry.all_streams())
        self.staging.end_all()
        while left := [(s, running.stream.name) for running in registry.all_streams() for s in running.sessions.all()]:
            registry.check_open()
            if deadline is not None and time.monotonic() > deadline:
                who = [f"{session.producer} ({session.state}) on {name}" for session, name in left]
                raise EngineError(
                    f"not finished after {timeout:g} s: {', '.join(who)}",
                    code="not_finished",
                    hint="close these producers, or wait longer",
                )
            self.collector.check_alive()
            left[0][0].ended.wait(0.05)
        self._parts.round_trips.wait_for_workers(deadline)
        feeder.flush()

    def call_before_rows(self, call: Callable[[str], object]) -> None:
        """Call it with a stream's name before a producer that commits nothing may send to it.

        For one who needs the engine to be made, such as the daemon's book of what a crash may take.
        """
        self._before_rows = call

    # -- results out

    def results(
        self, name: str, offset: int = 0, *, follow: bool = False, timeout: float | None = None
    ) -> Iterator[pa.RecordBatch]:
        """The query's results from `offset` on. Ends with what is there, or with `follow` when the query is
        cancelled, the engine closes, or nothing comes for `timeout` seconds."""
        return read_log(self.result_log(name), offset, follow, timeout)

    def late(
        self, name: str, offset: int = 0, *, follow: bool = False, timeout: float | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Rows that came too late for the query: the stream's fields and the watermark that had passed."""
        return read_log(self._registry.query(name).late_log, offset, follow, timeout)

    def on_results(self, name: str, callback: Callable[[pa.RecordBatch], None]) -> None:
        """Call back with every batch of new results, after it is in the log. A slow callback slows the engine."""
        self._registry.query(name).results.callbacks.append(callback)

    def result_log(self, name: str) -> ResultLog:
        return self._registry.query(name).log

    def late_log(self, name: str) -> QueryLate:
        return self._registry.query(name).late_log

    def late_rows_of(self, stream: str) -> LateLog | None:
        """The log of a stream's late rows, of all its queries; None: it has had no query yet."""
        return self._logs.late_of(stream)

    # -- where groups are served

    def move(self, targets: Mapping[int, int], reason: str = ASKED_FOR) -> list[GroupMove]:
        """Move groups to workers, {group: worker}, while rows arrive. Returns when they are settled there.

        Raises EngineError, and nothing has moved: a group is frozen, a worker is drained, or not there.
        """
        return self.balance.move_all(targets, reason)

    def split(self, group: int, workers: Iterable[int]) -> dict[str, Any]:
        """Let these workers serve connections of the group beside its owner, which goes on firing its windows.

        A producer that knows lanes is asked for one for each of them; otherwise the group needs two connections.
        Automatic balancing undoes it when the group is not hot: freeze the group to keep it.
        """
        return self.balance.split(group, workers)

    def unsplit(self, group: int) -> dict[str, Any]:
        """The group's owner serves all its connections again; lanes end. Nothing to do if it is not split."""
        return self.balance.unsplit(group)

    # -- producers' sessions

    def sessions(self, stream: str) -> list[dict[str, Any]]:
        """The sessions of a stream that have not ended, as in the status."""
        return sessions_of(self.running_stream(stream))

    def registered_sessions(self, for_s: float = 0.0) -> dict[str, list[tuple[str, int]]]:
        """(producer, epoch) of each stream's network producers that came so long ago, for `expect_sessions`."""
        streams, _ = self.running()
        return {running.stream.name: known for running in streams if (known := running.sessions.registered(for_s))}

    def expect_sessions(self, stream: str, known: Iterable[tuple[str, int]]) -> None:
        """Before the stream is added: its windows wait for these producers, for session_timeout_s at most.

        They were there before a restart; whoever is back first must not drive the watermark alone.
        """
        self._expected_sessions.expect(stream, known)

    def end_session(self, stream: str, producer: str, kind: str | None = None) -> dict[str, Any]:
        """End a session that holds or poisons a stream, as if it had said EOS everywhere, and close its connections.

        Its rows so far count. A producer that comes back with the same epoch is refused. Raises EngineError: no such
        session, or several kinds of that name and no `kind` to choose by.
        """
        self._registry.check_open()
        return end_session(self.running_stream(stream), producer, kind, self.acceptor)

    # -- what others ask of it

    @property
    def data_address(self) -> tuple[str, int] | None:
        return self.acceptor.address if self.acceptor is not None else None

    def running(self) -> tuple[list[RunningStream], list[RunningQuery]]:
        return self._registry.running()

    def port_of(self, stream: str) -> StreamPort | None:
        return self._registry.port_of(stream)

    def running_stream(self, name: str) -> RunningStream:
        return self._registry.stream(name)

    @property
    def rebalancer(self) -> Balance:
        """`balance`, by its name of before."""
        return self.balance

    def placement(self) -> list[int]:
        """The worker of each group."""
        return list(self._parts.placement.owners())

    def status(self) -> dict[str, Any]:
        """Everything that there is to know, as plain data (docs/operations.md)."""
        return engine_status(self)

    def health(self) -> dict[str, Any]:
        """{"state", "problem", "not_ready"}, the last two None when all is well. It asks acceptor and workers for an
        answer, which takes seconds when they have none, and needs no part of `status`."""
        return health(self)

    # -- life

    def drain(self, timeout: float | None = None) -> list[dict[str, Any]]:
        """Stop accepting, work off what was received, write all results; returns the windows still open.

        The engine is closed afterwards. Past `timeout` seconds what is left is dropped.
        """
        parts = self._parts
        with parts.registry.lock:
            if not parts.registry.close():
                return []
            self.state = "draining"
        deadline = time.monotonic() + (30.0 if timeout is None else timeout)
        if parts.acceptor is not None:
            parts.acceptor.stop_accepting()
        parts.staging.stop(deadline)
        parts.session_clock.stop()
        parts.rebalancer.stop()
        parts.mover.stop()
        parts.nic.stop()
        for worker in parts.workers:
            worker.stop()
        while not all(worker.ended for worker in parts.workers) and time.monotonic() < deadline:
            time.sleep(0.002)
        for worker in parts.workers:
            if not worker.ended:
                worker.stop(wait_for_readers=False)
        for worker in parts.workers:
            for fd in worker.join():
                os.close(fd)
        parts.placement.close_leftovers()
        parts.collector.stop()
        parts.collector.join(timeout=max(1.0, deadline - time.monotonic()))
        if parts.acceptor is not None:
            parts.acceptor.stop()
        parts.nic.close()
        parts.session_clock.join(timeout=2)
        parts.rebalancer.join(timeout=2)
        windows = open_windows(parts.registry.queries.values())
        if parts.collector.is_alive():  # a callback that does not return: leave it what it may still use
            self.state = "failed"
            return windows
        for running in parts.registry.queries.values():
            running.log.close()
        self._logs.close()
        parts.variants.stop()
        parts.allocator.stop()
        for worker in parts.workers:
            worker.release()
        os.close(parts.reader_fd)
        self.state = "stopped"
        return windows

    def close(self) -> None:
        """Work off what was received, then stop. Windows that have not fired are dropped: call finish() first."""
        self.drain(10.0)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
