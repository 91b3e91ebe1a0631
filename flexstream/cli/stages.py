"""flexstream stages: what waits for a commit; drop one."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote

import typer

from flexstream.cli.output import DEFAULT_URL, AsJson, TokenFile, Url, connect, emit, say, shown, table

app = typer.Typer(help="List stages, or drop one.", no_args_is_help=True, rich_markup_mode=None)

COLUMNS = {
    "stage": "STAGE",
    "stream": "STREAM",
    "state": "STATE",
    "rows": "ROWS",
    "bytes": "BYTES",
    "waiting_rows": "NOT APPLIED",
    "age_s": "AGE S",
    "producer": "PRODUCER",
}


@app.command("list")
def list_stages(url: Url = DEFAULT_URL, token_file: TokenFile = None, as_json: AsJson = False) -> None:
    """List stages that are open, wait for a commit, or are kept until their windows are in the result log.

    Example: flexstream stages list
    """
    reply = connect(url, token_file).get("/v1/stages")
    if as_json:
        emit(reply)
        return
    reply = shown(reply)
    if reply["stages"]:
        say(table(reply["stages"], COLUMNS))
    else:
        say("no stages")
    for batch, why in reply["failed"].items():
        say(f"batch {batch} was not applied: {why}")
    for batch in reply.get("set_aside", []):
        who = f"batch {batch['batch']} of sink {batch['sink']}, query {batch['query']}"
        say(f"{who} was set aside: {batch['rows']} rows; the daemon died {batch['died']} times while applying it")


@app.command("drop")
def drop(
    stage: Annotated[str, typer.Argument(help="The stage's UUID.")],
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Fence a stage and drop its rows. A committed stage stays: its rows already count.

    Example: flexstream stages drop 0b1cbd5e-5e1c-4f86-a6f3-0d6a0a5b7a3f
    """
    reply = connect(url, token_file).delete(f"/v1/stages/{quote(stage, safe='')}")
    if as_json:
        emit(reply)
    else:
        say(f"stage {stage}: {'dropped' if reply['dropped'] else 'nothing dropped, it was ' + reply['was']}")
