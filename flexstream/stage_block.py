"""A block of staged rows: rows of many groups, ordered by group, in one frame with a CRC. No I/O.

The payload of a DATA frame on a staging connection, and of one in a stage file:

    u32 parts, then for each part u32 group and u32 rows, then the rows in that order.

A producer groups the rows once; whoever applies them hands each part to its worker without looking at a row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from flexstream.cython_ext.crc32c import crc32c
from flexstream.cython_ext.partition import by_group
from flexstream.wire import (
    HEADER_BYTES,
    MAX_STAGE_FRAME_BYTES,
    STAGE_GROUP,
    ErrorCode,
    Flags,
    FrameType,
    Header,
    WireError,
)

if TYPE_CHECKING:
    from flexstream.stream import Stream

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
TIME_LIMIT = 1 << 62  # as in native.h: event times beyond it are rejected


@dataclass(frozen=True, slots=True)
class Block:
    """Rows ordered by group. `groups[i]` has `counts[i]` rows; `rows` are their bytes."""

    groups: list[int]
    counts: list[int]
    rows: Bytes

    def parts(self, row_bytes: int) -> list[tuple[int, Bytes]]:
        """(group, its rows) in order."""
        found, at = [], 0
        for group, count in zip(self.groups, self.counts, strict=True):
            end = at + count * row_bytes
            found.append((group, self.rows[at:end]))
            at = end
        return found


def encode(flat: Bytes, stream: Stream, groups: int, first_row: int) -> tuple[bytes, Bytes]:
    """The frame of these rows, in two pieces: header and table, and the rows ordered by group."""
    row_bytes = stream.schema.row_bytes
    ordered, offsets = by_group(flat, row_bytes, stream.key_hasher, groups)
    counts = np.diff(offsets.view(np.int64))
    used = np.flatnonzero(counts)
    table = np.empty(1 + 2 * len(used), "<u4")
    table[0] = len(used)
    table[1::2] = used
    table[2::2] = counts[used]
    head = table.tobytes()
    header = Header(FrameType.DATA, STAGE_GROUP, len(flat) // row_bytes, first_row, len(head) + len(ordered), Flags.CRC)
    crc = crc32c(ordered, crc32c(head, crc32c(header.pack())))
    return replace(header, crc32c=crc).pack() + head, ordered


def check_crc(header: Header, payload: Any) -> bool:
    return bool(header.flags & Flags.CRC) and header.crc32c == crc32c(payload, crc32c(replace(header, crc32c=0).pack()))


def check_header(header: Header) -> None:
    """Whether a DATA frame of a staging connection may be read. Raises WireError."""
    if not header.flags & Flags.CRC:
        raise WireError(ErrorCode.BAD_CRC, "staged rows need a CRC")
    if not 4 <= header.payload_bytes <= MAX_STAGE_FRAME_BYTES:
        most = f"at most {MAX_STAGE_FRAME_BYTES} are taken"
        raise WireError(ErrorCode.BAD_LENGTH, f"a block of {header.payload_bytes} bytes; {most}")


def decode(header: Header, payload: Bytes, row_bytes: int, groups: int) -> Block:
    """The block in a payload whose CRC was right. Raises WireError when its table does not fit its rows."""
    parts = int(payload[:4].view("<u4")[0])
    start = 4 + 8 * parts
    if start > len(payload):
        raise WireError(ErrorCode.BAD_LENGTH, f"a table of {parts} parts does not fit {len(payload)} bytes")
    table = payload[4:start].view("<u4").astype(np.int64)
    ids, counts = table[0::2], table[1::2]
    rows = payload[start:]
    if int(counts.sum()) != header.value or header.value * row_bytes != len(rows):
        raise WireError(ErrorCode.BAD_ROW_COUNT, f"{header.value} rows of {row_bytes} bytes are not {len(rows)} bytes")
    if parts and (ids[-1] >= groups or counts.min() < 1 or (parts > 1 and np.diff(ids).min() < 1)):
        raise WireError(ErrorCode.WRONG_GROUP, f"the parts of a block are not groups below {groups} in order")
    return Block(ids.tolist(), counts.tolist(), rows)


def check_groups(block: Block, stream: Stream, groups: int) -> None:
    """One row of each part must be of its group. Raises WireError."""
    if not block.groups:
        return
    starts = np.cumsum([0, *block.counts[:-1]])
    first = block.rows.view(stream.schema.dtype)[starts]
    if stream.group_of(first, groups).tolist() != block.groups:
        raise WireError(ErrorCode.WRONG_GROUP, "a row of a block is not of the group that its table says")


def time_span(block: Block, stream: Stream) -> tuple[int, int] | None:
    """(least, largest) event time of the rows that have a window; None: there is none."""
    times = block.rows.view(stream.schema.dtype)[stream.time]
    if not len(times):
        return None
    low, high = int(times.min()), int(times.max())
    if low < -TIME_LIMIT or high > TIME_LIMIT:
        times = times[(times >= -TIME_LIMIT) & (times <= TIME_LIMIT)]
        if not len(times):
            return None
        low, high = int(times.min()), int(times.max())
    return low, high


def frame_bytes(header: Header) -> int:
    return HEADER_BYTES + header.payload_bytes
