"""flexstream submit: hand a query to the daemon."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from flexstream.cli.output import DEFAULT_URL, AsJson, TokenFile, Url, connect, emit, say
from flexstream.errors import QueryError
from flexstream.query.query import Query


def submit(
    query: Annotated[
        str, typer.Argument(help="A file of query.to_json(), '-' for standard input, or MODULE:OBJECT.")
    ],
    url: Url = DEFAULT_URL,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Submit a query, and add its stream if it is new.

    Example: flexstream submit examples.ysb:views
    """
    plan = load(query)
    reply = connect(url, token_file).post("/v1/queries", plan.to_dict())
    if as_json:
        emit(reply)
    elif reply["created"]:
        say(f"query {plan.name} runs on stream {plan.stream.name}; see it with: flexstream tail {plan.name}")
    else:
        say(f"query {plan.name} is already running with the same plan")


def load(source: str) -> Query:
    """The query in a JSON file, on standard input, or at MODULE:OBJECT. Raises QueryError."""
    if source == "-":
        return Query.from_json(sys.stdin.buffer.read())
    path = Path(source)
    if path.suffix == ".json" or path.is_file():
        try:
            return Query.from_json(path.read_bytes())
        except OSError as error:
            raise QueryError(
                f"cannot read {path}: {error.strerror}",
                code="no_query",
                hint="write one with query.to_json()",
            ) from error
    module, colon, name = source.partition(":")
    if not colon or not module or not name:
        raise QueryError(
            f"{source!r} is neither a file nor MODULE:OBJECT",
            code="no_query",
            hint="e.g. `flexstream submit query.json` or `flexstream submit my_queries:views`",
        )
    return _imported(module, name)


def _imported(module: str, name: str) -> Query:
    sys.path.insert(0, os.getcwd())
    try:
        value: Any = importlib.import_module(module)
        for part in name.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError) as error:
        raise QueryError(
            f"cannot find {module}:{name}: {error}",
            code="no_query",
            hint="run this command from the module's folder",
        ) from error
    finally:
        sys.path.remove(os.getcwd())
    if callable(value) and not isinstance(value, Query):
        value = value()
    if not isinstance(value, Query):
        raise QueryError(
            f"{module}:{name} is a {type(value).__name__}, not a Query",
            code="no_query",
            hint="name a query, or a function without arguments that returns one",
        )
    return value
