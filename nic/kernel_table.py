"""A table in the kernel, for devices that have none: veth, loopback, many cloud NICs. Needs privilege, no hardware.

A BPF program on the device finds a packet's bucket as an RSS NIC would (the same Toeplitz, so producers steer their
ports in the same way) and sends it to the core that the table names. A "queue" here is a worker's core. Table and
counters are memory that the program and we share: a write is a store, and costs no system call.

`method` is "tcx" (kernel 6.6 and newer: the packet's hash is set, and RPS moves it; nearly free), "xdp" (5.15 and
newer: generic XDP and a cpumap; every packet is copied once) or "auto": tcx where it works. The program leaves with
this process, however it ends; the RPS masks, and the offloads that generic XDP switches off, are in the journal.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import struct
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from flexstream.errors import ConfigError
from flexstream.nic.bpf import loader as bpf
from flexstream.nic.bpf.loader import BpfError, Link
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
from flexstream.nic.contract import (
    FOUR_TUPLE,
    TABLE_ENTRIES,
    Capability,
    Change,
    Connection,
    Nic,
    NicHealth,
    NicState,
    Steering,
    Verdict,
    Verification,
    entries_for,
)
from flexstream.nic.device.devices import is_own_address, name_of_index
from flexstream.nic.device.journal import DeviceLock
from flexstream.nic.device.receive_steering import ReceiveSteering
from flexstream.nic.rss.toeplitz import bucket_of
from flexstream.nic.verification import TOLERATED_SHARE

log = logging.getLogger("flexstream.nic.kernel")

METHODS = ("auto", "tcx", "xdp")
OLDEST_TCX, OLDEST_XDP = (6, 6), (5, 15)
_NO_HARDWARE = "the table is a BPF map in the kernel, not the device's own"
_NO_INTERRUPTS = "the program moves packets to cores after the interrupt; interrupts stay where they are"
_NO_PINNING = "workers are pinned when the engine starts"
_IFF_UP, _IFF_LOOPBACK, _SIOCGIFFLAGS = 0x1, 0x8, 0x8913


class KernelNic(Nic):
    """A BPF table on `device` for `groups` groups, on the cores in `cpus` (default: all that this process may use).

    Loads the program but changes nothing on the device before `start`. Raises ConfigError for a device or a method
    that does not exist; what is missing otherwise (privilege, kernel) is in `capabilities()`, and `start` raises it.
    Packets of other ports than `port` are left alone; `listeners` tells it the port that the engine got.
    """

    kind = "kernel"

    def __init__(
        self,
        device: str,
        *,
        groups: int,
        cpus: Sequence[int] | None = None,
        method: str = "auto",
        port: int = 0,
        entries: int | None = None,
        journal_folder: Path | None = None,
    ) -> None:
        if method not in METHODS:
            raise _invalid(f"method {method!r}", f"use one of {', '.join(METHODS)}")
        if groups < 1:
            raise _invalid(f"{groups} groups", "at least one is needed")
        try:
            self._ifindex = socket.if_nametoindex(device)
        except OSError:
            names = ", ".join(name for _, name in socket.if_nameindex())
            raise _invalid(f"there is no device {device!r}", f"this network namespace has {names}") from None
        self.device: str = device
        self._groups = groups
        self._entries = entries or min(max(TABLE_ENTRIES, 1 << (groups - 1).bit_length()), MAX_ENTRIES)
        self._queue_cpu = list(cpus) if cpus else sorted(os.sched_getaffinity(0))
        self._port = port
        self._steering = ReceiveSteering(device, journal_folder=journal_folder)
        self._lock = DeviceLock(device)
        self._maps: TableMaps | None = None
        self._cpu_map: CpuMap | None = None
        self._program: bpf.Program | None = None
        self._link: Link | None = None
        self._verification: Verification | None = None
        self._refusal: str | None = None
        self._place = self._load(method)

    # -- what it can do

    @classmethod
    def probe(cls, device: str) -> str | None:
        """Why there can be no table on this device, or None. Changes nothing."""
        try:
            nic = cls(device, groups=1)
        except ConfigError as error:
            return error.message
        nic.close()
        return nic._refusal

    @property
    def method(self) -> str | None:
        """Which program it is ("tcx ingress", ...); None when none could be loaded."""
        return None if self._refusal else str(self._place)

    def capabilities(self) -> tuple[Capability, ...]:
        refusal = self._refusal or ""
        if not refusal and self._maps is None:
            refusal = "this NIC is closed"
        ours = ("read_table", "write_table", "alignment", "rss_key", "hash_fields", "bucket_counters")
        return (
            Capability("placement", True),
            Capability("hand_over", True),
            *(Capability(name, not refusal, refusal) for name in ours),
            Capability("hardware_table", False, _NO_HARDWARE),
            Capability("pin_worker", False, _NO_PINNING),
            Capability("pin_interrupt", False, _NO_INTERRUPTS),
        )

    def steering(self) -> Steering | None:
        return Steering(KEY, FOUR_TUPLE, self._entries, self._groups) if self._maps else None

    def queues(self) -> int:
        return len(self._queue_cpu)

    def key(self) -> bytes:
        self.require("rss_key")
        return KEY

    def hash_fields(self) -> tuple[str, ...]:
        return FOUR_TUPLE if self._maps else ()

    # -- life

    def start(self, worker_cpus: Sequence[int | None]) -> None:
        maps = self._needed_maps("write_table")
        if self._link is not None:
            raise _invalid(f"start on {self.device}", "it was already started")
        available = sorted(os.sched_getaffinity(0))
        self._queue_cpu = [
            available[worker % len(available)] if cpu is None else cpu for worker, cpu in enumerate(worker_cpus)
        ]
        self._lock.take()
        try:
            self._steering.recover()
            self._aim()
            self.set_table([entry % self._groups % self.queues() for entry in range(self._entries)])
            maps.set_port(self._port)
            self._attach()
        except BaseException:
            self.undo()
            raise
        log.info("%s: table of %d entries by %s", self.device, self._entries, self._place)

    def reapply(self) -> None:
        """Put back what somebody else has changed, and write the table again. Raises ConfigError."""
        table = self.table()
        if self._link is not None:
            self._aim()
        self.set_table(table)

    def listeners(self, first: socket.socket) -> None:
        """One socket serves all; but its port is the one whose packets are steered."""
        self.serve_port(first.getsockname()[1])

    def serve_port(self, port: int) -> None:
        self._port = port
        if self._maps is not None and self._link is not None:
            self._maps.set_port(port)

    def changes(self) -> tuple[Change, ...]:
        attached = [] if self._link is None else [Change(f"{self.device} {self._place}", "none", "fs_steer")]
        return (*self._steering.changes(), *attached)

    def undo(self) -> None:
        """Take the program off the device, put RPS back as it was, let others have the device."""
        if self._link is not None:
            self._gone()  # the masks are found by the name that the device has now
            self._link.close()
            self._link = None
        self._verification = None
        try:
            self._steering.undo()
        finally:
            self._lock.release()

    def close(self) -> None:
        try:
            self.undo()
        finally:
            for opened in (self._program, self._cpu_map, self._maps):
                if opened is not None:
                    opened.close()
            self._program = self._cpu_map = self._maps = None
            self._steering.close()

    # -- the table

    def table(self) -> tuple[int, ...]:
        return tuple(entry.queue for entry in self._needed_maps("read_table").read_table())

    def set_table(self, entries: Sequence[int]) -> None:
        maps = self._needed_maps("write_table")
        if len(entries) != self._entries:
            raise _invalid(f"a table of {len(entries)} entries", f"this table has {self._entries}")
        queues = np.asarray(entries, np.int64)
        if len(wrong := np.flatnonzero((queues < 0) | (queues >= self.queues()))):
            bucket = int(wrong[0])
            raise _invalid(f"entry {bucket} = queue {entries[bucket]}", f"queues are 0 to {self.queues() - 1}")
        if self._link is not None and self._link.ifindex() == 0:
            raise _invalid(f"the table of {self.device}", "the device is gone")
        maps.write_table(self._entry_words()[queues])

    def follow(self, placement: Sequence[int]) -> None:
        self.set_table(entries_for(placement, self._entries, self.queues()))

    def bucket_counters(self) -> tuple[int, ...]:
        return tuple(self._needed_maps("bucket_counters").bucket_counters())

    def queue_cpu(self) -> tuple[int | None, ...]:
        return tuple(self._queue_cpu)

    def pin(self, queue: int, cpu: int) -> None:
        """Send what the table has for this queue to another core."""
        if not 0 <= queue < self.queues():
            raise _invalid(f"queue {queue}", f"queues are 0 to {self.queues() - 1}")
        table, old = self.table(), list(self._queue_cpu)
        self._queue_cpu[queue] = cpu
        try:
            if self._link is not None:
                self._aim()
        except ConfigError:
            self._queue_cpu = old
            self._aim()
            raise
        self.set_table(table)

    # -- is it true?

    def verify(self, connections: Sequence[Connection]) -> Verification:
        """By the core of the latest packet. Connections that came by another device say nothing, and are left out."""
        table = self._needed_maps("read_table").read_table()
        wrong: list[str] = []
        checked = 0
        for connection in self._through_device(connections):
            bucket = bucket_of(KEY, connection.peer, connection.local, self._entries)
            checked += 1
            if connection.incoming_cpu != table[bucket].cpu:
                wrong.append(
                    f"{connection.peer[0]}:{connection.peer[1]} is in bucket {bucket}, which the table sends to core "
                    f"{table[bucket].cpu}, and arrived on core {connection.incoming_cpu}"
                )
        self._verification = _judged(wrong, checked, self.device)
        return self._verification

    def health(self) -> NicHealth:
        if self._refusal is not None:
            return NicHealth(NicState.UNVERIFIED, self._refusal)
        if (gone := self._gone()) is not None:
            return NicHealth(NicState.GONE, gone)
        if self._link is None:
            return NicHealth(NicState.UNVERIFIED, "the program is not attached: nothing has been started")
        self._lock.answer()
        if drift := self.drift():
            return NicHealth(NicState.UNVERIFIED, "; ".join(drift))
        if self._verification is None:
            return NicHealth(NicState.UNVERIFIED, "no connection has been compared with the table yet")
        return NicHealth(NicState(self._verification.verdict.value), self._verification.reason)

    def drift(self) -> list[str]:
        if self._link is None or self._gone() is not None:
            return []
        found = self._steering.drift()
        if not _is_up(self.device):
            found.append(f"{self.device} is down")
        return found

    def disobeyed_packets(self) -> int:
        """How many packets RPS left on another core than it was asked for."""
        return self._needed_maps("bucket_counters").disobeyed()

    # -- parts

    def _load(self, method: str) -> Place:
        """Maps and program, by the first method that works; `_refusal` says why none does."""
        reasons: list[str] = []
        place = Place.TCX_EGRESS if _is_loopback(self.device) else Place.TCX_INGRESS
        candidates = {"auto": [place, Place.XDP], "tcx": [place], "xdp": [Place.XDP]}[method]
        for place in candidates:
            reason = self._obstacle(place)
            if reason is None:
                try:
                    self._maps = TableMaps(self._entries)
                    self._cpu_map = CpuMap(bpf.possible_cpus()) if place is Place.XDP else None
                    self._program = load_table_program(place, self._maps, self._cpu_map)
                except BpfError as error:
                    reason = str(error)
                    for opened in (self._cpu_map, self._maps):
                        if opened is not None:
                            opened.close()
                    self._maps = self._cpu_map = None
                else:
                    return place
            if reason not in reasons:
                reasons.append(reason)
        self._refusal = "; ".join(reasons)
        return candidates[0]

    def _obstacle(self, place: Place) -> str | None:
        if sys.byteorder != "little":
            return "the BPF program is written for little-endian machines"
        if place is Place.XDP:
            if bpf.kernel_version() < OLDEST_XDP:
                return f"kernel {os.uname().release} has no cpumap for generic XDP (5.15 and newer have it)"
            return None
        try:
            bpf.attached_programs(self._ifindex, place.attach)
        except BpfError as error:
            if error.errno == errno.EINVAL:
                return f"kernel {os.uname().release} has no tcx (6.6 and newer have it)"
            return str(error)
        return self._steering.refusal()

    def _aim(self) -> None:
        """Let RPS or the cpumap reach the queues' cores."""
        online = bpf.online_cpus()
        for queue, cpu in enumerate(self._queue_cpu):
            if cpu not in online:
                raise _invalid(f"core {cpu} for queue {queue}", f"the cores that are online are {sorted(online)}")
        if self._cpu_map is None:
            self._steering.apply(self._queue_cpu)
            return
        self._steering.stop_merging()
        for cpu in set(self._queue_cpu):
            self._cpu_map.add(cpu)

    def _entry_words(self) -> npt.NDArray[np.uint64]:
        """The table's entry for each queue, packed. RPS counts the cores of its mask in order."""
        cores = sorted(set(self._queue_cpu))
        entries = [
            Entry(queue, cpu, rps_hash_base(cores.index(cpu), len(cores))) for queue, cpu in enumerate(self._queue_cpu)
        ]
        return np.array([entry.pack() for entry in entries], np.uint64)

    def _attach(self) -> None:
        assert self._program is not None
        flags = bpf.XDP_GENERIC if self._place is Place.XDP else 0
        try:
            self._link = Link(self._program, self._ifindex, self._place.attach, flags=flags)
        except BpfError as error:
            busy = f"`ip link show {self.device}` names the XDP program that is already attached"
            hint = busy if error.errno in (errno.EBUSY, errno.EEXIST) else None
            raise ConfigError(f"{self.device}: {error.message}", code="nic_refused", hint=hint) from None

    def _gone(self) -> str | None:
        """Why there is nothing to steer on any more. The program is on the device, whatever that is called."""
        name = name_of_index(self._ifindex)
        if name is None:
            return f"{self.device} is gone"
        if name != self.device:
            log.warning("%s is now called %s", self.device, name)
            self._steering.rename(name)
            self.device = name
        if self._link is not None and self._link.ifindex() == 0:
            return f"somebody took the program off {self.device}"
        return None

    def _through_device(self, connections: Sequence[Connection]) -> Iterator[Connection]:
        """A peer with an address of this machine comes by loopback, whatever address it calls."""
        by_loopback = _is_loopback(self.device)
        ours: dict[str, bool] = {}
        for connection in connections:
            if connection.incoming_cpu is None or connection.incoming_cpu < 0:
                continue
            peer = connection.peer[0]
            if peer not in ours:
                ours[peer] = is_own_address(peer)
            if ours[peer] == by_loopback:
                yield connection

    def _needed_maps(self, capability: str) -> TableMaps:
        maps = self._maps
        if maps is None:
            self.require(capability)  # raises: without maps it is absent
            raise AssertionError("unreachable")
        return maps


def _judged(wrong: Sequence[str], checked: int, device: str) -> Verification:
    if len(wrong) >= 2 and len(wrong) > TOLERATED_SHARE * checked:
        reason = f"{len(wrong)} of {checked} connections did not arrive where the table says: {wrong[0]}"
        return Verification(Verdict.DISOBEYED, reason, checked)
    if checked == 0:
        return Verification(Verdict.UNVERIFIED, f"no connection has received anything through {device} yet")
    if len(wrong) == checked:
        return Verification(Verdict.UNVERIFIED, f"there is only one connection, and {wrong[0]}", checked)
    reason = f"{checked - len(wrong)} of {checked} connections arrived on the core that the table names"
    return Verification(Verdict.VERIFIED, reason, checked)


def _is_up(device: str) -> bool:
    return bool(_flags(device) & _IFF_UP)


def _is_loopback(device: str) -> bool:
    return bool(_flags(device) & _IFF_LOOPBACK)


def _flags(device: str) -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFFLAGS, struct.pack("16sh14x", device.encode(), 0))
        except OSError:
            return 0
    return int(struct.unpack("16sH14x", answer)[1])


def _invalid(what: str, why: str) -> ConfigError:
    return ConfigError(f"kernel NIC: {what}: {why}", code="nic_invalid", hint=None)
