"""What the guest's kernel says of its NIC, asked without FlexStream; and the queue that a connection must arrive on."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from typing import Any

from tests.nic_in_loop.machine import DEVICE, QUEUES, Guest

SETTING_FILES = (
    "/proc/irq/*/smp_affinity_list",
    f"/sys/class/net/{DEVICE}/queues/*/rps_cpus",
    f"/sys/class/net/{DEVICE}/queues/*/rps_flow_cnt",
    f"/sys/class/net/{DEVICE}/queues/*/xps_cpus",
    f"/sys/class/net/{DEVICE}/queues/*/xps_rxqs",
    "/proc/sys/net/core/rps_sock_flow_entries",
)


def settings(guest: Guest) -> dict[str, str | None]:
    """Everything that FlexStream could have changed: table, key, features, channels, rings, interrupts, RPS, XPS."""
    said = {f"ethtool {flag}": guest.run("ethtool", flag, DEVICE)[1] for flag in ("-x", "-k", "-l", "-g")}
    return {**said, **guest.call("read_all", *SETTING_FILES)}


def features(guest: Guest) -> str:
    return guest.run("ethtool", "-k", DEVICE)[1]


def differences(before: dict[str, str | None], after: dict[str, str | None]) -> list[str]:
    return [
        f"{name}: {before.get(name)!r} -> {after.get(name)!r}"
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    ]


def table(guest: Guest) -> list[int]:
    entries: list[int] = guest.call("table", DEVICE)
    return entries


def key(guest: Guest) -> bytes:
    text = guest.run("ethtool", "-x", DEVICE)[1]
    found = re.search(r"RSS hash key:\s*([0-9a-f:]+)", text)
    assert found is not None, text
    return bytes.fromhex(found[1].replace(":", ""))


def queue_packets(guest: Guest) -> list[int]:
    counted: list[int] = guest.call("queue_packets", DEVICE)
    assert len(counted) == QUEUES, f"the guest's driver counts packets of the queues {counted}, not of {QUEUES}"
    return counted


def queue_interrupts(guest: Guest) -> dict[int, int]:
    """Queue -> interrupt number of its receiving side (virtioN-input.Q in /proc/interrupts)."""
    virtio = guest.call("read_link", f"/sys/class/net/{DEVICE}/device").rsplit("/", 1)[-1]
    pattern = rf"^\s*(\d+):.*\s{virtio}-input\.(\d+)$"
    found = re.findall(pattern, guest.call("read", "/proc/interrupts"), re.MULTILINE)
    assert len(found) == QUEUES, found
    return {int(queue): int(irq) for irq, queue in found}


def queue_cores(guest: Guest) -> list[int]:
    """The core that each queue's interrupt is pinned to."""
    irqs = queue_interrupts(guest)
    return [int(guest.call("read", f"/proc/irq/{irqs[queue]}/smp_affinity_list")) for queue in range(QUEUES)]


def thread_cores(guest: Guest, pid: int, thread: int) -> str:
    """The cores that a thread may run on."""
    found = re.search(r"Cpus_allowed_list:\s*(\S+)", guest.call("read", f"/proc/{pid}/task/{thread}/status"))
    assert found is not None
    return found[1]


def make_unusual(guest: Guest) -> None:
    """Settings that no daemon would choose, so that putting them back is seen."""
    entries = len(table(guest))
    guest.call("set_table", DEVICE, [(entry * entry + 1) % 3 for entry in range(entries)])
    for irq in queue_interrupts(guest).values():
        guest.call("write", f"/proc/irq/{irq}/smp_affinity_list", "1-2")
    guest.call("write", f"/sys/class/net/{DEVICE}/queues/tx-1/xps_cpus", "9")


# -- where a connection must arrive


def toeplitz(hash_key: bytes, data: bytes) -> int:
    """The hash, bit by bit as in its definition ("Introduction to Receive Side Scaling", Microsoft)."""
    window = int.from_bytes(hash_key, "big")
    unused = len(hash_key) * 8 - 32
    result = 0
    for position in range(len(data) * 8):
        if data[position // 8] >> (7 - position % 8) & 1:
            result ^= window >> (unused - position) & 0xFFFFFFFF
    return result


def bucket(hash_key: bytes, entries: int, connection: dict[str, Any]) -> int:
    """The entry of the table that decides on the packets of a connection to the guest."""
    ends: Sequence[tuple[str, int]] = [connection["peer"], connection["local"]]
    addresses = b"".join(ipaddress.ip_address(host).packed for host, _ in ends)
    ports = b"".join(port.to_bytes(2, "big") for _, port in ends)
    return toeplitz(hash_key, addresses + ports) % entries
