"""What somebody else changed on a device between two readings, in words and as the changes that put it back."""

from __future__ import annotations

from flexstream.nic.contract import Change
from flexstream.nic.device.facts import Facts
from flexstream.nic.device.interrupts import format_cpus
from flexstream.nic.device.settings import format_table


def differences(then: Facts, now: Facts) -> list[str]:
    """One line for each thing that the path from key to core depends on. A vanished device is one line."""
    if then.present and not now.present:
        return [f"{then.device} is gone"]
    found = []
    if then.up and not now.up:
        found.append(f"link: {now.device} is down")
    if now.channels is not None and then.channels != now.channels:
        was = "?" if then.channels is None else then.channels.receive
        found.append(f"channels: {was} -> {now.channels.receive} receive queues (drivers may drop their table with it)")
    if then.flags.get("rxhash") and not now.flags.get("rxhash"):
        found.append("receive hashing: now off (some drivers then send all packets to queue 0)")
    for flow, names in now.hash_fields.items():
        if then.hash_fields.get(flow) != names:
            found.append(f"hash fields of {flow}: now {', '.join(names or ()) or 'none'}")
    if then.rss is not None and now.rss is None:
        found.append(f"table: no longer readable ({now.reasons.get('table', 'no answer')})")
    if then.rss is not None and now.rss is not None:
        if then.rss.function != now.rss.function or then.rss.input_transform != now.rss.input_transform:
            found.append(f"hash function: {then.rss.function} -> {now.rss.function}")
        if then.key != now.key:
            found.append("key: the RSS key has changed (producers need it to choose their ports)")
        if then.table != now.table:
            found.append(f"table: {_table_difference(then.table, now.table)}")
    for queue, cpus in now.queue_cpus.items():
        was_cpus = then.queue_cpus.get(queue, cpus)
        if was_cpus != cpus:
            line = f"cores {format_cpus(was_cpus or ())} -> {format_cpus(cpus or ())}"
            found.append(f"interrupt {now.queue_irq[queue]} of queue {queue}: {line}")
    return found


def _table_difference(then: tuple[int, ...], now: tuple[int, ...]) -> str:
    if len(then) != len(now):
        return f"{len(then)} -> {len(now)} entries"
    changed = [entry for entry, (old, new) in enumerate(zip(then, now, strict=True)) if old != new]
    first = changed[0]
    return (
        f"{len(changed)} of {len(now)} entries changed, the first is entry {first}: queue {then[first]} -> {now[first]}"
    )


def put_back(then: Facts, now: Facts) -> list[Change]:
    """The changes from `now` to `then`, in the order in which they can be made: the table last.

    The table is among them whenever anything is: a driver may show the right one and have dropped it.
    """
    if not differences(then, now) or not now.present:
        return []
    device, changes = now.device, []
    if then.channels is not None and now.channels is not None:
        for name in ("combined", "rx", "tx"):
            old, new = getattr(now.channels, name), getattr(then.channels, name)
            if old != new:
                changes.append(Change(f"{device} channels {name}", str(old), str(new)))
    if then.flags.get("rxhash") and not now.flags.get("rxhash"):
        changes.append(Change(f"{device} flag rxhash", "off", "on"))
    for flow, names in then.hash_fields.items():
        current = now.hash_fields.get(flow)
        if names is not None and current is not None and names != current:
            changes.append(Change(f"{device} hash {flow}", ",".join(current), ",".join(names)))
    for queue, cpus in then.queue_cpus.items():
        held = now.queue_cpus.get(queue)
        if cpus and held is not None and cpus != held:
            changes.append(Change(f"irq {now.queue_irq[queue]} cpus", format_cpus(held), format_cpus(cpus)))
    if then.key and then.key != now.key:
        changes.append(Change(f"{device} key", now.key.hex(":"), then.key.hex(":")))
    if then.table:
        changes.append(Change(f"{device} table", format_table(now.table), format_table(then.table)))
    return changes
