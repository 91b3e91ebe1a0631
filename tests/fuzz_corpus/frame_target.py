"""What fuzzing checks of the frame decoder, for any bytes. Used by `scripts/fuzz` and by the tests that replay.

An input is two bytes of options and then what a connection would bring:

    byte 0: bit 0 CRC agreed | bits 1-2 next row wanted (0, 1, 3, 100) | bit 3 a key of bytes, rows of 21
            bit 4 eight groups instead of one | bit 5 CRCs are put right first | bit 6 a frame cap of 256 bytes
    byte 1: how the bytes are cut
"""

from __future__ import annotations

import random
import struct
from typing import Any

from flexstream import Stream
from flexstream.cython_ext.wire.crc32c import crc32c
from flexstream.cython_ext.wire.decoder import FrameDecoder

HEADER = struct.Struct("<HBBHHIIQQ")
SMALL = Stream("s", {"t": "timestamp[ms]", "k": "i32", "x": "u8"}, key="k", time="t")
TEXT = Stream("s", {"k": "bytes[5]", "t": "timestamp[ms]", "x": "f64"}, key="k", time="t")
NEXT_ROWS = (0, 1, 3, 100)
WITHOUT_PAYLOAD = {3: "watermark", 4: "marker", 5: "barrier", 7: "eos"}

Event = tuple[Any, ...]


class Options:
    def __init__(self, data: bytes) -> None:
        bits = data[0] if data else 0
        self.crc = bool(bits & 1)
        self.next_row = NEXT_ROWS[bits >> 1 & 3]
        self.stream = TEXT if bits & 8 else SMALL
        self.groups = 8 if bits & 16 else 1
        self.repair = bool(bits & 32)
        self.cap = 256 if bits & 64 else 32768
        self.cuts = data[1] if len(data) > 1 else 0
        self.group = 0

    def decoder(self) -> FrameDecoder:
        return FrameDecoder(
            self.stream,
            group=self.group,
            groups=self.groups,
            crc=self.crc,
            frame_bytes=self.cap,
            max_frame_bytes=2 * self.cap,
            next_row=self.next_row,
        )


def with_right_crcs(body: bytes) -> bytes:
    """The frames at the front of `body` with the CRC that each should have: mutations get past the check."""
    fixed, at = bytearray(body), 0
    while at + HEADER.size <= len(fixed):
        size = HEADER.size + int.from_bytes(fixed[at + 8 : at + 12], "little")
        if at + size > len(fixed):
            break
        fixed[at + 12 : at + 16] = bytes(4)
        fixed[at + 12 : at + 16] = crc32c(bytes(fixed[at : at + size])).to_bytes(4, "little")
        at += size
    return bytes(fixed)


def reference(options: Options, body: bytes) -> list[Event]:
    """The same decoder again, written for reading: whole input, one frame at a time."""
    row_bytes, wanted, at, ended = options.stream.schema.row_bytes, options.next_row, 0, False
    events: list[Event] = []
    while len(body) - at >= HEADER.size:
        magic, version, kind, flags, group, size, crc, value, sequence = HEADER.unpack_from(body, at)
        frame = body[at : at + HEADER.size + size]
        rows = frame[HEADER.size :]
        whole = len(rows) == size
        cap = options.cap if options.crc else 2 * options.cap
        fault = (
            1 if magic != 0x5346
            else 2 if version != 1
            else 6 if group != options.group
            else 3 if ended or kind not in (2, *WITHOUT_PAYLOAD)
            else 4 if size > (cap if kind == 2 else 0)
            else 18 if kind == 2 and value * row_bytes != size
            else 5 if flags & 1 != options.crc
            else 0
        )  # fmt: skip
        if options.crc and fault and not (fault == 4 and kind == 2 and value * row_bytes == size):
            fault = 5
        if not fault and options.crc:
            if not whole:
                return events
            if crc32c(frame[:12] + bytes(4) + frame[16:]) != crc:
                fault = 5
        if not fault and kind == 2 and sequence > wanted:
            fault = 12
        if fault:
            return [*events, ("fault", fault)]
        at += len(frame)
        if kind != 2:
            ended = kind == 7
            signed = value - (1 << 64) if kind == 3 and value >> 63 else value
            events.append((WITHOUT_PAYLOAD[kind],) if ended else (WITHOUT_PAYLOAD[kind], signed))
            continue
        n = len(rows) // row_bytes
        if n and options.groups > 1 and group_of(options, rows[:row_bytes]) != options.group:
            return [*events, ("fault", 6)]
        new = rows[min(wanted - sequence, n) * row_bytes : n * row_bytes]
        wanted += len(new) // row_bytes
        if new:
            events.append(("rows", new))
        if not whole:
            break
    return events


def group_of(options: Options, row: bytes) -> int:
    import numpy as np

    return int(options.stream.group_of(np.frombuffer(row, options.stream.schema.dtype), options.groups)[0])


def joined(events: list[Event]) -> list[Event]:
    """Neighbouring pieces of rows as one, so that cuts do not show."""
    out: list[Event] = []
    for event in events:
        if event[0] == "rows" and out and out[-1][0] == "rows":
            out[-1] = ("rows", out[-1][1] + event[1])
        else:
            out.append(event)
    return out


def pieces(body: bytes, seed: int) -> list[bytes]:
    if seed == 0:
        return [body[i : i + 1] for i in range(len(body))]
    rng = random.Random(seed)
    found, at = [], 0
    while at < len(body):
        n = rng.choice((1, 2, 13, 21, 32, 33, 64, 200))
        found.append(body[at : at + n])
        at += n
    return found


def check(data: bytes) -> list[Event]:
    """Raises AssertionError when the decoder breaks a promise. Returns the events."""
    options, body = Options(data), data[2:]
    if options.repair:
        body = with_right_crcs(body)
    row_bytes = options.stream.schema.row_bytes

    decoder = options.decoder()
    events = decoder.feed(body)
    rows = b"".join(event[1] for event in events if event[0] == "rows")
    assert len(rows) % row_bytes == 0
    assert len(rows) <= len(body)
    assert decoder.next_row == options.next_row + len(rows) // row_bytes
    faults = [event for event in events if event[0] == "fault"]
    assert faults == [event for event in events[-1:] if event[0] == "fault"], "a fault is the last event"
    if faults:
        assert decoder.feed(body) == faults, "after a fault there is only the fault"
    else:
        assert decoder.carried <= (options.cap + 32 if options.crc else max(row_bytes, 32) - 1)
    assert joined(events) == joined(reference(options, body))

    cut, found = options.decoder(), []
    for piece in pieces(body, options.cuts):
        found += cut.feed(piece)
        if found and found[-1][0] == "fault":
            break
        assert cut.carried <= (options.cap + 32 if options.crc else max(row_bytes, 32) - 1)
    assert joined(found) == joined(events), "the cuts show"
    assert cut.next_row == decoder.next_row
    return events
