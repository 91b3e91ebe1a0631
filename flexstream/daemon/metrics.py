"""Prometheus text (version 0.0.4) of everything in the engine's status. A pure function of that status."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

log = logging.getLogger("flexstream.metrics")

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

ENGINE_STATES = ("running", "draining", "failed")
NIC_STATES = ("verified", "unverified", "disobeyed", "gone")
SESSION_STATES = ("live", "idle", "broken", "ended")

# (key in the worker's status, metric, type, help)
_WORKER = (
    ("rows", "flexstream_worker_rows_total", "counter", "Rows received by the worker"),
    ("bytes", "flexstream_worker_bytes_total", "counter", "Bytes received by the worker"),
    ("receive_calls", "flexstream_worker_receive_calls_total", "counter", "Receive system calls"),
    ("busy_share", "flexstream_worker_busy_share", "gauge", "Share of time spent on rows, 0 to 1"),
    ("connections", "flexstream_worker_connections", "gauge", "Connections of the worker's groups"),
    ("cpu_seconds", "flexstream_worker_cpu_seconds_total", "counter", "CPU time of the worker's thread"),
    ("pinned", "flexstream_worker_pinned", "gauge", "1 when the worker is pinned to its core"),
    ("stalled", "flexstream_worker_stalled", "gauge", "1 when the worker waits for room (status says why)"),
    ("state_bytes", "flexstream_worker_state_bytes", "gauge", "Memory in use for window state"),
    ("arena_bytes", "flexstream_worker_arena_bytes", "gauge", "Memory set aside for window state"),
)
_QUERY = (
    ("rows", "flexstream_query_rows_total", "counter", "Rows that the query looked at"),
    ("filtered", "flexstream_query_filtered_rows_total", "counter", "Rows that its filters left out"),
    ("late", "flexstream_query_late_rows_total", "counter", "Rows too late for their window"),
    ("windows_fired", "flexstream_query_windows_fired_total", "counter", "Windows fired, counted per group"),
    ("results", "flexstream_query_results_total", "counter", "Result rows"),
    (
        "incomplete_results",
        "flexstream_query_incomplete_results_total",
        "counter",
        "Result rows of windows that may lack rows lost by a stop or a crash",
    ),
    ("nan_results", "flexstream_query_nan_results_total", "counter", "Result rows with an aggregate that is NaN"),
    ("output_bytes", "flexstream_query_output_bytes", "gauge", "Memory for results on their way to the log"),
    ("open_windows", "flexstream_query_open_windows", "gauge", "Windows that have not fired yet"),
)
_LATE_LOG = (
    ("first_offset", "flexstream_query_late_rows_dropped_total", "counter", "Late rows that are not kept any more"),
)
_STREAM_LATE_LOG = (
    ("bytes", "flexstream_late_log_bytes", "gauge", "Size of the log of the stream's late rows"),
    ("rows", "flexstream_late_log_rows", "gauge", "Late rows in it, each once, however many queries it is late for"),
    ("error", "flexstream_late_log_failing", "gauge", "1 while the log of late rows cannot be written"),
)
_LOG = (
    ("first_offset", "flexstream_result_log_first_offset", "gauge", "Oldest offset in the result log"),
    ("next_offset", "flexstream_result_log_next_offset", "gauge", "Offset of the next result row"),
    ("bytes", "flexstream_result_log_bytes", "gauge", "Size of the result log"),
    ("error", "flexstream_result_log_failing", "gauge", "1 while the result log cannot be written"),
)
_REBALANCE = (
    ("automatic", "flexstream_rebalance_automatic", "gauge", "1 when groups move by themselves"),
    ("moves", "flexstream_moves_total", "counter", "Groups that were moved to another worker"),
    ("imbalance_percent", "flexstream_imbalance_percent", "gauge", "Worst worker's distance from its fair share"),
    ("nic_errors", "flexstream_moves_nic_errors_total", "counter", "Times that the NIC did not follow a move"),
)
_CONNECTIONS = (
    ("open", "flexstream_connections_open", "gauge", "Open data connections"),
    ("accepted", "flexstream_connections_accepted_total", "counter", "Connections accepted"),
    ("pending_hello", "flexstream_connections_pending_hello", "gauge", "Connections before their HELLO"),
    ("leaving", "flexstream_connections_leaving", "gauge", "Refused connections that may still read why"),
    (
        "misaligned",
        "flexstream_connections_misaligned_total",
        "counter",
        "Connections that did not arrive at their worker",
    ),
    ("aligned", "flexstream_connections_aligned_total", "counter", "Connections that arrived at their worker"),
    ("alignment", "flexstream_alignment_ratio", "gauge", "Aligned connections among those that are open, 0 to 1"),
    ("behind_nat", "flexstream_connections_behind_nat_total", "counter", "Connections whose port NAT changed"),
)


class Page:
    """Collects samples and writes each metric once, with its help and type."""

    def __init__(self) -> None:
        self._metrics: dict[str, tuple[str, str, list[str]]] = {}

    def add(self, name: str, kind: str, help_text: str, value: object, /, **labels: object) -> None:
        """One sample. None is left out, a text or other object counts as 1 (something is there)."""
        if value is None and name.endswith(("_stalled", "_failing")):
            value = 0
        if value is None:
            return
        if isinstance(value, bool) or not isinstance(value, int | float):
            value = int(bool(value))
        lines = self._metrics.setdefault(name, (kind, help_text, []))[2]
        text = ",".join(f'{key}="{_escape(str(label))}"' for key, label in labels.items())
        lines.append(f"{name}{{{text}}} {value!r}" if text else f"{name} {value!r}")

    def table(
        self, rows: Iterable[tuple[str, str, str, str]], values: Mapping[str, Any], **labels: object
    ) -> None:
        for key, name, kind, help_text in rows:
            self.add(name, kind, help_text, values.get(key), **labels)

    def text(self) -> str:
        parts = []
        for name, (kind, help_text, lines) in self._metrics.items():
            parts += [f"# HELP {name} {help_text}", f"# TYPE {name} {kind}", *lines]
        return "\n".join(parts) + "\n"


def render(status: Mapping[str, Any]) -> str:
    """The page for one status. Missing parts are left out, so that an older engine's status works too.

    A part that cannot be rendered is named by a metric, as are those that the status could not make.
    """
    page = Page()
    failed = list(status.get("failed_parts") or {})
    for name, part in _PARTS.items():
        try:
            part(page, status)
        except Exception:
            log.exception("metrics_part_failed", extra={"fields": {"part": name}})
            failed.append(name)
    help_text = "1 for each part of the status that could not be made (the status and the log say why)"
    for name in failed:
        page.add("flexstream_status_part_failed", "gauge", help_text, 1, part=name)
    return page.text()


def _engine(page: Page, status: Mapping[str, Any]) -> None:
    page.add("flexstream_uptime_seconds", "gauge", "Seconds since the engine started", status.get("uptime_s"))
    page.add("flexstream_groups", "gauge", "Key groups of the engine", status.get("groups"))
    for state in ENGINE_STATES:
        page.add(
            "flexstream_state", "gauge", "1 for the state it is in", status.get("state") == state, state=state
        )
    for group, worker in enumerate(status.get("placement") or []):
        page.add("flexstream_group_worker", "gauge", "Worker that owns the group", worker, group=group)


def _workers(page: Page, status: Mapping[str, Any]) -> None:
    for worker in status.get("workers") or []:
        page.table(_WORKER, worker, worker=worker.get("worker"), cpu=worker.get("cpu"))


def _streams(page: Page, status: Mapping[str, Any]) -> None:
    for name, stream in (status.get("streams") or {}).items():
        _stream(page, name, stream)


def _queries(page: Page, status: Mapping[str, Any]) -> None:
    for name, query in (status.get("queries") or {}).items():
        _query(page, name, query)


def _connections(page: Page, status: Mapping[str, Any]) -> None:
    connections = status.get("connections") or {}
    page.table(_CONNECTIONS, connections)
    for reason, count in (connections.get("closed") or {}).items():
        page.add("flexstream_connections_closed_total", "counter", "Connections closed", count, reason=reason)


def _nic(page: Page, status: Mapping[str, Any]) -> None:
    if nic := status.get("nic"):
        labels = {"kind": nic.get("kind", "?"), "device": nic.get("device") or ""}
        help_text = "1 when producers can steer by its table"
        page.add("flexstream_nic_aligned", "gauge", help_text, nic.get("aligned"), **labels)
        for state in NIC_STATES if "state" in nic else ():
            help_text = "1 for what live connections say about the table"
            page.add("flexstream_nic_state", "gauge", help_text, nic["state"] == state, **labels, state=state)
        if "drift" in nic:
            changes = len(nic["drift"] or ())
            page.add("flexstream_nic_drift", "gauge", "Changes that somebody else made", changes, **labels)
        page.add("flexstream_nic_fallbacks_total", "counter", "Implementations given up", nic.get("fallbacks"))


def _rebalance(page: Page, status: Mapping[str, Any]) -> None:
    rebalance = status.get("rebalance") or {}
    page.table(_REBALANCE, rebalance)
    last = rebalance.get("last") or {}
    page.add("flexstream_last_move_ms", "gauge", "How long the last moves took, all steps", last.get("took_ms"))
    if "under_way" in rebalance:
        page.add("flexstream_moves_under_way", "gauge", "Groups on the move", len(rebalance["under_way"]))
        page.add("flexstream_frozen_groups", "gauge", "Groups that may not move", len(rebalance["frozen"]))
        page.add("flexstream_split_groups", "gauge", "Groups served by several workers", len(rebalance["split"]))
    for worker in rebalance.get("workers") or []:
        labels = {"worker": worker.get("worker")}
        page.add("flexstream_worker_active", "gauge", "0 when the worker is drained", worker.get("active"), **labels)
        waiting = worker.get("waiting_rows")
        page.add("flexstream_worker_waiting_rows", "gauge", "Rows that wait for the worker", waiting, **labels)
    for hot in rebalance.get("hot") or []:
        labels = {"group": hot.get("group"), "worker": hot.get("worker")}
        help_text = "Share of its worker's rows that a hot group has"
        page.add("flexstream_hot_group_percent", "gauge", help_text, hot.get("percent"), **labels)


def _stream(page: Page, name: str, stream: Mapping[str, Any]) -> None:
    for part, rows in (stream.get("ledger") or {}).items():
        help_text = "The ledger: received = accepted + rejected + staged + in_flight"
        page.add("flexstream_stream_rows", "gauge", help_text, rows, stream=name, part=part)
    help_text = "Accepted rows that came when the stream had no query"
    page.add("flexstream_stream_unqueried_rows_total", "counter", help_text, stream.get("unqueried"), stream=name)
    for group, rows in enumerate(stream.get("groups") or []):
        page.add(
            "flexstream_group_rows_total", "counter", "Rows of the group", rows, stream=name, group=group
        )
    for end, value in (stream.get("watermark") or {}).items():
        help_text = "Lowest and highest watermark of the groups, in units of the time field"
        page.add("flexstream_stream_watermark", "gauge", help_text, value, stream=name, end=end)
    page.table(_STREAM_LATE_LOG, stream.get("late_log") or {}, stream=name)
    help_text = "Memory for late rows on their way to the log"
    page.add("flexstream_stream_output_bytes", "gauge", help_text, stream.get("output_bytes"), stream=name)
    help_text = "Groups that have no watermark yet: none of their windows fires"
    without = stream.get("groups_without_watermark")
    page.add("flexstream_stream_groups_without_watermark", "gauge", help_text, without, stream=name)
    help_text = "Watermarks further ahead of the clock than max_future, per worker: they counted as the clock's time"
    capped = stream.get("watermarks_capped")
    page.add("flexstream_stream_watermarks_capped_total", "counter", help_text, capped, stream=name)
    for holder in stream.get("held_by") or []:
        labels = {"stream": name, "producer": holder.get("producer"), "idle": int(bool(holder.get("idle")))}
        help_text = "Watermark of the producers that hold the stream back"
        page.add("flexstream_stream_held_by", "gauge", help_text, holder.get("watermark"), **labels)
    for how in ("ended", "expired"):
        count = stream.get(f"sessions_{how}")
        help_text = "Producers that said end of stream, or broke and did not come back"
        page.add("flexstream_sessions_closed_total", "counter", help_text, count, stream=name, how=how)
    sessions = stream.get("sessions") or []
    for state in SESSION_STATES:
        count = sum(1 for session in sessions if session.get("state") == state)
        page.add("flexstream_sessions", "gauge", "Producers by state", count, stream=name, state=state)
    for session in sessions:
        labels = {"stream": name, "producer": session.get("producer")}
        for key in ("connections", "epoch", "watermark"):
            help_text = f"The {key} of each producer's session"
            page.add(f"flexstream_session_{key}", "gauge", help_text, session.get(key), **labels)


def _query(page: Page, name: str, query: Mapping[str, Any]) -> None:
    labels = {"query": name, "stream": query.get("stream")}
    page.add(
        "flexstream_query_failed",
        "gauge",
        "1 when the query failed",
        query.get("state") == "failed",
        **labels,
    )
    variant = query.get("variant", "?")
    page.add("flexstream_query_variant", "gauge", "1 for the variant that runs", 1, **labels, variant=variant)
    page.table(_QUERY, query, **labels)
    for part, rows in (query.get("ledger") or {}).items():
        help_text = "The ledger: accepted = applied + filtered + late + rejected + in_flight"
        page.add("flexstream_query_rows", "gauge", help_text, rows, **labels, part=part)
    for reason, rows in (query.get("rejected") or {}).items():
        help_text = "Rows that an expression failed on"
        page.add("flexstream_query_rejected_rows_total", "counter", help_text, rows, **labels, reason=reason)
    page.table(_LOG, query.get("log") or {}, query=name)
    page.table(_LATE_LOG, query.get("late_log") or {}, query=name)


def _stages(page: Page, status: Mapping[str, Any]) -> None:
    stages = status.get("stages") or {}
    for state in ("open", "finished", "committed"):
        page.add("flexstream_stages", "gauge", "Stages by state", stages.get(state), state=state)
    for key, name, help_text in (
        ("bytes", "stage_bytes", "Bytes of rows in stages, those that are kept included"),
        ("used_bytes", "stage_used_bytes", "What stages that are not applied take, on the disk and in memory"),
        ("limit_bytes", "stage_limit_bytes", "Bound on what stages that are not applied may take"),
        ("block_bytes", "stage_block_bytes", "Memory of blocks that are being received"),
        ("remembered_queries", "stage_remembered_queries", "Sinks' queries whose batches may be repeated"),
        ("held_back", "stage_held_back", "Producers that wait because the bound is reached"),
        ("kept_batches", "stage_kept_batches", "Committed batches whose windows are not all in the result log"),
        ("connections", "stage_connections", "Open staging connections"),
        ("failed", "stage_failed", "1 when a committed batch could not be applied"),
    ):
        page.add(f"flexstream_{name}", "gauge", help_text, stages.get(key))
    aside = stages.get("set_aside") or []
    page.add("flexstream_batches_set_aside", "gauge", "Committed batches that are not applied", len(aside))
    page.add("flexstream_stages_expired_total", "counter", "Stages that no commit named in time", stages.get("expired"))


def _latency(page: Page, status: Mapping[str, Any]) -> None:
    latency = status.get("latency") or {}
    help_text = "From marker sent to result observed"
    page.add("flexstream_latency_markers_total", "counter", "Markers measured", latency.get("count"))
    ignored = "Markers whose time is in the future, or more than a day old"
    page.add("flexstream_latency_markers_ignored_total", "counter", ignored, latency.get("ignored"))
    for key, quantile in (("p50_ms", "0.5"), ("p99_ms", "0.99"), ("max_ms", "1")):
        page.add("flexstream_latency_ms", "gauge", help_text, latency.get(key), quantile=quantile)


def _daemon(page: Page, status: Mapping[str, Any]) -> None:
    daemon = status.get("daemon") or {}
    if "version" in daemon:
        page.add("flexstream_build_info", "gauge", "The version that runs", 1, version=daemon["version"])
    for labels, count in daemon.get("http_requests") or []:
        page.add("flexstream_http_requests_total", "counter", "HTTP requests", count, **labels)
    for reason, count in (daemon.get("http_connections_closed") or {}).items():
        name, help_text = "flexstream_http_connections_closed_total", "HTTP connections that were dropped or refused"
        page.add(name, "counter", help_text, count, reason=reason)
    name, help_text = "flexstream_http_authentication_failures_total", "HTTP requests with a wrong token or none"
    page.add(name, "counter", help_text, daemon.get("authentication_failures"))
    cut = daemon.get("result_readers_cut")
    page.add("flexstream_result_readers_cut_total", "counter", "Result streams cut because nobody read them", cut)
    for key, help_text in (
        ("http_connections", "Open HTTP connections"),
        ("result_readers", "Open result streams"),
        ("log_lines_suppressed", "Log lines left out by the rate limit"),
        ("catalog_failed", "Streams and queries of the catalog that did not come back"),
    ):
        value = daemon.get(key)
        page.add(f"flexstream_{key}", "gauge", help_text, len(value) if isinstance(value, dict) else value)


_PARTS: dict[str, Callable[[Page, Mapping[str, Any]], None]] = {
    "engine": _engine,
    "nic": _nic,
    "rebalance": _rebalance,
    "workers": _workers,
    "streams": _streams,
    "queries": _queries,
    "connections": _connections,
    "stages": _stages,
    "latency": _latency,
    "daemon": _daemon,
}


def _escape(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
