"""The native sender over socket pairs: what is on the wire, for every row size and key kind."""

import socket
import threading

import numpy as np
import pytest

from flexstream.cython_ext.produce import sender as native
from flexstream.cython_ext.produce.sender import Sender
from flexstream.rows.stream import Stream
from flexstream.wire.frames import HEADER_BYTES, Flags, FrameType, Header, frame, frame_crc, signed


class Sink(threading.Thread):
    """Reads one connection to its end."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        ours, self.theirs = socket.socketpair()
        ours.setblocking(False)
        self.fd = ours.detach()
        self.data = bytearray()
        self.start()

    def run(self) -> None:
        while chunk := self.theirs.recv(65536):
            self.data += chunk

    def frames(self) -> list[tuple[Header, bytes]]:
        self.join(60)
        found, at = [], 0
        while at < len(self.data):
            header = Header.unpack(self.data[at:])
            at += HEADER_BYTES + header.payload_bytes
            found.append((header, bytes(self.data[at - header.payload_bytes : at])))
        assert at == len(self.data)
        return found


def make_stream(pad: int, key: str = "i64") -> Stream:
    fields = {"t": "timestamp[ms]", "k": key}
    if pad:
        fields["pad"] = f"bytes[{pad}]"
    return Stream("s", fields, key="k", time="t")


def make_rows(stream: Stream, n: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    rows = np.frombuffer(rng.bytes(n * stream.schema.row_bytes), stream.schema.dtype).copy()
    rows["t"] = np.arange(n)
    if rows.dtype["k"].kind == "f":
        rows["k"] = rng.integers(-50, 50, n)
    return rows


def make_sender(stream: Stream, groups: int, **options) -> Sender:
    defaults = {"rows_per_frame": 50, "linger_ns": 0, "acks": False}
    return Sender(
        stream.key_hasher,
        groups=groups,
        row_bytes=stream.schema.row_bytes,
        time_offset=stream.time_field.offset,
        **{**defaults, **options},
    )


def send_all(sender: Sender, rows: np.ndarray, step: int = 10**9) -> None:
    for start in range(0, len(rows), step):
        status, position = sender.send(rows[start : start + step].view(np.uint8))
        assert status == native.DONE
        assert position == len(rows[start : start + step])


def finish(sender: Sender) -> None:
    assert sender.flush(5000)
    sender.close_all()


@pytest.mark.parametrize("pad", [0, 1, 7, 15, 16, 17, 31, 62, 100, 176, 177, 400])
@pytest.mark.parametrize("groups", [1, 8, 13])
def test_each_row_arrives_once_in_order_in_its_group(pad, groups):
    stream = make_stream(pad)
    rows = make_rows(stream, 3000, seed=pad)
    sender = make_sender(stream, groups)
    sinks = [Sink() for _ in range(groups)]
    for group, sink in enumerate(sinks):
        assert sender.attach(group, sink.fd, 0) == 0
    send_all(sender, rows, 777)
    finish(sender)
    ids = stream.group_of(rows, groups)
    for group, sink in enumerate(sinks):
        data = [(h, p) for h, p in sink.frames() if h.type is FrameType.DATA]
        assert b"".join(p for _, p in data) == rows[ids == group].tobytes()
        expected = 0
        for header, _ in data:
            assert (header.group, header.sequence) == (group, expected)
            assert 0 < header.value <= 50
            expected += header.value


@pytest.mark.parametrize(
    "key", ["i8", "u8", "i16", "u16", "i32", "u32", "bool", "f32", "f64", "timestamp[ns]", "bytes[5]"]
)
def test_every_key_kind_is_grouped_as_the_stream_says(key):
    stream = make_stream(3, key)
    rows = make_rows(stream, 500, seed=1)
    if key == "bool":
        rows["k"] = rows["k"].view(np.uint8) & 1
    sender = make_sender(stream, 7)
    sinks = [Sink() for _ in range(7)]
    for group, sink in enumerate(sinks):
        sender.attach(group, sink.fd, 0)
    send_all(sender, rows)
    finish(sender)
    ids = stream.group_of(rows, 7)
    for group, sink in enumerate(sinks):
        payload = b"".join(p for h, p in sink.frames() if h.type is FrameType.DATA)
        assert payload == rows[ids == group].tobytes()


def test_data_frames_carry_a_crc_when_asked():
    stream = make_stream(9)
    sender = make_sender(stream, 1, crc=True)
    sink = Sink()
    sender.attach(0, sink.fd, 0)
    send_all(sender, make_rows(stream, 120, seed=2))
    finish(sender)
    data = [(h, p) for h, p in sink.frames() if h.type is FrameType.DATA]
    assert sum(h.value for h, _ in data) == 120
    for header, payload in data:
        assert header.flags == Flags.CRC
        assert header.crc32c == frame_crc(header, payload)


def test_a_watermark_follows_the_rows_that_made_it():
    stream = make_stream(0)
    rows = make_rows(stream, 300, seed=3)
    sender = make_sender(stream, 1, max_disorder=10)
    sink = Sink()
    sender.attach(0, sink.fd, 0)
    send_all(sender, rows, 100)
    finish(sender)
    seen, latest = 0, -(2**63)
    for header, _ in sink.frames():
        if header.type is FrameType.DATA:
            assert rows["t"][seen] >= latest
            seen += header.value
        elif header.type is FrameType.WATERMARK:
            latest = signed(header.value)
            assert latest == rows["t"][seen - 1] - 10
    assert (seen, latest) == (300, 289)


@pytest.mark.parametrize("time", [2**62 + 1, 2**63 - 1, -(2**62) - 1, -(2**63)])
def test_a_time_that_the_engine_refuses_does_not_move_the_watermark(time):
    stream = make_stream(0)
    rows = make_rows(stream, 50, seed=3)
    rows["t"][20] = time
    sender = make_sender(stream, 1, max_disorder=10)
    send_all(sender, rows)
    assert sender.stats()["watermark"] == 39


def test_the_largest_time_that_the_engine_takes_moves_the_watermark():
    stream = make_stream(0)
    rows = make_rows(stream, 50, seed=3)
    rows["t"][20] = 2**62
    sender = make_sender(stream, 1)
    send_all(sender, rows)
    assert sender.stats()["watermark"] == 2**62


def test_full_frames_wait_for_each_other_and_leave_together():
    stream = make_stream(0)
    rows = make_rows(stream, 200, seed=3)
    sender = make_sender(stream, 1, linger_ns=10**12, send_frames=3, acks=True, auto_watermark=False)
    sink = Sink()
    sender.attach(0, sink.fd, 0)
    for end, sent in ((101, 0), (151, 3), (200, 3)):  # a frame of 50 rows is full when the next row comes
        sender.send(rows[:end].view(np.uint8), sender.stats()["rows"])
        assert sender.stats()["bytes"] == sent * (HEADER_BYTES + 50 * stream.schema.row_bytes)
    sender.flush(0)
    sender.close_all()
    data = [p for h, p in sink.frames() if h.type is FrameType.DATA]
    assert b"".join(data) == rows.tobytes()


@pytest.mark.parametrize("crc", [False, True])
@pytest.mark.parametrize("wanted", [0, 1, 49, 50, 51, 99, 130, 199, 200])
def test_a_new_connection_resumes_in_mid_frame(wanted, crc):
    stream = make_stream(5)
    rows = make_rows(stream, 200, seed=4)
    sender = make_sender(stream, 1, acks=True, ring=8, crc=crc)
    first = Sink()
    sender.attach(0, first.fd, 0)
    send_all(sender, rows)
    sender.sever(0)
    first.join(60)
    second = Sink()
    assert sender.attach(0, second.fd, wanted) == 0
    sender.flush(0)
    sender.sever(0)
    third = Sink()
    assert sender.attach(0, third.fd, wanted) == 0
    sender.close_all()
    for sink in (second, third):
        data = [(h, p) for h, p in sink.frames() if h.type is FrameType.DATA]
        assert b"".join(p for _, p in data) == rows[wanted:].tobytes()
        if data:
            assert data[0][0].sequence == wanted
        if crc:
            assert all(h.crc32c == frame_crc(h, p) for h, p in data)


def test_a_server_that_forgot_acknowledged_rows_is_noticed_and_numbering_starts_where_it_wants():
    stream = make_stream(0)
    rows = make_rows(stream, 100, seed=5)
    sender = make_sender(stream, 1, acks=True)
    first = Sink()
    sender.attach(0, first.fd, 0)
    send_all(sender, rows)
    first.theirs.sendall(frame(FrameType.ACK, 0, sequence=60))
    sender.flush(20)
    assert sender.pending() == {0: (60, 100)}
    sender.sever(0)
    second = Sink()
    assert sender.attach(0, second.fd, 0) == 60
    sender.close_all()
    data = [(h, p) for h, p in second.frames() if h.type is FrameType.DATA]
    assert data[0][0].sequence == 0
    assert b"".join(p for _, p in data) == rows[60:].tobytes()


def test_a_server_that_wants_rows_that_never_were_is_refused():
    stream = make_stream(0)
    sender = make_sender(stream, 1, acks=True)
    first, second = Sink(), Sink()
    sender.attach(0, first.fd, 0)
    send_all(sender, make_rows(stream, 10, seed=6))
    sender.sever(0)
    assert sender.attach(0, second.fd, 11) == -1
    socket.close(second.fd)


def test_a_full_ring_without_waiting_says_how_many_rows_it_took():
    stream = make_stream(0)
    rows = make_rows(stream, 10_000, seed=7)
    sender = make_sender(stream, 1, acks=True, ring=4, rows_per_frame=10)
    status, position = sender.send(rows.view(np.uint8), 0, False)
    assert (status, position) == (native.FULL, 40)
    assert sender.pending() == {0: (0, 40)}


def test_a_buffer_that_is_not_whole_rows_is_refused():
    sender = make_sender(make_stream(0), 1)
    with pytest.raises(ValueError, match="whole rows"):
        sender.send(bytes(17))


def data_of(sink: Sink) -> list[tuple[Header, bytes]]:
    return [(h, p) for h, p in sink.frames() if h.type is FrameType.DATA]


def test_a_group_with_further_lanes_uses_them_in_turn_and_numbers_the_rows_of_each():
    stream = make_stream(3)
    rows = make_rows(stream, 4000, seed=5)
    sender = make_sender(stream, 1)
    sinks = [Sink() for _ in range(3)]
    sender.attach(0, sinks[0].fd, 0)
    lanes = [sender.add_lane(0, number) for number in (7, 8)]
    assert sender.wanted_groups() == lanes
    assert sender.further_lanes() == dict(zip(lanes, (7, 8), strict=True))
    send_all(sender, rows[:1000])
    for lane, sink in zip(lanes, sinks[1:], strict=True):
        sender.attach(lane, sink.fd, 0)
    send_all(sender, rows[1000:], 700)
    finish(sender)
    size = stream.schema.row_bytes
    found = []
    for sink in sinks:
        data = data_of(sink)
        assert [h.sequence for h, _ in data] == np.cumsum([0, *(h.value for h, _ in data)])[:-1].tolist()
        found += [p[at : at + size] for _, p in data for at in range(0, len(p), size)]
        assert sum(h.value for h, _ in data) >= 900
        assert signed([h for h, _ in sink.frames() if h.type is FrameType.WATERMARK][-1].value) == 3999
    whole = rows.tobytes()
    assert sorted(found) == sorted(whole[at : at + size] for at in range(0, len(whole), size))


def test_a_retired_lane_says_eos_behind_its_rows_and_its_place_is_free_when_the_server_has_closed():
    stream = make_stream(3)
    sender = make_sender(stream, 1)
    sinks = [Sink(), Sink()]
    sender.attach(0, sinks[0].fd, 0)
    lane = sender.add_lane(0, 7)
    sender.attach(lane, sinks[1].fd, 0)
    send_all(sender, make_rows(stream, 1000, seed=6))
    sender.retire_lane(lane)
    for _ in range(3):  # EOS, then the end of our side
        assert sender.flush(1000)
    before = sender.stats()["rows_acked"]
    sinks[1].frames()  # reads to the end: our side has shut down
    sinks[1].theirs.close()
    for _ in range(100):
        sender.flush(10)
        if not sender.further_lanes():
            break
    assert sender.further_lanes() == {}
    assert sender.stats()["rows_acked"] == before == 1000
    assert sinks[1].frames()[-1][0].type is FrameType.EOS
    send_all(sender, make_rows(stream, 500, seed=7))
    finish(sender)
    assert sum(h.value for s in sinks for h, _ in data_of(s)) == 1500
    assert sender.add_lane(0, 9) == lane


def test_a_lane_that_breaks_is_resumed_by_its_own_numbers_and_a_full_one_is_passed_over():
    stream = make_stream(3)
    rows = make_rows(stream, 400, seed=8)
    sender = make_sender(stream, 1, acks=True, ring=4, rows_per_frame=10)
    sinks = [Sink(), Sink(), Sink()]
    sender.attach(0, sinks[0].fd, 0)
    lane = sender.add_lane(0, 7)
    sender.attach(lane, sinks[1].fd, 0)
    assert sender.send(rows[:60].view(np.uint8), 0, False) == (native.DONE, 60)
    sender.sever(lane)
    status, taken = sender.send(rows[60:].view(np.uint8), 0, False)
    assert status == native.FULL
    assert taken > 0
    assert [fault[0] for fault in sender.faults()] == [lane]
    assert sender.attach(lane, sinks[2].fd, 13) == 0
    assert data_of_after(sender, sinks[2])[0].sequence == 13


def data_of_after(sender: Sender, sink: Sink) -> list[Header]:
    sender.flush(50)
    sender.close_all()
    return [h for h, _ in data_of(sink)]


def test_lanes_have_limits():
    sender = make_sender(make_stream(0), 2)
    lanes = [sender.add_lane(number % 2, number) for number in range(1, 33)]
    assert len(set(lanes)) == 32
    assert min(lanes) > 2
    assert sender.add_lane(0, 99) == -1
    assert sender.drop_lane(lanes[3])
    assert sender.add_lane(0, 99) == lanes[3]
    for group, number in ((2, 1), (0, 0)):
        with pytest.raises(ValueError, match="lane"):
            sender.add_lane(group, number)
