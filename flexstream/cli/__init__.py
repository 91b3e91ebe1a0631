"""The `flexstream` command. One file per command; each speaks to a daemon through its HTTP API only."""

from __future__ import annotations

import json
import os
import sys
from typing import Annotated

import typer

import flexstream
from flexstream.cli import (
    cancel,
    config,
    doctor,
    nic,
    queries,
    rebalance,
    send,
    serve,
    sessions,
    stages,
    status,
    streams,
    submit,
    tail,
    top,
)
from flexstream.cli.output import escaped, note
from flexstream.errors import FlexStreamError

app = typer.Typer(
    name="flexstream",
    help="Keyed, windowed stream processing at the speed of the network.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.command("serve")(serve.serve)
app.command("submit")(submit.submit)
app.add_typer(queries.app, name="queries")
app.command("cancel")(cancel.cancel)
app.command("tail")(tail.tail)
app.command("send")(send.send)
app.command("top")(top.top)
app.command("status")(status.status)
app.add_typer(streams.app, name="streams")
app.add_typer(sessions.app, name="sessions")
app.add_typer(stages.app, name="stages")
app.command("doctor")(doctor.doctor)
app.add_typer(config.app, name="config")
app.add_typer(rebalance.app, name="rebalance")
app.add_typer(nic.app, name="nic")


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        print(flexstream.__version__)
        raise typer.Exit()


def main(argv: list[str] | None = None) -> None:
    """Run the command line and exit: 0 it worked, 1 it did not, 2 wrong usage, 130 Ctrl-C."""
    arguments = sys.argv[1:] if argv is None else argv
    try:
        app(args=arguments, prog_name="flexstream")
    except FlexStreamError as error:
        report(error, as_json="--json" in arguments)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


def report(error: FlexStreamError, *, as_json: bool) -> None:
    """One line to standard error, and the hint below it."""
    if as_json:
        print(json.dumps({"error": error.to_dict()}), file=sys.stderr)
        return
    note(f"flexstream: {escaped(error.message)}")
    if error.hint:
        note(f"  hint: {escaped(error.hint)}")
