"""flexstream rebalance: where the groups are."""

from __future__ import annotations

import typer

from flexstream.cli.output import DEFAULT_URL, AsJson, TokenFile, Url, connect, emit, say, table

app = typer.Typer(help="Which worker owns which group.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def _group() -> None:
    """Which worker owns which group."""


@app.command("status")
def status(url: Url = DEFAULT_URL, token_file: TokenFile = None, as_json: AsJson = False) -> None:
    """The placement of groups on workers.

    Example: flexstream rebalance status
    """
    reply = connect(url, token_file).get("/v1/rebalance")
    if as_json:
        emit(reply)
        return
    say(table(reply["workers"], {"worker": "WORKER", "cpu": "CPU", "groups": "GROUPS"}))
    say(f"automatic balancing: {'on' if reply['automatic'] else 'off'}")
    placement = reply["placement"]
    for first in range(0, len(placement), 32):
        line = " ".join(str(worker) for worker in placement[first : first + 32])
        say(f"group {first:5d}: {line}")
