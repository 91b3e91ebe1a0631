"""flexstream nic: the receive side of the daemon's machine."""

from __future__ import annotations

import json
from typing import Any

import typer

from flexstream.cli.output import DEFAULT_URL, AsJson, TokenFile, Url, connect, emit, say

app = typer.Typer(
    help="The receive side of the daemon's machine.", no_args_is_help=True, rich_markup_mode=None
)


@app.callback()
def _group() -> None:
    """The receive side of the daemon's machine."""


@app.command("show")
def show(url: Url = DEFAULT_URL, token_file: TokenFile = None, as_json: AsJson = False) -> None:
    """How connections reach workers: the NIC in use, what it can do, and why not where it cannot.

    Example: flexstream nic show
    """
    reply = connect(url, token_file).get("/v1/nic")
    if as_json:
        emit(reply)
        return
    nic: dict[str, Any] = reply["nic"]
    for key, value in nic.items():
        say(f"{key:14s} {value if isinstance(value, str) else json.dumps(value)}")
