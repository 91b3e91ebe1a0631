"""The doctor's look at the receive side: the findings of `flexstream nic show`, as checks."""

from __future__ import annotations

import os
from pathlib import Path

from flexstream.cli.machine import Check
from flexstream.errors import FlexStreamError
from flexstream.nic.device.devices import irqbalance_finding
from flexstream.nic.device.facts import Facts, read_facts
from flexstream.nic.device.journal import DeviceLock, devices_with_journals, foreign_journals, left_behind
from flexstream.nic.device.link_settings import discover

DEFAULT_GROUPS = 128


def receive_side() -> list[Check]:
    """Each device's table and what stands between it and the workers, by the code that the daemon uses."""
    allowed = sorted(os.sched_getaffinity(0))
    found, by = discover()
    checks = [Check("nic facts", "info", f"drivers reported by {by}")] if found else []
    for device in found:
        facts = read_facts(device.name)
        if not facts.present:  # it went while we looked
            continue
        steering = facts.steering(DEFAULT_GROUPS)
        if isinstance(steering, str):
            checks.append(Check("nic table", "info", f"{device.name}: {steering}"))
        else:
            checks.append(Check("nic table", "ok", _table(facts, steering.entries)))
        # That one queue feeds one core is said of the device already.
        for finding in facts.findings(allowed if facts.queue_irq and facts.queues > 1 else ()):
            told_elsewhere = finding.what == facts.no_table() or finding.what.startswith("irqbalance")
            if not told_elsewhere and (facts.up or facts.queue_irq):
                checks.append(Check("nic", finding.level, finding.what, finding.fix or "see docs/nic.md"))
    return checks + journals()


def _table(facts: Facts, entries: int) -> str:
    pinned = sum(cpu is not None for cpu in facts.queue_cpu())
    return (
        f"{facts.device}: {entries} entries over {facts.queues} queues, toeplitz, RSS by {facts.reads_by}; "
        f"{pinned} of {facts.queues} queues pinned to one core"
    )


def journals() -> list[Check]:
    """Devices that a killed daemon or `nic apply` left changed."""
    checks: list[Check] = []
    try:
        names = devices_with_journals()
        foreign = foreign_journals()
    except FlexStreamError as error:
        return [Check("nic journal", "info", error.message, error.hint or "")]
    for path, why in foreign:
        advice = "flexstream reads only your own and root's: the service puts its own back when it starts and stops"
        checks.append(Check("nic journal", "info", f"{path} is not trusted: {why}", advice))
    for name in names:
        holder = DeviceLock(name).holder()
        try:
            left = left_behind(name)
        except FlexStreamError as error:
            checks.append(Check("nic journal", "warn", error.message, error.hint or "see docs/nic.md"))
            continue
        for journal in left:
            what = f"{name}: {len(journal.changes)} settings changed by {journal.owner} (process {journal.pid})"
            if holder is not None and journal.owner == "daemon":
                checks.append(Check("nic journal", "ok", f"{what}, which is running"))
            elif journal.owner == "apply":
                checks.append(Check("nic journal", "info", what, f"`flexstream nic undo {name}` takes them back"))
            else:
                advice = f"it did not stop cleanly: run `flexstream nic undo {name}`, or start it again"
                checks.append(Check("nic journal", "warn", what, advice))
    return checks


def irqbalance(root: Path) -> Check:
    finding = irqbalance_finding(sorted(os.sched_getaffinity(0)), root)
    if finding is None:
        return Check("irqbalance", "ok", "not running")
    return Check("irqbalance", finding.level, finding.what, finding.fix)
