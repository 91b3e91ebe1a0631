"""The software table as BPF programs: hash a packet of the data port, count its bucket, send it to the table's core.

The hash is Toeplitz with a key whose 16-bit words are all the same. It is the plain Toeplitz hash of that 40-byte
key, so producers compute it as they do for hardware; but since every 16-bit word of the input then meets the same
piece of the key, the hash is a function of the words' XOR alone. IPv4 and IPv6 both come down to a few XORs and two
table lookups. And since KEY_WORD has an odd number of bits, that function is a bijection of 16-bit words: whatever
the addresses are, each bucket can be reached, and by equally many source ports.

Three places, one front part:
- `TCX_INGRESS` (kernel 6.6): a packet on the wrong core gets a hash by which RPS picks the right one, and enters the
  device once more. One that comes back to the wrong core with that very hash was not obeyed: it is counted and let
  through, so nothing can go round for ever.
- `TCX_EGRESS`, for loopback (6.6): there what is sent is what will be received, so the hash is set on the way out, and
  the packet enters once.
- `XDP`, generic mode with a cpumap (5.15): the packet is handed to the core's kernel thread. Always, also when it is
  on the right core already: one that went straight on could overtake those that wait for the thread.
"""

from __future__ import annotations

import enum
import socket
import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flexstream.nic.bpf.assembler import R0, R1, R2, R3, R4, R5, R6, R7, R8, R9, R10, Assembler, Helper, Register, Size
from flexstream.nic.bpf.loader import (
    AttachType,
    Map,
    MapType,
    PerCpuWords,
    Program,
    ProgramType,
    SharedWords,
)

KEY_WORD = 0x6D5A
KEY = KEY_WORD.to_bytes(2, "big") * 20
MAX_ENTRIES = 2048  # the counters of a CPU are one value, and per-CPU values are limited to 32 KiB

_LONGEST_HEADERS = 14 + 4 + 60 + 4  # Ethernet, VLAN tag, IPv4 with all options, both ports
_SHORTEST_TCP = 14 + 20 + 20
_SKB_LENGTH, _SKB_IFINDEX, _SKB_HASH, _SKB_DATA, _SKB_DATA_END = 0, 40, 68, 76, 80  # struct __sk_buff
_XDP_DATA, _XDP_DATA_END = 0, 4  # struct xdp_md
_TCX_NEXT, _XDP_PASS = -1, 2
_REDIRECT_TO_INGRESS = 1  # BPF_F_INGRESS
_TCP = 6


class Place(enum.StrEnum):
    """Where the program sits."""

    TCX_INGRESS = "tcx ingress"
    TCX_EGRESS = "tcx egress"
    XDP = "XDP generic"

    @property
    def attach(self) -> AttachType:
        return {"tcx ingress": AttachType.TCX_INGRESS, "tcx egress": AttachType.TCX_EGRESS}.get(self, AttachType.XDP)


@dataclass(frozen=True, slots=True)
class Entry:
    """A table entry: the queue, its core, and the least hash by which RPS picks that core.

    Packed into one word, so that a store changes all of it at once.
    """

    queue: int
    cpu: int
    hash_base: int

    def pack(self) -> int:
        return self.hash_base << 32 | self.queue << 16 | self.cpu

    @classmethod
    def unpack(cls, word: int) -> Entry:
        return cls(word >> 16 & 0xFFFF, word & 0xFFFF, word >> 32)


def rps_hash_base(position: int, cpus: int) -> int:
    """The least hash for which RPS picks the CPU at `position` of its mask's `cpus`: (hash * cpus) >> 32.

    One more than that, because RPS takes the hash 0 for none. A base and 16 bits on top stay with one CPU for as many
    CPUs as there can be.
    """
    return -(-(position << 32) // cpus) + 1


class TableMaps:
    """What the programs and we share: the table with the port behind it, and the counters."""

    def __init__(self, entries: int) -> None:
        if entries < 1 or entries & (entries - 1) or entries > MAX_ENTRIES:
            raise ValueError(f"{entries} entries; a power of two up to {MAX_ENTRIES} is needed")
        self.entries = entries
        self._open: list[Map] = []
        try:
            self.table = SharedWords(entries + 1, name="fs_table")
            self._open.append(self.table)
            self.counters = PerCpuWords(entries + 1, name="fs_counters")
            self._open.append(self.counters)
            hash_tables = _hash_tables()
            self.hash_tables = Map(MapType.ARRAY, len(hash_tables), 1, name="fs_toeplitz")
            self._open.append(self.hash_tables)
            self.hash_tables.update(0, hash_tables)
        except BaseException:
            self.close()
            raise

    def read_table(self) -> list[Entry]:
        return [Entry.unpack(word) for word in self.table.words[: self.entries]]

    def write_entry(self, bucket: int, entry: Entry) -> None:
        self.table.words[bucket] = entry.pack()

    def write_table(self, words: npt.NDArray[np.uint64]) -> None:
        """Store the packed entries that differ, one by one."""
        table = self.table.words
        for bucket in np.flatnonzero(np.frombuffer(table, np.uint64)[: self.entries] != words).tolist():
            table[bucket] = int(words[bucket])

    def set_port(self, port: int) -> None:
        """Packets to this TCP port are steered, all others pass; 0: all pass."""
        self.table.words[self.entries] = socket.htons(port)

    def bucket_counters(self) -> list[int]:
        """Packets per bucket so far."""
        return self.counters.sums()[: self.entries]

    def disobeyed(self) -> int:
        """Packets that RPS left on the wrong core."""
        return self.counters.sums()[self.entries]

    def close(self) -> None:
        while self._open:
            self._open.pop().close()


class CpuMap(Map):
    """The cores that XDP may hand packets to; each entry is a kernel thread on its core."""

    QUEUED_PACKETS = 2048

    def __init__(self, cpus: int) -> None:
        super().__init__(MapType.CPUMAP, 8, cpus, name="fs_cpus")

    def add(self, cpu: int) -> None:
        self.update(cpu, struct.pack("=Ii", self.QUEUED_PACKETS, 0))


def load_table_program(place: Place, maps: TableMaps, cpus: CpuMap | None = None) -> Program:
    """Raises BpfError, with the verifier's words when it was the verifier."""
    code = Assembler()
    _find_packet(code, place)
    _read_headers(code, maps)
    _look_up(code, maps)
    if place is Place.TCX_INGRESS:
        _steer_received(code, maps)
    elif place is Place.TCX_EGRESS:
        _steer_sent(code, maps)
    else:
        assert cpus is not None
        _hand_over(code, maps, cpus)
    code.label("pass")
    code.exit(_XDP_PASS if place is Place.XDP else _TCX_NEXT)
    kind = ProgramType.XDP if place is Place.XDP else ProgramType.SCHED_CLS
    return Program(kind, code.assemble(), attach=place.attach, name="fs_steer")


def _hash_tables() -> bytes:
    """The hash of a first byte (256 values of 16 bits), then that of a second byte, of the XOR of all words."""
    bits = f"{KEY_WORD:016b}" * 3
    windows = [int(bits[start : start + 16], 2) for start in range(16)]  # both halves of the hash are the same

    def hash_of(byte: int, first_bit: int) -> int:
        value = 0
        for bit in range(8):
            if byte & 0x80 >> bit:
                value ^= windows[first_bit + bit]
        return value

    return struct.pack("=512H", *(hash_of(byte, first_bit) for first_bit in (0, 8) for byte in range(256)))


# What the parts below leave for the next: R6 the context, R2 and R3 start and end of the packet,
# R8 the hash (16 bits), R7 its bucket's offset in bytes, R9 the table's entry. "pass" is where other packets go.


def _find_packet(code: Assembler, place: Place) -> None:
    code.move(R6, R1)
    if place is Place.XDP:
        code.load(Size.U32, R2, R6, _XDP_DATA)
        code.load(Size.U32, R3, R6, _XDP_DATA_END)
        return
    code.load(Size.U32, R2, R6, _SKB_DATA)
    code.load(Size.U32, R3, R6, _SKB_DATA_END)
    code.move(R4, R2)
    code.alu(R4, "+", _SHORTEST_TCP)
    code.jump_if(R4, "<=", R3, "headers are there")
    code.load(Size.U32, R2, R6, _SKB_LENGTH)  # a driver may leave the headers in the packet's pages
    code.jump_if(R2, "<", _SHORTEST_TCP, "pass")
    code.jump_if(R2, "<=", _LONGEST_HEADERS, "pull")
    code.move(R2, _LONGEST_HEADERS)
    code.label("pull")
    code.move(R1, R6)
    code.call(Helper.SKB_PULL_DATA)
    code.load(Size.U32, R2, R6, _SKB_DATA)
    code.load(Size.U32, R3, R6, _SKB_DATA_END)
    code.label("headers are there")


def _read_headers(code: Assembler, maps: TableMaps) -> None:
    """Leaves the XOR of addresses and ports, as 32-bit words, in R7."""
    _need(code, 18)  # any TCP packet is longer than Ethernet and a VLAN tag
    code.load(Size.U16, R5, R2, 12)
    code.alu(R2, "+", 14)
    code.jump_if(R5, "==", socket.htons(0x8100), "vlan")
    code.jump_if(R5, "!=", socket.htons(0x88A8), "network")
    code.label("vlan")
    code.load(Size.U16, R5, R2, 2)
    code.alu(R2, "+", 4)
    code.label("network")
    code.jump_if(R5, "==", socket.htons(0x86DD), "ipv6")
    code.jump_if(R5, "!=", socket.htons(0x0800), "pass")

    _need(code, 20)
    code.load(Size.U8, R5, R2, 9)
    code.jump_if(R5, "!=", _TCP, "pass")
    code.load(Size.U16, R5, R2, 6)
    code.alu(R5, "&", socket.htons(0x3FFF))  # a fragment: only the first has ports, so none is steered
    code.jump_if(R5, "!=", 0, "pass")
    code.load(Size.U32, R7, R2, 12)
    code.load(Size.U32, R5, R2, 16)
    code.alu(R7, "^", R5)
    code.load(Size.U8, R5, R2, 0)
    code.alu(R5, "&", 0x0F)
    for words in range(5, 16):  # by constants: adding a register to a packet's address takes CAP_PERFMON
        code.jump_if(R5, "!=", words, f"not {words} words")
        code.alu(R2, "+", 4 * words)
        code.jump("transport")
        code.label(f"not {words} words")
    code.jump("pass")

    code.label("ipv6")
    _need(code, 40)
    code.load(Size.U8, R5, R2, 6)
    code.jump_if(R5, "!=", _TCP, "pass")
    code.load(Size.U32, R7, R2, 8)
    for word in range(1, 8):
        code.load(Size.U32, R5, R2, 8 + 4 * word)
        code.alu(R7, "^", R5)
    code.alu(R2, "+", 40)

    code.label("transport")
    _need(code, 4)
    code.map_value(R1, maps.table.fd, maps.entries * 8)
    code.load(Size.U64, R1, R1)
    code.load(Size.U16, R5, R2, 2)
    code.jump_if(R5, "!=", R1, "pass")
    code.load(Size.U32, R5, R2, 0)
    code.alu(R7, "^", R5)


def _look_up(code: Assembler, maps: TableMaps) -> None:
    code.move(R5, R7)
    code.alu(R5, ">>", 16)
    code.alu(R7, "^", R5)
    code.move(R5, R7)
    code.map_value(R1, maps.hash_tables.fd)
    _hash_byte(code, R7)  # the low byte is the first one on the wire
    code.load(Size.U16, R8, R7)
    code.alu(R5, ">>", 8)
    _hash_byte(code, R5)
    code.load(Size.U16, R5, R5, 512)
    code.alu(R8, "^", R5)
    code.move(R7, R8)
    code.alu(R7, "&", maps.entries - 1)
    code.alu(R7, "<<", 3)
    code.map_value(R1, maps.table.fd)
    code.alu(R1, "+", R7)
    code.load(Size.U64, R9, R1)


def _hash_byte(code: Assembler, register: Register) -> None:
    """Register: from a byte to the address of its hash in the table at R1."""
    code.alu(register, "&", 0xFF)
    code.alu(register, "<<", 1)
    code.alu(register, "+", R1)


def _steer_received(code: Assembler, maps: TableMaps) -> None:
    code.call(Helper.GET_SMP_PROCESSOR_ID)
    code.move(R1, R9)
    code.alu(R1, "&", 0xFFFF)
    code.jump_if(R0, "==", R1, "deliver")
    _rps_hash(code, R2)
    code.load(Size.U32, R1, R6, _SKB_HASH)
    code.jump_if(R1, "==", R2, "disobeyed")
    code.move(R1, R6)
    code.call(Helper.SET_HASH)
    code.load(Size.U32, R1, R6, _SKB_IFINDEX)
    code.move(R2, _REDIRECT_TO_INGRESS)
    code.call(Helper.REDIRECT)
    code.exit()
    code.label("disobeyed")
    _count(code, maps, "pass")
    code.load(Size.U64, R1, R0, maps.entries * 8)
    code.alu(R1, "+", 1)
    code.store(Size.U64, R0, maps.entries * 8, R1)
    code.jump("pass")
    code.label("deliver")
    _count(code, maps, "pass")


def _steer_sent(code: Assembler, maps: TableMaps) -> None:
    _rps_hash(code, R2)
    code.move(R1, R6)
    code.call(Helper.SET_HASH)
    _count(code, maps, "pass")


def _hand_over(code: Assembler, maps: TableMaps, cpus: CpuMap) -> None:
    _count(code, maps, "hand over")
    code.label("hand over")
    code.map_pointer(R1, cpus.fd)
    code.move(R2, R9)
    code.alu(R2, "&", 0xFFFF)
    code.move(R3, _XDP_PASS)  # what becomes of it when the map has no such core
    code.call(Helper.REDIRECT_MAP)
    code.exit()


def _rps_hash(code: Assembler, target: Register) -> None:
    code.move(target, R9)
    code.alu(target, ">>", 32)
    code.alu(target, "+", R8)


def _count(code: Assembler, maps: TableMaps, without: str) -> None:
    """One more in the bucket; leaves the counters in R0, or goes to `without` if there are none."""
    code.store(Size.U32, R10, -4, 0)
    code.map_pointer(R1, maps.counters.fd)
    code.move(R2, R10)
    code.alu(R2, "+", -4)
    code.call(Helper.MAP_LOOKUP_ELEM)
    code.jump_if(R0, "==", 0, without)
    code.move(R2, R0)
    code.alu(R2, "+", R7)
    code.load(Size.U64, R1, R2)
    code.alu(R1, "+", 1)
    code.store(Size.U64, R2, 0, R1)


def _need(code: Assembler, size: int) -> None:
    """Other packets than those with so many bytes from R2 on pass; the verifier wants to see it checked."""
    code.move(R4, R2)
    code.alu(R4, "+", size)
    code.jump_if(R4, ">", R3, "pass")
