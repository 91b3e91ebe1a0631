"""Toeplitz against the published verification suite, and its linearity against the plain definition."""

from __future__ import annotations

import random

import numpy as np
import pytest

from flexstream.nic.rss.toeplitz import (
    DEFAULT_KEY,
    address_bytes,
    bucket_of,
    key_windows,
    packet_bytes,
    parse_ip,
    port_basis,
    port_contributions,
    port_hashes,
    rank,
    reaches_every_bucket,
    toeplitz,
    toeplitz_many,
)

# (destination, its port, source, its port, hash of the addresses, hash of the 4-tuple): Microsoft's "Verifying the
# RSS Hash Calculation".
PUBLISHED = [
    ("161.142.100.80", 1766, "66.9.149.187", 2794, 0x323E8FC2, 0x51CCC178),
    ("65.69.140.83", 4739, "199.92.111.2", 14230, 0xD718262A, 0xC626B0EA),
    ("12.22.207.184", 38024, "24.19.198.95", 12898, 0xD2D0A5DE, 0x5C2B394A),
    ("209.142.163.6", 2217, "38.27.205.30", 48228, 0x82989176, 0xAFC7327F),
    ("202.188.127.2", 1303, "153.39.163.191", 44251, 0x5D1809C5, 0x10E828A2),
    ("3ffe:2501:200:3::1", 1766, "3ffe:2501:200:1fff::7", 2794, 0x2CC18CD5, 0x40207D3D),
    ("ff02::1", 4739, "3ffe:501:8::260:97ff:fe40:efab", 14230, 0x0F0C461C, 0xDDE51BBF),
    ("fe80::200:f8ff:fe21:67cf", 38024, "3ffe:1900:4545:3:200:f8ff:fe21:67cf", 44251, 0x4B61E985, 0x02D1FEEF),
]  # fmt: skip


def by_definition(key: bytes, data: bytes) -> int:
    """For every set bit of the input, XOR the 32 bits of the key that begin at that bit's position."""
    bits = "".join(f"{byte:08b}" for byte in key)
    result = 0
    for position, bit in enumerate("".join(f"{byte:08b}" for byte in data)):
        if bit == "1":
            result ^= int(bits[position : position + 32], 2)
    return result


@pytest.mark.parametrize(("dst", "dst_port", "src", "src_port", "two", "four"), PUBLISHED)
def test_the_published_vectors(dst: str, dst_port: int, src: str, src_port: int, two: int, four: int) -> None:
    assert toeplitz(DEFAULT_KEY, address_bytes(src, dst)) == two
    assert toeplitz(DEFAULT_KEY, packet_bytes((src, src_port), (dst, dst_port))) == four
    assert bucket_of(DEFAULT_KEY, (src, src_port), (dst, dst_port), 128) == four & 127
    assert int(port_hashes(DEFAULT_KEY, src, (dst, dst_port))[src_port]) == four


def test_many_at_once_equal_one_by_one_and_the_definition() -> None:
    rng = random.Random(7)
    for length in (8, 12, 32, 36):
        key = rng.randbytes(length + 4)
        data = [rng.randbytes(length) for _ in range(50)]
        hashes = toeplitz_many(key, np.array([list(d) for d in data], np.uint8)).tolist()
        assert hashes == [toeplitz(key, d) for d in data] == [by_definition(key, d) for d in data]


def test_a_longer_key_than_needed_changes_nothing() -> None:
    data = bytes(range(12))
    assert toeplitz(DEFAULT_KEY, data) == toeplitz(DEFAULT_KEY[:16], data) == toeplitz(DEFAULT_KEY + b"\xff" * 12, data)


def test_a_key_that_is_too_short_is_refused_with_the_length_that_is_needed() -> None:
    with pytest.raises(ValueError, match="it needs 40"):
        toeplitz(DEFAULT_KEY[:16], bytes(36))
    with pytest.raises(ValueError, match="it needs 16"):
        key_windows(b"", 96)


def test_v4_mapped_addresses_and_zones_are_read_as_the_packet_has_them() -> None:
    assert parse_ip("::ffff:10.0.0.7") == parse_ip("10.0.0.7")
    assert parse_ip("fe80::1%eth0") == parse_ip("fe80::1")
    mapped = packet_bytes(("::ffff:10.0.0.7", 5), ("::ffff:10.0.0.9", 6))
    assert mapped == packet_bytes(("10.0.0.7", 5), ("10.0.0.9", 6))
    with pytest.raises(ValueError, match="different families"):
        address_bytes("10.0.0.7", "fe80::1")


@pytest.mark.parametrize("version", [4, 6])
def test_the_contribution_of_a_port_is_the_xor_of_its_bits(version: int) -> None:
    basis = port_basis(DEFAULT_KEY, version)
    table = port_contributions(DEFAULT_KEY, version)
    assert len(table) == 65536
    for port in (0, 1, 2, 3, 80, 32768, 60999, 65535):
        expected = 0
        for bit in range(16):
            expected ^= basis[bit] if port >> bit & 1 else 0
        assert int(table[port]) == expected


def test_hashes_of_ports_equal_the_hash_of_each_packet() -> None:
    rng = random.Random(3)
    key = rng.randbytes(52)
    for source, destination in (("10.1.2.3", ("10.9.8.7", 7400)), ("fd00::1:2", ("fd00::9", 7400))):
        hashes = port_hashes(key, source, destination)
        for port in rng.sample(range(65536), 40):
            assert int(hashes[port]) == by_definition(key, packet_bytes((source, port), destination))


def test_the_rank_of_the_port_map_says_whether_every_bucket_can_be_reached() -> None:
    assert rank([]) == rank([0]) == 0
    assert rank([1, 2, 3, 3, 0]) == 2
    assert reaches_every_bucket(DEFAULT_KEY, 4, 128)
    assert reaches_every_bucket(DEFAULT_KEY, 6, 128)
    assert reaches_every_bucket(DEFAULT_KEY, 4, 1)
    for key in (bytes(40), b"\xff" * 40):  # all windows equal: the port moves nothing, or one bit for all
        assert not reaches_every_bucket(key, 4, 128)


def test_the_rank_agrees_with_trying_every_port() -> None:
    rng = random.Random(11)
    good = bad = 0
    for _ in range(60):
        key = bytearray(rng.randbytes(40))
        if rng.random() < 0.5:
            key[8:14] = bytes(6)  # few of the windows that the port reads are left
        mask = 127
        buckets = np.unique(port_contributions(bytes(key), 4) & np.uint32(mask))
        reaches = reaches_every_bucket(bytes(key), 4, mask + 1)
        assert reaches == (len(buckets) == mask + 1)
        good, bad = good + reaches, bad + (not reaches)
    assert good
    assert bad
