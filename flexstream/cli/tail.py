"""flexstream tail: watch a query's results arrive, or export them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from flexstream.cli.output import DEFAULT_URL, AsJson, TokenFile, Url, connect, emit, escaped, note, say
from flexstream.client.http import Client

HEADER_EVERY = 40


def tail(
    name: Annotated[str, typer.Argument(help="The query.")],
    rows: Annotated[int, typer.Option("-n", "--rows", min=0, help="Start with the last N rows.")] = 10,
    offset: Annotated[int | None, typer.Option(min=0, help="Start at this offset instead.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Stop after this many rows.")] = None,
    follow: Annotated[bool, typer.Option(help="Wait for more rows until Ctrl-C.")] = True,
    late: Annotated[
        bool, typer.Option("--late", help="Show the rows that came too late, not the results.")
    ] = False,
    parquet: Annotated[
        Path | None,
        typer.Option(help="Write all results to this directory as Parquet files; a later run continues."),
    ] = None,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Show results as windows fire: a table, or JSON lines with --json.

    Example: flexstream tail ysb -n 20
    """
    client = connect(url, token_file)
    if parquet is not None:
        _export(client, name, parquet, offset, limit, as_json)
        return
    if offset is None and not late:
        log = client.get(f"/v1/queries/{quote(name, safe='')}").get("log") or {}
        first, following = log.get("first_offset", 0), log.get("next_offset", 0)
        offset = max(first, following - rows)
    lines = client.lines(name, late=late, offset=offset, limit=limit, follow=follow or None)
    try:
        if as_json:
            for line in lines:
                say(line)
        else:
            _show(lines)
    except KeyboardInterrupt:
        pass


def _show(lines: Iterator[str]) -> None:
    widths: dict[str, int] = {}
    for number, line in enumerate(lines):
        row: dict[str, Any] = json.loads(line)
        cells = {escaped(key): _cell(value) for key, value in row.items()}
        if number % HEADER_EVERY == 0:
            widths = {key: max(len(key), len(text), widths.get(key, 0)) for key, text in cells.items()}
            say("  ".join(key.rjust(widths[key]) for key in cells))
        say("  ".join(text.rjust(widths.get(key, 0)) for key, text in cells.items()))


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return "-" if value is None else escaped(value) if isinstance(value, str) else json.dumps(value)


def _export(
    client: Client, name: str, directory: Path, offset: int | None, limit: int | None, as_json: bool
) -> None:
    """Everything that is not in the directory yet, from where it ends. Never follows."""
    from flexstream.results.export import ParquetDirectory

    sink = ParquetDirectory(directory)
    begin = sink.next_offset if sink.files or offset is None else offset
    if not sink.files and offset is None:
        log = client.get(f"/v1/queries/{quote(name, safe='')}").get("log") or {}
        begin = log.get("first_offset", 0)
    written = sink.write(client.batches(name, offset=begin, limit=limit), first_offset=begin)
    if as_json:
        emit({"directory": str(directory), "first_offset": begin, "rows": written, "files": len(sink.files)})
    else:
        note(f"{written} rows written to {directory}, from offset {begin} on")
