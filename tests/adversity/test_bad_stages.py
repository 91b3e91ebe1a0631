"""Staging connections that say nonsense: each costs itself, the stage is dropped, everybody else goes on."""

from __future__ import annotations

import json
import socket
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flexstream as fs
from flexstream.staging import port as stage_port
from flexstream.staging import room as stage_room
from flexstream.wire import stage_block
from flexstream.wire.frames import STAGE_GROUP, ErrorCode, FrameType, Header, frame, json_frame
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
    pool = stage_block.row_pool(STREAM, GROUPS, 2 << 20)
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


# What they may take, and for how long -----------------------------------------------------------------------


def on_disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.stage"))


EMPTY = frame(FrameType.DATA, STAGE_GROUP, payload=b"\0\0\0\0", crc=True)


@pytest.mark.parametrize("rows", [0, 1])
def test_small_frames_take_no_more_of_the_disk_than_the_limit(
    rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_room, "ROOM_WAIT_S", 0.1)
    limit = 200_000
    with serving(data_dir=tmp_path, stage_limit_bytes=limit) as engine, RawClient(engine) as client:
        sock = opened(client, "a")
        assert read_frame(sock)[0].type is FrameType.ACK
        for first_row in range(limit // 4096):
            sock.sendall(block(ROWS[:1], first_row) if rows else EMPTY)
        wait_until(lambda: engine.status()["stages"]["held_back"] == 1, "the bound")
        assert limit // 2 < on_disk(tmp_path) <= limit
        assert error_of(sock)["code"] == "stage_full"
        wait_until(lambda: engine.status()["stages"]["used_bytes"] == 0, "room")
        assert on_disk(tmp_path) == 0


def finished(engine: fs.Engine, rows: np.ndarray) -> dict[str, Any]:
    with fs.Producer(f"tcp://127.0.0.1:{engine.data_address[1]}", stream=STREAM, stage=str(uuid.uuid4())) as producer:
        producer.send(rows)
        return producer.finish_stage()


@pytest.mark.parametrize("bound", ["bytes", "stages"])
def test_stages_without_rows_are_bounded_until_somebody_commits(
    bound: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_room, "ROOM_WAIT_S", 0.1)
    monkeypatch.setattr(stage_room, "MOST_STAGES", 10)
    limit = {"stage_limit_bytes": 130_000} if bound == "bytes" else {}
    with serving(data_dir=tmp_path, **limit) as engine:
        receipts = [finished(engine, ROWS[:0]) for _ in range(10)]
        with pytest.raises(fs.FlexStreamError) as caught:
            finished(engine, ROWS[:0])
        assert caught.value.code == "stage_full"
        assert engine.status()["stages"]["used_bytes"] >= on_disk(tmp_path) > 0
        engine.staging.commit("sink", "q", 0, receipts)
        engine.staging.commit("sink", "q", 1, [finished(engine, ROWS)])
        assert_results(engine, ROWS)
        wait_until(lambda: engine.status()["stages"]["used_bytes"] == 0, "room")


def test_what_a_stage_takes_is_counted_again_after_a_restart(tmp_path: Path) -> None:
    with serving(data_dir=tmp_path) as engine:
        receipt = finished(engine, ROWS)
        taken = engine.status()["stages"]["used_bytes"]
    with serving(data_dir=tmp_path) as engine:
        assert engine.status()["stages"]["used_bytes"] == taken >= on_disk(tmp_path)
        engine.staging.drop(receipt["stage"])
        assert engine.status()["stages"]["used_bytes"] == 0


def large_block() -> bytes:
    return block(make_rows(40_000))


def test_who_stops_in_the_middle_of_a_block_is_refused_and_holds_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_port, "LOOK_S", 0.05)
    monkeypatch.setattr(stage_port, "STALL_S", 1.0)
    data = large_block()
    with serving() as engine, RawClient(engine) as client:
        socks = [opened(client, f"a{i}") for i in range(8)]
        for sock in socks:
            assert read_frame(sock)[0].type is FrameType.ACK
            sock.sendall(data[:300_000])
        wait_until(lambda: engine.status()["stages"]["block_bytes"] >= 1_000_000, "blocks under way")
        with company(engine):
            pass
        assert [error_of(sock)["code"] for sock in socks] == ["stage_slow"] * 8
        wait_until(lambda: engine.staging.port.connections == 0, "no connections")
        assert engine.status()["stages"]["block_bytes"] == 0
        assert engine.staging.stages.list() == []


def test_blocks_under_way_have_a_bound_and_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_port, "BLOCKS_BYTES", 2_000_000)
    data = large_block()
    with serving() as engine, RawClient(engine) as client:
        socks = [opened(client, f"a{i}") for i in range(4)]
        for sock in socks:
            assert read_frame(sock)[0].type is FrameType.ACK
            sock.sendall(data[:100_000])
        wait_until(lambda: engine.status()["stages"]["block_bytes"] > 1_000_000, "a block under way")
        for sock in socks:
            threading.Thread(target=sock.sendall, args=(data[100_000:],), daemon=True).start()
        assert engine.status()["stages"]["block_bytes"] <= 2_000_000
        wait_until(lambda: [s["rows"] for s in engine.staging.stages.list()] == [40_000] * 4, "the rows")


def test_a_stage_that_nobody_goes_on_with_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_port, "LOOK_S", 0.05)
    monkeypatch.setattr(stage_port, "STAGE_IDLE_S", 0.3)
    with serving() as engine, RawClient(engine) as client:
        sock = opened(client, "a")
        assert read_frame(sock)[0].type is FrameType.ACK
        assert error_of(sock)["code"] == "stage_slow"
        wait_until(lambda: engine.staging.stages.list() == [], "no stages")


def test_idle_connections_make_room_and_their_clients_do_not_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_port, "MAX_CONNECTIONS", 4)
    monkeypatch.setattr(stage_port, "SPARE_IDLE_S", 0.0)
    address = "tcp://127.0.0.1:{}"
    with serving() as engine, RawClient(engine) as client:
        producer = fs.Producer(address.format(engine.data_address[1]), stream=STREAM, stage=True)
        idle = [client.open(STAGE_GROUP) for _ in range(6)]
        assert engine.staging.port.connections == 4
        assert [sock.recv(1) for sock in idle[:2]] == [b"", b""]
        producer.begin_stage("a")
        producer.send(ROWS)
        engine.staging.commit("sink", "q", 0, [producer.finish_stage()])
        producer.close()
        busy = [opened(client, f"b{i}") for i in range(4)]
        assert all(read_frame(sock)[0].type is FrameType.ACK for sock in busy)
        sock = client.connect()
        sock.sendall(client.hello(STAGE_GROUP))
        header, _ = read_frame(sock)
        assert (header.type, header.value) == (FrameType.ERROR, int(ErrorCode.TOO_MANY_SESSIONS))
        for sock in busy:
            sock.close()
        wait_until(lambda: engine.staging.port.connections == 0, "no connections")
        assert_results(engine, ROWS)


def test_a_connection_without_a_stage_is_closed_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_port, "LOOK_S", 0.05)
    monkeypatch.setattr(stage_port, "IDLE_S", 0.2)
    with serving() as engine, RawClient(engine) as client:
        sock = client.open(STAGE_GROUP)
        assert sock.recv(1) == b""
        wait_until(lambda: engine.staging.port.connections == 0, "no connections")
