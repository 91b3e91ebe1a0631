"""flexstream queries: list them, show one."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote

import typer

from flexstream.cli.output import DEFAULT_URL, AsJson, TokenFile, Url, connect, emit, say, table

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
    """All queries and what they have done.

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
) -> None:
    """One query: its plan in words, its counters, its result log.

    Example: flexstream queries show ysb
    """
    reply = connect(url, token_file).get(f"/v1/queries/{quote(name, safe='')}")
    if as_json:
        emit(reply)
        return
    say(reply["explain"].rstrip())
    rejected = sum((reply.get("rejected") or {}).values())
    log = reply.get("log") or {}
    say(
        f"state {reply.get('state', '?')}, variant {reply.get('variant', '?')}: {reply.get('rows', 0)} rows, "
        f"{reply.get('filtered', 0)} filtered, {reply.get('late', 0)} late, {rejected} rejected"
    )
    say(
        f"{reply.get('windows_fired', 0)} windows fired, {reply.get('open_windows', 0)} open, "
        f"results {log.get('first_offset', 0)} to {log.get('next_offset', 0)}"
    )
    for what in (reply.get("error"), log.get("error")):
        if what:
            say(f"error: {what}")
