"""flexstream streams: list them, add one from a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from flexstream.cli.output import DEFAULT_URL, AsJson, TokenFile, Url, connect, emit, say, table
from flexstream.rows.stream import Stream

app = typer.Typer(help="List the streams, or add one.", no_args_is_help=True, rich_markup_mode=None)

COLUMNS = {
    "name": "STREAM",
    "fields": "FIELDS",
    "row_bytes": "ROW BYTES",
    "key": "KEY",
    "time": "TIME",
    "groups": "GROUPS",
    "data": "SEND ROWS TO",
}


@app.command("list")
def list_streams(url: Url = DEFAULT_URL, token_file: TokenFile = None, as_json: AsJson = False) -> None:
    """List all streams, and where producers send their rows.

    Example: flexstream streams list
    """
    reply = connect(url, token_file).get("/v1/streams")
    if as_json:
        emit(reply)
    elif reply["streams"]:
        say(table([_row(item) for item in reply["streams"]], COLUMNS))
    else:
        say("no streams; add one with: flexstream streams add FILE")


def _row(item: dict[str, Any]) -> dict[str, Any]:
    stream = Stream.from_dict(item["stream"])
    return {
        "name": stream.name,
        "fields": len(stream.schema.names),
        "row_bytes": stream.schema.row_bytes,
        "key": ", ".join(stream.key),
        "time": f"{stream.time} [{stream.time_unit}]",
        "groups": item["groups"],
        "data": item["data"],
    }


@app.command("add")
def add(
    file: Annotated[Path, typer.Argument(help="A .toml or .json file with name, fields, key and time.")],
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Add a stream. Adding the same definition again is not an error.

    Example: flexstream streams add ads.toml
    """
    stream = Stream.from_file(file)
    reply = connect(url, token_file).post("/v1/streams", stream.to_dict())
    if as_json:
        emit(reply)
    else:
        where = (
            f"send rows of {stream.schema.row_bytes} bytes to {reply['data']}" if reply["data"] else "added"
        )
        say(f"stream {stream.name}: {where}")
