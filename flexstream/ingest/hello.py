"""HELLO, the first frame of every connection: what it must say, and what is answered when it does not. No I/O."""

from __future__ import annotations

import hmac
import json
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeGuard

from flexstream.catalog.entries import StreamPort
from flexstream.catalog.sessions import Session
from flexstream.cython_ext.worker.worker import Worker
from flexstream.ingest.lane_book import LaneBook
from flexstream.ingest.nic_service import NicService
from flexstream.nic.rss.ports import Promise
from flexstream.rows.stream import Stream
from flexstream.wire.frames import (
    CONTROL_GROUP,
    MAX_HELLO_BYTES,
    STAGE_GROUP,
    VERSION,
    ErrorCode,
    FrameType,
    Header,
    json_frame,
)

DEFAULT_ACK_BYTES = 128 * 1024
MAX_ACK_BYTES = 1 << 40
MAX_LANE = (1 << 32) - 1
MAX_PRODUCER = 64

WHY = {
    ErrorCode.BAD_MAGIC: "these bytes are not a frame: the magic is wrong",
    ErrorCode.BAD_VERSION: f"this server speaks only protocol version {VERSION}",
    ErrorCode.BAD_TYPE: "a frame of that type may not come here",
    ErrorCode.BAD_LENGTH: "the payload is longer than the limit, or the frame's type has none",
    ErrorCode.BAD_CRC: "the CRC32C of a frame is wrong, or its flag does not match the HELLO",
    ErrorCode.WRONG_GROUP: "a row's key, or a frame, belongs to another group than this connection",
    ErrorCode.SEQUENCE_GAP: "a DATA frame begins after the next row wanted: the rows in between are missing",
    ErrorCode.BAD_ROW_COUNT: "a DATA frame's payload is not `value` whole rows",
    ErrorCode.FENCED: "a newer connection of the same session and group took over",
    ErrorCode.NO_SESSION: "the session has ended or was never registered",
    ErrorCode.SHUTTING_DOWN: "the daemon is stopping",
}
HINTS = {
    ErrorCode.WRONG_GROUP: "group = pmod(murmur3_32(key, seed 42), G); see docs/protocol.md",
    ErrorCode.SEQUENCE_GAP: "reconnect and resume at the sequence in the ACK",
    ErrorCode.BAD_LENGTH: "the ACK to HELLO says how many rows fit a frame",
    ErrorCode.NO_SESSION: "open the control connection (group 65535) first",
}


@dataclass(eq=False)
class Host:
    """What connections are served with: the parts of an engine that the acceptor works with."""

    groups: int
    frame_bytes: int
    workers: list[Worker]
    nic: NicService
    lanes: LaneBook
    adopt_stage: Callable[[socket.socket, tuple[str, int], Stream, dict[str, Any]], object]  # may raise Refused
    port_of: Callable[[str], StreamPort | None]
    placement: Callable[[], list[int]]


class Refused(Exception):
    """A peer that gets an ERROR frame with this code, message and hint."""

    def __init__(self, code: ErrorCode, message: str | None = None, hint: str | None = None) -> None:
        super().__init__(message or WHY[code])
        self.code, self.message, self.hint = code, message or WHY[code], hint or HINTS.get(code)


def is_name(value: object, most: int) -> TypeGuard[str]:
    """A name that a peer gave itself: every page, log and terminal can show it, so no surrogate and no control code."""
    return isinstance(value, str) and 1 <= len(value) <= most and value.isprintable()


def check_first_header(header: Header) -> None:
    if header.type is not FrameType.HELLO:
        raise Refused(ErrorCode.BAD_TYPE, f"the first frame is {header.type.name}, not HELLO")
    if header.payload_bytes > MAX_HELLO_BYTES:
        raise Refused(
            ErrorCode.BAD_LENGTH, f"the HELLO has {header.payload_bytes} bytes; the limit is {MAX_HELLO_BYTES}"
        )


def parse(payload: bytes) -> dict[str, Any]:
    try:
        hello = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise Refused(ErrorCode.BAD_HELLO, f"the payload of HELLO is not JSON: {error}") from None
    if not isinstance(hello, dict):
        raise Refused(ErrorCode.BAD_HELLO, "the payload of HELLO is not a JSON object")
    return hello


def addressed(sock: socket.socket, peer: tuple[str, int]) -> dict[str, Any]:
    """What every ACK to a HELLO begins with."""
    return {"version": VERSION, "peer": list(peer), "local": list(sock.getsockname()[:2])}


def welcome(
    sock: socket.socket, peer: tuple[str, int], group: int, stream: Stream, groups: int, more: dict[str, Any],
    value: int = 0,
) -> bytes:  # fmt: skip
    """The ACK to the HELLO of a control or a staging connection: what the stream is, and what else there is to know."""
    known = {"stream": stream.to_dict(), "schema": stream.schema.hash, "groups": groups}
    return json_frame(FrameType.ACK, group, {**addressed(sock, peer), **known, **more}, value=value)


def check(header: Header, hello: dict[str, Any], host: Host, token: str | None) -> tuple[StreamPort, Session | None]:
    """The stream that is meant, and for a data connection its session. Raises Refused."""
    given = hello.get("token")
    if token is not None and not (isinstance(given, str) and hmac.compare_digest(_bytes(given), _bytes(token))):
        raise Refused(ErrorCode.BAD_TOKEN, "the token is missing or wrong", "give the producer token=...")
    versions = hello.get("versions")
    if not isinstance(versions, list) or VERSION not in versions:
        raise Refused(
            ErrorCode.BAD_VERSION, f"no common version: the server has {[VERSION]}, the HELLO {versions!r:.80}"
        )
    name = hello.get("stream")
    port = host.port_of(name) if isinstance(name, str) else None
    if port is None:
        raise Refused(ErrorCode.UNKNOWN_STREAM, f"no stream {name!r:.80}", "`flexstream streams` lists them")
    producer, epoch = hello.get("producer"), hello.get("epoch", 0)
    if not is_name(producer, MAX_PRODUCER):
        raise Refused(
            ErrorCode.BAD_HELLO, f"producer must be 1 to {MAX_PRODUCER} printable characters, not {producer!r:.80}"
        )
    _whole(epoch, "epoch", (1 << 63) - 1)
    _check_schema(port.stream, header, hello)
    if header.group in (CONTROL_GROUP, STAGE_GROUP):
        return port, None
    if header.group >= host.groups:
        raise Refused(ErrorCode.WRONG_GROUP, f"group {header.group} of {host.groups}")
    session = port.sessions.find(producer)
    if session is None:
        raise Refused(ErrorCode.NO_SESSION, f"producer {producer!r:.80} has no session")
    if epoch < session.epoch:
        raise Refused(ErrorCode.STALE_EPOCH, f"the HELLO has epoch {epoch}, but the session has epoch {session.epoch}")
    return port, session


def data_options(hello: dict[str, Any]) -> tuple[bool, int]:
    """(crc, ack_bytes) of a data connection."""
    crc, ack_bytes = hello.get("crc", False), hello.get("ack_bytes", DEFAULT_ACK_BYTES)
    if not isinstance(crc, bool):
        raise Refused(ErrorCode.BAD_HELLO, f"crc must be true or false, not {crc!r:.80}")
    _whole(ack_bytes, "ack_bytes", MAX_ACK_BYTES)
    return crc, ack_bytes


def lane(hello: dict[str, Any]) -> int:
    """The number of a further lane; 0: the connection is its group's first."""
    number = hello.get("lane", 0)
    _whole(number, "lane", MAX_LANE)
    return int(number)


def lanes(hello: dict[str, Any]) -> tuple[int, frozenset[int]]:
    """(how many further lanes the producer of a control connection would open, the numbers of those that it has)."""
    most, there = hello.get("lanes", 0), hello.get("lanes_open", [])
    _whole(most, "lanes", MAX_LANE)
    if not isinstance(there, list):
        raise Refused(ErrorCode.BAD_HELLO, f"lanes_open must be a list of lane numbers, not {there!r:.80}")
    for number in there:
        _whole(number, "lanes_open", MAX_LANE)
    return most, frozenset(there)


def promise(hello: dict[str, Any]) -> Promise | None:
    """What a producer that chose its source port says about it: {"port", "bucket"}."""
    steered = hello.get("steered")
    if steered is None:
        return None
    if not isinstance(steered, dict):
        raise Refused(ErrorCode.BAD_HELLO, f"steered must be an object with port and bucket, not {steered!r:.80}")
    port, bucket = steered.get("port"), steered.get("bucket")
    _whole(port, "steered.port", 65535)
    _whole(bucket, "steered.bucket", (1 << 32) - 1)
    return Promise(int(port or 0), int(bucket or 0))


def _check_schema(stream: Stream, header: Header, hello: dict[str, Any]) -> None:
    expected = {"row_bytes": stream.schema.row_bytes, "schema": stream.schema.hash}
    for name, value in expected.items():
        given = hello.get(name)
        if given is None and header.group in (CONTROL_GROUP, STAGE_GROUP):
            continue
        if given != value or isinstance(given, bool):
            raise Refused(
                ErrorCode.SCHEMA_MISMATCH,
                f"{name} of stream {stream.name!r} is {value!r}, not {given!r:.80}",
                "the ACK of the control connection has the schema",
            )


def _whole(value: object, name: str, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise Refused(ErrorCode.BAD_HELLO, f"{name} must be an integer from 0 to {most}, not {value!r:.80}")


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")  # JSON may hold what UTF-8 may not
