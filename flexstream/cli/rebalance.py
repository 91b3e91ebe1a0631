"""flexstream rebalance: where the groups are, what would move and why, and orders to move them."""

from __future__ import annotations

import time
from enum import Enum
from typing import Annotated, Any

import typer

from flexstream.cli.output import DEFAULT_URL, AsJson, TokenFile, Url, connect, emit, say, shown, table

app = typer.Typer(
    help="Show which worker owns which group, and move groups.", no_args_is_help=True, rich_markup_mode=None
)
TIMEOUT_S = 60.0  # a move takes milliseconds; a worker that does not answer is waited for
WORKERS = {
    "worker": "WORKER",
    "cpu": "CPU",
    "active": "ACTIVE",
    "groups": "GROUPS",
    "load_percent": "LOAD %",
    "waiting_rows": "WAITING ROWS",
}
MOVES = {
    "group": "GROUP",
    "from": "FROM",
    "to": "TO",
    "took_ms": "MS",
    "connections": "CONNECTIONS",
    "panes": "PANES",
    "state": "STATE",
    "error": "ERROR",
}
SHOWN = 16

Group = Annotated[int, typer.Argument(min=0, help="The group, from 0.")]
Worker = Annotated[int, typer.Argument(min=0, help="The worker, from 0.")]


class OnOff(str, Enum):  # noqa: UP042 - typer shows the values of a str Enum
    on = "on"
    off = "off"


@app.callback()
def _group() -> None:
    """Show which worker owns which group, and move groups."""


@app.command("status")
def status(url: Url = DEFAULT_URL, token_file: TokenFile = None, as_json: AsJson = False) -> None:
    """Show each worker's groups and load, hot groups and keys, and the last decision.

    Example: flexstream rebalance status
    """
    reply = connect(url, token_file).get("/v1/rebalance")
    if as_json:
        emit(reply)
        return
    reply = shown(reply)
    columns = {key: name for key, name in WORKERS.items() if any(key in worker for worker in reply["workers"])}
    say(table(reply["workers"], columns))
    for line in describe(reply):
        say(line)
    placement = reply["placement"]
    for first in range(0, len(placement), 32):
        line = " ".join(str(worker) for worker in placement[first : first + 32])
        say(f"group {first:5d}: {line}")


def describe(reply: dict[str, Any]) -> list[str]:
    """What the balancer thinks, in lines; shared with `flexstream status`."""
    lines = [f"automatic balancing: {'on' if reply.get('automatic') else 'off'}"]
    if reply.get("imbalance_percent") is not None:
        lines[0] += f"; imbalance {reply['imbalance_percent']:.1f}%, {reply.get('moves', 0)} groups moved so far"
    if reply.get("automatic") and reply.get("verdict"):
        lines.append(f"last decision: {reply['verdict']}: {reply['text']}")
    if reply.get("inactive"):
        lines.append(f"drained workers: {', '.join(map(str, reply['inactive']))}")
    if reply.get("frozen"):
        lines.append(f"frozen groups: {_some(reply['frozen'])}")
    lines += [split_line(split) for split in reply.get("split") or []]
    lines += [f"too hot: {one['text']}" for one in reply.get("too_hot") or []]
    lines += [hot["text"] for hot in reply.get("hot") or []]
    return lines


def split_line(split: dict[str, Any]) -> str:
    """Who serves a group that is split, and how much of it."""
    shares = split.get("percent") or [None] * len(split["workers"])
    served = [
        f"{worker}" if share is None else f"{worker} ({share:.0f}%)"
        for worker, share in zip(split["workers"], shares, strict=True)
    ]
    away = f"; {split['misaligned']} connections away from their bucket's core" if split["misaligned"] else ""
    return f"group {split['group']} is split over workers {', '.join(served)}{away}"


def _some(groups: list[int]) -> str:
    shown = ", ".join(map(str, groups[:SHOWN]))
    return shown if len(groups) <= SHOWN else f"{shown} and {len(groups) - SHOWN} more"


@app.command("plan")
def plan(url: Url = DEFAULT_URL, token_file: TokenFile = None, as_json: AsJson = False) -> None:
    """Show what would move now, judged by the rows of the last seconds. Changes nothing.

    Example: flexstream rebalance plan
    """
    reply = connect(url, token_file).post("/v1/rebalance/plan", {})
    if as_json:
        emit(reply)
        return
    reply = shown(reply)
    say(reply["text"])
    if reply["plan"]:
        say(table(reply["plan"], {"group": "GROUP", "from": "FROM", "to": "TO"}))
    pairs = enumerate(zip(reply["worker_percent"], reply["worker_percent_after"], strict=True))
    for worker, (before, after) in pairs:
        say(f"worker {worker}: {before:.1f}% of a fair share -> {after:.1f}%")


@app.command("apply")
def apply(url: Url = DEFAULT_URL, token_file: TokenFile = None, as_json: AsJson = False) -> None:
    """Make a plan and carry it out now, even while automatic balancing is off.

    Example: flexstream rebalance apply
    """
    _order("apply", {}, url, token_file, as_json)


@app.command("auto")
def auto(
    state: Annotated[OnOff, typer.Argument(help="on or off.")],
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Let groups move automatically, or only on command.

    Example: flexstream rebalance auto off
    """
    _order("auto", {"on": state is OnOff.on}, url, token_file, as_json)


@app.command("freeze")
def freeze(
    groups: Annotated[list[int] | None, typer.Argument(min=0, help="Groups; by default all.")] = None,
    off: Annotated[bool, typer.Option("--off", help="Let them move again.")] = False,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Keep groups where they are, whatever the balancer would do.

    Example: flexstream rebalance freeze 17 18
    """
    body: dict[str, Any] = {"on": not off}
    if groups:
        body["groups"] = groups
    _order("freeze", body, url, token_file, as_json)


@app.command("move")
def move(
    group: Group, worker: Worker, url: Url = DEFAULT_URL, token_file: TokenFile = None, as_json: AsJson = False
) -> None:
    """Move one group to a worker, while rows arrive.

    Example: flexstream rebalance move 17 1
    """
    _order("move", {"group": group, "worker": worker}, url, token_file, as_json)


@app.command("split")
def split(
    group: Group,
    workers: Annotated[list[int], typer.Argument(min=0, help="Workers that serve it together with its owner.")],
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Let several workers serve one group, because it is hotter than a core.

    Example: flexstream rebalance split 17 1 2
    """
    _order("split", {"group": group, "workers": workers}, url, token_file, as_json)


@app.command("unsplit")
def unsplit(group: Group, url: Url = DEFAULT_URL, token_file: TokenFile = None, as_json: AsJson = False) -> None:
    """Un-split a group: its owner serves all its connections again.

    Example: flexstream rebalance unsplit 17
    """
    _order("unsplit", {"group": group}, url, token_file, as_json)


@app.command("drain")
def drain(worker: Worker, url: Url = DEFAULT_URL, token_file: TokenFile = None, as_json: AsJson = False) -> None:
    """Move all groups of a worker to the others and give it no more: scale down without a stop.

    Example: flexstream rebalance drain 1
    """
    _order("drain", {"worker": worker}, url, token_file, as_json)


@app.command("add")
def add(worker: Worker, url: Url = DEFAULT_URL, token_file: TokenFile = None, as_json: AsJson = False) -> None:
    """Activate a drained worker again and give it its share: scale up without a stop.

    Example: flexstream rebalance add 1
    """
    _order("add", {"worker": worker}, url, token_file, as_json)


@app.command("history")
def history(
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=256, help="Show only the last N.")] = 20,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Show decisions and commands, oldest first, with their numbers and what they moved.

    Example: flexstream rebalance history --limit 5
    """
    reply = connect(url, token_file).get("/v1/rebalance/history", limit=limit)
    if as_json:
        emit(reply)
        return
    for entry in shown(reply["history"]):
        say("\n".join(_entry(entry)))


def _entry(entry: dict[str, Any]) -> list[str]:
    at = time.strftime("%H:%M:%S", time.localtime(entry["at"]))
    times = f" ({entry['repeated']} times)" if entry["repeated"] > 1 else ""
    what = entry.get("verdict") or entry["what"]
    lines = [f"{at} {what}{times}: {entry['text']}"]
    if entry.get("worker_percent"):
        lines.append("  workers: " + ", ".join(f"{share:.0f}%" for share in entry["worker_percent"]))
    return lines + [f"  {line}" for line in outcome(entry)]


def outcome(entry: dict[str, Any]) -> list[str]:
    """What was moved, how long it took, and the latency meanwhile."""
    lines = [f"failed: {entry['error']}"] if entry["error"] else []
    if entry.get("split") and entry["took_ms"] is not None:
        lent = sum(part["connections"] for part in entry["split"]["lent"])
        done = "joined" if entry["what"] == "unsplit" else "split"
        lines.append(f"{done} in {entry['took_ms']:.3g} ms: {lent} connection{'s' if lent != 1 else ''} changed hands")
    elif entry["moved"]:
        groups = sorted(move["group"] for move in entry["moved"])
        count = f"{len(groups)} group{'s' if len(groups) > 1 else ''}"
        lines.append(f"moved {count} in {entry['took_ms']:.3g} ms: {_some(groups)}")
    else:
        return lines
    latency = entry.get("latency") or {}
    if latency.get("count"):
        p99 = f"p99 latency during the move: {latency['p99_ms']:.3g} ms"
        lines.append(f"{p99}, max {latency['max_ms']:.3g} ms over {latency['count']} markers")
    else:
        lines.append("p99 latency during the move: unknown, no producer sent a marker")
    return lines


def _order(path: str, body: dict[str, Any], url: str, token_file: Any, as_json: bool) -> None:
    reply = connect(url, token_file, TIMEOUT_S).post(f"/v1/rebalance/{path}", body)
    if as_json:
        emit(reply)
        return
    reply = shown(reply)
    say(reply["text"])
    for line in outcome(reply):
        say(line)
    if reply["moved"]:
        say(table(reply["moved"][:SHOWN], MOVES))
