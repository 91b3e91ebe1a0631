"""flexstream sessions: who sends to a stream; end one that holds or poisons it."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import quote

import typer

from flexstream.cli.output import DEFAULT_URL, AsJson, TokenFile, Url, connect, emit, say, table
from flexstream.client.http import Client
from flexstream.errors import EngineError

app = typer.Typer(help="List the producers' sessions, or end one.", no_args_is_help=True, rich_markup_mode=None)

COLUMNS = {
    "stream": "STREAM",
    "producer": "PRODUCER",
    "kind": "KIND",
    "state": "STATE",
    "epoch": "EPOCH",
    "watermark": "WATERMARK",
    "connections": "CONNECTIONS",
    "peer": "PEER",
}
Stream = Annotated[str | None, typer.Option("--stream", "-s", help="Only sessions of this stream.")]


@app.command("list")
def list_sessions(
    stream: Stream = None, url: Url = DEFAULT_URL, token_file: TokenFile = None, as_json: AsJson = False
) -> None:
    """List the producers, with the watermark that each has promised.

    Example: flexstream sessions list --stream ads
    """
    found = _sessions(connect(url, token_file), stream)
    if as_json:
        emit({"sessions": found})
    else:
        say(table(found, COLUMNS) if found else "no sessions")


@app.command("end")
def end(
    name: Annotated[str, typer.Argument(help="The producer, as `sessions list` shows it.")],
    stream: Stream = None,
    kind: Annotated[str | None, typer.Option(help="network, sink or feed, if several have the name.")] = None,
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """End a session: nothing waits for it any more, its connections are closed, its rows so far count.

    A producer that is still running is refused for session_timeout_s, or until it uses a higher epoch.

    Example: flexstream sessions end 0b1cbd5e-5e1c-4f86-a6f3-0d6a0a5b7a3f
    """
    client = connect(url, token_file)
    of = stream or _stream_of(client, name)
    chosen = f"?kind={quote(kind, safe='')}" if kind else ""
    reply = client.delete(f"/v1/streams/{quote(of, safe='')}/sessions/{quote(name, safe='')}{chosen}")
    if as_json:
        emit(reply)
    else:
        say(f"session {name} of stream {of}: ended")


def _sessions(client: Client, stream: str | None) -> list[dict[str, Any]]:
    names = [stream] if stream else [item["stream"]["name"] for item in client.get("/v1/streams")["streams"]]
    return [
        {"stream": name, **session}
        for name in names
        for session in client.get(f"/v1/streams/{quote(name, safe='')}/sessions")["sessions"]
    ]


def _stream_of(client: Client, producer: str) -> str:
    found = sorted({item["stream"] for item in _sessions(client, None) if item["producer"] == producer})
    if len(found) == 1:
        return str(found[0])
    raise EngineError(
        f"{len(found) or 'no'} streams have a session {producer!r:.80}",
        code="unclear_session" if found else "unknown_session",
        hint=f"say which: --stream {' or '.join(found)}" if found else "`flexstream sessions list` shows them",
    )
