"""Everything that can be known about a device's receive side, read at once; the base of show, doctor and plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from flexstream.nic.contract import FOUR_TUPLE, Steering
from flexstream.nic.device.devices import (
    DeviceFiles,
    Finding,
    has_net_admin,
    irqbalance_finding,
    numa_cpus,
    queue_findings,
    rule_findings,
    steering_findings,
)
from flexstream.nic.device.interrupts import (
    affinity,
    own_interrupts,
    pinning_obstacle,
    queue_interrupts,
    read_interrupts,
)
from flexstream.nic.rss.ioctl import FLOWS, Channels, Rss, channel_fields, errno_name
from flexstream.nic.rss.transport import RssTransport

Answer = TypeVar("Answer")


@dataclass
class Facts:
    """A device as it is now. None means that it did not say; `reasons` has the answer that it gave instead."""

    device: str
    present: bool
    up: bool = False
    state: str = "unknown"
    driver: str = "unknown"
    bus: str = ""
    numa_node: int | None = None
    numa_cpus: str | None = None
    channels: Channels | None = None
    queues: int = 1
    rss: Rss | None = None
    hash_fields: dict[str, tuple[str, ...] | None] = field(default_factory=dict)
    flags: dict[str, bool] = field(default_factory=dict)
    rules: int | None = None
    queue_irq: dict[int, int] = field(default_factory=dict)
    queue_cpus: dict[int, tuple[int, ...] | None] = field(default_factory=dict)
    pin_obstacle: str | None = None
    net_admin: bool = False
    reads_by: str = "ioctl"
    writes_by: str = "ioctl"
    way_reason: str = ""
    reasons: dict[str, str] = field(default_factory=dict)

    @property
    def table(self) -> tuple[int, ...]:
        return self.rss.table if self.rss is not None else ()

    @property
    def key(self) -> bytes:
        return self.rss.key if self.rss is not None else b""

    def tcp_fields(self) -> tuple[str, ...]:
        """What the hash reads of a TCP packet. Where the driver cannot say, the usual 4-tuple is assumed, and
        traffic has to verify it."""
        fields = self.hash_fields.get("tcp4")
        return FOUR_TUPLE if fields is None else fields

    def no_table(self) -> str | None:
        """Why there is no table to write, or None."""
        if not self.present:
            return f"there is no device {self.device}"
        if self.rss is None:
            return self.reasons["table"]
        if not self.rss.table:
            return f"no table: driver {self.driver} answered with a table of 0 entries"
        return None

    def steering(self, groups: int) -> Steering | str:
        """What producers need, or the reason why their ports cannot be chosen."""
        missing = self.no_table()
        if missing is not None:
            return missing
        assert self.rss is not None
        if not self.rss.key:
            return f"no alignment: driver {self.driver} does not show its RSS key"
        if self.rss.function not in ("toeplitz", None):
            return f"no alignment: the hash function is {self.rss.function}, not toeplitz"
        if self.rss.input_transform:
            return (
                f"no alignment: the device transforms the hash's input (symmetric RSS, {self.rss.input_transform:#x})"
            )
        try:
            return Steering(self.rss.key, self.tcp_fields(), len(self.rss.table), groups)
        except ValueError as error:
            return f"no alignment: {error}"

    def queue_cpu(self) -> tuple[int | None, ...]:
        """The one core of each queue's interrupt; None where several may serve it, or it is unknown."""
        cores = (self.queue_cpus.get(queue) for queue in range(self.queues))
        return tuple(cpus[0] if cpus is not None and len(cpus) == 1 else None for cpus in cores)

    def findings(self, worker_cpus: Sequence[int | None] = (), root: Path = Path("/")) -> list[Finding]:
        """What stands between the table and the workers, each with its fix."""
        if not self.present:
            return [Finding("warn", f"there is no device {self.device}", "`ip link` shows the devices")]
        files = DeviceFiles(self.device, root)
        found = []
        if not files.shown_in_sysfs():
            found.append(
                Finding(
                    "warn",
                    f"/sys does not show the network namespace of {self.device}: queues, RPS and driver are unknown",
                    "mount sysfs inside the namespace, as `ip netns exec` does",
                )
            )
        if not self.up:
            found.append(Finding("warn", f"{self.device} is down", f"ip link set {self.device} up"))
        missing = self.no_table()
        if missing is not None:
            found.append(Finding("info", missing, "--nic kernel puts a table into the kernel, --nic user needs none"))
        if missing is None and not self.flags.get("rxhash", True):
            found.append(
                Finding(
                    "warn",
                    f"{self.device}: receive hashing is off: some drivers then send all packets to queue 0",
                    f"ethtool -K {self.device} rxhash on",
                )
            )
        if missing is None and self.hash_fields.get("tcp6", FOUR_TUPLE) not in (FOUR_TUPLE, None):
            found.append(
                Finding(
                    "warn",
                    f"{self.device}: the hash of TCP over IPv6 does not read the ports, so IPv6 is not aligned",
                    f"ethtool -N {self.device} rx-flow-hash tcp6 sdfn",
                )
            )
        most = self.channels.max_receive if self.channels is not None else self.queues
        channel = "rx" if self.channels is not None and not self.channels.max_combined else "combined"
        if missing is None or self.queue_irq:  # not for devices that are memory
            found += queue_findings(self.device, self.queues, most, len(worker_cpus), channel)
        found += rule_findings(self.device, self.flags.get("ntuple", False), self.rules)
        if missing is None:  # without a table RPS is what the software table works with
            found += steering_findings(files)
        balancer = irqbalance_finding([cpu for cpu in worker_cpus if cpu is not None], root)
        if balancer is not None:
            found.append(balancer)
        if self.queue_irq and self.pin_obstacle is not None:
            found.append(Finding("warn", f"{self.device}: interrupts cannot be pinned: {self.pin_obstacle}"))
        return found

    def to_dict(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "present": self.present,
            "up": self.up,
            "state": self.state,
            "driver": self.driver,
            "bus": self.bus or None,
            "numa_node": self.numa_node,
            "numa_cpus": self.numa_cpus,
            "channels": None if self.channels is None else channel_fields(self.channels),
            "queues": self.queues,
            "table": list(self.table),
            "key": self.key.hex(":") or None,
            "hash": None if self.rss is None else self.rss.function,
            "input_transform": None if self.rss is None else self.rss.input_transform,
            "hash_fields": {flow: None if names is None else list(names) for flow, names in self.hash_fields.items()},
            "flags": self.flags,
            "ntuple_rules": self.rules,
            "queue_irq": {str(queue): irq for queue, irq in self.queue_irq.items()},
            "queue_cpus": {str(queue): None if cpus is None else list(cpus) for queue, cpus in self.queue_cpus.items()},
            "may_pin": self.pin_obstacle is None,
            "may_write": self.net_admin,
            "rss_by": {"read": self.reads_by, "write": self.writes_by, "reason": self.way_reason or None},
            "reasons": self.reasons,
        }


def read_facts(device: str, *, root: Path = Path("/"), transport: RssTransport | None = None) -> Facts:
    """Ask everything. A question that the driver does not answer becomes a reason, never an exception."""
    files = DeviceFiles(device, root)
    if not files.exists():
        return Facts(device, False, reasons={"device": "the kernel knows no device of this name"})
    way = transport or RssTransport(device)
    try:
        return _ask(files, way, root)
    finally:
        if transport is None:
            way.close()


def _ask(files: DeviceFiles, way: RssTransport, root: Path) -> Facts:
    device = files.name
    reasons: dict[str, str] = {}
    if not files.shown_in_sysfs():
        reasons["sysfs"] = "/sys shows another network namespace"
        files = DeviceFiles(device, Path("/nonexistent"))
    try:
        described = way.ioctl.driver()
        driver, bus = described.name, described.bus
    except OSError as error:
        reasons["driver"] = f"the kernel answered {errno_name(error)}"
        driver, bus = files.driver() or ("loopback" if device == "lo" else "unknown"), ""

    def ask(what: str, question: Callable[[], Answer]) -> Answer | None:
        try:
            return question()
        except OSError as error:
            reasons[what] = f"no {what}: driver {driver} answered {errno_name(error)}"
            return None

    channels = ask("channels", way.ioctl.channels)
    rings = ask("rx_rings", way.ioctl.rx_rings)
    queue_irq = queue_interrupts(
        read_interrupts(root), driver=driver, device=device, bus=bus, own=own_interrupts(device, root)
    )
    queues = rings or (channels.receive if channels is not None else 0) or len(files.queue_names("rx")) or 1
    # Interrupts of queues that are switched off are still there with some drivers.
    queue_irq = {queue: irq for queue, irq in queue_irq.items() if queue < queues}
    if not queue_irq:
        reasons["interrupts"] = (
            f"/proc/interrupts names no interrupt that is known as a receive queue of driver {driver}"
        )
    obstacles = [pinning_obstacle(irq, root) for irq in queue_irq.values()]
    node = files.numa_node()
    return Facts(
        device,
        True,
        up=DeviceFiles(device, root).is_up(),
        state=files.state(),
        driver=driver,
        bus=bus,
        numa_node=node,
        numa_cpus=None if node is None else numa_cpus(node, root),
        channels=channels,
        queues=queues,
        rss=ask("table", way.rss),
        hash_fields={flow: _fields(ask, way, flow) for flow in FLOWS},
        flags=ask("flags", way.ioctl.flags) or {},
        rules=ask("rules", way.ioctl.rule_count),
        queue_irq=queue_irq,
        queue_cpus={queue: affinity(irq, root) for queue, irq in queue_irq.items()},
        pin_obstacle=next((obstacle for obstacle in obstacles if obstacle is not None), None)
        if queue_irq
        else reasons["interrupts"],
        net_admin=has_net_admin(root),
        reads_by=way.reads_by,
        writes_by=way.writes_by,
        way_reason=way.reason,
        reasons=reasons,
    )


def _fields(
    ask: Callable[[str, Callable[[], tuple[str, ...]]], tuple[str, ...] | None], way: RssTransport, flow: str
) -> tuple[str, ...] | None:
    return ask(f"hash fields of {flow}", lambda: way.ioctl.hash_fields(flow))
