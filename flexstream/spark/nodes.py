"""The daemons behind an `endpoint` option: one, or several that share the groups between them.

Node i of n has the groups g with g mod n = i. The list's order is the division, so it must be the same everywhere and
always: a batch that is sent again must meet the same nodes. Daemons do not know of each other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from urllib.parse import quote

import numpy as np

from flexstream.client.http import Client
from flexstream.errors import ConfigError, ConnectError, FlexStreamError, SchemaError
from flexstream.query.query import Query
from flexstream.rows.stream import Stream
from flexstream.spark.options import Options

Answer = TypeVar("Answer")
Rows = np.ndarray[Any, np.dtype[Any]]
PASSING = ("shutting_down", "too_many_commits", "sink_ending")  # refusals that another attempt may not meet
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0


@dataclass(frozen=True)
class Target:
    """A stream as all its daemons have it. Goes to the executors with each task."""

    endpoints: tuple[str, ...]
    definition: dict[str, Any]
    groups: int
    token: str | None
    timeout_s: float

    @property
    def stream(self) -> Stream:
        return Stream.from_dict(self.definition)

    @classmethod
    def find(cls, options: Options, *, patient: bool = False) -> Target:
        """Ask every daemon; `patient`: one that is away is waited for. Raises ConnectError, FlexStreamError as the
        daemon says, SchemaError when they differ.
        """
        name = options.need("stream")
        answers = []
        for endpoint in options.endpoints:
            client = Client(endpoint, token=options.token, timeout_s=options.timeout_s)
            ask = partial(client.get, f"/v1/streams/{quote(name, safe='')}")
            answers.append(persist(ask, options.timeout_s) if patient else ask())
        first = answers[0]
        for endpoint, answer in zip(options.endpoints, answers, strict=True):
            if answer["stream"] != first["stream"] or answer["groups"] != first["groups"]:
                raise SchemaError(
                    f"stream {name!r} differs between {options.endpoints[0]} and {endpoint}",
                    code="stream_mismatch",
                    hint="give daemons that share a stream the same definition and the same number of groups",
                )
        if len(answers) > first["groups"]:
            raise ConfigError(f"{len(answers)} daemons cannot share {first['groups']} groups", code="bad_option")
        return cls(options.endpoints, first["stream"], int(first["groups"]), options.token, options.timeout_s)

    def client(self, endpoint: str) -> Client:
        return Client(endpoint, token=self.token, timeout_s=self.timeout_s)


def split(stream: Stream, groups: int, nodes: int, rows: Rows) -> list[Rows]:
    """The rows of each node, in their order."""
    if nodes == 1:
        return [rows]
    node = stream.group_of(rows, groups) % nodes
    return [rows[node == i] for i in range(nodes)]


def find_query(options: Options) -> Query:
    """The query's plan, which every daemon must have. Raises ConnectError, or FlexStreamError as the daemon says."""
    name = options.need("query")
    plans = []
    for endpoint in options.endpoints:
        client = Client(endpoint, token=options.token, timeout_s=options.timeout_s)
        plans.append(Query.from_dict(client.get(f"/v1/queries/{quote(name, safe='')}")["plan"]))
    if any(plan != plans[0] for plan in plans):
        raise SchemaError(
            f"query {name!r} differs between {', '.join(options.endpoints)}",
            code="query_mismatch",
            hint="submit the same plan to each daemon",
        )
    return plans[0]


def persist(call: Callable[[], Answer], timeout_s: float) -> Answer:
    """`call`, again and again while nobody answers, for so long. Only for calls that may be repeated."""
    deadline = time.monotonic() + timeout_s
    for pause in _pauses():
        try:
            return call()
        except ConnectError:
            if time.monotonic() + pause > deadline:
                raise
        except FlexStreamError as error:
            if error.code not in PASSING or time.monotonic() + pause > deadline:
                raise
        time.sleep(pause)
    raise AssertionError("pauses do not end")


def _pauses() -> Iterator[float]:
    pause = FIRST_PAUSE_S
    while True:
        yield pause
        pause = min(pause * 2, LONGEST_PAUSE_S)
