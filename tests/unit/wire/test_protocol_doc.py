"""docs/protocol.md is the protocol: its bytes, its table and its hash are checked against the code."""

import json
import re
import struct
from pathlib import Path

import numpy as np
import pytest

from flexstream.rows.stream import Stream
from flexstream.wire import frames as wire
from flexstream.wire.frames import CONTROL_GROUP, ErrorCode, FrameType, frame, json_frame

PAGE = Path(__file__).parents[3] / "docs" / "protocol.md"
CLICKS = Stream("clicks", {"t": "timestamp[ms]", "key": "i64"}, key="key", time="t")
PRODUCER = "00000000-0000-4000-8000-000000000001"
GROUP = 1
ROWS = struct.pack("<qqqq", 1000, 6, 1500, 6)


def golden_session() -> list[tuple[str, str, bytes]]:
    """(who, what, bytes) of one producer that sends two rows of key 6 to a server of four groups."""
    hello = {"versions": [1], "stream": "clicks", "producer": PRODUCER, "epoch": 1, "crc": False}
    seen = {"version": 1, "peer": ["127.0.0.1", 40000], "local": ["127.0.0.1", 7400]}
    schema = {"row_bytes": 16, "schema": CLICKS.schema.hash, "ack_bytes": 65536}
    stream = {"stream": CLICKS.to_dict(), "schema": CLICKS.schema.hash, "groups": 4, "epoch": 1}
    bits = wire.bitmap({GROUP}, 4)
    return [
        ("C", "HELLO on the control connection", json_frame(FrameType.HELLO, CONTROL_GROUP, hello)),
        ("S", "ACK", json_frame(FrameType.ACK, CONTROL_GROUP, seen | stream, value=2048)),
        ("C", "HELLO on a data connection", json_frame(FrameType.HELLO, GROUP, hello | schema)),
        ("S", "ACK: row 0 is wanted next", json_frame(FrameType.ACK, GROUP, seen, value=2048)),
        ("C", "DATA: rows 0 and 1", frame(FrameType.DATA, GROUP, value=2, payload=ROWS)),
        ("C", "the same DATA with a CRC", frame(FrameType.DATA, GROUP, value=2, payload=ROWS, crc=True)),
        ("C", "WATERMARK 1500", frame(FrameType.WATERMARK, GROUP, value=1500, sequence=2)),
        ("C", "control WATERMARK 1500", frame(FrameType.WATERMARK, value=1500, payload=bits)),
        ("S", "ACK: row 2 is wanted next", frame(FrameType.ACK, GROUP, sequence=2)),
        ("C", "EOS", frame(FrameType.EOS, GROUP, sequence=2)),
        ("C", "control EOS", frame(FrameType.EOS, payload=bits)),
        ("S", "final ACK on the control connection", frame(FrameType.ACK)),
        (
            "C",
            "HELLO on the control connection of a producer that knows lanes, and has lane 9 open",
            json_frame(FrameType.HELLO, CONTROL_GROUP, hello | {"lanes": 32, "lanes_open": [9]}),
        ),
        ("S", "LANES: of group 1 lanes 9 and 10, steered like groups 3 and 2", wire.lanes_frame(GROUP, {9: 3, 10: 2})),
        ("C", "HELLO of lane 10", json_frame(FrameType.HELLO, GROUP, hello | schema | {"lane": 10})),
        (
            "S",
            "ACK: row 0 of the lane is wanted next",
            json_frame(FrameType.ACK, GROUP, seen | {"lane": 10}, value=2048),
        ),
        ("S", "LANES: no further lanes of group 1", wire.lanes_frame(GROUP, {})),
        ("S", "an ERROR", wire.error_frame(ErrorCode.WRONG_GROUP, "key 6 is of group 1", None, 2)),
    ]


def dumps() -> list[tuple[str, str, bytes]]:
    found = re.findall(r"^([CS]) ([^\n]+)\n\n```hex\n(.*?)```", PAGE.read_text("utf-8"), re.M | re.S)
    return [(who, what, bytes.fromhex(text)) for who, what, text in found]


def test_the_golden_session_in_the_page_is_what_the_code_writes():
    assert dumps() == golden_session()


def test_the_golden_rows_belong_to_the_group_of_their_connection():
    assert CLICKS.group_of(np.frombuffer(ROWS, CLICKS.schema.dtype), 4).tolist() == [GROUP, GROUP]


def test_lanes_frames_say_what_they_were_told():
    for lanes in ({}, {9: 3, 10: 2}, {2**32 - 1: 65_533}):
        data = wire.lanes_frame(GROUP, lanes)
        header = wire.Header.unpack(data)
        assert (header.type, header.group, header.value) == (FrameType.LANES, CONTROL_GROUP, GROUP)
        assert wire.lanes_of(data[32:]) == lanes
    with pytest.raises(wire.WireError, match="a LANES frame cannot have 7 bytes"):
        wire.lanes_of(bytes(7))


def test_every_frame_in_the_page_parses():
    for _, what, data in dumps():
        header = wire.Header.unpack(data)
        payload = data[32:]
        assert header.payload_bytes == len(payload), what
        if payload[:1] == b"{":
            assert isinstance(json.loads(payload), dict)


def test_the_error_table_is_complete():
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|[^|]*\| (yes|no) \|", PAGE.read_text("utf-8"), re.M)
    assert [(int(value), name) for value, name, _ in rows] == [(code.value, code.code) for code in ErrorCode]
    assert {name for _, name, again in rows if again == "yes"} == {code.code for code in wire.RETRYABLE}


def test_the_type_table_is_complete():
    rows = re.findall(r"^\| (\d+) \| ([A-Z]+) \|", PAGE.read_text("utf-8"), re.M)
    assert [(int(value), name) for value, name in rows] == [(kind.value, kind.name) for kind in FrameType]


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("i8", [-128, -1, 0, 5, 127]),
        ("u16", [0, 1, 65535]),
        ("i32", [-(2**31), -1, 0, 7, 2**31 - 1]),
        ("u32", [0, 1, 2**32 - 1]),
        ("i64", [-(2**63), -1, 0, 6, 2**63 - 1]),
        ("timestamp[ms]", [-1, 0, 1_700_000_000_123]),
        ("timestamp[ns]", [-1, -1001, 0, 1_700_000_000_123_456_789]),
        ("f32", [-0.0, 0.0, 1.5, float("nan")]),
        ("f64", [-0.0, 0.0, -1.5, float("inf")]),
        ("bytes[11]", [b"", b"a", b"hello", b"\xff\x80\x01", b"elevenbytes"]),
    ],
)
def test_the_hash_in_the_page_groups_as_the_code_does(kind, values):
    code = re.search(r"```python\n(def murmur3.*?)```", PAGE.read_text("utf-8"), re.S)
    assert code is not None
    scope: dict = {}
    exec(code[1], scope)
    stream = Stream("s", {"t": "timestamp[ms]", "a": kind, "b": "i32"}, key=["a", "b"], time="t")
    rows = np.zeros(len(values), stream.schema.dtype)
    rows["a"] = values
    rows["b"] = 3
    for groups in (1, 7, 128):
        mine = [scope["group"]([(kind, value), ("i32", 3)], groups) for value in values]
        assert mine == stream.group_of(rows, groups).tolist()
