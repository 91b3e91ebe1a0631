"""A device's receive side as text: the chain from table to core on one screen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from flexstream.cli.output import table
from flexstream.nic.contract import Steering
from flexstream.nic.device.devices import Finding
from flexstream.nic.device.facts import Facts
from flexstream.nic.device.interrupts import format_cpus

ENTRIES_PER_LINE = 32


def describe_device(
    facts: Facts,
    link: dict[str, Any],
    findings: Sequence[Finding],
    groups: int,
    held_by: int | None,
    packets: Sequence[int] | None = None,
) -> str:
    """All that is known, from the outside in: device, hash, table, queues with their interrupts and cores."""
    if not facts.present:
        return f"{facts.device}: no such device"
    steering = facts.steering(groups)
    lines = [
        _line("device", _device(facts, held_by)),
        _line("rss by", _ways(facts, link)),
        _line("channels", _channels(facts)),
        _line("hash", _hash(facts)),
        _line("key", facts.key.hex(":") or "none"),
        _line("table", facts.no_table() or _table_summary(facts)),
    ]
    lines += [f"{'':14s} {row}" for row in _table_rows(facts.table)]
    aligned = (
        f"yes: a producer's source port decides the bucket ({steering.entries} entries, {groups} groups)"
        if isinstance(steering, Steering)
        else ("no" if facts.no_table() else f"no ({steering})")
    )
    lines.append(_line("alignment", aligned))
    for name in ("rings", "coalescing", "features"):
        lines.append(_line(name, _pairs(link.get(name))))
    lines += ["", _queues(facts, packets)]
    if findings:
        lines.append("")
    for finding in findings:
        lines.append(f"{finding.level}: {finding.what}")
        if finding.fix:
            lines.append(f"  fix: {finding.fix}")
    return "\n".join(lines)


def _line(name: str, text: str) -> str:
    return f"{name:14s} {text}"


def _device(facts: Facts, held_by: int | None) -> str:
    parts = [f"{facts.device}, driver {facts.driver}", "up" if facts.up else "down"]
    if facts.bus:
        parts.append(facts.bus)
    if facts.numa_node is not None:
        parts.append(f"NUMA node {facts.numa_node} (cores {facts.numa_cpus or '?'})")
    if held_by is not None:
        parts.append(f"in use by the flexstream daemon with process id {held_by}")
    return ", ".join(parts)


def _ways(facts: Facts, link: dict[str, Any]) -> str:
    text = f"{facts.reads_by} (read), {facts.writes_by} (write)"
    if facts.way_reason:
        text += f"; {facts.way_reason}"
    return f"{text}; rings and features by {link.get('by', 'nobody')}"


def _channels(facts: Facts) -> str:
    channels = facts.channels
    if channels is None:
        return f"{facts.queues} receive queues; {facts.reasons.get('channels', 'no answer')}"
    return f"{channels.receive} of {channels.max_receive} receive queues in use"


def _hash(facts: Facts) -> str:
    if facts.no_table() is not None or facts.rss is None:
        return "none"
    fields = "; ".join(
        f"{flow}: {'not reported, 4-tuple assumed' if names is None else ' '.join(names) or 'nothing'}"
        for flow, names in facts.hash_fields.items()
    )
    on = {True: "on", False: "off"}.get(facts.flags.get("rxhash", True), "?")
    return f"{facts.rss.function or 'function not reported'} over {fields}; receive hashing {on}"


def _table_summary(facts: Facts) -> str:
    counts = Counter(facts.table)
    shares = ", ".join(f"queue {queue}: {counts[queue]}" for queue in sorted(counts))
    return f"{len(facts.table)} entries ({shares})"


def _table_rows(entries: Sequence[int]) -> list[str]:
    width = len(str(max(entries, default=0)))
    return [
        f"{first:4d}: " + " ".join(f"{queue:{width}d}" for queue in entries[first : first + ENTRIES_PER_LINE])
        for first in range(0, len(entries), ENTRIES_PER_LINE)
    ]


def _pairs(values: dict[str, Any] | None) -> str:
    if not values:
        return "not reported by the driver"
    shown = {True: "on", False: "off"}
    return ", ".join(f"{name} {shown[value] if isinstance(value, bool) else value}" for name, value in values.items())


def _queues(facts: Facts, packets: Sequence[int] | None) -> str:
    counts = Counter(facts.table)
    rows = []
    for queue in range(facts.queues):
        cpus = facts.queue_cpus.get(queue)
        rows.append(
            {
                "queue": queue,
                "entries": counts[queue] if facts.table else None,
                "irq": facts.queue_irq.get(queue),
                "cpus": None if cpus is None else format_cpus(cpus),
                "packets": None if packets is None else packets[queue],
            }
        )
    headings = {"queue": "QUEUE", "entries": "ENTRIES", "irq": "IRQ", "cpus": "CORES", "packets": "PACKETS"}
    return table(rows, headings)
