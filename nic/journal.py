"""What was changed on this machine, on disk before it is changed: so that it can be undone after a crash.

One file per device, network namespace and owner (the daemon, or `flexstream nic apply`): a header line that says
in which boot and for which device, then one line per change, each flushed to the disk before the change is made.
Undoing everything removes the file. Interrupt numbers, tables and masks do not outlive a reboot, and a device that
was made anew has its own values, so a journal of another boot or of another device index is stale: it is removed,
never applied.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flexstream.errors import ConfigError
from flexstream.nic.contract import Change

VERSION = 1
FOLDERS = (Path("/var/lib/flexstream/nic"), Path("/run/flexstream/nic"))
OWNERS = ("daemon", "apply")  # in the order in which undo takes them


class JournalError(ConfigError):
    """The journal cannot be kept, so nothing may be changed; or it cannot be understood."""

    default_code = "nic_journal"


@dataclass(frozen=True, slots=True)
class Origin:
    """Which machine life, namespace and device a journal speaks of."""

    device: str
    boot_id: str
    netns: int
    ifindex: int

    @classmethod
    def here(cls, device: str) -> Origin:
        return cls(device, boot_id(), os.stat("/proc/self/ns/net").st_ino, device_index(device))

    def stale_reason(self, now: Origin) -> str | None:
        if self.boot_id != now.boot_id:
            return "it is from before the last reboot, which undid everything"
        if now.ifindex == 0:
            return f"{self.device} is gone, and its settings with it"
        if self.ifindex != now.ifindex:
            return f"{self.device} is another device now (index {now.ifindex}, was {self.ifindex})"
        return None


def device_index(device: str) -> int:
    """The device's number; 0 when there is none of that name."""
    try:
        return socket.if_nametoindex(device)
    except OSError:
        return 0


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def folders(given: Path | None = None) -> tuple[Path, ...]:
    """Where journals are looked for; `FLEXSTREAM_NIC_DIR` replaces the usual places."""
    if given is not None:
        return (given,)
    named = os.environ.get("FLEXSTREAM_NIC_DIR")
    return (Path(named),) if named else FOLDERS


@dataclass
class Journal:
    """An open journal: `record` first, then change."""

    path: Path
    origin: Origin
    owner: str
    pid: int
    changes: list[Change] = field(default_factory=list)

    @classmethod
    def create(cls, device: str, owner: str, folder: Path | None = None) -> Journal:
        """Start a new one. Raises JournalError where no folder can be written."""
        origin, problems = Origin.here(device), []
        for place in folders(folder):
            journal = cls(place / _name(origin, owner), origin, owner, os.getpid())
            try:
                _make_folder(place)
                journal._rewrite()
            except OSError as error:
                problems.append(f"{place}: {error.strerror}")
            else:
                return journal
        raise JournalError(
            f"{device}: no place to note what is changed ({'; '.join(problems)}), so nothing is changed",
            hint="run as root, or set FLEXSTREAM_NIC_DIR to a folder that may be written",
        )

    @classmethod
    def read(cls, path: Path) -> Journal:
        """A journal left behind. A last line cut short by a crash belongs to a change that was not made."""
        try:
            lines = path.read_text(encoding="utf-8").split("\n")
            header = json.loads(lines[0])
            if header["version"] != VERSION:
                raise ValueError(f"version {header['version']}, expected {VERSION}")
            origin = Origin(header["device"], header["boot_id"], int(header["netns"]), int(header["ifindex"]))
            changes = [Change(**json.loads(line)) for line in lines[1:-1]]
            return cls(path, origin, str(header["owner"]), int(header["pid"]), changes)
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            raise JournalError(
                f"{path}: this journal cannot be read: {error}",
                hint="put the settings back by hand (`flexstream nic show`), then remove the file",
            ) from None

    def is_stale(self) -> bool:
        return self.origin.stale_reason(Origin.here(self.origin.device)) is not None

    def record(self, change: Change) -> None:
        """Note a change before it is made. The first value of a setting is the one to go back to, so later changes
        of the same setting need no line. Raises JournalError: then do not change anything."""
        if any(known.where == change.where for known in self.changes):
            return
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(change)) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise JournalError(
                f"{self.path}: {error.strerror}: {change.where} stays as it is",
                hint="make room on that disk, or set FLEXSTREAM_NIC_DIR to another folder",
            ) from None
        self.changes.append(change)

    def keep(self, left: Iterable[Change], *, empty: bool = False) -> None:
        """Only these are still to be undone; none: the file goes, unless an empty one is to stay."""
        self.changes = list(left)
        if self.changes or empty:
            self._rewrite()
        else:
            self.path.unlink(missing_ok=True)
            _sync_folder(self.path.parent)

    def _rewrite(self) -> None:
        header: dict[str, Any] = {
            "version": VERSION,
            "owner": self.owner,
            "pid": self.pid,
            "time": int(time.time()),
            **asdict(self.origin),
        }
        text = "".join(json.dumps(line) + "\n" for line in (header, *map(asdict, self.changes)))
        draft = self.path.with_suffix(".new")
        with draft.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self.path)
        _sync_folder(self.path.parent)


def left_behind(device: str, folder: Path | None = None, owner: str | None = None) -> list[Journal]:
    """Journals of this device in this namespace, the daemon's first; stale ones too. Raises JournalError."""
    here = Origin.here(device)
    owners = OWNERS if owner is None else (owner,)
    found = []
    for path in (place / _name(here, name) for name in owners for place in folders(folder)):
        try:
            if path.exists():
                found.append(Journal.read(path))
        except PermissionError:
            raise _unreadable(path.parent) from None
    return found


def devices_with_journals(folder: Path | None = None) -> list[str]:
    """Devices of this namespace that have a journal. Raises JournalError where this user may not look."""
    netns = os.stat("/proc/self/ns/net").st_ino
    names: set[str] = set()
    for place in folders(folder):
        try:
            names.update(name.rsplit(".", 3)[0] for name in os.listdir(place) if f".{netns}." in name)
        except PermissionError:
            raise _unreadable(place) from None
        except OSError:
            continue
    return sorted(names)


def _unreadable(folder: Path) -> JournalError:
    return JournalError(f"{folder} may not be read by this user", hint="run as root, or as the daemon's user")


def _name(origin: Origin, owner: str) -> str:
    return f"{origin.device}.{origin.netns}.{owner}.jsonl"


def _make_folder(folder: Path) -> None:
    """Made with the owner of the folder above: root's `apply` must not lock the daemon's user out."""
    if folder.is_dir():
        return
    folder.mkdir(parents=True, mode=0o750)
    above = folder.parent.stat()
    if os.geteuid() == 0 and above.st_uid != 0:
        os.chown(folder, above.st_uid, above.st_gid)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class DeviceLock:
    """One owner of a device at a time: an abstract socket, which belongs to the network namespace like the device
    does, and which the kernel releases with the process."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._socket: socket.socket | None = None

    @property
    def held(self) -> bool:
        return self._socket is not None

    def take(self) -> None:
        """Raises ConfigError that names the process which has it."""
        if self._socket is not None:
            return
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            claim.bind(self._address)
            claim.listen(128)
            claim.setblocking(False)
        except OSError:
            claim.close()
            pid = self.holder()
            raise ConfigError(
                f"{self.device} is in use by another flexstream (process {pid if pid else 'unknown'})",
                code="nic_busy",
                hint="one daemon per device: stop that one, or give this one another device or --nic user",
            ) from None
        self._socket = claim

    def release(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def answer(self) -> None:
        """Let go of those who asked who holds it, so that there is always room for the next one."""
        while self._socket is not None:
            try:
                self._socket.accept()[0].close()
            except OSError:
                return

    def holder(self) -> int | None:
        """The process that has the device, or None."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
            caller.settimeout(2.0)
            try:
                caller.connect(self._address)
                credentials = caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            except OSError:
                return None
            return int(struct.unpack("3i", credentials)[0])

    @property
    def _address(self) -> str:
        return f"\0flexstream/nic/{self.device}"
