"""The table without privilege: one listener per worker, and a classic-BPF program that picks among them.

The listeners share an address (SO_REUSEPORT). The program computes Toeplitz over the real packet's 4-tuple, exactly
as a device would, looks the bucket up in its table and returns the index of a listener. It decides about new
connections only. Attaching needs no privilege; moving a group is attaching a program with another table.
"""

from __future__ import annotations

import ctypes
import socket
import struct
from collections.abc import Sequence
from functools import lru_cache

from flexstream.nic.rss.toeplitz import key_windows

SO_ATTACH_REUSEPORT_CBPF = 51
MOST_INSTRUCTIONS = 4096  # the kernel's limit for a classic program
MOST_ENTRIES = 1024  # of a table that still fits, with both families' hashes in front of it
BACKLOG = 4096

_NET = 0xFFF00000  # SKF_NET_OFF: offsets from here count from the network header
_LD_WORD, _LD_BYTE, _LD_IMM, _LD_MEM = 0x20, 0x30, 0x00, 0x60
_ST, _TAX, _TXA, _XOR, _AND = 0x02, 0x07, 0x87, 0xA4, 0x54
_JUMP, _JUMP_EQUAL, _JUMP_SET, _RETURN = 0x05, 0x15, 0x45, 0x06

Instruction = tuple[int, int, int, int]  # code, jump when true, jump when false, k


def _hash_words(key: bytes, words: Sequence[int], mask: int) -> list[Instruction]:
    """Scratch word 0 becomes the hash of these words of the packet (offsets from the network header)."""
    program: list[Instruction] = []
    windows = key_windows(key, len(words) * 32)
    for position, offset in enumerate(words):
        program += [(_LD_WORD, 0, 0, _NET + offset), (_TAX, 0, 0, 0)]
        for bit in range(32):
            window = int(windows[position * 32 + bit]) & mask
            if window:  # only the bits that choose the bucket matter
                program += [
                    (_TXA, 0, 0, 0),
                    (_JUMP_SET, 0, 3, 0x80000000 >> bit),
                    (_LD_MEM, 0, 0, 0),
                    (_XOR, 0, 0, window),
                    (_ST, 0, 0, 0),
                ]
    return program


@lru_cache(maxsize=8)
def _bucket_code(key: bytes, entries: int, versions: tuple[int, ...]) -> bytes:
    """Leaves the bucket in A. IPv4: addresses at 12 and 16, ports at 20; IPv6: at 8 to 39, ports at 40.

    A packet with IP options or extension headers is hashed wrongly, so it is misaligned, and handed over like any.
    """
    mask = entries - 1
    four = _hash_words(key, (12, 16, 20), mask) if 4 in versions else []
    six = _hash_words(key, tuple(range(8, 44, 4)), mask) if 6 in versions else []
    program: list[Instruction] = [(_LD_IMM, 0, 0, 0), (_ST, 0, 0, 0)]
    if four and six:
        four.append((_JUMP, 0, 0, len(six)))
        program += [
            (_LD_BYTE, 0, 0, _NET),
            (_AND, 0, 0, 0xF0),
            (_JUMP_EQUAL, 1, 0, 0x40),
            (_JUMP, 0, 0, len(four)),
        ]
    program += [*four, *six, (_LD_MEM, 0, 0, 0), (_AND, 0, 0, mask)]
    return _pack(program)


def _versions(listener: socket.socket) -> tuple[int, ...]:
    """The IP versions of the packets that reach it. Only what is needed: older kernels cap the program's memory."""
    if listener.family == socket.AF_INET:
        return (4,)
    host = listener.getsockname()[0]
    if host.startswith("::ffff:"):
        return (4,)
    only_six = listener.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
    return (4, 6) if host == "::" and not only_six else (6,)


def _table_code(table: Sequence[int]) -> bytes:
    program: list[Instruction] = []
    for bucket, listener in enumerate(table[:-1]):
        program += [(_JUMP_EQUAL, 0, 1, bucket), (_RETURN, 0, 0, listener)]
    program.append((_RETURN, 0, 0, table[-1]))
    return _pack(program)


def _pack(program: Sequence[Instruction]) -> bytes:
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def attach_table(listener: socket.socket, key: bytes, table: Sequence[int]) -> None:
    """Let entry e of the table choose the listener for connections of bucket e. Raises OSError."""
    code = _bucket_code(key, len(table), _versions(listener)) + _table_code(table)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("@HxxxxxxQ", len(code) // 8, ctypes.addressof(buffer))
    listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_REUSEPORT_CBPF, program)


def share(first: socket.socket, count: int) -> list[socket.socket]:
    """`first` and so many listeners on its address that there are `count`, in the order of the program's indices.

    `first` was bound and is listening alone, so a second daemon on the port has been noticed; only then it becomes one
    of a group. Raises OSError, and then `first` is as it was.
    """
    group = [first]
    first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        for _ in range(count - 1):
            sock = socket.socket(first.family, socket.SOCK_STREAM)
            group.append(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if first.family == socket.AF_INET6:
                only = first.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, only)
            sock.bind(first.getsockname())
            sock.listen(BACKLOG)
            sock.setblocking(False)
    except OSError:
        for sock in group[1:]:
            sock.close()
        first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 0)
        raise
    return group
