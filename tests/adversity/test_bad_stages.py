"""Staging connections that say nonsense: each costs itself, the stage is dropped, everybody else goes on."""

from __future__ import annotations

import json
import socket
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flexstream as fs
from flexstream import stage_block
from flexstream.wire import STAGE_GROUP, ErrorCode, FrameType, Header, frame, json_frame
from tests.adversity.rig import (
    GROUPS,
    QUERY,
    ROW_BYTES,
    STREAM,
    RawClient,
    assert_results,
    company,
    make_rows,
    read_frame,
    serving,
)
from tests.waiting import wait_until


def block(rows: np.ndarray, first_row: int = 0) -> bytes:
    pool = stage_block.row_pool(STREAM, GROUPS, 1 << 20)
    assert pool.put(rows.view(np.uint8)) == len(rows)
    return b"".join(stage_block.encode(pool, ROW_BYTES, first_row))


def damaged(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def with_table(rows: np.ndarray, change: Callable[[np.ndarray], None]) -> bytes:
    """A block whose table was changed, with a CRC that is right."""
    payload = np.frombuffer(block(rows)[32:], np.uint8).copy()
    parts = int(payload[:4].view("<u4")[0])
    change(payload[: 4 + 8 * parts].view("<u4"))
    return frame(FrameType.DATA, STAGE_GROUP, value=len(rows), payload=payload.tobytes(), crc=True)


def swap_groups(table: np.ndarray) -> None:
    table[1], table[3] = table[3], table[1]


ROWS = make_rows(100)
BAD: dict[str, tuple[bytes, str]] = {
    "not a frame": (b"GET / HTTP/1.1\r\n" * 4, "bad_magic"),
    "another version": (damaged(block(ROWS), 2), "bad_version"),
    "a group": (frame(FrameType.DATA, 3, value=1, payload=ROWS[:1].tobytes(), crc=True), "wrong_group"),
    "a watermark": (frame(FrameType.WATERMARK, STAGE_GROUP, value=1), "bad_type"),
    "a HELLO": (json_frame(FrameType.HELLO, STAGE_GROUP, {}), "bad_type"),
    "a second STAGE": (json_frame(FrameType.STAGE, STAGE_GROUP, {"stage": "b"}), "bad_type"),
    "no CRC": (frame(FrameType.DATA, STAGE_GROUP, value=100, payload=block(ROWS)[32:]), "bad_crc"),
    "a damaged row": (damaged(block(ROWS), 2000), "bad_crc"),
    "a damaged header": (damaged(block(ROWS), 17), "bad_crc"),
    "a gap": (block(ROWS, first_row=5), "sequence_gap"),
    "too long": (Header(FrameType.DATA, STAGE_GROUP, payload_bytes=1 << 31, flags=1).pack(), "bad_length"),
    "no table": (frame(FrameType.DATA, STAGE_GROUP, value=0, payload=b"\0\0", crc=True), "bad_length"),
    "a table longer than the block": (with_table(ROWS, lambda t: t.__setitem__(0, 1 << 20)), "bad_length"),
    "too many rows in the table": (with_table(ROWS, lambda t: t.__setitem__(2, 99)), "bad_row_count"),
    "a group that does not exist": (with_table(ROWS, lambda t: t.__setitem__(1, GROUPS)), "wrong_group"),
    "rows of another group": (with_table(ROWS, swap_groups), "wrong_group"),
    "an EOS with a payload": (frame(FrameType.EOS, STAGE_GROUP, payload=b"x"), "bad_length"),
}  # fmt: skip


def opened(client: RawClient, stage: Any) -> socket.socket:
    sock = client.open(STAGE_GROUP)
    sock.sendall(json_frame(FrameType.STAGE, STAGE_GROUP, {"stage": stage}))
    return sock


def error_of(sock: socket.socket) -> dict[str, Any]:
    header, payload = read_frame(sock)
    assert header.type is FrameType.ERROR, (header, payload)
    assert sock.recv(1) == b""
    return dict(json.loads(payload))


@pytest.mark.parametrize("case", BAD)
def test_nonsense_costs_the_stage_and_nothing_else(case: str) -> None:
    data, code = BAD[case]
    with serving() as engine, RawClient(engine) as client:
        sock = opened(client, "a")
        assert read_frame(sock)[0].type is FrameType.ACK
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        error = error_of(sock)
        assert error["code"].startswith(code), error
        assert error["message"]
        wait_until(lambda: engine.staging.stages.list() == [] and engine.staging.port.connections == 0, "no stages")
        with company(engine):
            pass


@pytest.mark.parametrize("stage", [None, 7, "", "a/b", "..", "x" * 65, "a\0b", ["a"], {"a": 1}])
def test_a_stage_needs_a_name(stage: Any) -> None:
    with serving() as engine, RawClient(engine) as client:
        sock = opened(client, stage)
        assert error_of(sock)["code"] == "bad_stage"


def test_rows_before_a_stage_and_a_name_that_is_taken_are_refused() -> None:
    with serving() as engine, RawClient(engine) as client:
        sock = client.open(STAGE_GROUP)
        sock.sendall(block(ROWS))
        assert error_of(sock)["code"] == "bad_type"
        name = str(uuid.uuid4())
        first = opened(client, name)
        assert read_frame(first)[0].type is FrameType.ACK
        assert error_of(opened(client, name))["code"] == "stage_exists"
        first.sendall(block(ROWS) + frame(FrameType.EOS, STAGE_GROUP, value=100))
        header, payload = read_frame(first)
        assert (header.type, header.sequence) == (FrameType.ACK, 100)
        engine.staging.commit("sink", "q", 0, [json.loads(payload)])
        assert_results(engine, ROWS)


def test_a_stage_with_fewer_rows_than_its_end_says_is_dropped_and_counted() -> None:
    with serving() as engine, RawClient(engine) as client:
        sock = opened(client, "a")
        assert read_frame(sock)[0].type is FrameType.ACK
        sock.sendall(block(ROWS) + frame(FrameType.EOS, STAGE_GROUP, value=101))
        assert error_of(sock)["code"] == "stage_counts"
        wait_until(lambda: engine.staging.stages.list() == [], "no stages")
        ledger = engine.status()["streams"]["s"]["ledger"]
        assert (ledger["received"], ledger["rejected"], ledger["staged"]) == (100, 100, 0)


def test_a_wrong_token_opens_no_staging_connection() -> None:
    with serving(token="secret") as engine, RawClient(engine, token="wrong") as client:
        sock = client.connect()
        sock.sendall(client.hello(STAGE_GROUP))
        header, _ = read_frame(sock)
        assert (header.type, header.value) == (FrameType.ERROR, int(ErrorCode.BAD_TOKEN))


def test_a_slow_staging_connection_keeps_nobody_waiting() -> None:
    data = block(ROWS)
    with serving() as engine, RawClient(engine) as client:
        sock = opened(client, "slow")
        assert read_frame(sock)[0].type is FrameType.ACK
        sock.sendall(data[:50])
        with company(engine):
            pass
        sock.sendall(data[50:])
        sock.sendall(frame(FrameType.EOS, STAGE_GROUP, value=100))
        assert read_frame(sock)[0].type is FrameType.ACK


def test_an_engine_that_closes_ends_staging_connections() -> None:
    with serving(QUERY) as engine:
        producer = fs.Producer(f"tcp://127.0.0.1:{engine.data_address[1]}", stream=STREAM, stage=str(uuid.uuid4()))
        producer.send(make_rows(10))
        producer.flush()
        engine.close()
        with pytest.raises(fs.FlexStreamError) as caught:
            producer.finish_stage(timeout=10)
        assert caught.value.code in ("stage_lost", "shutting_down"), caught.value
        producer.close()
