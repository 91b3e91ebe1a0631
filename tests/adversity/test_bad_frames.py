"""A connection that was accepted and then talks nonsense: one ERROR, one count, and the rows before it stay."""

import socket
import time

import numpy as np
import pytest

import flexstream as fs
from flexstream.daemon.metrics import render
from flexstream.engine import status as engine_status
from flexstream.testing import run
from flexstream.wire.frames import CONTROL_GROUP, ErrorCode, Flags, FrameType, Header, frame
from tests.adversity.rig import (
    GROUPS,
    QUERY,
    ROW_BYTES,
    STREAM,
    RawClient,
    address,
    all_of_them,
    assert_results,
    bitmap,
    closed,
    company,
    data_frame,
    expect_error,
    make_rows,
    read_frame,
    rows_of_group,
    serving,
)
from tests.property.checks import as_rows, assert_ledger, assert_same_results
from tests.waiting import WAIT_S, wait_until

GROUP = 3
BEFORE = rows_of_group(GROUP, 20)  # sent in a good frame ahead of the bad one
NEXT = rows_of_group(GROUP, 40)[20:]
FOREIGN = rows_of_group(4, 20)


def settle(engine):
    """What the acceptor has read has reached the workers, and what they say about it is known."""
    time.sleep(0.2)


def header(kind=FrameType.DATA, group=GROUP, **fields):
    return Header(kind, group, **fields).pack()


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]


LARGEST = (1 << 20) // ROW_BYTES

FAULTS = {
    "noise": (b"\xa5" * 64, ErrorCode.BAD_MAGIC),
    "version 2": (b"FS\x02\x02" + b"\0" * 28, ErrorCode.BAD_VERSION),
    "an unknown type": (b"FS\x01\x09\0\0" + GROUP.to_bytes(2, "little") + b"\0" * 24, ErrorCode.BAD_TYPE),
    "an ACK": (frame(FrameType.ACK, GROUP), ErrorCode.BAD_TYPE),
    "a second HELLO": (frame(FrameType.HELLO, GROUP, payload=b"{}"), ErrorCode.BAD_TYPE),
    "another group's frame": (data_frame(4, FOREIGN, 20), ErrorCode.WRONG_GROUP),
    "another group's row": (data_frame(GROUP, FOREIGN, 20), ErrorCode.WRONG_GROUP),
    "a group past the last": (data_frame(GROUPS, NEXT, 20), ErrorCode.WRONG_GROUP),
    "a control frame": (frame(FrameType.EOS, CONTROL_GROUP, payload=b"\0"), ErrorCode.WRONG_GROUP),
    "a payload over the limit": (
        header(value=LARGEST + 1, payload_bytes=(LARGEST + 1) * ROW_BYTES, sequence=20),
        ErrorCode.BAD_LENGTH,
    ),
    "a payload of 4 GiB": (header(value=2**27, payload_bytes=2**32 - 1, sequence=20), ErrorCode.BAD_LENGTH),
    "a watermark with payload": (frame(FrameType.WATERMARK, GROUP, payload=b"x"), ErrorCode.BAD_LENGTH),
    "an EOS with payload": (frame(FrameType.EOS, GROUP, payload=b"x"), ErrorCode.BAD_LENGTH),
    "more rows than payload": (header(value=3, payload_bytes=2 * ROW_BYTES, sequence=20), ErrorCode.BAD_ROW_COUNT),
    "fewer rows than payload": (header(value=1, payload_bytes=2 * ROW_BYTES, sequence=20), ErrorCode.BAD_ROW_COUNT),
    "parts of rows": (header(value=2, payload_bytes=2 * ROW_BYTES + 1, sequence=20), ErrorCode.BAD_ROW_COUNT),
    "2**64 - 1 rows": (header(value=2**64 - 1, payload_bytes=ROW_BYTES, sequence=20), ErrorCode.BAD_ROW_COUNT),
    "a gap of one row": (data_frame(GROUP, NEXT, 21), ErrorCode.SEQUENCE_GAP),
    "a sequence of 2**64 - 1": (data_frame(GROUP, NEXT, 2**64 - 1), ErrorCode.SEQUENCE_GAP),
    "a CRC that was not agreed": (data_frame(GROUP, NEXT, 20, crc=True), ErrorCode.BAD_CRC),
}


def test_each_bad_frame_ends_its_connection_only_and_rows_before_it_count_once():
    expected = [BEFORE] * len(FAULTS)
    with serving() as engine, company(engine, *expected), all_of_them() as each:
        for name, (data, code) in FAULTS.items():
            with each(name), RawClient(engine) as client:
                before = closed(engine, code.code)
                client.open()
                sock = client.open(GROUP)
                sock.sendall(data_frame(GROUP, BEFORE) + data)
                expect_error(sock, code)
                assert closed(engine, code.code) == before + 1
                client.open(GROUP)
                assert client.ack.sequence == len(BEFORE), "the session resumes behind the rows that were right"


CRC_FAULTS = {
    "a flipped bit in a row": flipped(data_frame(GROUP, NEXT, 20, crc=True), 32 + 5 * ROW_BYTES + 3),
    "a flipped bit in the sequence": flipped(data_frame(GROUP, NEXT, 20, crc=True), 31),
    "a flipped bit in the CRC": flipped(data_frame(GROUP, NEXT, 20, crc=True), 12),
    "no CRC": data_frame(GROUP, NEXT, 20),
}


def test_with_crc_no_row_of_a_damaged_frame_is_applied():
    expected = [BEFORE] * len(CRC_FAULTS)
    with serving() as engine, company(engine, *expected), all_of_them() as each:
        for number, (name, data) in enumerate(CRC_FAULTS.items(), 1):
            with each(name), RawClient(engine, crc=True) as client:
                client.open()
                sock = client.open(GROUP)
                sock.sendall(data_frame(GROUP, BEFORE, crc=True) + data)
                expect_error(sock, ErrorCode.BAD_CRC)
                assert closed(engine, "bad_crc") == number
                client.open(GROUP)
                assert client.ack.sequence == len(BEFORE)


def test_with_crc_a_frame_over_a_block_is_refused():
    rows = 32768 // ROW_BYTES + 1
    head = header(value=rows, payload_bytes=rows * ROW_BYTES, flags=Flags.CRC)
    with serving() as engine, company(engine), RawClient(engine, crc=True) as client:
        client.open()
        sock = client.open(GROUP)
        sock.sendall(head)
        expect_error(sock, ErrorCode.BAD_LENGTH)


def test_frames_of_the_largest_size_go_through():
    rows = np.resize(rows_of_group(GROUP, 1000), LARGEST)
    with serving() as engine, company(engine, rows), RawClient(engine) as client:
        client.open()
        sock = client.open(GROUP)
        sock.sendall(data_frame(GROUP, rows))
        while read_frame(sock)[0].sequence < LARGEST:
            pass


@pytest.mark.parametrize("crc", [False, True])
@pytest.mark.parametrize("cut", [1, 31, 32, 33, 32 + ROW_BYTES - 1, 32 + 7 * ROW_BYTES + 5])
def test_a_truncated_frame_counts_whole_rows_once_and_resumes_there(cut, crc):
    whole = data_frame(GROUP, NEXT, 20, crc=crc)
    arrived = 0 if crc else max(0, cut - 32) // ROW_BYTES
    expected = np.concatenate([BEFORE, NEXT])
    with serving(session_timeout_s=5.0) as engine, company(engine, expected), RawClient(engine, crc=crc) as client:
        control = client.open()
        sock = client.open(GROUP)
        sock.sendall(data_frame(GROUP, BEFORE, crc=crc) + whole[:cut])
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(4096):  # closing with unread ACKs would be a reset
            pass
        wait_until(lambda: closed(engine, "eof") == 1, "the lost connection")
        sock = client.open(GROUP)
        assert client.ack.sequence == 20 + arrived
        sock.sendall(data_frame(GROUP, expected, 0, crc=crc))  # all of it again: known rows are skipped
        sock.sendall(frame(FrameType.EOS, GROUP, crc=crc))
        control.sendall(frame(FrameType.EOS, payload=bitmap(GROUP), crc=crc))
        assert read_frame(control)[0].type is FrameType.ACK


def test_half_close_after_the_end_still_gets_the_final_ack():
    with serving() as engine, company(engine, BEFORE), RawClient(engine) as client:
        control = client.open()
        sock = client.open(GROUP)
        control.sendall(frame(FrameType.EOS, payload=bitmap(GROUP)))
        control.shutdown(socket.SHUT_WR)
        wait_until(lambda: "ending" in [s["state"] for s in engine.status()["streams"]["s"]["sessions"]], "the end")
        time.sleep(0.1)  # the half-close is seen as well
        sock.sendall(data_frame(GROUP, BEFORE) + frame(FrameType.EOS, GROUP))
        sock.shutdown(socket.SHUT_WR)
        assert read_frame(control)[0].type is FrameType.ACK
        wait_until(lambda: closed(engine, "eos") >= 1, "the data connection's end")


def test_half_close_without_an_end_is_a_broken_connection_that_may_come_back():
    with serving(session_timeout_s=5.0) as engine, company(engine, BEFORE), RawClient(engine) as client:
        client.open()
        sock = client.open(GROUP)
        sock.sendall(data_frame(GROUP, BEFORE))
        sock.shutdown(socket.SHUT_WR)
        wait_until(lambda: closed(engine, "eof") == 1, "the half-closed connection")
        sock = client.open(GROUP)
        assert client.ack.sequence == len(BEFORE)
        sock.sendall(frame(FrameType.EOS, GROUP))
        control = client.open()  # fences the first control connection
        control.sendall(frame(FrameType.EOS, payload=bitmap(GROUP)))
        assert read_frame(control)[0].type is FrameType.ACK


def test_a_watermark_that_goes_back_is_ignored():
    rows = rows_of_group(GROUP, 200, start=0)
    with serving() as engine, RawClient(engine) as client:
        control = client.open()
        sock = client.open(GROUP)
        at = int(rows["t"][100])
        sock.sendall(data_frame(GROUP, rows[:100]))
        for value in (at, at - 50, -(2**63), at - 1, 0):
            sock.sendall(frame(FrameType.WATERMARK, GROUP, value=value & (2**64 - 1)))
            control.sendall(frame(FrameType.WATERMARK, value=value & (2**64 - 1), payload=bitmap(GROUP)))
        sock.sendall(data_frame(GROUP, rows[100:], 100) + frame(FrameType.EOS, GROUP))
        wait_until(lambda: engine.status()["streams"]["s"]["watermark"]["max"] == at, "the watermark")
        control.sendall(frame(FrameType.EOS, payload=bitmap(GROUP)))
        assert read_frame(control)[0].type is FrameType.ACK
        assert not {"bad_type", "bad_length"} & set(engine.status()["connections"]["closed"])
        assert_results(engine, rows)


def test_event_time_that_goes_back_within_the_watermark_is_no_problem_and_beyond_it_is_late():
    rows = make_rows(400)
    late = make_rows(50, seed=9, start=-5000)
    with serving() as engine, fs.Producer(address(engine), stream=STREAM, watermark="explicit") as producer:
        producer.send(rows[::-1])
        producer.watermark(int(rows["t"].max()))
        producer.send(late)
        producer.close()
        engine.finish(timeout=WAIT_S)
        expected = run(QUERY, np.concatenate([rows[::-1], late]), {len(rows): int(rows["t"].max())})
        assert len(expected.late) == len(late)
        assert_same_results(QUERY, as_rows(engine.results("q")), expected.windows)
        status = engine.status()
        assert status["queries"]["q"]["late"] == len(late)
        assert_ledger(status, "s", len(rows) + len(late))
        found = as_rows(engine.late("q"))
        assert sorted(row["t"] for row in found) == sorted(late["t"].tolist())
        assert {row["watermark"] for row in found} == {int(rows["t"].max())}


@pytest.mark.parametrize("time", [-(2**63), 2**63 - 1, -(2**62), 2**62])
def test_a_time_at_the_end_of_the_range_is_applied_or_counted_and_never_fatal(time):
    odd = make_rows(3)
    odd["t"] = time
    with serving(expected_producers=2) as engine, company(engine, odd), RawClient(engine) as client:
        client.open()
        for group in set(STREAM.group_of(odd, GROUPS).tolist()):
            mine = odd[STREAM.group_of(odd, GROUPS) == group]
            sock = client.open(group)
            sock.sendall(data_frame(group, mine))
            while read_frame(sock)[0].sequence < len(mine):
                pass


@pytest.mark.parametrize("value", [2**63 - 1, 2**63 - 2, -(2**63)])
def test_a_watermark_at_the_end_of_the_range_is_not_taken_for_the_end_of_the_stream(value):
    """It is a legal promise. The session itself has not ended: it is there until it says EOS or breaks."""
    with serving(session_timeout_s=5.0) as engine, RawClient(engine) as client:
        control = client.open()
        sock = client.open(GROUP)
        sock.sendall(data_frame(GROUP, BEFORE) + frame(FrameType.WATERMARK, GROUP, value=value & (2**64 - 1)))
        control.sendall(frame(FrameType.WATERMARK, value=value & (2**64 - 1), payload=bitmap(GROUP)))
        while read_frame(sock)[0].sequence < len(BEFORE):
            pass
        settle(engine)
        assert [s["state"] for s in engine.status()["streams"]["s"]["sessions"]] == ["live"]
        sock.sendall(frame(FrameType.EOS, GROUP))
        control.sendall(frame(FrameType.EOS, payload=bitmap(GROUP)))
        assert read_frame(control)[0].type is FrameType.ACK
        assert_results(engine, BEFORE)


def test_what_a_producer_says_never_ends_the_session_of_another():
    """Slots are used again: a control connection must not speak for whoever has its slot now."""
    with serving(session_timeout_s=5.0) as engine, RawClient(engine) as odd, RawClient(engine) as good:
        control = odd.open()
        good_control = good.open()
        control.sendall(frame(FrameType.WATERMARK, value=2**63 - 1, payload=bitmap()))
        settle(engine)
        sock = good.open(GROUP)
        control.sendall(frame(FrameType.EOS, payload=bitmap()))
        wait_until(lambda: len(engine.status()["streams"]["s"]["sessions"]) == 1, "the odd one's end")
        settle(engine)
        assert [s["producer"] for s in engine.status()["streams"]["s"]["sessions"]] == [good.fields["producer"]]
        sock.sendall(data_frame(GROUP, BEFORE) + frame(FrameType.EOS, GROUP))
        good_control.sendall(frame(FrameType.EOS, payload=bitmap(GROUP)))
        assert read_frame(good_control)[0].type is FrameType.ACK
        assert_results(engine, BEFORE)


def test_frames_after_the_end_are_refused_and_change_nothing():
    with serving(session_timeout_s=5.0) as engine, company(engine, BEFORE), RawClient(engine) as client:
        control = client.open()
        sock = client.open(GROUP)
        sock.sendall(data_frame(GROUP, BEFORE) + frame(FrameType.EOS, GROUP) + data_frame(GROUP, NEXT, 20))
        expect_error(sock, ErrorCode.BAD_TYPE)
        control.sendall(frame(FrameType.EOS, payload=bitmap(GROUP)))
        assert read_frame(control)[0].type is FrameType.ACK


def test_a_connection_of_an_ended_session_is_refused():
    with serving() as engine, RawClient(engine) as client:
        control = client.open()
        control.sendall(frame(FrameType.EOS, payload=bitmap()))
        assert read_frame(control)[0].type is FrameType.ACK
        sock = client.connect()
        sock.sendall(client.hello(GROUP))
        expect_error(sock, ErrorCode.NO_SESSION)
        assert closed(engine, "no_session") == 1


def test_an_unknown_field_in_a_query_names_the_near_ones():
    with pytest.raises(fs.QueryError, match=r"padd.*") as caught:
        STREAM.query("wrong").window(fs.tumbling("1s")).agg(n=fs.min("padd"))
    assert caught.value.code
    assert "pad" in str(caught.value).replace("padd", "")
    document = QUERY.to_json().replace('"x"', '"y"', 1) if isinstance(QUERY.to_json(), str) else None
    if document is not None:
        with pytest.raises(fs.FlexStreamError):
            fs.Query.from_json(document)


ODD_MARKERS = (0, 1, 2**62, 2**63 - 1, 2**63, 2**63 + 1, 2**64 - 1)


def test_markers_with_any_time_take_no_part_of_the_status_down_and_show_no_odd_latency():
    with serving() as engine, company(engine), RawClient(engine) as client:
        client.open()
        sock = client.open(GROUP)
        now = time.time_ns()
        for value in (*ODD_MARKERS, now, now + 3600 * 10**9):
            sock.sendall(frame(FrameType.MARKER, GROUP, value=value))
        status = wait_until(
            lambda: (s := engine.status())["latency"]["ignored"] == len(ODD_MARKERS) + 1 and s, "the odd markers"
        )
        assert status["failed_parts"] == {}
        assert status["latency"]["count"] == 1
        assert 0 <= status["latency"]["max_ms"] < 24 * 3600 * 1000
        assert "flexstream_latency_markers_ignored_total 8" in render(status)
        assert engine.health()["state"] == "running"


def test_a_part_of_the_status_that_fails_is_named_and_the_others_are_there(monkeypatch):
    with serving() as engine:
        whole = engine.status()
        monkeypatch.setattr(engine.collector.latencies, "summary", lambda: 1 // 0)
        monkeypatch.setattr(engine_status, "query_status", lambda running: [][1])
        monkeypatch.setattr("flexstream.engine.engine.health", lambda engine: {}[0])  # asks around: not for a status
        status = engine.status()
        assert set(status["failed_parts"]) == {"latency", "queries.q"}
        assert "ZeroDivisionError" in status["failed_parts"]["latency"]
        assert set(whole) - set(status) == {"latency"}
        assert status["queries"] == {}
        assert status["streams"].keys() == whole["streams"].keys()
        page = render(status)
        assert 'flexstream_status_part_failed{part="queries.q"} 1' in page
