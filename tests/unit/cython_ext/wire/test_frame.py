"""Frames as native code writes them are frames as Python writes them, byte for byte; so are their numbers."""

from __future__ import annotations

import re
from enum import IntEnum
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexstream.cython_ext.testing import probes
from flexstream.rows.layout import SPAN_LIMIT
from flexstream.rows.stream import TIME_LIMIT
from flexstream.wire import frames
from flexstream.wire.frames import ErrorCode, FrameType, Header

HEADER = Path(__file__).parents[4] / "cython_ext/includes/frame.h"


def declared(prefix: str) -> dict[str, int]:
    """{name: number} of frame.h, by the beginning of their names."""
    text = HEADER.read_text()
    found = re.findall(rf"^    {prefix}(\w+) = (0x[0-9A-F]+|\d+)", text, re.M)
    assert found
    return {name: int(number, 0) for name, number in found}


def members(kind: type[IntEnum]) -> dict[str, int]:
    return {name: int(member) for name, member in kind.__members__.items()}


@given(
    st.sampled_from(FrameType),
    st.integers(0, 0xFFFF),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**64 - 1),
)
def test_a_header_has_the_same_bytes(kind: FrameType, group: int, payload: int, value: int, sequence: int) -> None:
    native = probes.frame_header(kind, group, payload, value, sequence)
    assert native == Header(kind, group, value, sequence, payload).pack()
    assert len(native) == frames.HEADER_BYTES


@pytest.mark.parametrize("payload", [b"", b"\0", b"flexstream" * 1000], ids=["none", "a byte", "several blocks"])
def test_a_frame_has_the_same_crc(payload: bytes) -> None:
    frame = frames.frame(FrameType.DATA, 5, value=1, sequence=2**40, payload=payload, crc=True)
    assert probes.crc_of_frame(frame) == Header.unpack(frame).crc32c


def test_frame_types_and_error_codes_are_the_same() -> None:
    numbers = declared("FRAME_")
    assert (numbers.pop("MAGIC"), numbers.pop("VERSION")) == (frames.MAGIC, frames.VERSION)
    assert numbers == members(FrameType)
    assert declared("FAULT_") == {"NONE": 0, **members(ErrorCode)}
    assert declared("FLAG_") == {"CRC": frames.Flags.CRC}
    assert declared("(?=CONTROL_GROUP|STAGE_GROUP)") == {
        "CONTROL_GROUP": frames.CONTROL_GROUP, "STAGE_GROUP": frames.STAGE_GROUP,
    }  # fmt: skip


def test_times_have_the_same_limits() -> None:
    assert probes.TIME_LIMIT == TIME_LIMIT
    assert probes.SPAN_LIMIT == SPAN_LIMIT


def test_nobody_else_in_native_code_knows_the_magic(project: Path) -> None:
    sources = [path for path in (project / "cython_ext").rglob("*.*") if path.suffix in (".pyx", ".pxd", ".h")]
    sources += (project / "benchmarks/native").iterdir()
    assert len(sources) > 60
    assert [path.name for path in sources if "0x5346" in path.read_text()] == ["frame.h"]
