"""RPS of one device: the cores that the kernel may move received packets to, one mask for each receive queue.

Written through the journal, so that it can be put back after a crash. RFS is switched off for the device: it moves
packets to where their reader runs, over the head of the table. And what else a table in the kernel changes of a device:
the offloads that generic XDP cannot live with.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Sequence
from pathlib import Path

from flexstream.errors import ConfigError
from flexstream.nic.contract import Change
from flexstream.nic.device.changes import Applied, recover, undo_journal
from flexstream.nic.device.interrupts import format_cpus
from flexstream.nic.device.journal import Journal
from flexstream.nic.device.settings import Settings

_NET = Path("/sys/class/net")
MERGING = ("rx-lro", "rx-gro-hw")  # offloads that make one large packet of several
_LOOKS = 3  # devices come and go while they are listed


class ReceiveSteering:
    """RPS of one device, and the offloads that generic XDP cannot live with.

    Guarantees: what `changes()` lists is in the journal on disk, and was so before it was changed.

    Assumes that the caller holds the device's lock while it changes anything.
    """

    def __init__(
        self, device: str, *, journal_folder: Path | None = None, settings: Settings | None = None
    ) -> None:
        self.device = device
        self._journal_folder = journal_folder
        self._settings = settings or Settings()
        self._journal: Journal | None = None
        self._applied: Applied | None = None
        self._wanted: dict[str, str] = {}

    def refusal(self) -> str | None:
        """Why the masks cannot be written, or None."""
        files = [_NET / self.device / "queues" / queue / "rps_cpus" for queue in self._queues()]
        if not sysfs_shows_this_namespace():
            return (
                "/sys does not show the network namespace of this process; mount sysfs inside it "
                "(`ip netns exec` does)"
            )
        if not files or not all(file.exists() for file in files):
            return f"{_NET / self.device}/queues has no rps_cpus: the kernel is built without CONFIG_RPS"
        for file in files:
            if not os.access(file, os.W_OK):
                return f"{file} cannot be written (read-only /sys in a container, or not root)"
        return None

    def recover(self) -> None:
        """Put back what a process that died has left. Raises ConfigError."""
        recover(self.device, self._settings, self._journal_folder)

    def apply(self, cpus: Sequence[int]) -> None:
        """Let RPS use exactly these cores. Raises ConfigError; what was changed until then is in `changes()`."""
        wanted = {}
        for queue in self._queues():
            wanted[f"{self.device} {queue} rps_flow_cnt"] = "0"
            wanted[f"{self.device} {queue} rps_cpus"] = format_cpus(cpus)
        for where, value in wanted.items():
            old = self._settings.read(where)
            if old == value:
                continue
            self._change(Change(where, old, value))
            if (now := self._settings.read(where)) != value:  # isolated cores are left out without a word
                raise ConfigError(
                    f"{where}: wrote {value}, but the kernel set {now or 'none'}",
                    code="nic_refused",
                    hint="cores that are offline or isolated (isolcpus=) get no packets: give the workers other cores",
                )
        self._wanted = wanted

    def stop_merging(self) -> None:
        """For generic XDP: the kernel switches these offloads off when one comes, and never on again. So that
        is done here before, with a line in the journal, and `undo` switches them on."""
        for name in MERGING:
            where = f"{self.device} feature {name}"
            with contextlib.suppress(ConfigError):  # a device without it, or that has it fixed, has nothing to restore
                if self._settings.read(where) == "on":
                    self._change(Change(where, "on", "off"))

    def _change(self, change: Change) -> None:
        if self._journal is None:
            self._journal = Journal.create(self.device, "daemon", self._journal_folder)
            self._applied = Applied(self._settings, self._journal)
        assert self._applied is not None
        self._applied.change(change)

    def drift(self) -> list[str]:
        """What somebody else has set since `apply`."""
        found = []
        for where, value in self._wanted.items():
            try:
                now = self._settings.read(where)
            except ConfigError:
                return []  # the device is gone, which is another finding
            if now != value:
                found.append(f"{where}: it is {now or 'none'}, but FlexStream had set {value}")
        return found

    def rename(self, device: str) -> None:
        """The device is called so now. Raises ConfigError; then nothing is changed."""
        if self._applied is not None:
            self._applied.rename(device)
        self._wanted = {f"{device} {where.partition(' ')[2]}": value for where, value in self._wanted.items()}
        self.device = device

    def changes(self) -> tuple[Change, ...]:
        return () if self._applied is None else self._applied.changes()

    def undo(self) -> None:
        """Put back what was there. Raises ConfigError for what could not be; that stays in `changes()`."""
        self._wanted = {}
        if self._journal is not None:
            self._undo(self._journal)
            self._journal = self._applied = None

    def _undo(self, journal: Journal) -> tuple[Change, ...]:
        """Nothing is written to another device that has the name now."""
        undone = undo_journal(journal, self._settings)
        if undone.problems:
            raise ConfigError(
                f"not everything could be put back: {'; '.join(undone.problems)}",
                code="nic_undo",
                hint="`flexstream nic undo` tries again",
            )
        return undone.undone

    def close(self) -> None:
        self._settings.close()

    def _queues(self) -> list[str]:
        with contextlib.suppress(OSError):
            names = os.listdir(_NET / self.device / "queues")
            return sorted((name for name in names if name.startswith("rx-")), key=lambda name: int(name[3:]))
        return []


def sysfs_shows_this_namespace() -> bool:
    """A sysfs shows the devices of the namespace in which it was mounted, not of the one that looks at it."""
    return any(_sysfs_devices() == {name: index for index, name in socket.if_nameindex()} for _ in range(_LOOKS))


def _sysfs_devices() -> dict[str, int]:
    found = {}
    with contextlib.suppress(OSError):
        for name in os.listdir(_NET):
            with contextlib.suppress(OSError, ValueError):
                found[name] = int((_NET / name / "ifindex").read_text())
    return found
