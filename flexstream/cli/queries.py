"""flexstream queries: list them, show one."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import quote

import typer

from flexstream.cli.output import DEFAULT_URL, AsJson, TokenFile, Url, connect, emit, say, shown, table

app = typer.Typer(help="List the queries, or show one.", no_args_is_help=True, rich_markup_mode=None)

COLUMNS = {
    "name": "QUERY",
    "stream": "STREAM",
    "state": "STATE",
    "variant": "VARIANT",
    "rows": "ROWS",
    "late": "LATE",
    "windows_fired": "FIRED",
    "open_windows": "OPEN",
    "results": "RESULTS",
}


@app.command("list")
def list_queries(url: Url = DEFAULT_URL, token_file: TokenFile = None, as_json: AsJson = False) -> None:
    """List all queries with their counters.

    Example: flexstream queries list
    """
    reply = connect(url, token_file).get("/v1/queries")
    if as_json:
        emit(reply)
    elif reply["queries"]:
        say(table(reply["queries"], COLUMNS))
    else:
        say("no queries; add one with: flexstream submit QUERY")


@app.command("show")
def show(
    name: Annotated[str, typer.Argument(help="The query.")],
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
    code: Annotated[bool, typer.Option("--code", help="Print only the C code that is compiled for it.")] = False,
) -> None:
    """Show one query: its plan in words, its variant and how it got there, its counters, its result log.

    Example: flexstream queries show ysb --code
    """
    reply = connect(url, token_file).get(f"/v1/queries/{quote(name, safe='')}")
    if code:
        from flexstream.query.query import Query

        text = Query.from_dict(reply["plan"]).explain("code")
        emit({"name": reply["name"], "code": text}) if as_json else say(text.rstrip())
        return
    if as_json:
        emit(reply)
        return
    say(reply["explain"].rstrip())
    reply = shown(reply)
    rejected = sum((reply.get("rejected") or {}).values())
    log = reply.get("log") or {}
    say(
        f"state {reply.get('state', '?')}: {reply.get('rows', 0)} rows, "
        f"{reply.get('filtered', 0)} filtered, {reply.get('late', 0)} late, {rejected} rejected"
    )
    say(
        f"{reply.get('windows_fired', 0)} windows fired, {reply.get('open_windows', 0)} open, "
        f"results {log.get('first_offset', 0)} to {log.get('next_offset', 0)}"
    )
    if reply.get("nan_results"):
        say(f"{reply['nan_results']} results have a NaN aggregate: producers sent rows with NaN")
    for line in _variant(reply):
        say(line)
    for what in (reply.get("error"), log.get("error")):
        if what:
            say(f"error: {what}")


def _variant(reply: dict[str, Any]) -> list[str]:
    """Which variant runs, why not the compiled one, and what happened so far."""
    reason = reply.get("variant_reason")
    lines = [
        f"variant {reply.get('variant', '?')}{f' ({reason})' if reason else ''}, "
        f"{reply.get('compiled_rows', 0)} rows by compiled code"
    ]
    if reply.get("watched_by"):
        lines.append(f"watched by the workers' own counts; {reply['watched_by']}")
    for entry in reply.get("history") or []:
        choices = f" [{entry['choices']}]" if entry.get("choices") else ""
        gain = f" (gain {entry['gain']:.2f})" if entry.get("gain") is not None else ""
        line = f"  after {entry.get('after_s', 0):.3f} s: {entry.get('variant')}{choices}, {entry.get('reason')}{gain}"
        lines.append(line)
    return lines
