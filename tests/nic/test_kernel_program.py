"""The BPF programs, run on single packets without a device: the right bucket, and nothing else touched. Needs root."""

from __future__ import annotations

import ipaddress
import os
import random
import struct
from collections.abc import Iterator

import numpy as np
import pytest

from flexstream.nic.bpf import loader as bpf
from flexstream.nic.bpf.assembler import R0, R1, Assembler, Size
from flexstream.nic.bpf.loader import BpfError, Program, ProgramType
from flexstream.nic.bpf.programs import (
    KEY,
    MAX_ENTRIES,
    CpuMap,
    Entry,
    Place,
    TableMaps,
    load_table_program,
    rps_hash_base,
)
from flexstream.nic.rss.toeplitz import bucket_of, port_hashes, reaches_every_bucket, toeplitz

pytestmark = pytest.mark.root

PORT = 7001
TCX_NEXT, TC_ACT_REDIRECT, XDP_PASS = -1, 7, 2
ETHERNET = bytes.fromhex("020000000001 020000000002")
UNTOUCHED = {Place.TCX_INGRESS: TCX_NEXT, Place.TCX_EGRESS: TCX_NEXT, Place.XDP: XDP_PASS}


def tcp(source: int, destination: int) -> bytes:
    return struct.pack("!HHIIBBHHH", source, destination, 1, 1, 0x50, 0x10, 512, 0, 0)


def ipv4(
    source: str, destination: str, payload: bytes, *, options: int = 0, protocol: int = 6, fragment: int = 0
) -> bytes:
    addresses = ipaddress.ip_address(source).packed + ipaddress.ip_address(destination).packed
    length = 20 + 4 * options + len(payload)
    head = struct.pack("!BBHHHBBH", 0x45 + options, 0, length, 7, fragment, 64, protocol, 0)
    return b"\x08\x00" + head + addresses + bytes(4 * options) + payload


def ipv6(source: str, destination: str, payload: bytes, *, following: int = 6) -> bytes:
    addresses = ipaddress.ip_address(source).packed + ipaddress.ip_address(destination).packed
    return b"\x86\xdd" + struct.pack("!IHBB", 6 << 28, len(payload), following, 64) + addresses + payload


class Bench:
    """A loaded program, its maps, and which bucket a packet was counted in."""

    def __init__(self, place: Place, entries: int = 128) -> None:
        self.place = place
        self.maps = TableMaps(entries)
        self._cpus = CpuMap(bpf.possible_cpus()) if place is Place.XDP else None
        self.program = load_table_program(place, self.maps, self._cpus)
        for bucket in range(entries):  # a core that is not there: no packet is ever on the right one already
            self.maps.write_entry(bucket, Entry(0, 0xFFFF, rps_hash_base(0, 1)))
        self.maps.set_port(PORT)

    def counted(self, packet: bytes) -> tuple[list[int], int]:
        before = self.maps.bucket_counters()
        result, _ = self.program.run(packet)
        after = self.maps.bucket_counters()
        return [bucket for bucket in range(self.maps.entries) if after[bucket] != before[bucket]], result

    def close(self) -> None:
        self.program.close()
        self.maps.close()
        if self._cpus is not None:
            self._cpus.close()


@pytest.fixture(params=[Place.TCX_EGRESS, Place.XDP], ids=str)
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    made = Bench(request.param)
    yield made
    made.close()


def test_a_packet_is_counted_in_the_bucket_that_toeplitz_says(bench: Bench, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(300):
        options, tagged = rng.choice((0, 1, 10)), rng.random() < 0.3
        version = rng.choice((4, 6))
        kind = ipaddress.IPv4Address if version == 4 else ipaddress.IPv6Address
        source, destination = (str(kind(rng.randbytes(4 if version == 4 else 16))) for _ in range(2))
        port = rng.randrange(65536)
        payload = tcp(port, PORT) + rng.randbytes(rng.choice((0, 1, 400)))
        inner = (
            ipv4(source, destination, payload, options=options) if version == 4 else ipv6(source, destination, payload)
        )
        packet = ETHERNET + (b"\x81\x00\x00\x05" if tagged else b"") + inner
        expected = bucket_of(KEY, (source, port), (destination, PORT), 128)
        assert bench.counted(packet)[0] == [expected], (source, port, destination, options, tagged)


OTHERS = {
    "another port": ipv4("10.0.0.2", "10.0.0.1", tcp(40000, PORT + 1)),
    "an answer from our port": ipv4("10.0.0.1", "10.0.0.2", tcp(PORT, 40000)),
    "UDP": ipv4("10.0.0.2", "10.0.0.1", tcp(40000, PORT), protocol=17),
    "first fragment": ipv4("10.0.0.2", "10.0.0.1", tcp(40000, PORT), fragment=0x2000),
    "later fragment": ipv4("10.0.0.2", "10.0.0.1", tcp(40000, PORT), fragment=0x00B9),
    "IPv6 with an extension header": ipv6("fd00::2", "fd00::1", bytes(8) + tcp(40000, PORT), following=0),
    "IPv6 UDP": ipv6("fd00::2", "fd00::1", tcp(40000, PORT), following=17),
    "ARP": b"\x08\x06" + bytes(28),
    "IPv4 whose header is shorter than it may be": b"\x08\x00\x41" + ipv4("10.0.0.2", "10.0.0.1", tcp(1, PORT))[3:],
    "IPv4 that ends before its options": ipv4("10.0.0.2", "10.0.0.1", tcp(40000, PORT), options=10)[:40],
    "IPv6 that ends in its addresses": ipv6("fd00::2", "fd00::1", tcp(40000, PORT))[:30],
    "a bare Ethernet header": b"\x08\x00",
    "two VLAN tags": b"\x88\xa8\x00\x01\x81\x00\x00\x02" + ipv4("10.0.0.2", "10.0.0.1", tcp(40000, PORT)),
}


CUT_SHORT = {"IPv4 that ends before its options", "IPv6 that ends in its addresses", "a bare Ethernet header"}


@pytest.mark.parametrize("place", list(Place), ids=str)
def test_other_packets_pass_untouched(place: Place) -> None:
    bench = Bench(place)
    try:
        for name, packet in OTHERS.items():
            if place is not Place.XDP and name in CUT_SHORT:
                continue  # the kernel makes no test packet of it for tcx
            assert bench.counted(ETHERNET + packet) == ([], UNTOUCHED[place]), name
        bench.maps.set_port(0)
        assert bench.counted(ETHERNET + ipv4("10.0.0.2", "10.0.0.1", tcp(40000, PORT))) == ([], UNTOUCHED[place])
    finally:
        bench.close()


def test_random_bytes_never_fail(bench: Bench, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(500):
        head = rng.choice((b"\x08\x00\x45", b"\x08\x00\x4f", b"\x86\xdd\x60", b"\x81\x00", b"\x88\xa8", b""))
        bench.program.run(ETHERNET + (head + rng.randbytes(rng.randrange(60, 120))))


def test_a_received_packet_is_delivered_on_its_core_and_sent_on_from_any_other() -> None:
    packet = ETHERNET + ipv4("10.0.0.2", "10.0.0.1", tcp(40000, PORT))
    bucket = bucket_of(KEY, ("10.0.0.2", 40000), ("10.0.0.1", PORT), 128)
    bench, before = Bench(Place.TCX_INGRESS), os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert bench.counted(packet) == ([], TC_ACT_REDIRECT)
        bench.maps.write_entry(bucket, Entry(0, min(before), rps_hash_base(0, 1)))
        assert bench.counted(packet) == ([bucket], TCX_NEXT)
        assert bench.maps.disobeyed() == 0
    finally:
        os.sched_setaffinity(0, before)
        bench.close()


def test_every_bucket_is_reached_by_equally_many_ports() -> None:
    for source, destination in (("10.0.0.2", "10.0.0.1"), ("2001:db8::77", "2001:db8:1::1")):
        buckets = port_hashes(KEY, source, (destination, PORT)) & np.uint32(127)
        assert np.bincount(buckets).tolist() == [512] * 128
    assert reaches_every_bucket(KEY, 4, MAX_ENTRIES)
    assert reaches_every_bucket(KEY, 6, MAX_ENTRIES)
    assert toeplitz(KEY, bytes(12)) == 0


def test_rps_picks_the_core_whose_hash_is_set() -> None:
    for cpus in (1, 2, 3, 7, 24, 64, 1024, 4096):
        for position in (0, 1, cpus // 2, cpus - 1):
            if position < cpus:
                for hash16 in (0, 1, 0xFFFF):
                    value = rps_hash_base(position, cpus) + hash16
                    assert 0 < value < 1 << 32
                    assert value * cpus >> 32 == position  # net/core/dev.c: reciprocal_scale(hash, map->len)


def test_a_program_that_the_verifier_refuses_says_why() -> None:
    code = Assembler()
    code.load(Size.U32, R0, R1, 4096)
    code.exit()
    with pytest.raises(BpfError, match=r"(?s)verifier says: .*invalid bpf_context access") as caught:
        Program(ProgramType.SCHED_CLS, code.assemble(), name="wrong")
    assert caught.value.errno > 0


@pytest.mark.parametrize("entries", [0, 3, 100, MAX_ENTRIES * 2])
def test_a_table_that_is_no_power_of_two_is_refused(entries: int) -> None:
    with pytest.raises(ValueError, match="a power of two"):
        TableMaps(entries)


def test_the_largest_table_can_be_had() -> None:
    maps = TableMaps(MAX_ENTRIES)
    assert len(maps.bucket_counters()) == MAX_ENTRIES
    maps.close()
    maps.close()
