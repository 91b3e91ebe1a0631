"""flexstream status: how the daemon is doing, on one screen."""

from __future__ import annotations

from typing import Any

from flexstream.cli.nic_status import nic_lines
from flexstream.cli.output import DEFAULT_URL, AsJson, TokenFile, Url, connect, emit, say, shown, size, table
from flexstream.cli.rebalance import describe as balance_lines

WORKERS = {
    "worker": "WORKER",
    "cpu": "CPU",
    "pinned": "PINNED",
    "busy": "BUSY",
    "rows": "ROWS",
    "connections": "CONNECTIONS",
    "state": "STATE",
    "stalled": "STALLED",
}
STREAMS = {
    "name": "STREAM",
    "received": "RECEIVED",
    "accepted": "ACCEPTED",
    "unqueried": "UNQUERIED",
    "rejected": "REJECTED",
    "staged": "STAGED",
    "in_flight": "IN FLIGHT",
    "sessions": "PRODUCERS",
    "held_by": "HELD BACK BY",
}
QUERIES = {
    "name": "QUERY",
    "state": "STATE",
    "variant": "VARIANT",
    "accepted": "ACCEPTED",
    "applied": "APPLIED",
    "filtered": "FILTERED",
    "late": "LATE",
    "rejected": "REJECTED",
    "open_windows": "OPEN",
    "results": "RESULTS",
    "log_bytes": "LOG",
    "error": "ERROR",
}


def status(url: Url = DEFAULT_URL, token_file: TokenFile = None, as_json: AsJson = False) -> None:
    """Show everything the daemon counts: workers, streams with their ledgers, queries.

    Example: flexstream status --json | jq .streams
    """
    reply = connect(url, token_file).get("/v1/status")
    if as_json:
        emit(reply)
    else:
        say(describe(reply))


def describe(reply: dict[str, Any]) -> str:
    """The status as text; a pure function."""
    reply = shown(reply)
    daemon, nic = reply.get("daemon", {}), reply.get("nic", {})
    connections, latency = reply.get("connections", {}), reply.get("latency", {})
    parts = [
        f"flexstream {daemon.get('version', '?')} (pid {daemon.get('pid', '?')}) is {reply.get('state')}, "
        f"up {reply.get('uptime_s', 0):.0f} s; {reply.get('groups')} groups, nic {nic.get('kind', '?')} "
        f"({'aligned' if nic.get('aligned') else nic.get('reason') or 'not aligned'})",
        f"connections: {connections.get('open', 0)} open, {connections.get('accepted', 0)} accepted, "
        f"{connections.get('pending_hello', 0)} before HELLO, {connections.get('misaligned', 0)} misaligned"
        + (f", {100 * share:.0f}% aligned now" if (share := connections.get("alignment")) is not None else "")
        + "".join(
            f", {count} closed by {reason}" for reason, count in (connections.get("closed") or {}).items()
        ),
    ]
    parts += nic_lines(nic, connections)
    if latency.get("count"):
        parts.append(
            f"latency: p50 {latency['p50_ms']:.3g} ms, p99 {latency['p99_ms']:.3g} ms, "
            f"max {latency['max_ms']:.3g} ms over {latency['count']} markers"
        )
    if reply.get("rebalance"):
        parts += balance_lines(reply["rebalance"])
    parts += ["", table([_worker(worker) for worker in reply.get("workers", [])], WORKERS)]
    parts += [
        f"worker {worker.get('worker')} is not pinned: {worker['pin_reason']}"
        for worker in reply.get("workers", [])
        if worker.get("pin_reason") and worker.get("cpu", -1) >= 0
    ]
    if reply.get("streams"):
        parts += ["", table([_stream(*item) for item in reply["streams"].items()], STREAMS)]
    if reply.get("queries"):
        parts += ["", table([_query(*item) for item in reply["queries"].items()], QUERIES)]
    for what, error in (reply.get("failed_parts") or {}).items():
        parts.append(f"the status of {what} could not be computed: {error}")
    for what, error in (daemon.get("catalog_failed") or {}).items():
        parts.append(f"{what} did not start again after the restart: {error}")
    return "\n".join(parts)


def _worker(worker: dict[str, Any]) -> dict[str, Any]:
    return {
        **worker,
        "busy": f"{100 * (worker.get('busy_share') or 0):.0f}%",
        "state": size(worker.get("state_bytes")),
        "stalled": worker.get("stalled") or "no",
    }


def _stream(name: str, stream: dict[str, Any]) -> dict[str, Any]:
    holders = [
        f"{holder.get('producer')}{' (idle)' if holder.get('idle') else ''}"
        for holder in stream.get("held_by", [])
    ]
    return {
        "name": name,
        **stream.get("ledger", {}),
        "unqueried": stream.get("unqueried", 0),
        "sessions": len(stream.get("sessions", [])),
        "held_by": ", ".join(holders[:3]) or "nobody",
    }


def _query(name: str, query: dict[str, Any]) -> dict[str, Any]:
    log = query.get("log") or {}
    return {
        "name": name,
        **query,
        **query.get("ledger", {}),
        "log_bytes": size(log.get("bytes")),
        "error": query.get("error") or log.get("error") or "none",
    }
