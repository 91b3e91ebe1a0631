"""The NIC that is none: placement in user space, for every machine and without any privilege.

The acceptor reads which group a new connection is for and hands the socket to the worker that owns the group.
So the "table" is the placement itself, written out in the shape that hardware has: entry e is the worker of
group e mod G, and a queue is a worker. Moving a group rewrites its entries, and the engine moves the sockets.

With `listeners` every worker has a listening socket, and a program in the kernel puts new connections on the right
one by the same hash and the same table as a device would (`flexstream.nic.bpf.reuseport`).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence

from flexstream.errors import ConfigError
from flexstream.nic.bpf import reuseport
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
from flexstream.nic.rss.toeplitz import DEFAULT_KEY, bucket_of

_NO_HARDWARE = "pure user space has no hardware table; the acceptor hands each socket to its group's worker"
_NO_HASH = "user space does not hash: a connection names its group itself"
_NO_LISTENERS = (
    "no hardware table, and no listeners to choose from: the acceptor hands each socket to its group's worker"
)
_NO_COUNTERS = "no engine feeds the counters of this NIC (group_rows was not given)"
_NO_PINNING = "workers are pinned when the engine starts (pin_worker was not given)"
_UNTOUCHED = "packets arrive on whatever core the kernel picks; FlexStream touches nothing below the socket"


class UserNic(Nic):
    """Placement of groups on workers, kept in user space.

    `cpus` has one entry per worker: its core, or None when it is not pinned. `placement` has one worker per
    group; the default deals the groups out in turn. `group_rows` returns the rows received per group so far;
    `pin_worker(worker, cpu)` moves a worker's thread. Both are the engine's; without them the two things that
    need them are absent capabilities. `no_steering` is a reason not to steer connections to listeners. Not
    thread-safe: one caller changes it, the engine's control thread.
    """

    kind = "user"

    def __init__(
        self,
        groups: int,
        cpus: Sequence[int | None],
        *,
        placement: Sequence[int] | None = None,
        entries: int | None = None,
        group_rows: Callable[[], Sequence[int]] | None = None,
        pin_worker: Callable[[int, int], None] | None = None,
        no_steering: str | None = None,
    ) -> None:
        if groups < 1:
            raise _invalid(f"{groups} groups", "at least one group is needed")
        if not cpus:
            raise _invalid("no workers", "at least one worker is needed")
        size = 1 << (max(TABLE_ENTRIES, groups) - 1).bit_length() if entries is None else entries
        if size < groups:
            why = f"entries must be at least {groups}, one per group"
            raise _invalid(f"a table of {size} entries for {groups} groups", why)
        self._groups = groups
        self._cpus = list(cpus)
        self._entries = size
        self._group_rows = group_rows
        self._pin_worker = pin_worker
        self._changes: list[Change] = []
        self._listeners: list[socket.socket] = []
        self._steering: Steering | None = None
        self._no_steering = no_steering or _NO_LISTENERS
        self._may_steer = no_steering is None
        self._health = NicHealth(NicState.UNVERIFIED, "no connection has been handed to a worker yet")
        start = [group % len(self._cpus) for group in range(groups)] if placement is None else list(placement)
        self._check_placement(start)
        self._placement = start

    def placement(self) -> tuple[int, ...]:
        """The worker of each group."""
        return tuple(self._placement)

    def owner(self, group: int) -> int:
        """The worker that the acceptor hands a socket of this group to."""
        if not 0 <= group < self._groups:
            raise _invalid(f"group {group}", f"groups are 0 to {self._groups - 1}")
        return self._placement[group]

    # -- following the placement

    def steering(self) -> Steering | None:
        return self._steering

    def follow(self, placement: Sequence[int]) -> None:
        self._check_placement(placement)
        self._placement = list(placement)
        self._attach()

    def listeners(self, first: socket.socket) -> list[socket.socket] | None:
        """One listener per worker with a table that chooses among them; None, and the reason, where that fails."""
        if not self._may_steer:
            return None
        if len(self._cpus) == 1:
            self._no_steering = "one worker has every group: there is nothing to align"
            return [first]
        size = min(1 << (self._entries - 1).bit_length(), reuseport.MOST_ENTRIES)
        group: list[socket.socket] = []
        try:
            group = reuseport.share(first, len(self._cpus))
            self._listeners, self._steering = group, Steering(DEFAULT_KEY, FOUR_TUPLE, size, self._groups)
            self._attach()
        except (OSError, ConfigError) as error:
            for sock in group[1:]:
                sock.close()
            self._listeners, self._steering = [], None
            why = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
            self._no_steering = f"no hardware table, and SO_REUSEPORT with a table does not work here: {why}"
            return None
        return list(group)

    def _attach(self) -> None:
        if self._steering is None:
            return
        table = entries_for(self._placement, self._steering.entries, len(self._cpus))
        try:
            reuseport.attach_table(self._listeners[0], self._steering.key, table)
        except OSError as error:
            raise _invalid("the listeners' table", error.strerror or str(error)) from error

    def health(self) -> NicHealth:
        return self._health

    def close(self) -> None:
        self._listeners, self._steering = [], None  # the sockets are the acceptor's

    # -- the table

    def capabilities(self) -> tuple[Capability, ...]:
        steered = self._steering is not None
        return (
            Capability("placement", True),
            Capability("hand_over", True),
            Capability("read_table", True),
            Capability("write_table", True),
            Capability("hardware_table", False, _NO_HARDWARE),
            _capability("alignment", steered, self._no_steering),
            _capability("rss_key", steered, _NO_HASH),
            _capability("hash_fields", steered, _NO_HASH),
            _capability("bucket_counters", self._group_rows is not None, _NO_COUNTERS),
            _capability("pin_worker", self._pin_worker is not None, _NO_PINNING),
            Capability("pin_interrupt", False, _UNTOUCHED),
        )

    def queues(self) -> int:
        return len(self._cpus)

    def table(self) -> tuple[int, ...]:
        return tuple(self._placement[entry % self._groups] for entry in range(self._entries))

    def set_table(self, entries: Sequence[int]) -> None:
        if len(entries) != self._entries:
            raise _invalid(f"a table of {len(entries)} entries", f"this table has {self._entries}")
        wanted = list(entries[: self._groups])
        self._check_placement(wanted)
        for entry, worker in enumerate(entries):
            if worker != wanted[entry % self._groups]:
                raise _invalid(
                    f"entry {entry} = worker {worker} but entry {entry % self._groups} = worker "
                    f"{wanted[entry % self._groups]}",
                    f"both belong to group {entry % self._groups}, and a group has one worker",
                )
        before, self._placement = self._placement, wanted
        try:
            self._attach()
        except ConfigError:
            self._placement = before
            raise
        for group, (old, new) in enumerate(zip(before, wanted, strict=True)):
            if old != new:
                self._changes.append(Change(f"group {group}", f"worker {old}", f"worker {new}"))

    def key(self) -> bytes:
        self.require("rss_key")
        assert self._steering is not None
        return self._steering.key

    def hash_fields(self) -> tuple[str, ...]:
        return () if self._steering is None else self._steering.fields

    def bucket_counters(self) -> tuple[int, ...]:
        """Rows per bucket.

        A group with several entries counts in its first one, so that the sum is the rows'.
        """
        self.require("bucket_counters")
        assert self._group_rows is not None
        rows = tuple(int(count) for count in self._group_rows())
        if len(rows) != self._groups:
            raise _invalid(f"counters of {len(rows)} groups", f"this engine has {self._groups} groups")
        return rows + (0,) * (self._entries - self._groups)

    def queue_cpu(self) -> tuple[int | None, ...]:
        return tuple(self._cpus)

    def pin(self, queue: int, cpu: int) -> None:
        """Move the worker's thread to the core. Interrupts stay where the kernel has them."""
        if not 0 <= queue < len(self._cpus):
            raise _invalid(f"queue {queue}", f"queues are the workers, 0 to {len(self._cpus) - 1}")
        self.require("pin_worker")
        assert self._pin_worker is not None
        old = self._cpus[queue]
        if old == cpu:
            return
        self._pin_worker(queue, cpu)  # raises before anything is noted
        self._cpus[queue] = cpu
        self._changes.append(Change(f"worker {queue}", f"core {'any' if old is None else old}", f"core {cpu}"))

    def verify(self, connections: Sequence[Connection]) -> Verification:
        """Check that every connection is with its group's owner, and came through the listener of its bucket."""
        result = self._verify(connections)
        self._health = NicHealth(NicState(result.verdict.value), result.reason)
        return result

    def _verify(self, connections: Sequence[Connection]) -> Verification:
        known = [connection for connection in connections if connection.worker is not None]
        if not known:
            return Verification(Verdict.UNVERIFIED, "no connection has been handed to a worker yet")
        for connection in known:
            owner = self.owner(connection.group)
            if connection.worker != owner:
                reason = (
                    f"{connection.peer[0]}:{connection.peer[1]} of group {connection.group} is on worker "
                    f"{connection.worker}, but its owner is worker {owner}"
                )
                return Verification(Verdict.DISOBEYED, reason, len(known))
        steered, elsewhere = self._steered(known)
        if 2 * elsewhere > steered:  # one or two may have come while the table was changed
            reason = f"{elsewhere} of {steered} new connections came through another listener than their bucket's"
            return Verification(Verdict.DISOBEYED, reason, len(known))
        return Verification(Verdict.VERIFIED, "every connection is on its group's owner", len(known))

    def _steered(self, connections: Sequence[Connection]) -> tuple[int, int]:
        """How many came through a listener of ours, and how many of them through one that the table did not name."""
        steering = self._steering
        steered = [c for c in connections if c.listener is not None]
        if steering is None or not steered:
            return 0, 0
        table = entries_for(self._placement, steering.entries, len(self._cpus))
        buckets = [bucket_of(steering.key, c.peer, c.local, steering.entries) for c in steered]
        return len(steered), sum(table[b] != c.listener for b, c in zip(buckets, steered, strict=True))

    def changes(self) -> tuple[Change, ...]:
        return tuple(self._changes)

    def undo(self) -> None:
        while self._changes:
            back = self._changes[-1].reversed()
            subject, index = back.where.split()
            value = back.new.split()[1]
            if subject == "group":
                self._placement[int(index)] = int(value)
                self._attach()
            elif value == "any":
                raise _invalid(f"undo of {self._changes[-1]}", "a pinned worker stays pinned until the engine stops")
            else:
                assert self._pin_worker is not None
                self._pin_worker(int(index), int(value))
                self._cpus[int(index)] = int(value)
            self._changes.pop()

    def _check_placement(self, placement: Sequence[int]) -> None:
        if len(placement) != self._groups:
            raise _invalid(f"a placement of {len(placement)} groups", f"this engine has {self._groups} groups")
        for group, worker in enumerate(placement):
            if not 0 <= worker < len(self._cpus):
                raise _invalid(f"group {group} on worker {worker}", f"workers are 0 to {len(self._cpus) - 1}")


def _capability(name: str, present: bool, reason: str) -> Capability:
    return Capability(name, present, "" if present else reason)


def _invalid(what: str, why: str) -> ConfigError:
    return ConfigError(f"user NIC: {what}: {why}", code="nic_invalid", hint=None)
