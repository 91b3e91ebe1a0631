"""Wire protocol v1: the 32-byte header, frame types and error codes. The words are in docs/protocol.md.

No I/O and no native code is needed here: the daemon, the producers and the tests share these names. Native code has the
same in cython_ext/includes/frame.h; a test compares them byte for byte.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import IntEnum, IntFlag
from typing import Any, Final

MAGIC: Final = 0x5346  # the bytes b"FS" on the wire
VERSION: Final = 1
HEADER: Final = struct.Struct("<HBBHHIIQQ")
HEADER_BYTES: Final = 32
LANE: Final = struct.Struct("<IHH")  # of a LANES frame: number, group to steer by, 0
CONTROL_GROUP: Final = 0xFFFF
STAGE_GROUP: Final = 0xFFFE  # a connection that stages rows of any group
FRAME_BYTES: Final = 32 * 1024  # what a receive block holds; the ACK to HELLO tells the rows
MAX_FRAME_BYTES: Final = 1 << 20  # payloads above this close the connection with bad_length
MAX_STAGE_FRAME_BYTES: Final = 16 << 20  # the same on a staging connection
MAX_HELLO_BYTES: Final = 4096

assert HEADER.size == HEADER_BYTES


class FrameType(IntEnum):
    HELLO = 1
    DATA = 2
    WATERMARK = 3
    MARKER = 4
    BARRIER = 5
    ACK = 6
    EOS = 7
    ERROR = 8
    STAGE = 9
    LANES = 10


class Flags(IntFlag):
    NONE = 0
    CRC = 1


class ErrorCode(IntEnum):
    """Value of an ERROR frame; the lower-case name is `code` in its JSON payload and in exceptions."""

    BAD_MAGIC = 1
    BAD_VERSION = 2
    BAD_TYPE = 3
    BAD_LENGTH = 4
    BAD_CRC = 5
    WRONG_GROUP = 6
    UNKNOWN_STREAM = 7
    SCHEMA_MISMATCH = 8
    BAD_TOKEN = 9
    NO_SESSION = 10
    STALE_EPOCH = 11
    SEQUENCE_GAP = 12
    BAD_HELLO = 13
    HELLO_TIMEOUT = 14
    TOO_MANY_PENDING = 15
    SHUTTING_DOWN = 16
    TOO_MANY_SESSIONS = 17
    BAD_ROW_COUNT = 18
    FENCED = 19
    REJECTED = 20

    @property
    def code(self) -> str:
        return self.name.lower()


# After these a producer may connect again and go on; after any other the same bytes would fail again.
RETRYABLE: Final = frozenset(
    {
        ErrorCode.BAD_CRC,
        ErrorCode.NO_SESSION,
        ErrorCode.HELLO_TIMEOUT,
        ErrorCode.TOO_MANY_PENDING,
        ErrorCode.SHUTTING_DOWN,
        ErrorCode.TOO_MANY_SESSIONS,
    }
)


class WireError(ValueError):
    """Bytes that are not a v1 frame header; `code` says which check failed."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Header:
    """One frame header. `value` is unsigned here; see `signed()` for watermarks."""

    type: FrameType
    group: int = CONTROL_GROUP
    value: int = 0
    sequence: int = 0
    payload_bytes: int = 0
    flags: int = 0
    crc32c: int = 0
    version: int = VERSION

    def pack(self) -> bytes:
        return HEADER.pack(
            MAGIC,
            self.version,
            self.type,
            self.flags,
            self.group,
            self.payload_bytes,
            self.crc32c,
            self.value & 0xFFFFFFFFFFFFFFFF,
            self.sequence,
        )

    @classmethod
    def unpack(cls, data: bytes | bytearray | memoryview) -> Header:
        """The header in the first 32 bytes. Raises WireError for a wrong magic, version or type."""
        magic, version, kind, flags, group, payload_bytes, crc, value, sequence = HEADER.unpack_from(data)
        if magic != MAGIC:
            raise WireError(ErrorCode.BAD_MAGIC, f"the frame's magic is 0x{magic:04x}, not 0x{MAGIC:04x}")
        if version != VERSION:
            raise WireError(ErrorCode.BAD_VERSION, f"the frame has protocol version {version}, not {VERSION}")
        try:
            frame_type = FrameType(kind)
        except ValueError:
            raise WireError(ErrorCode.BAD_TYPE, f"no frame type has the number {kind}") from None
        return cls(frame_type, group, value, sequence, payload_bytes, flags, crc, version)


def signed(value: int) -> int:
    """The u64 `value` of a WATERMARK frame as the int64 that it is."""
    return value - (1 << 64) if value >= 1 << 63 else value


def frame(
    kind: FrameType,
    group: int = CONTROL_GROUP,
    *,
    value: int = 0,
    sequence: int = 0,
    payload: bytes = b"",
    crc: bool = False,
) -> bytes:
    """A whole frame, header and payload, with its CRC when asked for."""
    header = Header(kind, group, value, sequence, len(payload), Flags.CRC if crc else Flags.NONE)
    if crc:
        header = replace(header, crc32c=frame_crc(header, payload))
    return header.pack() + payload


def frame_crc(header: Header, payload: bytes | bytearray | memoryview) -> int:
    """CRC32C over the header with its crc32c field 0, then the payload."""
    from flexstream.cython_ext.wire.crc32c import crc32c

    return crc32c(payload, crc32c(replace(header, crc32c=0).pack()))


def check_crc(header: Header, payload: bytes) -> None:
    """Raises WireError when the frame carries a CRC and it is wrong."""
    if header.flags & Flags.CRC and header.crc32c != frame_crc(header, payload):
        raise WireError(ErrorCode.BAD_CRC, f"the CRC of a {header.type.name} frame is wrong")


def json_frame(kind: FrameType, group: int, document: dict[str, Any], *, value: int = 0, sequence: int = 0) -> bytes:
    """A HELLO, ACK or ERROR frame with a JSON payload."""
    payload = json.dumps(document, separators=(",", ":")).encode()
    return frame(kind, group, value=value, sequence=sequence, payload=payload)


def error_frame(code: ErrorCode, message: str, hint: str | None = None, group: int = CONTROL_GROUP) -> bytes:
    document = {"code": code.code, "message": message, "hint": hint}
    return json_frame(FrameType.ERROR, group, document, value=int(code))


def error_code(value: int) -> ErrorCode | None:
    """The ErrorCode of an ERROR frame's value, or None when a newer peer sent one that we do not know."""
    try:
        return ErrorCode(value)
    except ValueError:
        return None


def bitmap(groups: set[int] | frozenset[int] | list[int], count: int) -> bytes:
    """ceil(count/8) bytes, least significant bit first: bit g is set when g is in `groups`."""
    bits = bytearray((count + 7) // 8)
    for group in groups:
        bits[group >> 3] |= 1 << (group & 7)
    return bytes(bits)


def bitmap_groups(bits: bytes | bytearray | memoryview, count: int) -> set[int]:
    """The groups whose bit is set: the inverse of `bitmap`."""
    return {group for group in range(count) if bits[group >> 3] >> (group & 7) & 1}


def lanes_frame(group: int, lanes: Mapping[int, int]) -> bytes:
    """LANES: the further lanes {number: steer} that a producer should have for a group, and no others."""
    payload = b"".join(LANE.pack(number, steer, 0) for number, steer in lanes.items())
    return frame(FrameType.LANES, value=group, payload=payload)


def lanes_of(payload: bytes) -> dict[int, int]:
    """{number: steer} of a LANES frame. Raises WireError."""
    if len(payload) % LANE.size:
        raise WireError(ErrorCode.BAD_LENGTH, f"a LANES frame cannot have {len(payload)} bytes of payload")
    return {number: steer for number, steer, _ in LANE.iter_unpack(payload)}
