"""CRC32C: known vectors (RFC 3720 B.4), and the instruction against the tables."""

import random

import pytest

from flexstream.cython_ext.wire.crc32c import HARDWARE, crc32c, crc32c_portable

VECTORS = [
    (b"", 0x00000000),
    (b"123456789", 0xE3069283),
    (bytes(32), 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (bytes(range(31, -1, -1)), 0x113FDB5C),
]


@pytest.mark.parametrize(("data", "expected"), VECTORS)
@pytest.mark.parametrize("function", [crc32c, crc32c_portable])
def test_known_vectors(function, data, expected):
    assert function(data) == expected


def test_every_length_and_alignment_agrees_with_the_tables():
    data = random.Random(7).randbytes(20_000)
    for length in [*range(70), 255, 767, 768, 769, 1535, 6143, 6144, 6145, 12_288, 19_000]:
        for start in (0, 1, 5, 7):
            piece = data[start : start + length]
            assert crc32c(piece) == crc32c_portable(piece), (start, length)


def test_a_sum_can_be_continued():
    data = random.Random(8).randbytes(10_000)
    for cut in (0, 1, 33, 6144, 9_999, 10_000):
        assert crc32c(data[cut:], crc32c(data[:cut])) == crc32c(data)


def test_x86_builds_use_the_instruction():
    import platform

    assert (platform.machine() == "x86_64") == HARDWARE
