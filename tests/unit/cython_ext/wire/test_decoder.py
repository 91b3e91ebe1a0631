"""The frame decoder: bytes cut anywhere give the same rows; what is wrong gives one fault and then silence."""

import struct
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexstream import Stream
from flexstream.cython_ext.wire.decoder import FrameDecoder
from flexstream.wire.frames import ErrorCode, FrameType, Header, frame

STREAM = Stream("s", {"t": "timestamp[ms]", "k": "i32", "x": "u8"}, key="k", time="t")
GROUPS = 8
ROWS = np.zeros(200, STREAM.schema.dtype)
ROWS["t"] = np.arange(200)
ROWS["k"] = np.arange(200)
GROUP = int(STREAM.group_of(ROWS[:1], GROUPS)[0])
MINE = ROWS[STREAM.group_of(ROWS, GROUPS) == GROUP]
OTHER = ROWS[STREAM.group_of(ROWS, GROUPS) != GROUP]
ROW_BYTES = STREAM.schema.row_bytes


def decoder(**options):
    return FrameDecoder(STREAM, group=GROUP, groups=GROUPS, **options)


def data(rows, sequence, *, crc=False, group=GROUP):
    return frame(FrameType.DATA, group, value=len(rows), sequence=sequence, payload=rows.tobytes(), crc=crc)


def control(kind, value=0, **fields):
    return frame(kind, GROUP, value=value & (2**64 - 1), **fields)


def joined(events):
    """Neighbouring pieces of rows as one, so that cuts do not show."""
    out = []
    for event in events:
        if event[0] == "rows" and out and out[-1][0] == "rows":
            out[-1] = ("rows", out[-1][1] + event[1])
        else:
            out.append(event)
    return out


def fault(code):
    return ("fault", int(code))


CONVERSATION = [
    (data(MINE[:5], 0), [("rows", MINE[:5].tobytes())]),
    (control(FrameType.WATERMARK, -12), [("watermark", -12)]),
    (data(MINE[5:6], 5), [("rows", MINE[5:6].tobytes())]),
    (control(FrameType.MARKER, 2**63 + 5), [("marker", 2**63 + 5)]),
    (control(FrameType.BARRIER, 9), [("barrier", 9)]),
    (data(MINE[:0], 6), []),
    (data(MINE[4:9], 4), [("rows", MINE[6:9].tobytes())]),
    (control(FrameType.EOS), [("eos",)]),
]
BYTES = b"".join(piece for piece, _ in CONVERSATION)
EVENTS = joined([event for _, events in CONVERSATION for event in events])


@pytest.mark.parametrize("crc", [False, True])
def test_a_cut_at_any_byte_changes_nothing(crc):
    watermark = control(FrameType.WATERMARK, 4, crc=crc)
    whole = data(MINE[:7], 0, crc=crc) + watermark + data(MINE[7:9], 7, crc=crc)
    expected = [("rows", MINE[:7].tobytes()), ("watermark", 4), ("rows", MINE[7:9].tobytes())]
    for cut in range(len(whole) + 1):
        reader = decoder(crc=crc)
        assert joined(reader.feed(whole[:cut]) + reader.feed(whole[cut:])) == expected, f"cut at {cut}"
        assert reader.carried == 0
        assert reader.next_row == 9


def test_byte_by_byte_gives_every_event():
    reader = decoder()
    events = [event for i in range(len(BYTES)) for event in reader.feed(BYTES[i : i + 1])]
    assert joined(events) == EVENTS


def test_rows_are_delivered_before_the_frame_is_whole_but_not_with_crc():
    piece = data(MINE[:3], 0)[: 32 + ROW_BYTES + 1]
    assert decoder().feed(piece) == [("rows", MINE[:1].tobytes())]
    assert decoder(crc=True).feed(data(MINE[:3], 0, crc=True)[:-1]) == []


@pytest.mark.parametrize(("sequence", "n"), [(0, 4), (0, 6), (2, 4), (5, 1), (6, 2), (0, 10)])
def test_a_replay_delivers_only_rows_that_are_new(sequence, n):
    reader = decoder(next_row=6)
    new = MINE[sequence : sequence + n][max(0, 6 - sequence) :]
    expected = [("rows", new.tobytes())] if len(new) else []
    assert joined(reader.feed(data(MINE[sequence : sequence + n], sequence))) == expected
    assert reader.next_row == max(6, sequence + n)


def test_a_replay_cut_anywhere_delivers_only_rows_that_are_new():
    whole = data(MINE[:8], 0)
    for cut in range(len(whole)):
        reader = decoder(next_row=6)
        assert joined(reader.feed(whole[:cut]) + reader.feed(whole[cut:])) == [("rows", MINE[6:8].tobytes())]
        assert reader.next_row == 8


def test_a_gap_is_a_fault():
    reader = decoder()
    assert reader.feed(data(MINE[:1], 1)) == [fault(ErrorCode.SEQUENCE_GAP)]
    assert reader.next_row == 0


def test_nothing_is_delivered_after_a_fault():
    reader = decoder()
    assert reader.feed(data(MINE[:1], 1)) == [fault(ErrorCode.SEQUENCE_GAP)]
    assert reader.feed(data(MINE[:1], 0)) == [fault(ErrorCode.SEQUENCE_GAP)]
    assert reader.next_row == 0


def test_rows_before_a_fault_in_the_same_bytes_are_delivered():
    events = decoder().feed(data(MINE[:2], 0) + b"\0" * 32)
    assert events == [("rows", MINE[:2].tobytes()), fault(ErrorCode.BAD_MAGIC)]


def test_a_frame_for_another_group_is_a_fault():
    assert decoder().feed(data(MINE[:1], 0, group=(GROUP + 1) % GROUPS)) == [fault(ErrorCode.WRONG_GROUP)]
    assert decoder().feed(frame(FrameType.EOS)) == [fault(ErrorCode.WRONG_GROUP)]


def test_rows_of_another_group_are_a_fault():
    assert decoder().feed(data(OTHER[:1], 0)) == [fault(ErrorCode.WRONG_GROUP)]


@pytest.mark.parametrize("whole", [data(MINE[:3], 0, crc=True), control(FrameType.WATERMARK, 99, crc=True)])
def test_a_flipped_bit_anywhere_fails_the_crc_at_once_and_nothing_of_the_frame_is_delivered(whole):
    for bit in range(8 * len(whole)):
        broken = bytearray(whole)
        broken[bit >> 3] ^= 1 << (bit & 7)
        assert decoder(crc=True).feed(bytes(broken)) == [fault(ErrorCode.BAD_CRC)], f"bit {bit}"


@pytest.mark.parametrize("crc", [False, True])
def test_the_crc_flag_must_be_as_agreed(crc):
    assert decoder(crc=crc).feed(data(MINE[:1], 0, crc=not crc)) == [fault(ErrorCode.BAD_CRC)]


def test_payloads_over_the_limit_are_a_fault_at_once():
    def head(payload, rows, **fields):
        return Header(FrameType.DATA, GROUP, value=rows, payload_bytes=payload, **fields).pack()

    rows = (1 << 20) // ROW_BYTES
    assert decoder().feed(head(rows * ROW_BYTES, rows)) == []
    assert decoder().feed(head((rows + 1) * ROW_BYTES, rows + 1)) == [fault(ErrorCode.BAD_LENGTH)]
    assert decoder().feed(head(2**32 - 1, 1)) == [fault(ErrorCode.BAD_LENGTH)]
    rows = 32768 // ROW_BYTES
    too_long = head((rows + 1) * ROW_BYTES, rows + 1, flags=1)
    assert decoder(crc=True).feed(too_long) == [fault(ErrorCode.BAD_LENGTH)]


@pytest.mark.parametrize("rows", [0, 1, 3, 2**63, 2**64 - 1])
def test_the_number_of_rows_must_fit_the_payload(rows):
    header = Header(FrameType.DATA, GROUP, value=rows, payload_bytes=2 * ROW_BYTES).pack()
    assert decoder().feed(header + MINE[:2].tobytes()) == [fault(ErrorCode.BAD_ROW_COUNT)]


def test_a_payload_of_parts_of_rows_is_a_fault():
    header = Header(FrameType.DATA, GROUP, value=1, payload_bytes=ROW_BYTES + 1).pack()
    assert decoder().feed(header) == [fault(ErrorCode.BAD_ROW_COUNT)]


@pytest.mark.parametrize(
    "more", [data(MINE[:1], 0), control(FrameType.WATERMARK, 4), control(FrameType.EOS), control(FrameType.MARKER)]
)
def test_nothing_may_follow_the_end(more):
    assert decoder().feed(control(FrameType.EOS) + more) == [("eos",), fault(ErrorCode.BAD_TYPE)]


@pytest.mark.parametrize("kind", [FrameType.HELLO, FrameType.ACK, FrameType.ERROR])
def test_types_that_belong_elsewhere_are_a_fault(kind):
    assert decoder().feed(control(kind)) == [fault(ErrorCode.BAD_TYPE)]


@pytest.mark.parametrize("kind", [0, 9, 255])
def test_unknown_types_and_versions_are_a_fault(kind):
    header = bytearray(control(FrameType.EOS))
    header[3] = kind
    assert decoder().feed(bytes(header)) == [fault(ErrorCode.BAD_TYPE)]
    header[2] = 2
    assert decoder().feed(bytes(header)) == [fault(ErrorCode.BAD_VERSION)]


def test_a_watermark_with_a_payload_is_a_fault():
    assert decoder().feed(control(FrameType.WATERMARK, 1, payload=b"x")) == [fault(ErrorCode.BAD_LENGTH)]


@pytest.mark.parametrize("value", [-(2**63), -1, 0, 2**63 - 1])
def test_watermarks_are_signed(value):
    assert decoder().feed(control(FrameType.WATERMARK, value)) == [("watermark", value)]


def test_rows_of_the_largest_size_go_through():
    wide = Stream("w", {"t": "timestamp[ms]", "k": "i8", "pad": "bytes[16375]"}, key="k", time="t")
    rows = np.zeros(3, wide.schema.dtype)
    rows["pad"] = b"x" * 16375
    group = int(wide.group_of(rows[:1], 4)[0])
    whole = frame(FrameType.DATA, group, value=3, payload=rows.tobytes())
    reader = FrameDecoder(wide, group=group, groups=4)
    events = [event for i in range(0, len(whole), 1000) for event in reader.feed(whole[i : i + 1000])]
    assert joined(events) == [("rows", rows.tobytes())]


# -- arbitrary bytes


def pieces(whole, cuts):
    edges = [0, *sorted(cut % (len(whole) + 1) for cut in cuts), len(whole)]
    return [whole[a:b] for a, b in pairwise(edges)]


HEADERS = st.builds(
    lambda magic, version, kind, flags, group, payload, value, sequence: struct.pack(
        "<HBBHHIIQQ", magic, version, kind, flags, group, payload, 0, value, sequence
    ),
    st.sampled_from([0x5346, 0x5346, 0x5346, 0]),
    st.sampled_from([1, 1, 1, 2]),
    st.integers(0, 9),
    st.integers(0, 3),
    st.sampled_from([GROUP, GROUP, 0xFFFF]),
    st.one_of(st.sampled_from([0, ROW_BYTES, 2 * ROW_BYTES]), st.integers(0, 2**32 - 1)),
    st.one_of(st.integers(0, 3), st.integers(0, 2**64 - 1)),
    st.one_of(st.integers(0, 5), st.integers(0, 2**64 - 1)),
)
NOISE = st.lists(st.one_of(HEADERS, st.binary(max_size=80), st.just(MINE[:2].tobytes())), max_size=8).map(b"".join)


@given(noise=NOISE, cuts=st.lists(st.integers(0, 10_000), max_size=6), crc=st.booleans())
def test_arbitrary_bytes_never_crash_and_cuts_do_not_matter(noise, cuts, crc):
    whole, cut = decoder(crc=crc), decoder(crc=crc)
    events = whole.feed(noise)
    if any(event[0] == "fault" for event in events):
        assert [event[0] for event in events].count("fault") == 1
        assert events[-1][0] == "fault"
    found = []
    for piece in pieces(noise, cuts):
        found += cut.feed(piece)
        if found and found[-1][0] == "fault":
            break
    assert joined(found) == joined(events)
    assert cut.next_row == whole.next_row


@given(
    frames=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 4), st.sampled_from(["data", "watermark", "marker"]))),
    cuts=st.lists(st.integers(0, 100_000), max_size=20),
    crc=st.booleans(),
)
def test_valid_streams_cut_anywhere_deliver_every_row_once(frames, cuts, crc):
    sent, whole, expected = 0, b"", []
    for rows, overlap, kind in frames:
        if kind == "data":
            first = max(0, sent - overlap)
            whole += data(np.resize(MINE, 2000)[first : sent + rows], first, crc=crc)
            expected.append(("rows", np.resize(MINE, 2000)[sent : sent + rows].tobytes()))
            sent += rows
        else:
            whole += control(FrameType[kind.upper()], rows, crc=crc)
            expected.append((kind, rows))
    reader = decoder(crc=crc)
    found = [event for piece in pieces(whole, cuts) for event in reader.feed(piece)]
    assert joined(found) == joined([event for event in expected if event != ("rows", b"")])
    assert reader.next_row == sent
    assert reader.carried == 0
