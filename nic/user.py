"""The NIC that is none: placement in user space, for every machine and without any privilege.

The acceptor reads which group a new connection is for and hands the socket to the worker that owns the group.
So the "table" is the placement itself, written out in the shape that hardware has: entry e is the worker of
group e mod G, and a queue is a worker. Moving a group rewrites its entries, and the engine moves the sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flexstream.errors import ConfigError
from flexstream.nic.contract import TABLE_ENTRIES, Capability, Change, Connection, Nic, Verdict, Verification

_NO_HARDWARE = "pure user space has no hardware table; the acceptor hands each socket to its group's worker"
_NO_HASH = "nothing is hashed in user space: a connection says its group itself"
_NO_COUNTERS = "no engine feeds the counters of this NIC (group_rows was not given)"
_NO_PINNING = "workers are pinned when the engine starts (pin_worker was not given)"
_UNTOUCHED = "packets arrive on whatever core the kernel picks; nothing below the socket is touched"


class UserNic(Nic):
    """Placement of groups on workers, kept in user space.

    `cpus` has one entry per worker: its core, or None when it is not pinned. `placement` has one worker per
    group; the default deals the groups out in turn. `group_rows` returns the rows received per group so far;
    `pin_worker(worker, cpu)` moves a worker's thread. Both are the engine's; without them the two things that
    need them are absent capabilities. Not thread-safe: one caller changes it, the engine's control thread.
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
    ) -> None:
        if groups < 1:
            raise _invalid(f"{groups} groups", "at least one group is needed")
        if not cpus:
            raise _invalid("no workers", "at least one worker is needed")
        size = max(TABLE_ENTRIES, groups) if entries is None else entries
        if size < groups:
            why = f"entries must be at least {groups}, one per group"
            raise _invalid(f"a table of {size} entries for {groups} groups", why)
        self._groups = groups
        self._cpus = list(cpus)
        self._entries = size
        self._group_rows = group_rows
        self._pin_worker = pin_worker
        self._changes: list[Change] = []
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

    def capabilities(self) -> tuple[Capability, ...]:
        return (
            Capability("placement", True),
            Capability("hand_over", True),
            Capability("read_table", True),
            Capability("write_table", True),
            Capability("hardware_table", False, _NO_HARDWARE),
            Capability("alignment", False, _NO_HARDWARE),
            Capability("rss_key", False, _NO_HASH),
            Capability("hash_fields", False, _NO_HASH),
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
                    f"both belong to group {entry % self._groups}, and a group is on one worker",
                )
        for group, (old, new) in enumerate(zip(self._placement, wanted, strict=True)):
            if old != new:
                self._changes.append(Change(f"group {group}", f"worker {old}", f"worker {new}"))
        self._placement = wanted

    def key(self) -> bytes:
        self.require("rss_key")
        raise AssertionError("unreachable: rss_key is never present")

    def hash_fields(self) -> tuple[str, ...]:
        return ()

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
        """Check that every connection is with its group's owner:

        the hand-over is the only thing to check here.
        """
        known = [connection for connection in connections if connection.worker is not None]
        if not known:
            return Verification(Verdict.UNVERIFIED, "no connection has been handed to a worker yet")
        for connection in known:
            owner = self.owner(connection.group)
            if connection.worker != owner:
                reason = (
                    f"{connection.peer[0]}:{connection.peer[1]} of group {connection.group} is with worker "
                    f"{connection.worker}, its owner is worker {owner}"
                )
                return Verification(Verdict.DISOBEYED, reason, len(known))
        return Verification(Verdict.VERIFIED, "every connection is with its group's owner", len(known))

    def changes(self) -> tuple[Change, ...]:
        return tuple(self._changes)

    def undo(self) -> None:
        while self._changes:
            back = self._changes[-1].reversed()
            subject, index = back.where.split()
            value = back.new.split()[1]
            if subject == "group":
                self._placement[int(index)] = int(value)
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
