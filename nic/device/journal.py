"""What was changed on this machine, on disk before it is changed: so that it can be undone after a crash.

One file per device, network namespace and owner (the daemon, or `flexstream nic apply`): a header line that says
in which boot and for which device, then one line per change, each flushed to the disk before the change is made.
Undoing everything removes the file. Interrupt numbers, tables and masks do not outlive a reboot, and a device that
was made anew has its own values, so a journal of another boot, namespace or device index is stale: it is removed,
never applied. A device is its index, not its name: one that was renamed is still the same.

A journal makes its reader write to the machine, so it is believed only where nobody else could have written it
(`trust.py`), and only if each line is a setting of its own device with a value that such a setting can have.
"""

from __future__ import annotations

import json
import os
import re
import socket
import struct
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from flexstream.errors import ConfigError, FlexStreamError
from flexstream.nic.contract import Change
from flexstream.nic.device.device_lock import DeviceLock
from flexstream.nic.device.settings import check_change, check_device, renamed
from flexstream.nic.device.trust import Distrusted, check_folder, read_text

VERSION = 2
STATE_FOLDER, RUN_FOLDER = Path("/var/lib/flexstream/nic"), Path("/run/flexstream/nic")
OWNERS = ("daemon", "apply")  # in the order in which undo takes them
SO_NETNS_COOKIE = 71  # <asm-generic/socket.h>, Linux 5.14
_FILE = re.compile(r"(?P<device>[^/]+)\.(?P<netns>\d+)\.(?P<ifindex>\d+)\.(?P<owner>[a-z]+)\.jsonl")


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
        return cls(device, boot_id(), namespace_cookie(), device_index(device))

    def now(self) -> Origin:
        """The same device as it is called today, or what has its name when it is gone."""
        return Origin.here(present_name(self.device, self.ifindex) or self.device)

    def stale_reason(self, now: Origin) -> str | None:
        if self.boot_id != now.boot_id:
            return "it is from before the last reboot, which undid everything"
        if self.netns != now.netns:
            return f"it is about {self.device} in another network namespace"
        if now.ifindex == 0:
            return f"{self.device} is gone, and its settings with it"
        if self.ifindex != now.ifindex:
            return f"{self.device} is now another device (index {now.ifindex}, was {self.ifindex})"
        return None


def device_index(device: str) -> int:
    """The device's number; 0 when there is none of that name."""
    try:
        return socket.if_nametoindex(device)
    except OSError:
        return 0


def device_name(index: int) -> str | None:
    """What the device of this number is called; None when there is none."""
    try:
        return socket.if_indextoname(index)
    except (OSError, OverflowError):
        return None


def present_name(device: str, index: int) -> str | None:
    """What a device of this number, once called `device`, is called now; None when it is gone."""
    return device if device_index(device) == index else device_name(index)


def namespace_cookie() -> int:
    """This thread's network namespace. Cookies are never used again; inode numbers, all that old kernels have, are."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as asker:
        try:
            cookie = asker.getsockopt(socket.SOL_SOCKET, SO_NETNS_COOKIE, 8)
        except OSError:
            return os.stat("/proc/thread-self/ns/net").st_ino
    return int(struct.unpack("=Q", cookie)[0])


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def folders(given: Path | None = None) -> tuple[Path, ...]:
    """Where journals are looked for; `FLEXSTREAM_NIC_DIR` replaces the usual places.

    The state folder is the service's, so root has the other one: no journal is worth anything after a reboot.
    """
    if given is not None:
        return (given,)
    named = os.environ.get("FLEXSTREAM_NIC_DIR")
    if named:
        return (Path(named),)
    return (RUN_FOLDER, STATE_FOLDER) if os.geteuid() == 0 else (STATE_FOLDER, RUN_FOLDER)


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
        """Start a new one. Raises JournalError where no folder can be written, ConfigError for no device's name."""
        check_device(device)
        origin, problems = Origin.here(device), []
        for place in folders(folder):
            journal = cls(place / _name(origin, owner), origin, owner, os.getpid())
            try:
                check_folder(place)
                place.mkdir(parents=True, exist_ok=True, mode=0o750)
                journal._rewrite()
            except OSError as error:
                problems.append(f"{place}: {error.strerror}")
            except Distrusted as error:
                problems.append(str(error))
            else:
                return journal
        raise JournalError(
            f"{device}: there is no place for the journal of changes ({'; '.join(problems)}), so nothing is changed",
            hint="run as root, or set FLEXSTREAM_NIC_DIR to a folder that you may write to",
        )

    @classmethod
    def read(cls, path: Path) -> Journal:
        """A journal left behind. A last line cut short by a crash belongs to a change that was not made."""
        try:
            lines = read_text(path).split("\n")
            header = json.loads(lines[0])
            if header["version"] != VERSION:
                raise ValueError(f"version {header['version']}, expected {VERSION}")
            origin = Origin(
                str(header["device"]), str(header["boot_id"]), int(header["netns"]), int(header["ifindex"])
            )
            changes = [Change(**json.loads(line)) for line in lines[1:-1]]
            for change in changes:
                check_change(change, origin.device)
            return cls(path, origin, str(header["owner"]), int(header["pid"]), changes)
        except Distrusted as error:
            raise JournalError(f"{path} is not trusted: {error}", hint=_foreign_hint(path)) from None
        except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, FlexStreamError) as error:
            raise JournalError(
                f"cannot read the journal {path}: {getattr(error, 'message', error)}",
                hint="put the settings back by hand (`flexstream nic show`), then remove the file",
            ) from None

    def is_stale(self) -> bool:
        return self.origin.stale_reason(self.origin.now()) is not None

    def rename(self, device: str) -> None:
        """The device is called so now: what is noted from here on speaks of it by that name. Raises JournalError; then
        all is as it was, which serves as well until more is to be noted."""
        if device == self.origin.device:
            return
        before = self.origin, self.changes
        self.changes = [renamed(change, self.origin.device, device) for change in self.changes]
        self.origin = replace(self.origin, device=device)
        try:
            self._rewrite()
        except OSError as error:
            self.origin, self.changes = before
            raise JournalError(f"{self.path}: {error.strerror}", hint="make room on that disk") from None

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
        draft.unlink(missing_ok=True)
        private = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640)
        with open(private, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self.path)
        _sync_folder(self.path.parent)


def left_behind(device: str, folder: Path | None = None, owner: str | None = None) -> list[Journal]:
    """Journals of this device in this namespace, the daemon's first; stale ones too, foreign ones not.

    Raises JournalError for one that cannot be understood, or a folder that may not be looked into.
    """
    paths = [path for path, _ in _files(folder, foreign=False) if _is_of(path, device)]
    owners = OWNERS if owner is None else (owner,)
    return [Journal.read(path) for name in owners for path in paths if _parts(path)["owner"] == name]


def foreign_journals(folder: Path | None = None) -> list[tuple[Path, str]]:
    """Journals of this namespace that somebody else may have written, and why they are not trusted."""
    return list(_files(folder, foreign=True))


def devices_with_journals(folder: Path | None = None) -> list[str]:
    """Devices of this namespace that have a journal, as they are called now. Raises JournalError where this user may
    not look."""
    names = set()
    for path, _ in _files(folder, foreign=False):
        part = _parts(path)
        names.add(present_name(part["device"], int(part["ifindex"])) or part["device"])
    return sorted(names)


def _files(folder: Path | None, *, foreign: bool) -> Iterator[tuple[Path, str]]:
    """This namespace's journals in folders that are ours to act upon, or in those that are not, with the reason.

    Ours: nobody else could have written them, and we can. A folder of somebody else that cannot be looked into stands
    for its journals. Raises JournalError for one of ours that cannot.
    """
    netns = str(namespace_cookie())
    for place in folders(folder):
        why = _not_ours(place)
        if bool(why) != foreign:
            continue
        try:
            names = os.listdir(place)
        except PermissionError:
            if not foreign:
                raise JournalError(
                    f"this user may not read {place}", hint="run as root, or as the daemon's user"
                ) from None
            yield place, f"this user may not read {place}"
            continue
        except OSError:
            continue
        for name in sorted(names):
            if (found := _FILE.fullmatch(name)) and found["netns"] == netns:
                yield place / name, why


def _not_ours(place: Path) -> str:
    """Why journals in this folder are not to be acted upon; empty: they are ours, or there is no such folder."""
    try:
        check_folder(place)
        there = place.exists()
    except Distrusted as error:
        return str(error)
    except OSError as error:
        return f"{place}: {error.strerror}"
    if there and not os.access(place, os.W_OK | os.X_OK):
        return f"this user may not change {place}"
    return ""


def _parts(path: Path) -> dict[str, str]:
    found = _FILE.fullmatch(path.name)
    assert found is not None
    return found.groupdict()


def _is_of(path: Path, device: str) -> bool:
    """By the device's number; by the name that it had when no device of that number, or of that name, is left."""
    part = _parts(path)
    number, index = int(part["ifindex"]), device_index(device)
    return number == index or (part["device"] == device and (index == 0 or device_name(number) is None))


def _foreign_hint(path: Path) -> str:
    return (
        "a journal makes its reader change the machine, so flexstream reads only your own and root's: "
        f"the service puts its changes back when it starts or stops; then remove {path.name}"
    )


def _name(origin: Origin, owner: str) -> str:
    return f"{origin.device}.{origin.netns}.{origin.ifindex}.{owner}.jsonl"


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


__all__ = [
    "OWNERS",
    "VERSION",
    "DeviceLock",
    "Journal",
    "JournalError",
    "Origin",
    "boot_id",
    "device_index",
    "device_name",
    "devices_with_journals",
    "folders",
    "foreign_journals",
    "left_behind",
    "namespace_cookie",
    "present_name",
]
