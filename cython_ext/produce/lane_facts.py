"""What Python is told of a producer's lanes."""

from __future__ import annotations

from typing import NamedTuple


class LaneFacts(NamedTuple):
    """A lane as of one moment. Rows are numbered within the lane; on the wire `base` is added."""

    at: int  # a group, the number of groups for the control connection, or beyond for a further lane
    carries_rows: bool = False  # in use, and not the control connection
    wanted: bool = False  # it needs its first connection
    broken: bool = False
    fault: int = 0  # errno; 0: the peer closed
    error_value: int = 0  # of an ERROR frame that came; 0: none
    said: bytes = b""  # its payload
    is_open: bool = False
    linked: bool = False  # a further lane that gets rows
    acked: int = 0  # rows below are the server's
    end_row: int = 0
    base: int = 0
    frames: int = 0
    sent_bytes: int = 0


class LaneFault(NamedTuple):
    """A connection that broke."""

    lane: int  # a group, -1 for the control connection, or a further lane's index
    errno: int  # 0: the peer closed
    value: int  # of an ERROR frame that came; 0: none
    payload: bytes  # and what it said
