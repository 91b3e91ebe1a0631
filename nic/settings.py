"""Every setting of the machine that FlexStream may touch: how it is named, read, written and said in shell.

A name is what a `Change` carries in `where`: "eth0 table", "eth0 channels combined", "eth0 hash tcp4",
"eth0 flag rxhash", "eth0 rx-0 rps_cpus", "eth0 ring rx", "eth0 coalesce rx_usecs", "irq 38 cpus". A value is text, so
that a journal can keep it. Reading changes nothing; writing raises ConfigError with the kernel's answer.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

from flexstream.errors import ConfigError
from flexstream.nic.contract import FOUR_TUPLE
from flexstream.nic.interrupts import format_cpus, format_mask, parse_cpus, parse_mask, set_affinity
from flexstream.nic.link_settings import read_link_setting, write_link_setting
from flexstream.nic.rss_ioctl import EthtoolIoctl, refused
from flexstream.nic.rss_transport import RssTransport

# Letters of `ethtool -N DEVICE rx-flow-hash tcp4 sdfn`.
FIELD_LETTERS = dict(zip(FOUR_TUPLE, "sdfn", strict=True))
_NAME = re.compile(
    r"irq (?P<irq>\d+) cpus"
    r"|(?P<device>\S+) (?:(?P<rss>table|key)|channels (?P<channels>combined|rx|tx)|hash (?P<flow>tcp4|tcp6)"
    r"|flag (?P<flag>rxhash|ntuple)|(?P<queue>[rt]x-\d+) (?P<file>rps_cpus|rps_flow_cnt|xps_cpus)"
    r"|(?P<link>ring (?:rx|tx)|coalesce (?:rx_usecs|rx_frames|tx_usecs|tx_frames|adaptive_rx)|feature \S+))"
)


class Settings:
    """Reads and writes by name. `root` is for tests of what is files."""

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
    match = _NAME.fullmatch(where)
    if match is None:
        raise ConfigError(
            f"{where!r} is no setting that flexstream knows",
            code="nic_setting",
            hint='settings are named like "eth0 table", "eth0 channels combined" or "irq 38 cpus"',
        )
    return match.groupdict()


def _read_device(device: RssTransport, part: dict[str, str]) -> str:
    if part["rss"] == "table":
        return format_table(device.rss().table)
    if part["rss"] == "key":
        return device.rss().key.hex(":")
    if part["channels"]:
        return str(getattr(device.ioctl.channels(), part["channels"]))
    if part["flow"]:
        return ",".join(device.ioctl.hash_fields(part["flow"]))
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
    else:
        _set_flag(device.ioctl, part["flag"], value == "on")


def _set_flag(device: EthtoolIoctl, flag: str, on: bool) -> None:
    device.set_flag(flag, on)
    if device.flags()[flag] != on:  # the kernel keeps what a driver has fixed, and says nothing
        raise ConfigError(
            f"{device.device}: {flag} stays {'off' if on else 'on'}: the driver has it fixed",
            code="nic_refused",
            hint=f"`ethtool -k {device.device}` shows [fixed]",
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
        option = {"ring": "-G", "coalesce": "-C", "feature": "-K"}[kind]
        return f"ethtool {option} {device} {name.replace('_', '-')} {value}"
    return f"ethtool -K {device} {part['flag']} {value}"


def format_table(table: tuple[int, ...]) -> str:
    """(0, 1, 0, 1) -> `0,1,0,1`."""
    return ",".join(map(str, table))


def parse_table(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(entry) for entry in text.split(",") if entry.strip())
    except ValueError:
        raise ConfigError(
            f"{shorten(text)!r} is no table", code="nic_setting", hint="a table is queue numbers with commas: 0,1,0,1"
        ) from None


def shorten(text: str, limit: int = 48) -> str:
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
