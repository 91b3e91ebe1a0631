"""What all commands share: the options that reach a daemon, and how things are printed."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from flexstream.client.http import Client
from flexstream.daemon.config import read_token

Url = Annotated[
    str, typer.Option("--url", "-u", envvar="FLEXSTREAM_URL", help="The daemon's control address, HOST:PORT.")
]
TokenFile = Annotated[
    Path | None,
    typer.Option(envvar="FLEXSTREAM_TOKEN_FILE", help="File with the token, if the daemon requires one."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of text for people.")]
DEFAULT_URL = "127.0.0.1:7401"


def connect(url: str, token_file: Path | None, timeout_s: float = 10.0) -> Client:
    return Client(url, token=read_token(token_file) if token_file is not None else None, timeout_s=timeout_s)


def emit(value: Any) -> None:
    """One JSON value on one line of standard output."""
    say(json.dumps(value))


def say(text: str) -> None:
    print(_printable(text, sys.stdout), flush=True)


def note(text: str) -> None:
    """A remark for people, on standard error, where it does not mix with what was asked for."""
    print(_printable(text, sys.stderr), file=sys.stderr, flush=True)


def _printable(text: str, stream: TextIO) -> str:
    """Lines that move no cursor, set no title, and that the stream can hold, whoever wrote them."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    lines = "\n".join(escaped(line, keep="\t") for line in text.split("\n"))
    return lines.encode(encoding, "backslashreplace").decode(encoding)


def escaped(text: str, keep: str = "") -> str:
    r"""What is not printable as \n, \x1b or \u202e: for names, keys and messages that came from outside."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def shown(value: Any) -> Any:
    """A daemon's reply for people: every text in it on one line and escaped. Programs get it as it is, as JSON."""
    if isinstance(value, str):
        return escaped(value)
    if isinstance(value, dict):
        return {shown(key): shown(item) for key, item in value.items()}
    return [shown(item) for item in value] if isinstance(value, list) else value


def table(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> str:
    """Aligned text: `columns` is key -> heading. Numbers to the right."""
    cells = [[_text(row.get(key)) for key in columns] for row in rows]
    right = [
        bool(rows) and all(isinstance(row.get(key), int | float | None) for row in rows) for key in columns
    ]
    lines = [list(columns.values()), *cells]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in lines
    )


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return escaped(str(value))


def size(count: float | None) -> str:
    """1536 -> 1.5 KiB."""
    if count is None:
        return "-"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
