"""What a worker tells Python: one type for each kind of report, named as in memory/messages.pxd, and its samples.

A report is made for a block or an event, never for a row. Fields have names, so that to take the wrong one is a type
error.
"""

from __future__ import annotations

from typing import NamedTuple


class ResultBlock(NamedTuple):
    """Results of a query, in the order in which they were made."""

    query: int
    rows: bytes


class LateBlock(NamedTuple):
    """Rows of a stream that came too late for some of its queries, each with the slots of these (QueryHere)."""

    stream: int
    rows: bytes


class MarkerSeen(NamedTuple):
    """All that came before the marker is in the results."""

    stream: int
    sent_ns: int  # as its sender said


class ConnectionClosed(NamedTuple):
    """The socket's descriptor is the reader's from here on. `why`: an ErrorCode, 0 for its end, or less: an errno."""

    number: int
    fd: int
    stream: int
    group: int
    slot: int
    why: int
    ended: bool  # EOS was seen
    rows: int


class SessionDone(NamedTuple):
    """The session has ended, and all of it has fired, in so many more groups."""

    stream: int
    slot: int
    groups: int


class SessionAwake(NamedTuple):
    """An idle session has sent something."""

    stream: int
    slot: int


class QueryHere(NamedTuple):
    """The worker has the query: its slot in the stream's late blocks from here to QueryGone."""

    query: int
    stream: int
    slot: int


class QueryGone(NamedTuple):
    """The worker has nothing of the query any more."""

    query: int
    refused: bool  # it never took it


class Pong(NamedTuple):
    """All that was posted before the ping was worked off. With the tag 0: the worker's thread has ended."""

    tag: int


Report = (
    ResultBlock | LateBlock | MarkerSeen | ConnectionClosed | SessionDone | SessionAwake | QueryHere | QueryGone | Pong
)


class Progress(NamedTuple):
    """What a worker has done so far."""

    rows: int
    batches: int  # that they came in
    connections: int


class Links(NamedTuple):
    """The connections of a group on a worker, as of its last sample."""

    connections: int
    recent: int  # rows that they brought a moment ago
    busiest: int  # of these, those of the busiest connection
