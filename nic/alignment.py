"""Where connections arrived, against where they should have: counted, sampled for verification, and said once.

Nothing here decides anything about rows: a misaligned connection is handed to its group's worker like any other.
"""

from __future__ import annotations

import logging
import random
import socket
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from flexstream.nic.contract import Connection, Steering
from flexstream.nic.rss.ports import Promise
from flexstream.nic.rss.toeplitz import bucket_of

log = logging.getLogger("flexstream.nic")

SO_INCOMING_CPU = 49
SO_INCOMING_NAPI_ID = 56
MOST_SAMPLES = 256  # connections looked at per check
MOST_PEERS_TOLD = 1024  # peers remembered, so that each is spoken of once
_LAST_DATA_RECEIVED = 52  # offset of tcpi_last_data_recv (milliseconds ago) in struct tcp_info
_SETTLE_S = 0.25  # packets on their way, and interrupts, follow a new table with this delay at most

Endpoint = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Arrival:
    """One data connection at its HELLO: the 4-tuple as the daemon sees it, and what the producer promised.

    `home` is the producer's address on its control connection, from which it computed the promise.
    """

    peer: Endpoint
    local: Endpoint
    group: int
    owner: int
    listener: int | None = None
    promise: Promise | None = None
    home: str | None = None

    def translation(self) -> str | None:
        """What was changed on the way, in words; None: nothing was."""
        if self.promise is not None and self.peer[1] != self.promise.port:
            return "the source port has changed"
        if self.home is not None and self.peer[0] != self.home:
            return "the source address is not the control connection's"
        return None


@dataclass(slots=True)
class _Live:
    arrival: Arrival
    accepted_at: float
    family: int
    aligned: bool


def observed_bucket(steering: Steering, arrival: Arrival) -> int | None:
    """The bucket of the connection's packets; None when the key is too short for its addresses."""
    try:
        return bucket_of(steering.key, arrival.peer, arrival.local, steering.entries)
    except ValueError:
        return None


def passes_device(arrival: Arrival, device: str | None) -> bool:
    """Packets to oneself pass no device but loopback."""
    return device in (None, "lo") or arrival.peer[0] != arrival.local[0]


def _is_aligned(arrival: Arrival, steering: Steering | None, table: Sequence[int] | None, owner: int) -> bool:
    if steering is None or table is None:
        return False
    bucket = observed_bucket(steering, arrival)
    return bucket is not None and bucket < len(table) and table[bucket] == owner


class Alignment:
    """The live connections and how they came. Thread-safe: the acceptor adds, the collector removes, a check samples.

    Every socket that was added must be removed with `forget` before its descriptor is closed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._live: dict[int, _Live] = {}
        self._told: OrderedDict[str, None] = OrderedDict()
        self.aligned = 0
        self.misaligned = 0
        self.translated = 0  # connections whose port or address was changed on the way: NAT
        self.stale = 0  # connections steered by a key or table that is no longer the device's

    def arrived(
        self, fd: int, arrival: Arrival, steering: Steering | None, table: Sequence[int] | None
    ) -> tuple[bool, bool]:
        """Note a connection. `table` is worker per bucket as last written, None when that failed or there is none.

        Returns (aligned, stale): it arrived at its owner's queue or listener; its producer used old steering.
        """
        bucket = None if steering is None else observed_bucket(steering, arrival)
        if arrival.listener is not None:
            aligned = arrival.listener == arrival.owner
        else:
            aligned = _is_aligned(arrival, steering, table, arrival.owner)
        stale = False
        family = socket.AF_INET6 if ":" in arrival.local[0] else socket.AF_INET
        with self._lock:
            self._live[fd] = _Live(arrival, time.monotonic(), family, aligned)
            if aligned:
                self.aligned += 1
            else:
                self.misaligned += 1
            if arrival.promise is not None and bucket != arrival.promise.bucket:
                stale = arrival.translation() is None
                self.stale += stale
                self.translated += not stale
                self._tell(arrival, bucket, stale)
        return aligned, stale

    def _tell(self, arrival: Arrival, bucket: int | None, stale: bool) -> None:
        """Say it once per peer."""
        assert arrival.promise is not None
        host = arrival.home or arrival.peer[0]  # a pool has many addresses for one producer
        fields = {
            "peer": host,
            "group": arrival.group,
            "promised_bucket": arrival.promise.bucket,
            "observed_bucket": bucket,
        }
        if stale:
            log.info("steered_by_old_table", extra={"fields": fields})
            return
        if host in self._told:
            return
        self._told[host] = None
        if len(self._told) > MOST_PEERS_TOLD:
            self._told.popitem(last=False)
        fields |= {
            "bound_port": arrival.promise.port,
            "seen_port": arrival.peer[1],
            "seen_address": arrival.peer[0],
            "control_address": arrival.home,
            "why": f"{arrival.translation()} on the way (NAT): its connections are handed over, not aligned",
        }
        log.warning("behind_nat", extra={"fields": fields})

    def judge_again(
        self, steering: Steering | None, table: Sequence[int] | None, placement: Sequence[int], device: str | None
    ) -> None:
        """The path from bucket to core is another one: which of the open connections are aligned now?

        One that a worker's own listener accepted stays as it was judged: no table has a say in it any more.
        """
        with self._lock:
            for live in self._live.values():
                if live.arrival.listener is None:
                    seen = table if passes_device(live.arrival, device) else None
                    live.aligned = _is_aligned(live.arrival, steering, seen, placement[live.arrival.group])

    def forget(self, fd: int) -> None:
        with self._lock:
            self._live.pop(fd, None)

    def open(self) -> int:
        """Connections that are open now."""
        return len(self._live)

    @property
    def ratio(self) -> float | None:
        """Aligned connections among those that are open, as things are now; among all so far when none is open; None
        before the first."""
        with self._lock:
            here = [live.aligned for live in self._live.values()]
        total = self.aligned + self.misaligned
        if here:
            return sum(here) / len(here)
        return self.aligned / total if total else None

    def counts(self) -> dict[str, int | float | None]:
        ratio = self.ratio
        return {
            "aligned": self.aligned,
            "misaligned": self.misaligned,
            "alignment": None if ratio is None else round(ratio, 6),
            "behind_nat": self.translated,
            "steered_by_old_table": self.stale,
        }

    def sample(self, placement: Sequence[int], changed_at: float) -> list[Connection]:
        """Connections that say something about the present table: data came after it was written."""
        with self._lock:
            fds = list(self._live)
        if len(fds) > MOST_SAMPLES:
            fds = random.sample(fds, MOST_SAMPLES)
        found = []
        for fd in fds:
            with self._lock:  # while it is held the descriptor is not closed
                live = self._live.get(fd)
                if live is not None and (seen := _look(fd, live, placement, changed_at + _SETTLE_S)) is not None:
                    found.append(seen)
        return found


def _look(fd: int, live: _Live, placement: Sequence[int], since: float) -> Connection | None:
    arrival = live.arrival
    try:
        sock = socket.socket(live.family, socket.SOCK_STREAM, socket.IPPROTO_TCP, fileno=fd)
    except OSError:
        return None
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
        ago_s = struct.unpack_from("=I", info, _LAST_DATA_RECEIVED)[0] / 1000
        if time.monotonic() - ago_s < since:
            return None
        cpu = sock.getsockopt(socket.SOL_SOCKET, SO_INCOMING_CPU)
        napi = sock.getsockopt(socket.SOL_SOCKET, SO_INCOMING_NAPI_ID)
    except OSError:
        return None
    finally:
        sock.detach()
    return Connection(
        peer=arrival.peer,
        local=arrival.local,
        group=arrival.group,
        worker=placement[arrival.group],
        incoming_cpu=cpu if cpu >= 0 else None,
        napi_id=napi or None,
        listener=arrival.listener if live.accepted_at > since else None,
    )
