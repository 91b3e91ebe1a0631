"""The header to the byte."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexstream.wire import frames as wire
from flexstream.wire.frames import ErrorCode, Flags, FrameType, Header, WireError


def test_header_is_32_little_endian_bytes():
    header = Header(FrameType.DATA, 0x0102, 0x1112131415161718, 0x2122232425262728, 0x31323334, 1, 0x41424344)
    assert header.pack().hex() == (
        "4653" "01" "02" "0100" "0201" "34333231" "44434241" "1817161514131211" "2827262524232221"
    )  # fmt: skip


@given(
    st.sampled_from(FrameType),
    st.integers(0, 0xFFFF),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**32 - 1),
)
def test_header_survives_the_wire(kind, group, value, sequence, payload_bytes):
    header = Header(kind, group, value, sequence, payload_bytes)
    assert Header.unpack(header.pack()) == header


@pytest.mark.parametrize(
    ("offset", "byte", "code"),
    [(0, 0x00, ErrorCode.BAD_MAGIC), (2, 9, ErrorCode.BAD_VERSION), (3, 99, ErrorCode.BAD_TYPE)],
)
def test_bytes_that_are_no_header_say_which_check_failed(offset, byte, code):
    data = bytearray(Header(FrameType.EOS).pack())
    data[offset] = byte
    with pytest.raises(WireError) as caught:
        Header.unpack(data)
    assert caught.value.code is code


def test_watermarks_are_signed():
    header = Header.unpack(Header(FrameType.WATERMARK, 3, value=-5).pack())
    assert wire.signed(header.value) == -5
    assert wire.signed(2**63 - 1) == 2**63 - 1


def test_crc_covers_header_and_payload():
    data = wire.frame(FrameType.DATA, 3, value=1, sequence=2, payload=b"abcd", crc=True)
    header = Header.unpack(data)
    assert header.flags == Flags.CRC
    assert header.crc32c == wire.frame_crc(header, b"abcd")
    assert header.crc32c != wire.frame_crc(header, b"abce")
    assert header.crc32c != wire.frame_crc(Header(FrameType.DATA, 3, 1, 3, 4, 1), b"abcd")


@given(st.integers(1, 300), st.data())
def test_bitmaps_are_least_significant_bit_first(count, data):
    groups = data.draw(st.sets(st.integers(0, count - 1)))
    bits = wire.bitmap(groups, count)
    assert len(bits) == -(-count // 8)
    assert int.from_bytes(bits, "little") == sum(1 << g for g in groups)
    assert wire.bitmap_groups(bits, count) == groups


def test_error_codes_are_stable():
    assert [code.value for code in ErrorCode] == list(range(1, 21))
    assert ErrorCode.UNKNOWN_STREAM.code == "unknown_stream"
    assert wire.error_code(7) is ErrorCode.UNKNOWN_STREAM
    assert wire.error_code(9999) is None
