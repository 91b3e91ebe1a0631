"""A block of staged rows: rows of many groups in parts of one group each, in one frame with a CRC. No I/O.

The payload of a DATA frame on a staging connection, and of one in a stage file:

    u32 parts, then for each part u32 group and u32 rows, then the rows in that order.

A producer groups the rows once; whoever applies them hands each part to its worker without looking at a row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from flexstream.cython_ext.produce import stage_rows
from flexstream.cython_ext.produce.stage_rows import StageRows
from flexstream.cython_ext.wire.crc32c import crc32c
from flexstream.rows.stream import TIME_LIMIT
from flexstream.wire.frames import (
    MAX_STAGE_FRAME_BYTES,
    STAGE_GROUP,
    ErrorCode,
    Flags,
    FrameType,
    Header,
    WireError,
)

if TYPE_CHECKING:
    from flexstream.rows.stream import Stream

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
MIN_CHUNK_BYTES, MAX_CHUNK_BYTES = 1 << 10, 32 << 10


@dataclass(frozen=True, slots=True)
class Block:
    """Part i is `counts[i]` rows of `groups[i]`; `rows` are their bytes, one part after the other."""

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


def row_pool(stream: Stream, groups: int, block_bytes: int) -> StageRows:
    """Where a producer collects the rows of a block."""
    chunk = max(MIN_CHUNK_BYTES, min(MAX_CHUNK_BYTES, block_bytes // (2 * groups)))
    return StageRows(
        stream.key_hasher, groups=groups, row_bytes=stream.schema.row_bytes, block_bytes=block_bytes, chunk_bytes=chunk
    )


def encode(rows: StageRows, row_bytes: int, first_row: int) -> list[Any]:
    """The frame of these rows, in pieces: header and table, then the rows where they lie."""
    groups, counts, _, _ = rows.parts(0, False)
    table = np.empty(1 + 2 * len(groups), "<u4")
    table[0] = len(groups)
    table[1::2] = groups
    table[2::2] = counts
    head = table.tobytes()
    size = len(head) + rows.rows * row_bytes
    header = Header(FrameType.DATA, STAGE_GROUP, rows.rows, first_row, size, Flags.CRC)
    _, _, pieces, crc = rows.parts(crc32c(head, crc32c(header.pack())), True)
    return [replace(header, crc32c=crc).pack() + head, *pieces]


def crc_of_header(header: Header) -> int:
    """What the CRC of a frame begins with."""
    return crc32c(replace(header, crc32c=0).pack())


def check_crc(header: Header, payload: Any) -> bool:
    return bool(header.flags & Flags.CRC) and header.crc32c == crc32c(payload, crc_of_header(header))


def check_header(header: Header) -> None:
    """Whether a DATA frame of a staging connection may be read. Raises WireError."""
    if not header.flags & Flags.CRC:
        raise WireError(ErrorCode.BAD_CRC, "a block of staged rows must have a CRC")
    if not 4 <= header.payload_bytes <= MAX_STAGE_FRAME_BYTES:
        most = f"the limit is {MAX_STAGE_FRAME_BYTES}"
        raise WireError(ErrorCode.BAD_LENGTH, f"a block has {header.payload_bytes} bytes; {most}")


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
    if parts and (ids.max() >= groups or counts.min() < 1):
        raise WireError(ErrorCode.WRONG_GROUP, f"a part of a block is empty, or its group is not below {groups}")
    return Block(ids.tolist(), counts.tolist(), rows)


def check_groups(block: Block, stream: Stream, groups: int) -> None:
    """One row of each part must be of its group. Raises WireError."""
    if not block.groups:
        return
    starts = np.cumsum([0, *block.counts[:-1]])
    first = block.rows.view(stream.schema.dtype)[starts]
    if stream.group_of(first, groups).tolist() != block.groups:
        raise WireError(ErrorCode.WRONG_GROUP, "a row of a block is not of the group that the block's table names")


def time_span(block: Block, stream: Stream, latest: int = TIME_LIMIT) -> tuple[int, int] | None:
    """(least, largest) event time, up to `latest`, of the rows that have a window; None: there is none."""
    span: tuple[int, int] | None = stage_rows.time_span(
        block.rows, stream.schema.row_bytes, stream.time_field.offset, -TIME_LIMIT, latest
    )
    return span
