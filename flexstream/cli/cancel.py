"""flexstream cancel: stop a query."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote

import typer

from flexstream.cli.output import DEFAULT_URL, AsJson, TokenFile, Url, connect, emit, say


def cancel(
    name: Annotated[str, typer.Argument(help="The query.")],
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Cancel a query and drop its open windows; its stream and other queries continue.

    Example: flexstream cancel ysb
    """
    reply = connect(url, token_file).delete(f"/v1/queries/{quote(name, safe='')}")
    if as_json:
        emit(reply)
    else:
        say(f"query {name} is cancelled")
