"""Source ports that land a group's connection in the group's bucket: chosen by arithmetic, bound with patience.

The producer's side of steering. A port that somebody has, or that rests in TIME_WAIT, is passed over for the next of
the same bucket; after a bounded number of tries the connection is made without alignment. It is always made.
"""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from flexstream.nic.contract import Steering
from flexstream.nic.rss.toeplitz import parse_ip, port_hashes, reaches_every_bucket

MOST_TRIES = 32  # a bucket of a 128-entry table has about 220 ports of the usual range
_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")  # IPv6 uses the same
_RESERVED_FILE = Path("/proc/sys/net/ipv4/ip_local_reserved_ports")
_USUAL_RANGE = (32768, 60999)
_TAKEN = frozenset((errno.EADDRINUSE, errno.EACCES))  # this port cannot be had; another one may

Ports = npt.NDArray[np.int64]


def local_port_range() -> tuple[int, int]:
    """The lowest and highest port that the kernel itself would choose from."""
    try:
        low, high = (int(part) for part in _RANGE_FILE.read_text().split())
    except (OSError, ValueError):
        return _USUAL_RANGE
    return (low, high) if 0 < low <= high < 65536 else _USUAL_RANGE


def reserved_ports() -> list[int]:
    """Ports that the administrator keeps out of automatic choice ("8080,9000-9010")."""
    found: list[int] = []
    try:
        for part in _RESERVED_FILE.read_text().strip().split(","):
            low, _, high = part.partition("-")
            found += range(int(low), int(high or low) + 1) if part else ()
    except (OSError, ValueError):
        pass
    return found


def eligible_ports() -> Ports:
    low, high = local_port_range()
    ports = np.arange(low, high + 1, dtype=np.int64)
    return np.setdiff1d(ports, np.array(reserved_ports(), np.int64), assume_unique=True)


def candidate_ports(
    steering: Steering,
    source_ip: str,
    destination: tuple[str, int],
    groups: Sequence[int],
    ports: Ports | None = None,
) -> dict[int, Ports]:
    """The source ports of each group, in ascending order, by XOR arithmetic over all of `ports` at once.

    `source_ip` and `destination` are the addresses as the daemon sees them. Raises ValueError for addresses of two
    families and for a key too short for the family.
    """
    if ports is None:
        ports = eligible_ports()
    ports = ports[ports != destination[1]]  # from its own port, a socket can connect to itself
    hashes = port_hashes(steering.key, source_ip, destination)[ports]
    buckets = (hashes & np.uint32(steering.entries - 1)).astype(np.int64)
    shared = min(steering.groups, steering.entries)  # entry e is of group e mod G, and group g of entry g mod entries
    owners = buckets % shared
    order = np.argsort(owners, kind="stable")
    bounds = np.searchsorted(owners[order], np.arange(shared + 1))
    by_owner = ports[order]
    return {group: by_owner[bounds[group % shared] : bounds[group % shared + 1]] for group in groups}


@dataclass(frozen=True, slots=True)
class Promise:
    """What a producer says in HELLO about its connection: the port that it bound and the bucket that this should be."""

    port: int
    bucket: int


class PortChooser:
    """Binds sockets of one producer to ports of their groups' buckets.

    `source` is the local address to bind, as `getsockname()` of the control connection gives it; `seen` the same as
    the daemon saw it (they differ behind NAT), `destination` the daemon's address and port. Not thread-safe.
    `reason` says why nothing can be aligned, when that is known beforehand.
    """

    def __init__(
        self,
        steering: Steering,
        source: tuple[str, int] | tuple[str, int, int, int],
        seen: str,
        destination: tuple[str, int],
        *,
        tries: int = MOST_TRIES,
        rng: random.Random | None = None,
        ports: Ports | None = None,
    ) -> None:
        self.steering = steering
        self._source = source
        self._tries = tries
        self._rng = rng or random.Random()
        self._hashes = port_hashes(steering.key, seen, destination)  # ValueError before anything is bound
        version = parse_ip(seen).version
        self.reason: str | None = None
        if not reaches_every_bucket(steering.key, version, steering.entries):
            self.reason = f"with this RSS key no source port reaches some of the {steering.entries} buckets"
        self._candidates = candidate_ports(steering, seen, destination, range(steering.groups), ports)
        self._next: dict[int, int] = {}

    def candidates(self, group: int) -> Ports:
        return self._candidates[group]

    def bucket(self, port: int) -> int:
        return int(self._hashes[port]) & (self.steering.entries - 1)

    def bind(self, sock: socket.socket, group: int) -> Promise | None:
        """Bind the socket to a port of the group's bucket. None: there is none to be had, the socket is unbound.

        Starts at a random port of the bucket, so that producers on one host do not meet, and goes on from there with
        the next call: a port that just failed is not tried again at once.
        """
        ports = self._candidates.get(group)
        if ports is None or not len(ports):
            return None
        at = self._next.setdefault(group, self._rng.randrange(len(ports)))
        for step in range(min(self._tries, len(ports))):
            port = int(ports[(at + step) % len(ports)])
            self._next[group] = at + step + 1
            try:
                # No SO_REUSEADDR: it would let the bind succeed on ports whose connect then fails.
                sock.bind((self._source[0], port, *self._source[2:]))
            except OSError as error:
                if error.errno in _TAKEN:
                    continue
                return None  # the address is not ours (any more), or binding is not allowed: let the kernel choose
            return Promise(port, self.bucket(port))
        return None
