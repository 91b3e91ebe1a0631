"""From what is wanted to what must change: a list of `Change`, printed, written as a script, applied or undone.

The order is the order of application: channels first, because a driver may drop its table with them; the table
last, written even when it already reads as wanted, because some drivers show a table that they do not apply.
"""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from flexstream.errors import ConfigError, FlexStreamError
from flexstream.nic.contract import FOUR_TUPLE, Change, entries_for
from flexstream.nic.device.devices import DeviceFiles
from flexstream.nic.device.facts import Facts
from flexstream.nic.device.interrupts import format_cpus
from flexstream.nic.device.journal import Journal, foreign_journals, left_behind
from flexstream.nic.device.settings import Settings, format_table, parse_table, renamed

log = logging.getLogger("flexstream.nic")
GONE = (errno.ENODEV, errno.ENOENT, errno.ENXIO)


@dataclass(frozen=True, slots=True)
class Wish:
    """What a device should be like. None and False leave a thing alone."""

    worker_cpus: tuple[int | None, ...]
    groups: int = 128
    placement: tuple[int, ...] | None = None  # default: dealt out in turn, as the engine starts
    channels: int | None = None
    without_rps: bool = False
    table: bool = True
    pin: bool = True

    def wanted_placement(self) -> tuple[int, ...]:
        if self.placement is not None:
            return self.placement
        return tuple(group % len(self.worker_cpus) for group in range(self.groups))


def plan(facts: Facts, wish: Wish, *, root: Path = Path("/")) -> list[Change]:
    """The changes that lead from `facts` to `wish`. Reads only."""
    if not facts.present:
        raise ConfigError(f"there is no device {facts.device}", code="nic_device", hint="`ip link` shows the devices")
    changes = _channel_changes(facts, wish)
    if facts.no_table() is None:
        changes += _hash_changes(facts)
    if wish.without_rps:
        changes += _rps_changes(DeviceFiles(facts.device, root))
    if wish.pin and facts.no_table() is None:
        changes += _pin_changes(facts, wish)
        changes += _xps_changes(DeviceFiles(facts.device, root), wish)
    if wish.table and facts.no_table() is None:
        changes.append(_table_change(facts, wish))
    return changes


def _channel_changes(facts: Facts, wish: Wish) -> list[Change]:
    channels = facts.channels
    if wish.channels is None or channels is None:
        return []
    name = "combined" if channels.max_combined else "rx"
    now, most = getattr(channels, name), channels.max_receive
    wanted = min(wish.channels, most)
    return [Change(f"{facts.device} channels {name}", str(now), str(wanted))] if wanted != now else []


def _hash_changes(facts: Facts) -> list[Change]:
    changes = []
    if facts.flags.get("rxhash") is False:
        changes.append(Change(f"{facts.device} flag rxhash", "off", "on"))
    for flow, names in facts.hash_fields.items():
        if names is not None and names != FOUR_TUPLE:
            changes.append(Change(f"{facts.device} hash {flow}", ",".join(names), ",".join(FOUR_TUPLE)))
    return changes


def _rps_changes(files: DeviceFiles) -> list[Change]:
    changes = [Change(f"{files.name} {queue} rps_cpus", format_cpus(cpus), "") for queue, cpus in files.rps().items()]
    if files.rps_flows():
        for queue in files.queue_names("rx"):
            now = (files.folder / "queues" / queue / "rps_flow_cnt").read_text().strip()
            if now != "0":
                changes.append(Change(f"{files.name} {queue} rps_flow_cnt", now, "0"))
    return changes


def _pin_changes(facts: Facts, wish: Wish) -> list[Change]:
    """Queue i to the core of worker i; queues without a worker of their own get no entry of the table."""
    changes = []
    for queue, irq in sorted(facts.queue_irq.items()):
        cpu = wish.worker_cpus[queue] if queue < len(wish.worker_cpus) else None
        now = facts.queue_cpus.get(queue)
        if cpu is not None and now is not None and now != (cpu,):
            changes.append(Change(f"irq {irq} cpus", format_cpus(now), str(cpu)))
    return changes


def _xps_changes(files: DeviceFiles, wish: Wish) -> list[Change]:
    """Acknowledgements leave by the queue of the core that makes them. Only where there is a choice of queues."""
    queues = files.xps()
    if len(queues) < 2 or any(cpus is None for cpus in queues.values()):
        return []
    changes = []
    for index, (queue, now) in enumerate(queues.items()):
        cpu = wish.worker_cpus[index] if index < len(wish.worker_cpus) else None
        if cpu is not None and now is not None and now != (cpu,):
            changes.append(Change(f"{files.name} {queue} xps_cpus", format_cpus(now), str(cpu)))
    return changes


def _table_change(facts: Facts, wish: Wish) -> Change:
    usable = min(facts.queues, len(wish.worker_cpus))
    wanted = entries_for(wish.wanted_placement(), len(facts.table), usable)
    return Change(f"{facts.device} table", format_table(facts.table), format_table(tuple(wanted)))


def needed(changes: Sequence[Change]) -> list[Change]:
    """Without those that only write again what is there."""
    return [change for change in changes if change.old != change.new]


def script(changes: Sequence[Change], settings: Settings, device: str) -> str:
    """The plan for /bin/sh, and how to take it back."""
    lines = ["#!/bin/sh", f"# flexstream nic plan {device}", "set -e"]
    lines += [settings.shell(change.where, change.new) for change in changes]
    lines.append("# To take it back:")
    lines += [f"#   {settings.shell(change.where, change.old)}" for change in reversed(changes)]
    return "\n".join(lines) + "\n"


class Applied:
    """Changes made, each noted in the journal before it was made.

    Not thread-safe: one thread changes a device.
    """

    def __init__(self, settings: Settings, journal: Journal) -> None:
        self._settings = settings
        self._journal = journal
        self._latest: dict[str, Change] = {change.where: change for change in journal.changes}

    def changes(self) -> tuple[Change, ...]:
        """One per setting: from its first value to its latest."""
        return tuple(change for change in self._latest.values() if change.old != change.new)

    def change(self, change: Change) -> None:
        """Note, then write, also when old and new are equal. Raises ConfigError; then the value is as it was."""
        known = self._latest.get(change.where)
        first = change.old if known is None else known.old
        self._journal.record(Change(change.where, first, change.new))
        try:
            self._settings.write(change.where, change.new)
        except FlexStreamError:
            if known is None:
                self._forget_if_unchanged(change.where, first)
            raise
        self._latest[change.where] = Change(change.where, first, change.new)

    def rename(self, device: str) -> None:
        """The device is called so now. Raises ConfigError; then nothing is changed."""
        old = self._journal.origin.device
        self._journal.rename(device)
        latest = [renamed(change, old, device) for change in self._latest.values()]
        self._latest = {change.where: change for change in latest}

    def _forget_if_unchanged(self, where: str, first: str) -> None:
        """A refused change needs no undoing, if it really left no trace."""
        with contextlib.suppress(FlexStreamError):
            if self._settings.read(where) == first:
                self._journal.keep([change for change in self._journal.changes if change.where != where], empty=True)

    def forget_unchanged(self) -> None:
        """Settings that were only written again need no undoing; without any other the journal goes."""
        changed = {change.where for change in self.changes()}
        self._journal.keep(change for change in self._journal.changes if change.where in changed)

    def undo(self) -> None:
        """Newest first. What could not be undone stays in the journal, and is raised."""
        left, problems, dropped, _ = undo(self._journal.changes, self._settings)
        for line in dropped:
            log.warning("%s", line)
        self._latest = {change.where: change for change in left}
        self._journal.keep(left)
        if problems:
            raise ConfigError(
                f"not everything could be put back: {'; '.join(problems)}",
                code="nic_undo",
                hint="`flexstream nic undo` tries again; `flexstream nic show` shows what is set",
            )


class Outcome(NamedTuple):
    """What is left to undo and why; what needs no undoing any more, in words; and what is as it was."""

    left: list[Change]
    problems: list[str]
    dropped: list[str]
    undone: list[Change]


def undo(changes: Sequence[Change], settings: Settings, device: str | None = None) -> Outcome:
    """Put the old values back, newest first; tables after channels, which decide what a table may name.

    What is not, or not any more, this device's is not touched. A value that the device can no longer hold is dropped,
    a table for the driver's own: both are said, and neither is tried again.
    """
    left: list[Change] = []
    problems: list[str] = []
    dropped: list[str] = []
    undone: list[Change] = []
    for change in _order_of_undoing(changes, settings):
        if device is not None and not settings.is_of(device, change.where):
            dropped.append(f"{change.where} does not belong to {device}: left alone")
            continue
        try:
            stale = _put_back(change, settings)
        except FlexStreamError as error:
            if getattr(error, "error", None) in GONE:
                dropped.append(f"{change.where} is gone: nothing to put back")
                continue
            left.append(change)
            problems.append(error.message)
        else:
            if stale is not None:
                dropped.append(stale)
            else:
                undone.append(change)
    in_order = [[change for change in changes if change in found] for found in (left, undone)]
    return Outcome(in_order[0], problems, dropped, in_order[1])


def _order_of_undoing(changes: Sequence[Change], settings: Settings) -> list[Change]:
    newest_first = list(reversed(changes))
    if not any(" channels " in change.where for change in changes):
        return newest_first
    tables = [change for change in newest_first if change.where.endswith(" table")]
    for table in tables:
        with contextlib.suppress(FlexStreamError):  # a table that names a queue keeps it from going
            settings.device(table.where.split()[0]).set_rss_default()
    return [change for change in newest_first if change not in tables] + tables


def _put_back(change: Change, settings: Settings) -> str | None:
    """Why the old value cannot be had any more, and what there is instead; None: it is back."""
    why = settings.cannot_hold(change.where, change.old)
    if change.where.endswith(" table"):
        return _put_back_table(change, settings, why)
    if why is not None:
        return f"{change.where} stays {settings.read(change.where) or 'none'}: {why}"
    if settings.read(change.where) != change.old:
        settings.write(change.where, change.old)
    return None


def _put_back_table(change: Change, settings: Settings, why: str | None) -> str | None:
    old = parse_table(change.old)
    queues = max(old, default=0) + 1
    device = settings.device(change.where.split()[0])
    if why is not None or old == tuple(entry % queues for entry in range(len(old))):
        # The driver's own default, so that later channel changes spread it again; a driver whose default is
        # another one gets the old table entry by entry.
        device.set_rss_default()
        if why is not None:
            return f"{change.where} now has the driver's default: {why}"
        if settings.read(change.where) == change.old:
            return None
    settings.write(change.where, change.old)
    return None


@dataclass(frozen=True, slots=True)
class Undone:
    """What `undo_journal` did with one journal. `dropped`: what needs no undoing any more, in words."""

    owner: str
    undone: tuple[Change, ...]
    left: tuple[Change, ...]
    problems: tuple[str, ...]
    stale: str | None = None
    dropped: tuple[str, ...] = ()


def undo_journal(journal: Journal, settings: Settings) -> Undone:
    """Undo what a journal says on the device as it is called now, or remove a journal of another boot, namespace or
    device."""
    now = journal.origin.now()
    stale = journal.origin.stale_reason(now)
    if stale is not None:
        journal.keep(())
        return Undone(journal.owner, (), (), (), stale)
    journal.rename(now.device)
    left, problems, dropped, done = undo(journal.changes, settings, now.device)
    journal.keep(left)
    return Undone(journal.owner, tuple(done), tuple(left), tuple(problems), dropped=tuple(dropped))


def recover(device: str, settings: Settings, folder: Path | None = None) -> None:
    """A daemon that was killed left the device changed: put it back before its values are taken for the old.

    Raises ConfigError when something stays changed.
    """
    for path, why in foreign_journals(folder):
        log.warning("%s is not trusted, so nothing in it is put back: %s", path, why)
    for journal in left_behind(device, folder, owner="daemon"):
        undone = undo_journal(journal, settings)
        if undone.stale is not None:
            log.info("%s: an old journal was dropped: %s", device, undone.stale)
        elif undone.left:
            raise ConfigError(
                f"{device}: cannot put back what process {journal.pid} changed: {'; '.join(undone.problems)}",
                code="nic_undo",
                hint="`flexstream nic undo` shows more",
            )
        else:
            for line in undone.dropped:
                log.warning("%s: %s", device, line)
            log.warning("%s: put back %d settings that process %d left", device, len(undone.undone), journal.pid)
