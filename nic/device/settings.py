"""Every setting of the machine that FlexStream may touch: how it is named, read, written and said in shell.

A name is what a `Change` carries in `where`: "eth0 table", "eth0 channels combined", "eth0 hash tcp4",
"eth0 flag rxhash", "eth0 rx-0 rps_cpus", "eth0 ring rx", "eth0 coalesce rx_usecs", "irq 38 cpus". A value is text, so
that a journal can keep it. Reading changes nothing; writing raises ConfigError with the kernel's answer. What a name or
a value may be is checked before anything is opened: a name has no path in it, and a value is one that the setting can
have.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

from flexstream.errors import ConfigError
from flexstream.nic.contract import FOUR_TUPLE, Change
from flexstream.nic.device.interrupts import (
    format_cpus,
    format_mask,
    is_interrupt_of,
    parse_cpus,
    parse_mask,
    set_affinity,
)
from flexstream.nic.device.link_settings import read_link_setting, write_link_setting
from flexstream.nic.rss.ioctl import EthtoolIoctl, refused
from flexstream.nic.rss.transport import RssTransport

# Letters of `ethtool -N DEVICE rx-flow-hash tcp4 sdfn`.
FIELD_LETTERS = dict(zip(FOUR_TUPLE, "sdfn", strict=True))
_DEVICE = r"(?!\.\.? )[^\s/:]{1,15}"  # dev_valid_name() of the kernel
_NAME = re.compile(
    r"irq (?P<irq>\d{1,9}) cpus"
    rf"|(?P<device>{_DEVICE}) (?:(?P<rss>table|key)|channels (?P<channels>combined|rx|tx)|hash (?P<flow>tcp4|tcp6)"
    r"|flag (?P<flag>rxhash|ntuple)|(?P<queue>[rt]x-\d{1,5}) (?P<file>rps_cpus|rps_flow_cnt|xps_cpus)"
    r"|feature (?P<feature>[a-z0-9-]{1,31})"
    r"|(?P<link>ring (?:rx|tx)|coalesce (?:rx_usecs|rx_frames|tx_usecs|tx_frames|adaptive_rx)))"
)
MOST_CORES = 8192  # NR_CPUS of the largest kernels
MOST_ENTRIES = MOST_QUEUES = 1 << 16
LONGEST_KEY = 256
_KEY = re.compile(r"[0-9a-fA-F]{2}(?::?[0-9a-fA-F]{2})*")
_RANGE = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?")


class Settings:
    """The settings of network devices, read and written by name. `root` is for tests of what is files."""

    def __init__(self, root: Path = Path("/"), open_rss: Callable[[str], RssTransport] | None = None) -> None:
        self._root = root
        self._open_rss = open_rss or RssTransport
        self._devices: dict[str, RssTransport] = {}

    def device(self, name: str) -> RssTransport:
        if name not in self._devices:
            self._devices[name] = self._open_rss(name)
        return self._devices[name]

    def close(self) -> None:
        for device in self._devices.values():
            device.close()
        self._devices.clear()

    def read(self, where: str) -> str:
        """The present value. Raises ConfigError."""
        part = _parse(where)
        if part["irq"]:
            return format_cpus(parse_cpus(self._read_file(self._affinity(part["irq"]))))
        if part["file"]:
            text = self._read_file(self._queue_file(part))
            return text if part["file"] == "rps_flow_cnt" else format_cpus(parse_mask(text))
        try:
            if part["link"]:
                return read_link_setting(part["device"], *part["link"].split())
            return _read_device(self.device(part["device"]), part)
        except OSError as error:
            raise refused(f"read {where.partition(' ')[2]}", part["device"], error) from None

    def write(self, where: str, value: str) -> None:
        """Make it so. Raises ConfigError; then the value is as it was."""
        check_value(where, value)
        part = _parse(where)
        if part["irq"]:
            set_affinity(int(part["irq"]), parse_cpus(value), self._root)
        elif part["file"]:
            text = value if part["file"] == "rps_flow_cnt" else format_mask(parse_cpus(value))
            self._write_file(self._queue_file(part), text, where)
        else:
            try:
                if part["link"]:
                    kind, name = part["link"].split()
                    write_link_setting(part["device"], kind, name, value)
                else:
                    _write_device(self.device(part["device"]), part, value)
            except OSError as error:
                raise refused(f"set {where.partition(' ')[2]} to {shorten(value)}", part["device"], error) from None

    def is_of(self, device: str, where: str) -> bool:
        """Whether the kernel has this as a setting of the device, or of one of its interrupts."""
        irq = interrupt_of(where)
        if irq is None:
            return _parse(where)["device"] == device
        try:
            bus = self.device(device).ioctl.driver().bus
        except OSError:
            bus = ""
        return is_interrupt_of(irq, device, bus, self._root)

    def cannot_hold(self, where: str, value: str) -> str | None:
        """Why the device can no longer have this value, which it once had; None where nothing speaks against it."""
        part = _parse(where)
        try:
            if part["rss"] == "table":
                return _table_too_large(self.device(part["device"]), value)
            if part["rss"] == "key":
                now = len(self.device(part["device"]).rss().key)
                size = len(value.replace(":", "")) // 2
                return None if now == size else f"the old key has {size} bytes, but the device's key has {now}"
            if part["channels"]:
                channels = self.device(part["device"]).ioctl.channels()
                most = getattr(channels, f"max_{part['channels']}")
                return None if int(value) <= most else f"it was {value}, but the device now has no more than {most}"
            if part["irq"]:
                return self._offline(parse_cpus(value))
        except OSError:
            return None  # what does not answer is another finding
        return None

    def _offline(self, cpus: tuple[int, ...]) -> str | None:
        online = parse_cpus((self._root / "sys/devices/system/cpu/online").read_text())
        return None if set(cpus) & set(online) else f"no core of {format_cpus(cpus)} is online"

    def shell(self, where: str, value: str) -> str:
        """The command that a person would type."""
        part = _parse(where)
        if part["irq"]:
            return f"echo {value} > /proc/irq/{part['irq']}/smp_affinity_list"
        if part["file"]:
            text = value if part["file"] == "rps_flow_cnt" else format_mask(parse_cpus(value))
            return f"echo {text} > /sys/class/net/{part['device']}/queues/{part['queue']}/{part['file']}"
        return _shell_device(part, where, value)

    def _affinity(self, irq: str) -> Path:
        return self._root / f"proc/irq/{irq}/smp_affinity_list"

    def _queue_file(self, part: dict[str, str]) -> Path:
        return self._root / "sys/class/net" / part["device"] / "queues" / part["queue"] / part["file"]

    def _read_file(self, path: Path) -> str:
        try:
            return path.read_text().strip()
        except OSError as error:
            raise refused("read", str(path), error) from None

    def _write_file(self, path: Path, text: str, where: str) -> None:
        try:
            path.write_text(text)
        except OSError as error:
            raise refused(f"set {where} to {text}", str(path), error) from None


def _parse(where: str) -> dict[str, str]:
    match = _NAME.fullmatch(where) if isinstance(where, str) else None
    if match is None:
        raise ConfigError(
            f"flexstream does not know a setting {where!r}",
            code="nic_setting",
            hint='write a setting such as "eth0 table", "eth0 channels combined" or "irq 38 cpus"',
        )
    return match.groupdict()


def check_value(where: str, value: str) -> None:
    """Raises ConfigError where this is no setting, or its value can never be such a one."""
    part = _parse(where)
    expected = _expected(part, value)
    if expected is not None:
        raise ConfigError(f"{where} = {shorten(value)!r}", code="nic_setting", hint=f"it is {expected}")


def _expected(part: dict[str, str], value: str) -> str | None:
    """What the value should have been, or None when it is that."""
    if part["irq"] or part["file"] in ("rps_cpus", "xps_cpus"):
        fine = _is_core_list(value) and not (part["irq"] and not value)
        return None if fine else "cores, such as 0-2,5" + ("" if part["irq"] else ", or nothing")
    if part["rss"] == "table":
        entries = value.split(",")
        fine = len(entries) <= MOST_ENTRIES and all(_is_number(entry, MOST_QUEUES - 1) for entry in entries)
        return None if fine else "queue numbers with commas: 0,1,0,1"
    if part["rss"] == "key":
        fine = bool(_KEY.fullmatch(value)) and len(value) <= 3 * LONGEST_KEY
        return None if fine else "bytes in hexadecimal with colons: 6d:5a:56"
    if part["flow"]:
        names = [name for name in value.split(",") if name]
        return None if set(names) <= set(FIELD_LETTERS) else f"some of {','.join(FIELD_LETTERS)}"
    if part["flag"] or part["feature"]:
        return None if value in ("on", "off") else "on or off"
    most = MOST_QUEUES if part["channels"] else (1 << 32) - 1
    return None if _is_number(value, most) else f"a number from 0 to {most}"


def _is_number(text: str, most: int) -> bool:
    return re.fullmatch(r"[0-9]{1,10}", text) is not None and int(text) <= most


def _is_core_list(text: str) -> bool:
    for part in text.split(",") if text else ():
        found = _RANGE.fullmatch(part)
        if found is None or not int(found[1]) <= int(found[2] or found[1]) < MOST_CORES:
            return False
    return True


def check_change(change: Change, device: str) -> None:
    """A line of a device's journal: a setting of this device, or of an interrupt. Raises ConfigError."""
    for value in (change.old, change.new):
        if value or _parse(change.where)["rss"] is None:  # a device that shows no key or table has none to note
            check_value(change.where, value)
    named = _parse(change.where)["device"]
    if named is not None and named != device:
        raise ConfigError(f"{change.where!r} is not a setting of {device}", code="nic_setting", hint=None)


def check_device(name: str) -> None:
    """Raises ConfigError for what can be no device's name."""
    if re.fullmatch(_DEVICE + " ", name + " ") is None:
        raise ConfigError(
            f"{name!r} is not the name of a device", code="nic_device", hint="`ip link` shows the devices"
        )


def interrupt_of(where: str) -> int | None:
    """The interrupt that a setting is of; None for a device's."""
    number = _parse(where)["irq"]
    return None if number is None else int(number)


def renamed(change: Change, old: str, new: str) -> Change:
    """The same change of a device that is called otherwise now."""
    device, _, rest = change.where.partition(" ")
    if interrupt_of(change.where) is not None or device != old:
        return change
    return Change(f"{new} {rest}", change.old, change.new)


def _table_too_large(device: RssTransport, value: str) -> str | None:
    old, now = parse_table(value), device.rss().table
    if len(old) != len(now):
        return f"the old table has {len(old)} entries, but the device's has {len(now)}"
    queues = device.ioctl.rx_rings()
    if max(old, default=0) >= queues:
        return f"the old table names queue {max(old)}, but the device now has {queues} receive queues"
    return None


def _read_device(device: RssTransport, part: dict[str, str]) -> str:
    if part["rss"] == "table":
        return format_table(device.rss().table)
    if part["rss"] == "key":
        return device.rss().key.hex(":")
    if part["channels"]:
        return str(getattr(device.ioctl.channels(), part["channels"]))
    if part["flow"]:
        return ",".join(device.ioctl.hash_fields(part["flow"]))
    if part["feature"]:
        return "on" if _features(device.ioctl, part["feature"])[part["feature"]] else "off"
    return "on" if device.ioctl.flags()[part["flag"]] else "off"


def _write_device(device: RssTransport, part: dict[str, str], value: str) -> None:
    if part["rss"] == "table":
        device.set_rss(table=parse_table(value))
    elif part["rss"] == "key":
        device.set_rss(key=bytes.fromhex(value.replace(":", "")))
    elif part["channels"]:
        device.ioctl.set_channels(**{part["channels"]: int(value)})
    elif part["flow"]:
        device.ioctl.set_hash_fields(part["flow"], [name for name in value.split(",") if name])
    elif part["feature"]:
        _set_feature(device.ioctl, part["feature"], value == "on")
    else:
        _set_flag(device.ioctl, part["flag"], value == "on")


def _set_flag(device: EthtoolIoctl, flag: str, on: bool) -> None:
    device.set_flag(flag, on)
    if device.flags()[flag] != on:  # the kernel keeps what a driver has fixed, and says nothing
        raise _fixed(device.device, flag, on)


def _set_feature(device: EthtoolIoctl, name: str, on: bool) -> None:
    if _features(device, name)[name] == on:
        return
    device.set_feature(name, on)
    if device.features()[name] != on:
        raise _fixed(device.device, name, on)


def _features(device: EthtoolIoctl, name: str) -> dict[str, bool]:
    found = device.features()
    if name not in found:
        raise ConfigError(
            f"{device.device}: there is no feature {name!r}",
            code="nic_setting",
            hint=f"`ethtool -k {device.device}` shows them",
        )
    return found


def _fixed(device: str, name: str, on: bool) -> ConfigError:
    return ConfigError(
        f"{device}: {name} stays {'off' if on else 'on'}: the driver does not let it change",
        code="nic_refused",
        hint=f"`ethtool -k {device}` shows [fixed]",
    )


def _shell_device(part: dict[str, str], where: str, value: str) -> str:
    device = shlex.quote(part["device"])
    if part["rss"] == "table":
        table = parse_table(value)
        queues = max(table, default=0) + 1
        if table == tuple(entry % queues for entry in range(len(table))):
            return f"ethtool -X {device} equal {queues}"
        # ethtool(8) can write equal shares and weights only, not single entries.
        return f"flexstream nic set {shlex.quote(where)} {value}"
    if part["rss"] == "key":
        return f"ethtool -X {device} hkey {value}"
    if part["channels"]:
        return f"ethtool -L {device} {part['channels']} {value}"
    if part["flow"]:
        letters = "".join(letter for name, letter in FIELD_LETTERS.items() if name in value.split(","))
        return f"ethtool -N {device} rx-flow-hash {part['flow']} {letters}"
    if part["link"]:
        kind, name = part["link"].split()
        option = {"ring": "-G", "coalesce": "-C"}[kind]
        return f"ethtool {option} {device} {name.replace('_', '-')} {value}"
    return f"ethtool -K {device} {part['flag'] or part['feature']} {value}"


def format_table(table: tuple[int, ...]) -> str:
    """(0, 1, 0, 1) -> `0,1,0,1`."""
    return ",".join(map(str, table))


def parse_table(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(entry) for entry in text.split(",") if entry.strip())
    except ValueError:
        raise ConfigError(
            f"{shorten(text)!r} is not a table",
            code="nic_setting",
            hint="a table is queue numbers with commas: 0,1,0,1",
        ) from None


def shorten(text: str, limit: int = 48) -> str:
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
