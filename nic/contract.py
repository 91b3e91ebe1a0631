"""What every NIC implementation promises: one interface for hardware, for the kernel and for user space.

Placement (group -> worker) is the truth; a NIC's indirection table follows it where it can. So nothing here
may fail a stream: an implementation that cannot do a thing says so in `capabilities()`, with the reason, and
raises `ConfigError` with that same reason when it is asked all the same. It never pretends.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flexstream.errors import ConfigError

TABLE_ENTRIES = 128  # the usual size of an RSS indirection table


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
    incoming_cpu: int | None = None


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


class Nic(ABC):
    """A device's receive side: a table of buckets, its queues, and the cores behind them.

    Guarantees: reading methods change nothing; every change that a method makes is in `changes()`, oldest
    first.
    """

    kind: str

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
        """Compare where connections arrived with where the table sends them."""

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
        aligned = self.capability("alignment")
        return {"kind": self.kind, "aligned": aligned.present, "reason": aligned.reason or None}
