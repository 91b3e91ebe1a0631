"""What sysfs and procfs say about a network device, and what there is in the way of its table.

Only reading, no privilege. Every obstacle comes with the command that removes it, for this distribution where
distributions differ.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flexstream.nic.device.interrupts import format_cpus, parse_mask
from flexstream.nic.rss.toeplitz import parse_ip

CAP_NET_ADMIN = 12
IFF_UP = 1
SIOCGIFFLAGS = 0x8913
# Where the ban list of irqbalance lives. The variable's name changed with version 1.8.
IRQBALANCE_FILES = ("etc/sysconfig/irqbalance", "etc/default/irqbalance", "etc/irqbalance.env")


@dataclass(frozen=True, slots=True)
class Finding:
    """Something an operator should know. `level`: warn (it costs or breaks alignment) or info."""

    level: str
    what: str
    fix: str = ""

    def to_dict(self) -> dict[str, str]:
        return {"level": self.level, "what": self.what, "fix": self.fix}


@dataclass(frozen=True, slots=True)
class DeviceFiles:
    """One device's folder in /sys/class/net."""

    name: str
    root: Path = Path("/")

    @property
    def folder(self) -> Path:
        return self.root / "sys/class/net" / self.name

    def index(self) -> int | None:
        """The device's number, asked of the kernel: /sys may be that of another network namespace."""
        if self.root != Path("/"):
            text = self._read("ifindex") or ("1" if self.folder.exists() else None)
            return None if text is None else int(text)
        try:
            return socket.if_nametoindex(self.name)
        except OSError:
            return None

    def exists(self) -> bool:
        return self.index() is not None

    def shown_in_sysfs(self) -> bool:
        """Whether /sys speaks of this very device: it shows the namespace in which it was mounted."""
        return self.root != Path("/") or self._read("ifindex") == str(self.index())

    def is_up(self) -> bool:
        """Administratively up: IFF_UP."""
        if self.root != Path("/"):
            flags = self._read("flags")
            return flags is not None and bool(int(flags, 16) & IFF_UP)
        request = struct.pack("16sH22x", self.name.encode(), 0)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            try:
                reply = fcntl.ioctl(sock, SIOCGIFFLAGS, request)
            except OSError:
                return False
        return bool(struct.unpack_from("=H", reply, 16)[0] & IFF_UP)

    def state(self) -> str:
        return self._read("operstate") or "unknown"

    def driver(self) -> str | None:
        link = self.folder / "device/driver"
        return os.path.basename(os.readlink(link)) if link.is_symlink() else None

    def numa_node(self) -> int | None:
        """None: the machine has one node, or the device is on none."""
        for place in ("device/numa_node", "device/../numa_node"):
            text = self._read(place)
            if text is not None and int(text) >= 0:
                return int(text)
        return None

    def queue_names(self, direction: str) -> list[str]:
        names = [path.name for path in (self.folder / "queues").glob(f"{direction}-*")]
        return sorted(names, key=lambda name: int(name.partition("-")[2]))

    def rps(self) -> dict[str, tuple[int, ...]]:
        """Receive queues with receive packet steering on, and the cores that it sends packets to."""
        found = {}
        for name in self.queue_names("rx"):
            cpus = parse_mask(self._read(f"queues/{name}/rps_cpus") or "0")
            if cpus:
                found[name] = cpus
        return found

    def rps_flows(self) -> int:
        """Flow entries of receive flow steering, over all queues; 0: it is off."""
        return sum(int(self._read(f"queues/{name}/rps_flow_cnt") or 0) for name in self.queue_names("rx"))

    def xps(self) -> dict[str, tuple[int, ...] | None]:
        """Transmit queue -> cores that use it; None where the device has no such choice."""
        found: dict[str, tuple[int, ...] | None] = {}
        for name in self.queue_names("tx"):
            text = self._read(f"queues/{name}/xps_cpus")
            found[name] = None if text is None else parse_mask(text)
        return found

    def _read(self, name: str) -> str | None:
        try:
            return (self.folder / name).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return None


def name_of_index(index: int, root: Path = Path("/")) -> str | None:
    """What the device of this number is called now; None when it is gone."""
    if root != Path("/"):
        return next((name for name in device_names(root) if DeviceFiles(name, root).index() == index), None)
    try:
        return socket.if_indextoname(index)
    except OSError:
        return None


def device_names(root: Path = Path("/")) -> list[str]:
    folder = root / "sys/class/net"
    found = [path.name for path in folder.iterdir() if (path / "flags").exists()] if folder.is_dir() else []
    return sorted(found)


def is_own_address(address: str) -> bool:
    """Whether packets from there come by loopback, whatever address they call."""
    ip = parse_ip(address)
    if ip.is_loopback:
        return True
    if ip.is_link_local:
        return False  # needs a zone to be asked about, and the usual peer with one is a neighbour
    with socket.socket(socket.AF_INET if ip.version == 4 else socket.AF_INET6, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((str(ip), 0))
        except OSError:
            return False
    return True


def numa_cpus(node: int, root: Path = Path("/")) -> str | None:
    try:
        return (root / f"sys/devices/system/node/node{node}/cpulist").read_text().strip()
    except OSError:
        return None


def has_net_admin(root: Path = Path("/")) -> bool:
    """CAP_NET_ADMIN in effect. In a container it may still not reach the host's devices."""
    try:
        for line in (root / "proc/self/status").read_text().splitlines():
            if line.startswith("CapEff:"):
                return bool(int(line.split()[1], 16) >> CAP_NET_ADMIN & 1)
    except (OSError, ValueError):
        pass
    return False


def irqbalance_running(root: Path = Path("/")) -> bool:
    for entry in (root / "proc").glob("[0-9]*/comm"):
        try:
            if entry.read_text().strip() == "irqbalance":
                return True
        except OSError:
            continue  # it ended meanwhile
    return False


def irqbalance_finding(cpus: Sequence[int], root: Path = Path("/")) -> Finding | None:
    """irqbalance moves interrupts away from where they were pinned, unless the cores are on its ban list."""
    if not irqbalance_running(root):
        return None
    file = next((name for name in IRQBALANCE_FILES if (root / name).exists()), None)
    if file is None:
        file = "etc/default/irqbalance" if (root / "etc/debian_version").exists() else "etc/sysconfig/irqbalance"
    try:
        text = (root / file).read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    banned = next((line for line in text.splitlines() if line.strip().startswith("IRQBALANCE_BANNED_CPU")), None)
    wanted = format_cpus(cpus) or "the workers' cores"
    if banned is not None:
        return Finding(
            "info", f"irqbalance is running; /{file} has {banned.strip()}", f"check that it names cores {wanted}"
        )
    return Finding(
        "warn",
        "irqbalance is running: it moves interrupts away from the workers' cores",
        f"put IRQBALANCE_BANNED_CPULIST={wanted} into /{file} (before irqbalance 1.8: IRQBALANCE_BANNED_CPUS, a mask), "
        "then `systemctl restart irqbalance`; or `systemctl disable --now irqbalance`",
    )


def steering_findings(device: DeviceFiles) -> list[Finding]:
    """RPS and RFS on top of a table: each moves packets once more, by an inter-processor interrupt."""
    found = []
    rps = device.rps()
    if rps:
        cpus = format_cpus([cpu for cpus in rps.values() for cpu in cpus])
        found.append(
            Finding(
                "warn",
                f"{device.name}: RPS is on for {', '.join(rps)} (cores {cpus}): packets leave their queue's core",
                f"for q in /sys/class/net/{device.name}/queues/rx-*; do echo 0 > $q/rps_cpus; done",
            )
        )
    flows = device.rps_flows()
    if flows:
        found.append(
            Finding(
                "warn",
                f"{device.name}: RFS is on ({flows} flow entries): packets follow the reading thread, not the table",
                f"for q in /sys/class/net/{device.name}/queues/rx-*; do echo 0 > $q/rps_flow_cnt; done",
            )
        )
    return found


def rule_findings(device: str, ntuple: bool, rules: int | None) -> list[Finding]:
    """Classifier rules and accelerated RFS decide before the table does."""
    if rules:
        return [
            Finding(
                "warn",
                f"{device} has {rules} ntuple rules: packets that match one bypass the table",
                f"`ethtool -n {device}` shows them, `ethtool -N {device} delete N` removes one",
            )
        ]
    if ntuple:
        return [
            Finding(
                "info",
                f"{device}: ntuple filters are on: with RFS they become aRFS rules that bypass the table",
                f"ethtool -K {device} ntuple off",
            )
        ]
    return []


def _queues(count: int) -> str:
    return f"{count} receive queue{'' if count == 1 else 's'}"


def queue_findings(device: str, queues: int, most: int, workers: int, channel: str = "combined") -> list[Finding]:
    """Fewer queues than workers, or the reverse."""
    if workers and queues < workers:
        can = min(most, workers)
        more = f"`ethtool -L {device} {channel} {can}`" if can > queues else f"the device has no more than {most}"
        return [
            Finding(
                "warn",
                f"{device} has {_queues(queues)} for {workers} workers: some workers "
                "get their packets from another core",
                f"{more}; or serve with --workers {queues}",
            )
        ]
    if workers and queues > workers:
        return [
            Finding(
                "info",
                f"{device} has {_queues(queues)} for {workers} workers: the table uses the first {workers}",
                f"start more workers, or run `ethtool -L {device} {channel} {workers}`",
            )
        ]
    return []
