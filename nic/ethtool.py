"""Real RSS: a device's own indirection table, key and interrupts, through the kernel's ethtool interfaces.

What a driver says is not what a device does. Devices were seen that show a table before the first write and do not
apply it, that drop it with a channel change, that ignore it when receive hashing is off, and that accept every table
and obey none. So `start` writes the table even when it is as wanted, `drift` compares all that the table depends on,
and only connections that arrived where the table sends them make the device `verified`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flexstream.errors import ConfigError
from flexstream.nic.contract import (
    FOUR_TUPLE,
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
from flexstream.nic.device.changes import Applied, Wish, plan, recover
from flexstream.nic.device.devices import DeviceFiles, is_own_address, name_of_index
from flexstream.nic.device.facts import Facts, read_facts
from flexstream.nic.device.interrupts import affinity
from flexstream.nic.device.journal import DeviceLock, Journal
from flexstream.nic.device.queue_counters import queue_packets
from flexstream.nic.device.settings import Settings, format_table
from flexstream.nic.drift import differences
from flexstream.nic.rss.ioctl import Rss, refused
from flexstream.nic.rss.transport import RssTransport
from flexstream.nic.verification import judge, judge_spread

log = logging.getLogger("flexstream.nic")


class EthtoolNic(Nic):
    """A device with an indirection table of its own.

    `groups` is the engine's G; `group_rows` returns the rows received per group so far, for `bucket_counters`. Making
    one reads the device and changes nothing. Raises ConfigError when there is no such device; a device without a table
    can be looked at, and `start` refuses it with the driver's answer.
    """

    kind = "ethtool"

    def __init__(
        self,
        device: str,
        *,
        groups: int,
        group_rows: Callable[[], Sequence[int]] | None = None,
        root: Path = Path("/"),
        journal_folder: Path | None = None,
        transport: RssTransport | None = None,
    ) -> None:
        self.device: str = device
        self._groups = groups
        self._group_rows = group_rows
        self._root = root
        self._journal_folder = journal_folder
        self._transport = transport or RssTransport(device)
        self._settings = Settings(root, open_rss=lambda name: self._transport)
        self._lock = DeviceLock(device)
        self._applied: Applied | None = None
        self._worker_cpus: tuple[int | None, ...] = ()
        self._verified = Verification(Verdict.UNVERIFIED, "no connection has been compared with the table yet")
        self.notes: list[str] = []  # what start could not do, though the table works without it
        self._facts = self.read()
        if not self._facts.present:
            raise ConfigError(f"there is no device {device}", code="nic_device", hint="`ip link` shows the devices")
        self._index = DeviceFiles(device, root).index()
        self._reference = self._facts

    @classmethod
    def probe(cls, device: str) -> str | None:
        """Why this device's own table cannot be used, or None. Changes nothing."""
        try:
            nic = cls(device, groups=1)
        except ConfigError as error:
            return error.message
        try:
            return nic.capability("write_table").reason or None
        finally:
            nic.close()

    # -- reading

    def read(self) -> Facts:
        """Ask the device everything, now."""
        return read_facts(self.device, root=self._root, transport=self._transport)

    def capabilities(self) -> tuple[Capability, ...]:
        facts = self._facts
        missing, steering = facts.no_table(), facts.steering(self._groups)
        fields = facts.reasons.get("hash fields of tcp4")
        no_write = missing or (None if facts.net_admin else "CAP_NET_ADMIN is missing: run as root or see docs/nic.md")
        counters = (
            None if self._group_rows else "the device counts packets per queue, not per bucket: see queue_counters"
        )
        return (
            Capability("placement", True),
            Capability("hand_over", True),
            _capability("read_table", missing),
            _capability("write_table", no_write),
            _capability("hardware_table", missing),
            _capability("alignment", steering if isinstance(steering, str) else None),
            _capability("rss_key", missing or (None if facts.key else f"driver {facts.driver} shows no key")),
            _capability(
                "hash_fields",
                missing or (fields and f"{fields}; FlexStream assumes the 4-tuple until it has seen traffic"),
            ),
            _capability("bucket_counters", counters),
            Capability("pin_worker", False, "workers are pinned when the engine starts"),
            _capability("pin_interrupt", facts.pin_obstacle),
        )

    def queues(self) -> int:
        return self._facts.queues

    def table(self) -> tuple[int, ...]:
        self.require("read_table")
        return self._rss().table

    def _rss(self) -> Rss:
        try:
            return self._transport.rss()
        except OSError as error:
            raise refused("read table and key", self.device, error, self._facts.driver) from None

    def key(self) -> bytes:
        self.require("rss_key")
        return self._rss().key

    def hash_fields(self) -> tuple[str, ...]:
        return () if self._facts.no_table() is not None else self._facts.tcp_fields()

    def steering(self) -> Steering | None:
        """With the key that the device has now: a foreign change of it reaches the next producer."""
        try:
            self._facts.rss = self._transport.rss()
        except OSError:
            return None
        steering = self._facts.steering(self._groups)
        return None if isinstance(steering, str) else steering

    def cannot_align(self) -> str | None:
        facts = self._facts
        if self._applied is None:  # start will ask for the 4-tuple
            facts = replace(facts, hash_fields=dict.fromkeys(facts.hash_fields, FOUR_TUPLE))
        steering = facts.steering(self._groups)
        return steering if isinstance(steering, str) else None

    def bucket_counters(self) -> tuple[int, ...]:
        """Rows per bucket; a group with several entries counts in its first one, so that the sum is the rows'."""
        self.require("bucket_counters")
        assert self._group_rows is not None
        rows, entries = tuple(map(int, self._group_rows())), len(self.table())
        buckets = [0] * entries
        for group, count in enumerate(rows):
            buckets[group % entries] += count
        return tuple(buckets)

    def queue_counters(self) -> tuple[int, ...] | None:
        """Packets per receive queue since boot; None where neither driver nor kernel counts them."""
        return queue_packets(self._transport, self.queues())

    def queue_cpu(self) -> tuple[int | None, ...]:
        for queue, irq in self._facts.queue_irq.items():
            self._facts.queue_cpus[queue] = affinity(irq, self._root)
        return self._facts.queue_cpu()

    def changes(self) -> tuple[Change, ...]:
        return () if self._applied is None else self._applied.changes()

    def describe(self) -> dict[str, Any]:
        facts = self._facts
        return {
            **super().describe(),
            "driver": facts.driver,
            "queues": facts.queues,
            "queue_cpu": list(self.queue_cpu()),
            "queue_irq": [facts.queue_irq.get(queue) for queue in range(facts.queues)],
            "numa_node": facts.numa_node,
            "rss_by": {"read": facts.reads_by, "write": facts.writes_by},
            "notes": list(self.notes),
        }

    # -- changing

    def start(self, worker_cpus: Sequence[int | None]) -> None:
        self._lock.take()
        try:
            recover(self.device, self._settings, self._journal_folder)
            self._facts = self.read()
            self.require("write_table")
            self._worker_cpus = tuple(worker_cpus)
            self._applied = Applied(self._settings, Journal.create(self.device, "daemon", self._journal_folder))
            self.notes = []
            for change in plan(self._facts, Wish(self._worker_cpus, self._groups, table=False), root=self._root):
                self._try(change)
            self._facts = self._reference = self.read()
            self.set_table(self.table())
        except ConfigError:
            self._give_up()
            raise

    def _try(self, change: Change) -> None:
        """Everything but the table helps and is not needed: what is refused becomes a note."""
        assert self._applied is not None
        try:
            self._applied.change(change)
        except ConfigError as error:
            self.notes.append(f"{change.where} stays {change.old or 'none'}: {error.message}")

    def _give_up(self) -> None:
        try:
            self.undo()
        except ConfigError as error:
            log.error("%s: %s", self.device, error)
        self._lock.release()

    def follow(self, placement: Sequence[int]) -> None:
        if len(placement) != self._groups:
            raise ConfigError(
                f"{self.device}: the placement has {len(placement)} groups, but the engine has {self._groups}",
                code="nic_invalid",
            )
        self._is_there()
        if self._channels_changed():
            self._facts = self._reference = self.read()  # another number of queues, and perhaps another table
        self.set_table(entries_for(placement, len(self.table()), self.queues()))

    def _channels_changed(self) -> bool:
        try:
            return self._transport.ioctl.channels() != self._reference.channels
        except OSError:
            return False

    def set_table(self, entries: Sequence[int]) -> None:
        self.require("write_table")
        now = self.table()
        if len(entries) != len(now):
            raise ConfigError(
                f"{self.device}: the new table has {len(entries)} entries, but the device's has {len(now)}",
                code="nic_invalid",
            )
        for entry, queue in enumerate(entries):
            if not 0 <= queue < self.queues():
                raise ConfigError(
                    f"{self.device}: entry {entry} names queue {queue}; queues are 0 to {self.queues() - 1}",
                    code="nic_invalid",
                )
        self._change(Change(f"{self.device} table", format_table(now), format_table(tuple(entries))))
        self._facts.rss = self._rss()
        # What was written, not what reads back: a driver that keeps another table shows up as drift.
        self._reference = replace(self._reference, rss=replace(self._facts.rss, table=tuple(entries)))

    def pin(self, queue: int, cpu: int) -> None:
        if not 0 <= queue < self.queues():
            raise ConfigError(
                f"{self.device} has no queue {queue}; queues are 0 to {self.queues() - 1}", code="nic_invalid"
            )
        self.require("pin_interrupt")
        where = f"irq {self._facts.queue_irq[queue]} cpus"
        now = self._settings.read(where)
        if now != str(cpu):
            self._change(Change(where, now, str(cpu)))

    def _change(self, change: Change) -> None:
        if self._applied is None:
            self._lock.take()
            self._applied = Applied(self._settings, Journal.create(self.device, "daemon", self._journal_folder))
        self._applied.change(change)

    def undo(self) -> None:
        if self._applied is None:
            return
        self._is_there()
        self._applied.undo()
        self._applied = None
        if DeviceFiles(self.device, self._root).exists():
            self._facts = self._reference = self.read()

    def close(self) -> None:
        """Put everything back; what cannot be stays in the journal for `flexstream nic undo`, and is raised."""
        try:
            self.undo()
        finally:
            self._lock.release()
            self._transport.close()

    # -- is it a fact?

    def verify(self, connections: Sequence[Connection]) -> Verification:
        steering = self.steering()
        rps = bool(DeviceFiles(self.device, self._root).rps())
        cores: Sequence[int | None] = [None] * self.queues() if rps else self.queue_cpu()
        if steering is None:
            reason = self.capability("alignment").reason or "the device does not answer"
            self._verified = judge_spread(_from_outside(connections), self._facts.table, cores, why=reason)
        else:
            napi = self._transport.queue_napi()
            self._verified = judge(
                connections, steering, self.table(), cores, device=self.device, rps=rps, queue_napi=napi
            )
        return self._verified

    def health(self) -> NicHealth:
        self._lock.answer()
        if not self._is_there():
            return NicHealth(NicState.GONE, f"{self.device} is gone")
        if not DeviceFiles(self.device, self._root).is_up():
            return NicHealth(NicState.UNVERIFIED, f"{self.device} is down")
        return NicHealth(NicState(self._verified.verdict.value), self._verified.reason)

    def _is_there(self) -> bool:
        """By its number: a device that was renamed is followed to its new name."""
        if self._index is None or DeviceFiles(self.device, self._root).index() == self._index:
            return self._index is not None
        name = name_of_index(self._index, self._root)
        if name is None:
            return False
        log.warning("%s is now called %s", self.device, name)
        if self._applied is not None:
            self._applied.rename(name)
        self.device = self._facts.device = self._reference.device = name
        self._transport.rename(name)
        return True

    def drift(self) -> list[str]:
        self._is_there()
        self._facts = self.read()  # so that queues, key and reasons are those of today
        return differences(self._reference, self._facts)


def _from_outside(connections: Sequence[Connection]) -> list[Connection]:
    """Those that came by a device, whether or not its driver marks packets with a NAPI id."""
    ours: dict[str, bool] = {}
    for connection in connections:
        peer = connection.peer[0]
        if peer not in ours:
            ours[peer] = connection.napi_id is None and is_own_address(peer)
    return [connection for connection in connections if not ours[connection.peer[0]]]


def _capability(name: str, obstacle: str | None) -> Capability:
    return Capability(name, obstacle is None, obstacle or "")
