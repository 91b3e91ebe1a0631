"""Which NIC implementation serves the data port: probed in order, each one that is passed over with its reason.

"auto" tries the device of the listen address: its own table (ethtool), a table in the kernel, then user space, which
always works. It takes the first that can align: a table whose key nobody knows spreads packets, and steers none. A
named one is taken or refused with the reason; it is not replaced silently.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from flexstream.errors import ConfigError
from flexstream.nic.contract import Nic
from flexstream.nic.user import UserNic

KINDS = ("ethtool", "kernel", "user")  # in the order of preference
_CLASSES = {"ethtool": ("flexstream.nic.ethtool", "EthtoolNic"), "kernel": ("flexstream.nic.kernel_table", "KernelNic")}
_DEVICE = re.compile(r"[^\s/:]{1,15}")
_ROUTES = Path("/proc/net/route")
_RTM_NEWADDR, _RTM_GETADDR, _NLM_DUMP, _NLMSG_ERROR, _NLMSG_DONE = 20, 22, 0x301, 2, 3
_IFA_ADDRESS, _IFA_LOCAL = 1, 2


@dataclass(frozen=True, slots=True)
class Spec:
    """auto, user, ethtool:DEVICE or kernel:DEVICE."""

    kind: str
    device: str | None = None

    @classmethod
    def parse(cls, text: object) -> Spec:
        """Raises ValueError with what was expected."""
        if isinstance(text, str):
            kind, colon, device = text.strip().partition(":")
            if kind in ("auto", "user") and not colon:
                return cls(kind)
            if kind in _CLASSES and _DEVICE.fullmatch(device) and device not in (".", ".."):
                return cls(kind, device)
        raise ValueError("auto, user, ethtool:DEVICE or kernel:DEVICE, such as ethtool:eth0")

    def __str__(self) -> str:
        return self.kind if self.device is None else f"{self.kind}:{self.device}"


def open_nic(
    spec: Spec | str,
    *,
    groups: int,
    cpus: Sequence[int | None],
    host: str | None = None,
    placement: Sequence[int] | None = None,
    group_rows: Callable[[], Sequence[int]] | None = None,
    passed_over: Sequence[str] = (),
    below: str | None = None,
) -> Nic:
    """The first implementation that can be had, made and started: it follows `placement` when this returns.

    `host` is the listen address, from which "auto" finds its device. `below` leaves out this kind and those before it:
    what comes after one that failed. Raises ConfigError when a named implementation cannot be had.
    """
    wanted = Spec.parse(spec) if isinstance(spec, str) else spec
    start = tuple(group % len(cpus) for group in range(groups)) if placement is None else tuple(placement)
    notes = list(passed_over)
    for kind, device in _order(wanted, host, below, notes):
        if kind == "user":
            break
        ours = wanted.kind == "auto" or below is not None
        try:
            nic = _make(kind, device, groups, cpus, start, group_rows, must_align=ours)
        except ConfigError as error:
            if not ours:
                raise
            notes.append(f"{kind}:{device}: {error.message}")
        else:
            nic.passed_over = tuple(notes)
            return nic
    user = UserNic(groups, cpus, placement=start, group_rows=group_rows)
    user.passed_over = tuple(notes)
    return user


def _order(spec: Spec, host: str | None, below: str | None, notes: list[str]) -> Iterator[tuple[str, str]]:
    """(kind, device) of what is to be tried before user space."""
    kinds = KINDS[KINDS.index(below) + 1 :] if below is not None else KINDS
    if spec.kind == "user":
        return
    device = spec.device
    if device is None:
        device, why = listening_device(host)
        if device is None:
            notes.append(f"ethtool, kernel: {why}")
            return
    for kind in kinds:
        if kind in _CLASSES and (spec.kind in ("auto", kind) or below is not None):
            yield kind, device


def _make(
    kind: str, device: str, groups: int, cpus: Sequence[int | None], placement: Sequence[int], group_rows: Any,
    *, must_align: bool,
) -> Nic:  # fmt: skip
    module, name = _CLASSES[kind]
    try:
        implementation: Any = getattr(import_module(module), name)
    except ImportError as error:
        raise _cannot(kind, device, f"something that it needs is not installed: {error}") from error
    reason = implementation.probe(device)
    if reason:
        raise _cannot(kind, device, reason)
    more = {"group_rows": group_rows} if kind == "ethtool" else {}  # the kernel's table counts by itself
    nic = cast(Nic, implementation(device, groups=groups, **more))
    try:
        _check_alignment(nic, must_align)
        nic.start(cpus)
        _check_alignment(nic, must_align)  # the driver may have refused what was missing
        nic.follow(placement)
    except ConfigError:
        nic.close()
        raise
    except OSError as error:
        nic.close()
        raise _cannot(kind, device, error.strerror or str(error)) from error
    return nic


def _check_alignment(nic: Nic, must_align: bool) -> None:
    if must_align and (reason := nic.cannot_align()) is not None:
        assert nic.device is not None
        raise _cannot(nic.kind, nic.device, reason)


def _cannot(kind: str, device: str, reason: str) -> ConfigError:
    return ConfigError(
        f"nic = {kind}:{device} does not work here: {reason}",
        code="nic_unavailable",
        hint="`flexstream doctor` shows what this machine offers; nic = auto uses what works",
    )


# The device of an address ------------------------------------------------------------------------------------


def listening_device(host: str | None) -> tuple[str | None, str]:
    """The device that packets for a listen address arrive on, or None and why there is none to speak of."""
    if host is None:
        return None, "there is no data port"
    try:
        ip = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        try:
            ip = ipaddress.ip_address(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
        except OSError as error:
            return None, f"{host} has no address: {error.strerror or error}"
    if ip.is_loopback:
        return None, f"{host} is loopback, which has no device to steer"
    if ip.is_unspecified:
        device = default_device()
        return (
            device,
            "" if device else "there is no default route, so the device is unknown; name one: ethtool:DEVICE",
        )
    device = device_of(str(ip))
    return device, "" if device else f"no device has the address {ip}"


def device_of(address: str) -> str | None:
    """The device that has an address, asked of the kernel (secondary addresses too)."""
    wanted = ipaddress.ip_address(address).packed
    for index, found in _addresses():
        if found == wanted:
            try:
                return socket.if_indextoname(index)
            except OSError:
                return None
    return None


def default_device() -> str | None:
    """The device of the default route; without one, the only device but loopback that is there."""
    try:
        for line in _ROUTES.read_text().splitlines()[1:]:
            fields = line.split()
            if fields[1] == "00000000" and fields[7] == "00000000":
                return fields[0]
    except (OSError, IndexError):
        pass
    others = [name for _, name in socket.if_nameindex() if name != "lo"]
    return others[0] if len(others) == 1 else None


def _addresses() -> Iterator[tuple[int, bytes]]:
    """(device index, address) of every address of this machine, by rtnetlink."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as netlink:
        netlink.settimeout(2.0)
        netlink.send(struct.pack("=IHHII8x", 24, _RTM_GETADDR, _NLM_DUMP, 1, 0))
        while True:
            data = netlink.recv(1 << 16)
            while len(data) >= 16:
                length, kind = struct.unpack_from("=IH", data)
                if kind in (_NLMSG_DONE, _NLMSG_ERROR) or length < 16:
                    return
                if kind == _RTM_NEWADDR:
                    yield from _address(data[16:length])
                data = data[(length + 3) & ~3 :]


def _address(message: bytes) -> Iterator[tuple[int, bytes]]:
    index = struct.unpack_from("=I", message, 4)[0]
    rest = message[8:]
    while len(rest) >= 4:
        length, kind = struct.unpack_from("=HH", rest)
        if length < 4:
            return
        if kind in (_IFA_ADDRESS, _IFA_LOCAL):
            yield index, rest[4:length]
        rest = rest[(length + 3) & ~3 :]
