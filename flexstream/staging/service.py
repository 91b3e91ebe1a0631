"""Exactly once: staged rows become visible by a commit, once per (sink, query, batch), also across restarts.

The stages are the write-ahead log. A commit is one record in the journal: before it is durable nothing of the batch
counts, from then on all of it does. A thread applies committed batches in the order of the journal, as one in-process
session per (stream, sink) whose watermark follows the rows that were applied. With a directory a batch is kept until
every window that it touched is in the result log; a restarted engine applies the kept ones again, and the log leaves
out what it holds (state/results/already_logged.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexstream.catalog.sessions import SINK, Session, SessionRefused
from flexstream.errors import FlexStreamError, StageError
from flexstream.ingest.in_process import Feeder
from flexstream.rows.stream import TIME_LIMIT
from flexstream.staging.port import Host, StagePort
from flexstream.staging.stages import DEFAULT_LIMIT_BYTES, Stage, Stages
from flexstream.state.results.already_logged import KnownLate, KnownResults
from flexstream.state.stage.applied import DEFAULT_REMEMBER_S
from flexstream.state.stage.commit_journal import CommitJournal, Record
from flexstream.state.stage.direct_io import Bytes, SparePages
from flexstream.wire.frames import WireError
from flexstream.wire.stage_block import decode

if TYPE_CHECKING:
    from flexstream.catalog.entries import RunningQuery, RunningStream
    from flexstream.cython_ext.worker.worker import Worker
    from flexstream.results.late_log import LateLog

log = logging.getLogger("flexstream.staging")

TICK_S = 0.25
COMMIT_WAIT_S = 5.0  # a commit waits so long for its rows to be applied; it counts whether they are or not
ENDING_WAIT_S = 30.0
DEFAULT_TIMEOUT_S = 24 * 3600.0
MOST_FAILED = 1000  # that the status names
MOST_DEATHS = 3  # so many processes that died while they applied a batch, and it is set aside


class Staging:
    """The stages of an engine and what becomes of them. Thread-safe."""

    def __init__(
        self, catalog: Host, workers: list[Worker], feeder: Feeder, wait_for_workers: Callable[[], None],
        data_dir: Path | None, limit_bytes: int | None, timeout_s: float,
    ) -> None:  # fmt: skip
        """Reads the journal and finds the stages. Raises StageError."""
        directory = data_dir / "stage" if data_dir is not None else None
        self._catalog = catalog
        self._workers = workers
        self._feeder = feeder
        self._wait_for_workers = wait_for_workers
        self.stages = Stages(directory, DEFAULT_LIMIT_BYTES if limit_bytes is None else limit_bytes, timeout_s)
        self.journal = CommitJournal(directory)
        self.port = StagePort(catalog, self.stages)
        self.failed: dict[str, str] = {}  # batches that could not be applied again, and why
        self._lock = threading.RLock()  # one commit at a time
        self._lives = 0
        self._registering = threading.Lock()
        self._sessions: dict[tuple[str, str], Session] = {}
        self._handing: deque[tuple[Stage, int, Bytes, dict[Any, int]]] = deque()  # what workers have not worked off
        self._spare = SparePages()  # for their rows
        self._todo: queue.Queue[tuple[Record, Future[None]] | None] = queue.Queue()  # None: the end
        self._applied: set[int] = set()  # numbers of kept batches that were applied by this process
        self._settled: set[int] = set()  # and whose windows have all fired
        self._closed = False
        self._replayed = False
        self._stopping = threading.Event()
        self._set_aside()
        self.stages.forget(self.journal.dropped_stages)
        self.journal.dropped_stages.clear()
        for record in self.journal.kept.values():
            self.stages.commit(filter(None, (self.stages.get(stage["stage"]) for stage in record["stages"])))
        self._replayed = not self.journal.kept and not self.journal.sinks
        self.journal.rewrite(always=True)
        self._thread = threading.Thread(target=self._run, name="fs-stages", daemon=True)
        self._thread.start()

    def _set_aside(self) -> None:
        """Batches that the processes before this one died of, again and again."""
        for number in [number for number, died in self.journal.attempts.items() if died >= MOST_DEATHS]:
            self.journal.set_aside(number)
            batch = self.journal.aside[-1]
            log.error("batch_set_aside", extra={"fields": batch})
        for batch in self.journal.aside:
            self.stages.set_aside(batch["stages"])

    # Commits ------------------------------------------------------------------------------------------------

    def commit(
        self, sink: str, query: str, batch: int | None, receipts: Sequence[dict[str, Any]],
        *, stream: str | None = None, end: bool = False, remember_s: float = DEFAULT_REMEMBER_S,
        wait_s: float = COMMIT_WAIT_S,
    ) -> dict[str, Any]:  # fmt: skip
        """Apply exactly these stages, all or none, once. `end`: the sink has ended, its windows need not wait.
        `remember_s`: how long after the query's last batch one of them may come again and must be known.

        Raises StageError: `unknown_stage`, `stage_counts`, `stage_used`, `mixed_streams`, `sink_full`, and the disk's;
        nothing was applied then, and the batch may be committed again, with the same or with other stages.
        `batch_differs`: another batch was applied under that number. A repetition's stages are dropped.
        """
        answer, applied = self.begin_commit(sink, query, batch, receipts, stream=stream, end=end, remember_s=remember_s)
        with contextlib.suppress(TimeoutError):
            applied.result(wait_s)
        return answer

    def begin_commit(
        self, sink: str, query: str, batch: int | None, receipts: Sequence[dict[str, Any]],
        *, stream: str | None = None, end: bool = False, remember_s: float = DEFAULT_REMEMBER_S,
    ) -> tuple[dict[str, Any], Future[None]]:  # fmt: skip
        """The same without the wait: (the answer, done when the rows are applied). The batch counts already."""
        self._wait_until_ended(sink)
        applied: Future[None] = Future()
        with self._lock:
            self._check_open()
            self.replay()
            if batch is not None and self.journal.is_applied(sink, query, batch):
                self._check_repeated(sink, query, batch, sum(receipt.get("rows", 0) for receipt in receipts))
                for receipt in receipts:
                    self.stages.drop(receipt["stage"], "its batch was applied before")
                applied.set_result(None)
                return {"applied": False, "rows": 0, "duplicate": True}, applied
            stages = self._named(receipts)
            streams = {stage.stream for stage in stages} | ({stream} if stream is not None else set())
            if len(streams) > 1:
                raise StageError(
                    f"the stages belong to several streams: {', '.join(sorted(streams))}",
                    code="mixed_streams",
                    hint="one sink writes to one stream",
                )
            record = self._record(sink, query, batch, stages, next(iter(streams), None), end)
            record["remember_s"] = remember_s
            self.stages.sync()
            record = self.journal.commit(record)
            self.stages.commit(stages)
            self._todo.put((record, applied))
        return {"applied": True, "rows": record["rows"], "duplicate": False}, applied

    def _check_repeated(self, sink: str, query: str, batch: int, rows: int) -> None:
        """A batch that comes again has as many rows as it had; if not, it is another one under a number that is
        taken, and to say that it was applied would lose it.
        """
        known = self.journal.applied_rows(sink, query, batch)
        if known == rows or known is None:
            return
        had = f"had {known} rows" if known >= 0 else "was applied long ago"
        raise StageError(
            f"batch {batch} of query {query!r:.80} of sink {sink!r:.80} {had}; now it comes with {rows}",
            code="batch_differs",
            hint="is the checkpoint a copy of one that went on, or was the source changed? Rows under a batch number"
            " that was used are not applied: start with a new checkpoint (a named job: with another name)",
        )

    def _wait_until_ended(self, sink: str) -> None:
        """A sink that is ending begins anew when it has ended; meanwhile others may commit."""
        for (_, name), session in list(self._sessions.items()):
            if name == sink and session.state in ("ending", "ended") and not session.ended.wait(ENDING_WAIT_S):
                raise StageError(f"sink {sink} is still ending", code="sink_ending", hint="commit again")

    def _named(self, receipts: Sequence[dict[str, Any]]) -> list[Stage]:
        found: dict[str, Stage] = {}
        for receipt in receipts:
            stage = self.stages.get(receipt["stage"])
            if stage is None or stage.state == "open":
                raise StageError(
                    f"stage {receipt['stage']} is {'not finished' if stage else 'not here'}",
                    code="unknown_stage",
                    hint="it expired, was dropped, or the daemon restarted before it was durable: run the batch again",
                )
            if stage.state == "committed" or stage.id in found:
                raise StageError(
                    f"stage {stage.id} is part of a batch already", code="stage_used", hint="each attempt stages anew"
                )
            known = stage.receipt()
            for name in ("rows", "bytes", "groups"):
                said = receipt.get(name)
                if name == "groups" and isinstance(said, dict):
                    said = {str(group): rows for group, rows in said.items()}
                if said is not None and said != known[name]:
                    raise StageError(
                        f"stage {stage.id} has {name} = {known[name]!r:.80}, the commit says {said!r:.80}",
                        code="stage_counts",
                        hint="rows were lost or added on the way: run the batch again",
                    )
            found[stage.id] = stage
        return list(found.values())

    def _record(
        self, sink: str, query: str, batch: int | None, stages: list[Stage], stream: str | None, end: bool
    ) -> Record:
        before = dict(self.journal.sinks.get(stream or "", {}))
        times = [stage.max_time for stage in stages if stage.max_time is not None]
        reached = before.get(sink)
        until = max(times if reached is None else [*times, reached], default=None)
        queries: list[RunningQuery] = []
        running = self._stream(stream) if stream is not None else None
        if running is not None:
            queries = [q for q in self._catalog.running()[1] if q.stream is running]
            self._session(running, sink)  # before the batch counts: there may be no room for it
        return {
            "sink": sink,
            "query": query,
            "batch": batch,
            "stream": stream,
            "schema": running.stream.schema.hash if running is not None else None,
            "groups": self._catalog.groups,
            "stages": [{"stage": stage.id, "rows": stage.rows} for stage in stages],
            "rows": sum(stage.rows for stage in stages),
            "min_time": min((s.min_time for s in stages if s.min_time is not None), default=None),
            "max_time": max(times, default=None),
            "before": before,
            "until": until,
            "end": end,
            "queries": [q.query.name for q in queries],
            "late": {q.query.name: q.late_log.next_offset for q in queries},
        }

    def drop(self, stage_id: str) -> dict[str, Any]:
        """Fence a stage and drop its rows; a committed one stays as it is."""
        was = self.stages.drop(stage_id, "its task was aborted")
        return {"stage": stage_id, "dropped": was in ("open", "finished"), "was": was}

    def end_all(self) -> None:
        """End of stream for every sink that has committed."""
        for (stream, sink), session in list(self._sessions.items()):
            if session.state not in ("ending", "ended"):
                self.commit(sink, "", None, [], stream=stream, end=True)

    def query_gone(self, name: str) -> None:
        """A query was cancelled. Batches do not wait for it any more, and are not for one of that name later."""
        self.journal.query_gone(name)

    def needed_from(self, query: str) -> int | None:
        """The oldest event time of batches that a query sees again after a restart."""
        kept = [record for record in self.journal.kept_records() if query in record["queries"]]
        return min((record["min_time"] for record in kept if record["min_time"] is not None), default=None)

    def only_queries(self, names: set[str]) -> None:
        """After a restart: these are all there are."""
        for name in {name for record in self.journal.kept_records() for name in record["queries"]} - names:
            self.journal.query_gone(name)

    # Applying -----------------------------------------------------------------------------------------------

    def _stream(self, name: str) -> RunningStream:
        found = next((running for running in self._catalog.running()[0] if running.stream.name == name), None)
        if found is None:
            raise StageError(f"no stream {name!r}", code="unknown_stream", hint="add it first")
        return found

    def _session(self, running: RunningStream, sink: str) -> Session:
        key = running.stream.name, sink
        with self._registering:
            known = self._sessions.get(key)
            if known is not None and known.state not in ("ending", "ended"):
                return known
            if known is not None and not known.ended.wait(ENDING_WAIT_S):
                raise StageError(f"sink {sink} is still ending", code="sink_ending", hint="commit again")
            self._sessions = {key: one for key, one in self._sessions.items() if not one.ended.is_set()}
            self._lives += 1
            try:
                session = running.sessions.register(_producer_of(sink), self._lives, "commits", kind=SINK)
            except SessionRefused as error:
                raise StageError(error.message, code="too_many_sessions", hint=error.hint) from error
            self._sessions[key] = session
            return session

    def _apply(self, record: Record) -> None:
        if record["stream"] is None:
            return
        running = self._stream(record["stream"])
        session = self._session(running, record["sink"])
        for named in record["stages"]:
            stage = self.stages.get(named["stage"])
            if stage is not None:
                self._apply_stage(running, session.slot, stage)
        self._raise_watermark(running, session, record["until"])
        if record["end"]:
            running.sessions.end(session, None)
            while not session.ended.wait(0.2) and not self._stopping.is_set():
                pass
            if not running.sessions.all():  # nobody holds a window open
                self._settled |= self._applied & {r["number"] for r in self.journal.kept_of(record["stream"])}
                self._settled.add(record["number"])
        self._applied.add(record["number"])

    def _apply_stage(self, running: RunningStream, slot: int, stage: Stage) -> None:
        row_bytes = running.stream.schema.row_bytes
        for header, payload in stage.file.blocks(self._spare.take):
            try:
                parts = decode(header, payload, row_bytes, self._catalog.groups).parts(row_bytes)
            except WireError as error:
                raise StageError(f"stage {stage.id} does not fit the engine: {error}", code="stage_damaged") from error
            self.stages.handed(stage, header.value)
            tickets = self._feeder.feed_parts(running, slot, parts)
            self._handing.append((stage, header.value, payload, tickets))
            self._note_handed()

    def _note_handed(self) -> None:
        """Their pages and their room are needed until the workers have worked them off."""
        while self._handing and all(worker.fed >= ticket for worker, ticket in self._handing[0][3].items()):
            stage, rows, payload, _ = self._handing.popleft()
            self.stages.applied(stage, rows)
            self._spare.give(payload)

    def _raise_watermark(self, running: RunningStream, session: Session, until: int | None) -> None:
        if until is not None:
            watermark = max(until - running.stream.max_disorder, -TIME_LIMIT)
            for worker in self._workers:
                worker.session_watermark(running.index, session.slot, watermark, fed=True)

    def _run(self) -> None:
        while True:
            try:
                taken = self._todo.get(timeout=TICK_S)
            except queue.Empty:
                self._tidy()
                continue
            if taken is None:
                return
            record, done = taken
            try:
                self.journal.applying(record["number"])
                self._apply(record)
                self._feeder.flush()
                self._note_handed()
            except Exception as error:
                self._note_failed(record, error)
                log.exception("batch_not_applied", extra={"fields": {"batch": record["batch"], "sink": record["sink"]}})
            finally:
                self.journal.applying(None)
                self._todo.task_done()
                done.set_result(None)
            self._tidy()

    def _note_failed(self, record: Record, error: Exception) -> None:
        self.failed[f"{record['sink']} {record['query']} {record['batch']}"] = str(error)
        while len(self.failed) > MOST_FAILED:  # the log has the others
            del self.failed[next(iter(self.failed))]

    # What is not needed any more ----------------------------------------------------------------------------

    def _tidy(self) -> None:
        try:
            self.stages.expire()
            if self._replayed:
                self._let_go()
            if self.journal.has_grown:  # by commits of nothing, which nobody lets go
                self.journal.rewrite()
        except FlexStreamError as error:
            log.warning("stages_not_tidied", extra={"fields": {"error": error.message}})

    def _let_go(self) -> None:
        kept = [record for record in self.journal.kept_records() if record["number"] in self._applied]
        done = self._finished(kept)
        if not done or self._stopping.is_set():
            return
        if self.stages.directory is not None and not self._in_the_logs({record["stream"] for record in done}):
            return
        numbers = [record["number"] for record in done]
        self.journal.done(numbers)
        self._applied.difference_update(numbers)
        self._settled.difference_update(numbers)
        self.journal.rewrite()
        self.stages.forget(stage["stage"] for record in done for stage in record["stages"])

    def _finished(self, kept: list[Record]) -> list[Record]:
        """The batches whose windows have all fired. An end goes with the last of the batches before it."""
        found: list[Record] = []
        unfinished: set[str] = set()
        for record in kept:
            waits = record["end"] and record["stream"] in unfinished
            if not waits and (self.stages.directory is None or self._has_fired(record)):
                found.append(record)
            else:
                unfinished.add(record["stream"])
        return found

    def _has_fired(self, record: Record) -> bool:
        """Whether the watermark of every group has passed every window of the batch, and their lateness."""
        queries = [q for q in self._catalog.running()[1] if q.query.name in record["queries"]]
        if len(queries) < len(record["queries"]):
            return False  # one did not come back after a restart: the batch waits for it
        if not queries or record["max_time"] is None or record["number"] in self._settled:
            return True
        running = self._stream(record["stream"])
        marks = [mark for handle in running.handles for mark in handle.watermarks().values()]
        if len(marks) < self._catalog.groups:
            return False
        windowers = [q.query.bound().windower for q in queries]
        return min(marks) >= max(windower.final_at(record["max_time"]) for windower in windowers)

    def _in_the_logs(self, streams: set[str]) -> bool:
        """Wait until all that workers have fired is in the logs, and on the disk."""
        self._wait_for_workers()
        late: set[LateLog] = set()
        for running in self._catalog.running()[1]:
            if running.stream.stream.name in streams:
                if running.results.held or running.late_log.stream.held:
                    return False
                running.log.flush()
                late.add(running.late_log.stream)
        for one in late:
            one.log.flush()
        return True

    # After a restart ----------------------------------------------------------------------------------------

    def replay(self, bring_back: Callable[[list[str]], object] = lambda names: None) -> None:
        """Apply the kept batches again; before each, `bring_back` submits the queries that saw it. Once."""
        with self._lock:
            if self._replayed:
                return
            began = time.monotonic()
            numbers = list(self.journal.kept)
            based: set[str] = set()
            guarded: dict[str, RunningQuery] = {}
            for number in numbers:
                record = self.journal.kept[number]
                try:
                    self.journal.applying(number)
                    self._replay_one(record, bring_back, based, guarded)
                    self._feeder.flush()  # what it does it does now, not while the next is applied
                    self._note_handed()
                    self._wait_for_workers()
                except FlexStreamError as error:
                    self._note_failed(record, error)
                    log.error("batch_not_replayed", extra={"fields": {"batch": record["batch"], "error": str(error)}})
            known = {running.stream.name for running in self._catalog.running()[0]}
            for stream in self.journal.sinks:
                if stream in known:
                    self._restore_sinks(stream, self.journal.sinks[stream])
            self._wait_for_workers()
            self.journal.applying(None)
            for running in guarded.values():
                running.late_log.known = None
            self._replayed = True
        if numbers:
            fields = {"batches": len(numbers), "seconds": round(time.monotonic() - began, 3)}
            log.info("batches_replayed", extra={"fields": fields})

    def _replay_one(
        self, record: Record, bring_back: Callable[[list[str]], object], based: set[str],
        guarded: dict[str, RunningQuery],
    ) -> None:  # fmt: skip
        stream = record["stream"]
        bring_back(record["queries"])
        if (self._stream(stream).stream.schema.hash, self._catalog.groups) != (record["schema"], record["groups"]):
            raise StageError(
                f"stream {stream!r} or the number of groups changed since the batch was committed",
                code="stage_damaged",
                hint="start with the stream and the groups as they were",
            )
        if stream not in based:
            based.add(stream)
            self._restore_sinks(stream, record["before"])
        since = min((r["min_time"] for r in self.journal.kept_of(stream) if r["min_time"] is not None), default=None)
        for running in self._catalog.running()[1]:
            name = running.query.name
            if running.stream.stream.name == stream and name not in guarded:
                guarded[name] = running
                self._guard(running, since, record["late"].get(name))
        missing = [named["stage"] for named in record["stages"] if self.stages.get(named["stage"]) is None]
        if missing:
            raise StageError(f"stage {missing[0]} is gone", code="stage_damaged", hint="restore data_dir/stage")
        for named in record["stages"]:
            stage = self.stages.get(named["stage"])
            assert stage is not None
            stage.file.verify()
        self._apply(record)

    def _guard(self, running: RunningQuery, since: int | None, late_from: int | None) -> None:
        """The logs leave out what they hold."""
        rows = running.results.rows
        if since is not None:
            names = [n for n in rows.dtype.names if n not in running.query.aggregates and n != "window_end"]
            running.results.known = KnownResults(running.log, rows.dtype, names, since)
        if late_from is not None:
            late = running.late_log
            late.known = KnownLate(late, late.stream.rows.of_query, late_from)

    def _restore_sinks(self, stream: str, sinks: dict[str, int | None]) -> None:
        running = self._stream(stream)
        for sink, until in sinks.items():
            self._raise_watermark(running, self._session(running, sink), until)

    # Life ---------------------------------------------------------------------------------------------------

    def counts(self, running: RunningStream) -> tuple[int, int, int]:
        """(rows that workers were given, staged rows, dropped rows) for the ledger. In the order in which rows do not
        go: none is counted twice.
        """
        handed = self._feeder.rows_handed(running)
        return handed, *self.stages.counts(running.stream.name)

    def status(self) -> dict[str, Any]:
        room = self.stages.room
        return {
            "limit_bytes": room.limit_bytes,
            "used_bytes": room.used_bytes,
            **self.stages.totals(),
            "kept_batches": len(self.journal.kept),
            "remembered_queries": self.journal.applied.queries,
            "expired": self.stages.expired,
            "held_back": room.held_back,
            "connections": self.port.connections,
            "block_bytes": self.port.block_bytes,
            "failed": dict(self.failed),
            "set_aside": [dict(batch) for batch in self.journal.aside],
        }

    def _check_open(self) -> None:
        if self._closed:
            raise StageError("the daemon is stopping", code="shutting_down", hint="commit again after its restart")

    def stop(self, deadline: float) -> None:
        """No more rows and commits; what was committed is applied, as far as the time allows."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self.stages.stop()
        self.port.stop()
        while self._todo.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(0.005)
        self._stopping.set()
        self._todo.put(None)
        self._thread.join(max(1.0, deadline - time.monotonic()))
        self.journal.applying(None)  # whatever is not finished has not killed anybody
        self.journal.close()
        self.stages.close()


def _producer_of(sink: str) -> str:
    """The session's producer name: 64 characters at most."""
    name = f"sink:{sink}"
    return name if len(name) <= 64 else f"sink:{hashlib.sha1(sink.encode()).hexdigest()}"
