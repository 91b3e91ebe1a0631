"""flexstream top: a live view of cores, groups and queries."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flexstream.cli.output import DEFAULT_URL, AsJson, TokenFile, Url, connect, emit, say, shown, size, table
from flexstream.client.http import Client

if TYPE_CHECKING:
    from rich.console import RenderableType

SHADES = " .:-=+*#%@"
GROUPS_PER_LINE = 64

Sample = dict[str, Any]
CORES = {
    "worker": "WORKER",
    "cpu": "CPU",
    "busy": "BUSY",
    "rows_per_s": "ROWS/S",
    "bytes_per_s": "BYTES/S",
    "connections": "CONNECTIONS",
    "state": "STATE",
    "stalled": "STALLED",
}
QUERIES = {
    "query": "QUERY",
    "state": "STATE",
    "variant": "VARIANT",
    "rows_per_s": "ROWS/S",
    "results_per_s": "RESULTS/S",
    "open_windows": "OPEN",
    "late": "LATE",
    "rejected": "REJECTED",
}


def top(
    interval: Annotated[
        float, typer.Option("--interval", "-i", min=0.1, help="Seconds between updates.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one snapshot and exit.")] = False,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Show load per core, rows per group and rate per query, live, until Ctrl-C.

    With --json: one JSON object per update.

    Example: flexstream top --once
    """
    client = connect(url, token_file)
    before = _look(client)
    if not as_json and not once:
        _live(client, before, interval)
        return
    try:
        while True:
            time.sleep(interval)
            after = _look(client)
            rates = rates_of(before, after)
            if as_json:
                emit(rates)
            else:
                say(as_text(rates))
            if once:
                return
            before = after
    except KeyboardInterrupt:
        pass


def _look(client: Client) -> Sample:
    return {"at": time.monotonic(), "status": client.get("/v1/status")}


def rates_of(before: Sample, after: Sample) -> dict[str, Any]:
    """What happened between two looks, per second. A pure function."""
    seconds = max(after["at"] - before["at"], 1e-9)
    old, new = before["status"], after["status"]

    def rate(now: Any, then: Any) -> float:
        return max(0.0, ((now or 0) - (then or 0)) / seconds)  # never below 0: the daemon may have restarted

    old_workers = {worker["worker"]: worker for worker in old.get("workers", [])}
    cores = [
        {
            "worker": worker["worker"],
            "cpu": worker.get("cpu"),
            "busy_share": worker.get("busy_share"),
            "rows_per_s": rate(worker.get("rows"), old_workers.get(worker["worker"], {}).get("rows")),
            "bytes_per_s": rate(worker.get("bytes"), old_workers.get(worker["worker"], {}).get("bytes")),
            "connections": worker.get("connections"),
            "state_bytes": worker.get("state_bytes"),
            "stalled": worker.get("stalled"),
        }
        for worker in new.get("workers", [])
    ]
    groups = {
        name: [
            rate(now, then)
            for now, then in zip(
                stream.get("groups", []),
                old.get("streams", {}).get(name, {}).get("groups") or [0] * len(stream.get("groups", [])),
                strict=False,
            )
        ]
        for name, stream in new.get("streams", {}).items()
    }
    queries = [
        {
            "query": name,
            "state": query.get("state"),
            "variant": query.get("variant"),
            "rows_per_s": rate(query.get("rows"), old.get("queries", {}).get(name, {}).get("rows")),
            "results_per_s": rate(query.get("results"), old.get("queries", {}).get(name, {}).get("results")),
            "open_windows": query.get("open_windows"),
            "late": query.get("late"),
            "rejected": sum((query.get("rejected") or {}).values()),
        }
        for name, query in new.get("queries", {}).items()
    ]
    return {
        "state": new.get("state"),
        "uptime_s": new.get("uptime_s"),
        "latency": new.get("latency"),
        "connections": new.get("connections"),
        "placement": new.get("placement"),
        "rebalance": new.get("rebalance"),
        "cores": cores,
        "groups": groups,
        "queries": queries,
    }


def _core_cells(core: dict[str, Any]) -> dict[str, Any]:
    return {
        **core,
        "busy": f"{100 * (core['busy_share'] or 0):.0f}%",
        "rows_per_s": round(core["rows_per_s"]),
        "bytes_per_s": size(core["bytes_per_s"]),
        "state": size(core["state_bytes"]),
        "stalled": core["stalled"] or "no",
    }


def _query_cells(query: dict[str, Any]) -> dict[str, Any]:
    return {
        **query,
        "rows_per_s": round(query["rows_per_s"]),
        "results_per_s": round(query["results_per_s"]),
    }


def picture(rates: list[float]) -> list[str]:
    """One character per group, darker for more rows, GROUPS_PER_LINE to a line."""
    highest = max(rates, default=0.0)
    marks = [
        SHADES[min(len(SHADES) - 1, round(rate / highest * (len(SHADES) - 1)))] if highest else " "
        for rate in rates
    ]
    return ["".join(marks[i : i + GROUPS_PER_LINE]) for i in range(0, len(marks), GROUPS_PER_LINE)]


def headline(rates: dict[str, Any]) -> str:
    total = sum(core["rows_per_s"] for core in rates["cores"])
    latency, connections = rates.get("latency") or {}, rates.get("connections") or {}
    text = f"{rates['state']}, {total / 1e6:.3f} M rows/s, {connections.get('open', 0)} connections"
    if latency.get("count"):
        text += f", p50 {latency['p50_ms']:.3g} ms, p99 {latency['p99_ms']:.3g} ms"
    return text


def balance(rates: dict[str, Any]) -> list[str]:
    """Hot groups and keys, and the last moves."""
    state = rates.get("rebalance") or {}
    last = state.get("last") or {}
    lines = [f"last moves: {len(last['moved'])} groups in {last['took_ms']:.3g} ms"] if last.get("moved") else []
    return lines + [hot["text"] for hot in state.get("hot") or []]


def as_text(rates: dict[str, Any]) -> str:
    rates = shown(rates)
    parts = [headline(rates), *balance(rates), "", table([_core_cells(core) for core in rates["cores"]], CORES)]
    for name, groups in rates["groups"].items():
        parts += ["", f"groups of {name} (darker = more rows, {max(groups, default=0):.0f} rows/s at most)"]
        parts += [f"|{line}|" for line in picture(groups)]
    if rates["queries"]:
        parts += ["", table([_query_cells(query) for query in rates["queries"]], QUERIES)]
    return "\n".join(parts)


def _live(client: Client, before: Sample, interval: float) -> None:
    from rich.live import Live

    try:
        with Live(auto_refresh=False, screen=True) as live:
            while True:
                time.sleep(interval)
                after = _look(client)
                live.update(_screen(rates_of(before, after)), refresh=True)
                before = after
    except KeyboardInterrupt:
        pass


def _screen(rates: dict[str, Any]) -> RenderableType:
    from rich.console import Group
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    def grid(columns: dict[str, str], rows: list[dict[str, Any]]) -> Table:
        out = Table(*columns.values(), expand=True, box=None)
        for row in rows:
            out.add_row(*(Text("-" if row.get(key) is None else str(row[key])) for key in columns))
        return out

    rates = shown(rates)
    parts: list[RenderableType] = [Text("\n".join([headline(rates), *balance(rates)]), style="bold")]
    parts.append(Panel(grid(CORES, [_core_cells(core) for core in rates["cores"]]), title="cores"))
    for name, groups in rates["groups"].items():
        parts.append(Panel(Text("\n".join(picture(groups))), title=Text(f"groups of {name}")))
    parts.append(Panel(grid(QUERIES, [_query_cells(query) for query in rates["queries"]]), title="queries"))
    return Group(*parts)
