"""What `status` says: counters of workers, streams, queries and connections, put together without stopping any."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from flexstream.balance.pinning import read_back

if TYPE_CHECKING:
    from flexstream.catalog.entries import RunningQuery, RunningStream
    from flexstream.catalog.sessions import Session
    from flexstream.engine.engine import Engine
    from flexstream.results.late_log import LateLog

log = logging.getLogger("flexstream.status")
_PRIVATE = ("busy_ns", "drained_ns")
_FOREVER = (1 << 63) - 1
MOST_RANGES = 16  # of the open windows of a query that are listed; how many more there are is said


class Parts:
    """Collects the parts of a status. One that fails is named with its error, and the others are there."""

    def __init__(self) -> None:
        self.failed: dict[str, str] = {}

    def each(self, looks: Mapping[str, Callable[[], Any]], of: str = "") -> dict[str, Any]:
        found = {}
        for name, look in looks.items():
            try:
                found[name] = look()
            except Exception as error:
                self.failed[of + name] = f"{type(error).__name__}: {error}"
                log.exception("status_part_failed", extra={"fields": {"part": of + name}})
        return found


def engine_status(engine: Engine) -> dict[str, Any]:
    streams, queries = engine.running()
    parts = Parts()
    of_streams = {running.stream.name: partial(_stream, engine, running) for running in streams}
    of_queries = {running.query.name: partial(query_status, running) for running in queries}
    status = parts.each(
        {
            "uptime_s": lambda: round(time.monotonic() - engine.started_at, 3),
            "groups": lambda: engine.groups,
            "state": lambda: "failed" if engine.collector.failure is not None else engine.state,
            "nic": engine.nic.status,
            "placement": engine.placement,
            "rebalance": engine.balance.status,
            "workers": lambda: [_worker(worker.stats()) for worker in engine.workers],
            "streams": lambda: parts.each(of_streams, "streams."),
            "stages": engine.staging.status,
            "queries": lambda: parts.each(of_queries, "queries."),
            "connections": lambda: _connections(engine),
            "latency": engine.collector.latencies.summary,
        }
    )
    return {**status, "failed_parts": parts.failed}


def _worker(stats: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in read_back(stats).items() if name not in _PRIVATE}


def _stream(engine: Engine, running: RunningStream) -> dict[str, Any]:
    status = stream_status(running, partial(engine.staging.counts, running))
    return {**status, "late_log": _late_log(engine.late_rows_of(running.stream.name))}


def _late_log(late: LateLog | None) -> dict[str, Any]:
    """What all queries of the stream have together: a row that is late for several is there once."""
    if late is None:
        return {"rows": 0, "bytes": 0, "error": None}
    rows = late.log.next_offset - late.log.first_offset
    return {"rows": rows, "bytes": late.log.bytes, "error": late.error}


def _connections(engine: Engine) -> dict[str, Any]:
    acceptor = engine.acceptor
    arrived = engine.nic.connections()
    away = sum(split.away for split in engine.mover.splits())
    return {
        "open": sum(worker.stats()["connections"] for worker in engine.workers),
        "accepted": acceptor.accepted if acceptor else 0,
        "pending_hello": acceptor.pending if acceptor else 0,
        "leaving": acceptor.leaving if acceptor else 0,
        **arrived,
        "misaligned": arrived["misaligned"] + away,
        "split_away": away,
        "closed": dict(acceptor.closed) if acceptor else {},
    }


def _ledger(running: RunningStream, accepted: int, counts: Callable[[], tuple[int, int, int]]) -> dict[str, int]:
    """Rows go from staged to handed to received to accepted while this looks. It looks the other way round, so that it
    may miss one that is on its way, and counts none twice; what was shown before is not taken back.
    """
    received = sum(handle.received for handle in running.handles)
    fed = sum(handle.fed for handle in running.handles)
    handed, staged, dropped = counts()
    running.received_shown = max(running.received_shown, received + handed - fed + staged + dropped)
    in_flight = running.received_shown - accepted - staged - dropped
    return {
        "received": running.received_shown,
        "accepted": accepted,
        "rejected": dropped,
        "staged": staged,
        "in_flight": in_flight,
    }


def stream_status(running: RunningStream, counts: Callable[[], tuple[int, int, int]]) -> dict[str, Any]:
    """`counts`: rows that were handed to workers in this process; those that wait for a commit or for a worker; those
    that were staged and never committed.

    What became of the accepted rows, each query says for itself. Of these, `unqueried` came when there was none.
    """
    parts = [handle.counters() for handle in running.handles]
    accepted = sum(part["accepted"] for part in parts)
    ledger = _ledger(running, accepted, counts)
    groups = [sum(values) for values in zip(*(part["groups"] for part in parts), strict=True)]
    watermarks = [w for handle in running.handles for w in handle.watermarks().values()]
    missing = sum(handle.groups_without_watermark() for handle in running.handles)
    sessions = sessions_of(running)
    return {
        "ledger": ledger,
        "unqueried": sum(part["unqueried"] for part in parts),
        "groups": groups,
        "watermark": {
            "min": None if missing else min(watermarks, default=None),
            "max": max(watermarks, default=None),
        },
        "groups_without_watermark": missing,
        "output_bytes": sum(handle.output_bytes for handle in running.handles),
        "watermarks_capped": sum(handle.watermarks_capped for handle in running.handles),
        "held_by": _held_by(sessions),
        "sessions": sessions,
        "sessions_ended": running.sessions.completed,
        "sessions_expired": running.sessions.expired,
    }


def sessions_of(running: RunningStream) -> list[dict[str, Any]]:
    return [_session(running, session) for session in running.sessions.all()]


def _held_by(sessions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The sessions that everybody waits for: of those that count the ones behind; when all are idle, all of them."""
    holding = [s for s in sessions if s["state"] != "idle" and s["holds"]]
    least = min((s["watermark"] for s in holding if s["watermark"] is not None), default=None)
    holders = [s for s in holding if s["watermark"] in (None, least)] or [s for s in sessions if s["holds"]]
    return [
        {"producer": s["producer"], "peer": s["peer"], "watermark": s["watermark"], "idle": s["state"] == "idle"}
        for s in holders
    ]


def _session(running: RunningStream, session: Session) -> dict[str, Any]:
    family = [one for one in session.family() if one is session or one.state != "ended"]
    marks = [handle.session_watermark(one.slot) for handle in running.handles for one in family]
    sent = [mark for mark in marks if mark is not None]
    least = min(sent) if len(sent) == len(marks) else None
    return {
        "producer": session.producer,
        "kind": session.kind,
        "epoch": session.epoch,
        "state": session.state,
        "peer": session.peer,
        "watermark": None if least == _FOREVER else least,
        "holds": least != _FOREVER,  # it has not ended in every group
        "connections": sum(one.connections for one in family),
        "further_lanes": len(family) - 1,
    }


def worker_threads(workers: Iterable[Any]) -> list[int]:
    """As the kernel numbers them."""
    return [worker.stats()["thread_id"] for worker in workers]


def query_status(running: RunningQuery) -> dict[str, Any]:
    parts = [state.counters() for state in running.states]
    rejected: Counter[str] = Counter()
    for part in parts:
        rejected.update(part["rejected"])
    handles = running.stream.handles  # read after the outcomes, as above
    accepted = sum(state.accepted(handle.received) for state, handle in zip(running.states, handles, strict=True))
    error = next((state.failed for state in running.states if state.failed), None)
    totals = {
        name: sum(part[name] for part in parts)
        for name in ("rows", "filtered", "late", "windows_fired", "results", "open_windows", "compiled_rows")
    }
    return {
        "stream": running.stream.stream.name,
        "state": "failed" if error else "running",
        "error": error,
        "variant": running.variant,
        "variant_reason": running.variant_reason,
        "watched_by": running.watched_by,
        "history": list(running.history),
        **totals,
        "nan_results": running.results.rows.nan_results,
        "output_bytes": sum(state.output_bytes for state in running.states),
        "incomplete_results": running.results.rows.cut.results,
        "rejected": dict(rejected),
        "ledger": query_ledger(accepted, totals, rejected.total()),
        "log": {
            "first_offset": running.log.first_offset,
            "next_offset": running.log.next_offset,
            "generation": running.log.generation,
            "generation_offset": running.log.generation_offset,
            "bytes": running.log.bytes,
            "error": running.results.error or running.late_log.error,
        },
        "late_log": {
            "first_offset": running.late_log.first_offset,  # so many were dropped by the bound, or by retention
            "next_offset": running.late_log.next_offset,
        },
    }


def query_ledger(accepted: int, totals: dict[str, int], rejected: int) -> dict[str, int]:
    """Rows of the stream since the query came: each is in exactly one of the other parts."""
    done, filtered, late = totals["rows"], totals["filtered"], totals["late"]
    return {
        "accepted": accepted,
        "applied": done - filtered - late - rejected,
        "filtered": filtered,
        "late": late,
        "rejected": rejected,
        "in_flight": accepted - done,
    }


def open_windows(queries: Iterable[RunningQuery]) -> list[dict[str, Any]]:
    """Windows that have rows and have not fired. Only when the workers have ended.

    `ranges`: [from, to] in event time, of windows that follow each other; the rows of these times are theirs.
    """
    found = []
    for running in queries:
        windower = running.query.bound().windower
        per_group = [runs for state in running.states for runs in state.open_runs().values()]
        runs = windower.joined(run for group in per_group for run in group)
        if runs:
            ranges = [list(windower.times(run)) for run in runs]
            found.append(
                {
                    "query": running.query.name,
                    "groups": len(per_group),
                    "windows": sum(windower.count(run) for run in runs),
                    "first_end": runs[0][0],
                    "last_end": runs[-1][1],
                    "ranges": ranges[:MOST_RANGES],
                    "more_ranges": max(0, len(ranges) - MOST_RANGES),
                }
            )
    return found


def group_rows(streams: Iterable[RunningStream], groups: int) -> list[int]:
    """Rows received per group, over all streams."""
    counts = [handle.counters()["groups"] for running in streams for handle in running.handles]
    return [sum(of_group) for of_group in zip(*counts, strict=True)] or [0] * groups
