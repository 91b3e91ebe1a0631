"""Lets a service's group write the few files of a device that are root's, instead of a capability for all files.

Interrupt affinities, RPS and XPS are files of mode 644 that belong to root, and nobody else may open them for writing
but with CAP_DAC_OVERRIDE, which opens every file of the machine. Root hands over exactly those of one device before
the service starts, and takes them back after it. The kernel forgets both with the device and the interrupt.
"""

from __future__ import annotations

import grp
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from flexstream.errors import ConfigError
from flexstream.nic.device.facts import read_facts
from flexstream.nic.device.interrupts import own_interrupts

QUEUE_FILES = ("rps_cpus", "rps_flow_cnt", "xps_cpus")


@dataclass(frozen=True, slots=True)
class Granted:
    """Files whose owner group or mode was changed, and what was refused."""

    files: tuple[Path, ...]
    problems: tuple[str, ...]


def group_id(name: str) -> int:
    """Raises ConfigError for a group that is not there, and for root's."""
    try:
        found = grp.getgrnam(name).gr_gid
    except KeyError:
        raise ConfigError(f"there is no group {name!r}", code="nic_grant", hint="`getent group` shows them") from None
    if found == 0:
        raise ConfigError("root needs no grant", code="nic_grant", hint="name the service's group: flexstream")
    return found


def grant(device: str, group: int, root: Path = Path("/")) -> Granted:
    """Let the group write this device's files. Raises ConfigError for a device that is not there."""
    facts = read_facts(device, root=root)
    if not facts.present:
        raise ConfigError(f"there is no device {device}", code="nic_device", hint="`ip link` shows the devices")
    if "sysfs" in facts.reasons:
        raise ConfigError(f"{device}: {facts.reasons['sysfs']}", code="nic_grant", hint="mount sysfs inside it")
    interrupts = own_interrupts(device, root) | set(facts.queue_irq.values())
    files = [root / f"proc/irq/{irq}/smp_affinity_list" for irq in sorted(interrupts)]
    return _each([*files, *_queue_files(root / "sys/class/net" / device)], group, stat.S_IWGRP)


def take_back(group: int, root: Path = Path("/")) -> Granted:
    """Give all such files that this group has, of whichever device, back to root."""
    files = list((root / "proc/irq").glob("*/smp_affinity_list"))
    for folder in (root / "sys/class/net").glob("*"):
        files += _queue_files(folder)
    return _each([path for path in files if _group_of(path) == group], 0, 0)


def _queue_files(folder: Path) -> Iterator[Path]:
    for queue in sorted((folder / "queues").glob("[rt]x-*")):
        yield from (path for name in QUEUE_FILES if (path := queue / name).exists())


def _group_of(path: Path) -> int | None:
    try:
        return path.stat().st_gid
    except OSError:
        return None


def _each(files: Sequence[Path], group: int, writable: int) -> Granted:
    done, problems = [], []
    for path in files:
        try:
            mode = stat.S_IMODE(path.stat().st_mode) & ~stat.S_IWGRP | writable
            os.chown(path, -1, group)
            path.chmod(mode)
        except FileNotFoundError:
            continue  # a queue or an interrupt that went meanwhile
        except OSError as error:
            problems.append(f"{path}: {error.strerror}")
        else:
            done.append(path)
    return Granted(tuple(done), tuple(problems))
