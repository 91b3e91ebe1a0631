"""What every NIC implementation promises: one interface for hardware, for the kernel and for user space.

Placement (group -> worker) is the truth; a NIC's indirection table follows it where it can. So nothing here
may fail a stream: an implementation that cannot do a thing says so in `capabilities()`, with the reason, and
raises `ConfigError` with that same reason when it is asked all the same. It never pretends.
"""

from __future__ import annotations

import enum
import socket
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flexstream.errors import ConfigError

TABLE_ENTRIES = 128  # the usual size of an RSS indirection table
FOUR_TUPLE = ("src_ip", "dst_ip", "src_port", "dst_port")  # in the order in which Toeplitz reads them
TWO_TUPLE = ("src_ip", "dst_ip")
SHORTEST_KEY = 16  # bytes of key that IPv4's 12 bytes of input need; IPv6's 36 bytes need 40


@dataclass(frozen=True, slots=True)
class Capability:
    """One thing that a NIC can or cannot do; `reason` says why not, and what would change that."""

    name: str
    present: bool
    reason: str = ""

    def __post_init__(self) -> None:
        if not self.present and not self.reason:
            raise ValueError(f"capability {self.name!r} is absent and gives no reason")


@dataclass(frozen=True, slots=True)
class Change:
    """One change to the machine: it can be printed, applied and undone."""

    where: str
    old: str
    new: str

    def reversed(self) -> Change:
        return Change(self.where, self.new, self.old)

    def __str__(self) -> str:
        return f"{self.where}: {self.old} -> {self.new}"


@dataclass(frozen=True, slots=True)
class Connection:
    """A producer's connection as the daemon sees it: who, for which group, and where its packets arrived."""

    peer: tuple[str, int]
    local: tuple[str, int]
    group: int
    worker: int | None = None
    incoming_cpu: int | None = None  # SO_INCOMING_CPU: the core that handled its latest packet
    napi_id: int | None = None  # SO_INCOMING_NAPI_ID: one per queue; None where the device has none (veth, lo)
    listener: int | None = None  # the worker whose listener accepted it, where each worker has one


class Verdict(enum.StrEnum):
    """Does the device do what its table says? A successful write and an equal read-back prove nothing."""

    VERIFIED = "verified"
    UNVERIFIED = "unverified"
    DISOBEYED = "disobeyed"


@dataclass(frozen=True, slots=True)
class Verification:
    """A verdict, with the reason for it and the number of connections that it rests on."""

    verdict: Verdict
    reason: str
    checked: int = 0

    def __str__(self) -> str:
        return f"{self.verdict.value}: {self.reason}"


class NicState(enum.StrEnum):
    """A verdict, or that the device is not there any more."""

    VERIFIED = "verified"
    UNVERIFIED = "unverified"
    DISOBEYED = "disobeyed"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class NicHealth:
    """Whether the device is there and does what its table says, and why we think so."""

    state: NicState
    reason: str

    def __str__(self) -> str:
        return f"{self.state.value}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Steering:
    """What a producer must know to land a group's connection in the group's bucket.

    bucket = toeplitz(key, fields of the packet) & (entries - 1). Group g owns every entry e with e mod groups = g;
    in a table smaller than `groups` it shares entry g mod entries with others, and they move together.
    Raises ValueError when no port can be computed from these values: the table is no power of two, the hash does
    not read the 4-tuple, the key is too short.
    """

    key: bytes
    fields: tuple[str, ...]
    entries: int
    groups: int

    def __post_init__(self) -> None:
        if self.entries < 1 or self.entries & (self.entries - 1):
            raise ValueError(f"the table has {self.entries} entries, which is not a power of two")
        if self.groups < 1:
            raise ValueError(f"{self.groups} groups; at least one is needed")
        if self.fields != FOUR_TUPLE:
            raise ValueError(f"the hash reads {', '.join(self.fields) or 'nothing'}, not {', '.join(FOUR_TUPLE)}")
        if len(self.key) < SHORTEST_KEY:
            raise ValueError(f"the key has {len(self.key)} bytes; at least {SHORTEST_KEY} are needed")

    def group_of(self, bucket: int) -> int:
        """The group that owns the bucket; the lowest one when several share it."""
        return bucket % self.groups

    def buckets_of(self, group: int) -> tuple[int, ...]:
        if not 0 <= group < self.groups:
            raise ValueError(f"group {group} of {self.groups}")
        return tuple(range(group, self.entries, self.groups)) or (group % self.entries,)

    def to_dict(self) -> dict[str, Any]:
        return {
            "hash": "toeplitz",
            "key": self.key.hex(),
            "fields": list(self.fields),
            "entries": self.entries,
            "groups": self.groups,
        }

    @classmethod
    def from_dict(cls, document: Any) -> Steering:
        """Raises ValueError for anything that is not what `to_dict` makes."""
        if not isinstance(document, dict) or document.get("hash") != "toeplitz":
            raise ValueError("not a description of Toeplitz steering")
        key, fields, entries, groups = (document.get(name) for name in ("key", "fields", "entries", "groups"))
        if (
            not isinstance(key, str)
            or not isinstance(fields, list)
            or type(entries) is not int
            or type(groups) is not int
        ):
            raise ValueError("key, fields, entries or groups are missing or of the wrong type")
        return cls(bytes.fromhex(key), tuple(str(name) for name in fields), entries, groups)


def entries_for(placement: Sequence[int], entries: int, queues: int) -> list[int]:
    """The table that follows a placement (worker per group) on a device with so many queues.

    Queue i serves worker i; with fewer queues than workers, queue i serves workers i, i + queues, ... An entry that
    several groups share points to the worker that most of them are on.
    """
    groups = len(placement)
    if entries >= groups:
        return [placement[entry % groups] % queues for entry in range(entries)]
    table = []
    for entry in range(entries):
        votes = Counter(placement[group] for group in range(entry, groups, entries))
        table.append(min(votes, key=lambda worker: (-votes[worker], worker)) % queues)
    return table


class Nic(ABC):
    """A device's receive side: a table of buckets, its queues, and the cores behind them.

    Guarantees: reading methods change nothing; every change that a method makes is in `changes()`, oldest
    first. One thread at a time changes it (the engine's control thread); reading is allowed from any.
    """

    kind: str  # "ethtool", "kernel" or "user"
    device: str | None = None
    passed_over: tuple[str, ...] = ()  # set by probing: what was tried before this one, and why it was not taken

    # -- following the placement

    def steering(self) -> Steering | None:
        """What producers need to choose their ports; None: no alignment, capability "alignment" has the reason."""
        return None

    def cannot_align(self) -> str | None:
        """Why this one will never steer a connection, once started; None: it does, or may. "auto" then goes on."""
        return None

    def start(self, worker_cpus: Sequence[int | None]) -> None:
        """Make the device ours: queue i to the core of worker i, the table written even when it is unchanged.

        Undo information is on disk before the first change. Raises ConfigError; then nothing is changed. The caller
        calls `follow` next.
        """
        return  # nothing to prepare, unless an implementation says otherwise

    def follow(self, placement: Sequence[int]) -> None:
        """Point every group's buckets at the queue of its worker, in one write.

        ConfigError: the table is as before. The caller counts that as misalignment, never as a failure.
        """
        self.set_table(entries_for(placement, len(self.table()), self.queues()))

    def listeners(self, first: socket.socket) -> list[socket.socket] | None:
        """One listening socket per worker, `first` (bound and listening) among them; None: `first` serves all."""
        return None

    def health(self) -> NicHealth:
        """Whether the device is there, up and obeys. Cheap: called about once a second."""
        return NicHealth(NicState.UNVERIFIED, "nothing has been verified yet")

    def drift(self) -> list[str]:
        """What somebody else changed since our last write: table, key, fields, channels, receive hashing, link."""
        return []

    def close(self) -> None:
        """Give the device back: undo every change, release what is held. Safe to call twice."""
        self.undo()

    @abstractmethod
    def capabilities(self) -> tuple[Capability, ...]:
        """All that this contract knows of, present or not, each absent one with a reason."""

    @abstractmethod
    def queues(self) -> int:
        """The number of receive queues."""

    @abstractmethod
    def table(self) -> tuple[int, ...]:
        """The indirection table: entry e is the queue of bucket e."""

    @abstractmethod
    def set_table(self, entries: Sequence[int]) -> None:
        """Write the whole table. On ConfigError the table is as it was before."""

    @abstractmethod
    def key(self) -> bytes:
        """The RSS key. Raises ConfigError where there is none."""

    @abstractmethod
    def hash_fields(self) -> tuple[str, ...]:
        """The header fields that the device hashes for TCP, in order; empty where it hashes none."""

    @abstractmethod
    def bucket_counters(self) -> tuple[int, ...]:
        """What arrived per bucket since the start, for as many buckets as the table has entries."""

    @abstractmethod
    def queue_cpu(self) -> tuple[int | None, ...]:
        """The core that serves each queue; None where that is up to the kernel's scheduler."""

    @abstractmethod
    def pin(self, queue: int, cpu: int) -> None:
        """Let this core serve this queue. On ConfigError the pinning is as it was before."""

    @abstractmethod
    def verify(self, connections: Sequence[Connection]) -> Verification:
        """Compare where connections arrived with where the table sends them.

        The caller gives only connections whose latest packet came after the latest write of the table. The result
        is also what `health()` says from then on.
        """

    @abstractmethod
    def changes(self) -> tuple[Change, ...]:
        """What has been changed so far and not been undone, oldest first."""

    @abstractmethod
    def undo(self) -> None:
        """Take all changes back, newest first. What cannot be undone stays in `changes()`, and is raised."""

    def capability(self, name: str) -> Capability:
        for capability in self.capabilities():
            if capability.name == name:
                return capability
        raise KeyError(name)

    def require(self, name: str) -> None:
        """Raise ConfigError with the capability's own reason when it is absent."""
        capability = self.capability(name)
        if not capability.present:
            raise ConfigError(
                f"the {self.kind} NIC cannot do {name}: {capability.reason}",
                code="nic_capability",
                hint="`flexstream doctor` shows what this machine offers",
            )

    def describe(self) -> dict[str, Any]:
        """What status and the control handshake say about this NIC."""
        steering = self.steering()
        reason = None if steering is not None else self.capability("alignment").reason or None
        return {
            "kind": self.kind,
            "device": self.device,
            "aligned": steering is not None,
            "reason": reason,
            "steering": None if steering is None else steering.to_dict(),
        }
