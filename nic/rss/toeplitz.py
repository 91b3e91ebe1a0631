"""Toeplitz, the hash of receive-side scaling, bit for bit as devices compute it; for one packet or for many.

The hash is linear over XOR: hash(a ^ b) = hash(a) ^ hash(b). So a connection's hash is a constant (both addresses and
the destination port) XOR a contribution of the source port, and that contribution is the XOR of one of 16 basis values
per bit that is set. Choosing a port for a bucket is then a table look-up, not a search with the hash in its loop.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

# The key of the published verification suite; many drivers use it, and so does the table in user space.
DEFAULT_KEY = bytes.fromhex("6d5a56da255b0ec24167253d43a38fb0d0ca2bcbae7b30b477cb2da38030f20c6a42b73bbeac01fa")
PORTS = 1 << 16

Hashes = npt.NDArray[np.uint32]
Ip = ipaddress.IPv4Address | ipaddress.IPv6Address


def parse_ip(text: str) -> Ip:
    """The address as it is in the packet: a v4-mapped one is IPv4, a zone (fe80::1%eth0) is left out."""
    ip = ipaddress.ip_address(text.partition("%")[0])
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return mapped or ip


def address_bytes(source: str, destination: str) -> bytes:
    """What a 2-tuple hash reads. Raises ValueError for addresses of different families."""
    first, second = parse_ip(source), parse_ip(destination)
    if first.version != second.version:
        raise ValueError(f"{source} and {destination} are addresses of different families")
    return first.packed + second.packed


def packet_bytes(source: tuple[str, int], destination: tuple[str, int]) -> bytes:
    """What a 4-tuple hash reads of a packet from `source` to `destination`."""
    ports = source[1].to_bytes(2, "big") + destination[1].to_bytes(2, "big")
    return address_bytes(source[0], destination[0]) + ports


@lru_cache(maxsize=64)
def key_windows(key: bytes, bits: int) -> Hashes:
    """The 32 bits of the key from bit i on, for every bit i of an input: the hash is the XOR of those that are set."""
    if len(key) * 8 < bits + 31:
        raise ValueError(f"a key of {len(key)} bytes cannot hash {bits // 8} bytes: it needs {bits // 8 + 4}")
    number, length = int.from_bytes(key, "big"), len(key) * 8
    windows = np.array([(number << 32 >> (length - bit)) & 0xFFFFFFFF for bit in range(bits)], dtype=np.uint32)
    windows.flags.writeable = False
    return windows


def toeplitz(key: bytes, data: bytes) -> int:
    """The hash of one input."""
    return int(toeplitz_many(key, np.frombuffer(data, np.uint8).reshape(1, -1))[0])


def toeplitz_many(key: bytes, data: npt.NDArray[np.uint8]) -> Hashes:
    """The hashes of many inputs of one length: an array of shape (inputs, bytes)."""
    bits = np.unpackbits(np.ascontiguousarray(data, np.uint8), axis=1).astype(bool)
    windows = key_windows(bytes(key), bits.shape[1])
    chosen = np.where(bits, windows, np.uint32(0))
    return np.bitwise_xor.reduce(chosen, axis=1).astype(np.uint32)


def bucket_of(key: bytes, source: tuple[str, int], destination: tuple[str, int], entries: int) -> int:
    """The entry of a table of `entries` (a power of two) that decides about packets from `source`."""
    return toeplitz(key, packet_bytes(source, destination)) & (entries - 1)


def port_basis(key: bytes, version: int) -> tuple[int, ...]:
    """The contributions of the source port's 16 bits, the lowest bit first."""
    first = 64 if version == 4 else 256  # behind both addresses
    windows = key_windows(bytes(key), first + 32)
    return tuple(int(window) for window in windows[first : first + 16][::-1])


@lru_cache(maxsize=8)
def port_contributions(key: bytes, version: int) -> Hashes:
    """The contribution of every source port, 0 to 65535."""
    table = np.zeros(1, np.uint32)
    for value in port_basis(key, version):
        table = np.concatenate((table, table ^ np.uint32(value)))
    table.flags.writeable = False
    return table


def port_hashes(key: bytes, source_ip: str, destination: tuple[str, int]) -> Hashes:
    """The hash of packets from every source port of an address, by port."""
    constant = toeplitz(key, packet_bytes((source_ip, 0), destination))
    return port_contributions(bytes(key), parse_ip(source_ip).version) ^ np.uint32(constant)


def rank(values: Sequence[int]) -> int:
    """The dimension of what XORs of these values can make."""
    basis: list[int] = []
    for value in values:
        for known in basis:
            value = min(value, value ^ known)
        if value:
            basis.append(value)
    return len(basis)


def reaches_every_bucket(key: bytes, version: int, entries: int) -> bool:
    """Whether the source port alone can reach each entry of the table: about one random key in a thousand cannot."""
    mask = entries - 1
    return rank([value & mask for value in port_basis(key, version)]) == mask.bit_length()
