"""One device's RSS settings by whichever way the kernel answers: generic netlink, else the SIOCETHTOOL ioctl.

RSS_GET came with Linux 6.2 and RSS_SET with 6.17, but what a kernel has is asked, not assumed; the release only
decides whether asking is worth loading pyroute2. Reading and writing are chosen one by one. FLEXSTREAM_NIC_WAY=ioctl
or =netlink decides for the machine's owner.
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from flexstream.errors import ConfigError
from flexstream.nic.rss.ioctl import EthtoolIoctl, Rss, errno_name

if TYPE_CHECKING:
    from flexstream.nic.rss.netlink import RssNetlink

RSS_GET_SINCE = (6, 2)


def kernel_release(text: str | None = None) -> tuple[int, int]:
    """`6.18.44-fc` -> (6, 18); (0, 0) for what cannot be read."""
    match = re.match(r"(\d+)\.(\d+)", platform.release() if text is None else text)
    return (int(match[1]), int(match[2])) if match else (0, 0)


class RssTransport:
    """Reads and writes table and key. Thread-safe. OSError is the kernel's answer, whichever way it came."""

    def __init__(self, device: str, *, ioctl: EthtoolIoctl | None = None, way: str | None = None) -> None:
        chosen = way or os.environ.get("FLEXSTREAM_NIC_WAY") or "auto"
        if chosen not in ("auto", "ioctl", "netlink"):
            raise ConfigError(
                f"FLEXSTREAM_NIC_WAY={chosen!r} is unknown", code="nic_setting", hint="set it to auto, ioctl or netlink"
            )
        self.device = device
        self.ioctl = ioctl or EthtoolIoctl(device)
        self._netlink: RssNetlink | None = None
        self.reason = ""  # why the ioctl is used for something
        self._choose(chosen)

    def _choose(self, chosen: str) -> None:
        if chosen == "ioctl":
            self.reason = "FLEXSTREAM_NIC_WAY asks for the ioctl"
            return
        if chosen == "auto" and kernel_release() < RSS_GET_SINCE:
            self.reason = f"RSS_GET came with Linux 6.2, and this is {platform.release()}"
            return
        try:
            from flexstream.nic.rss.netlink import RssNetlink
        except ImportError:
            if chosen == "netlink":
                raise ConfigError(
                    "FLEXSTREAM_NIC_WAY=netlink needs pyroute2", code="nic_setting", hint="pip install flexstream[nic]"
                ) from None
            self.reason = "pyroute2 is not installed (pip install flexstream[nic])"
            return
        netlink = RssNetlink(self.device)
        try:
            commands = netlink.commands()
        except OSError as error:
            self.reason = f"the kernel's ethtool netlink family did not answer: {error.strerror or error}"
            return
        if "RSS_GET" not in commands:
            self.reason = "this kernel's ethtool netlink family has no RSS_GET"
            return
        self._netlink = netlink
        self._netlink_writes = "RSS_SET" in commands
        if not self._netlink_writes:
            self.reason = "this kernel's ethtool netlink family has no RSS_SET (it came with Linux 6.17)"

    def rename(self, device: str) -> None:
        """The device is called so now."""
        self.device = self.ioctl.device = device
        if self._netlink is not None:
            self._netlink.device = device

    @property
    def reads_by(self) -> str:
        return "ioctl" if self._netlink is None else "netlink"

    @property
    def writes_by(self) -> str:
        return "netlink" if self._netlink is not None and self._netlink_writes else "ioctl"

    def rss(self) -> Rss:
        return self.ioctl.rss() if self._netlink is None else self._netlink.rss()

    def set_rss(self, *, table: Sequence[int] | None = None, key: bytes | None = None) -> None:
        if self._netlink is not None and self._netlink_writes:
            try:
                self._netlink.set_rss(table=table, key=key)
                return
            except OSError as error:
                # RSS_SET is young: a driver behind it may still know the older call only.
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ETIMEDOUT):
                    raise
                refusal = error
            self.ioctl.set_rss(table=table, key=key)
            self._netlink_writes = False
            self.reason = f"the kernel answered RSS_SET with {errno_name(refusal)}, but the ioctl works"
        else:
            self.ioctl.set_rss(table=table, key=key)

    def queue_napi(self) -> dict[int, int]:
        """NAPI id of each receive queue as the kernel tells it (netdev netlink family, Linux 6.8); empty without."""
        return {} if self._netlink is None else self._netlink.queue_napi()

    def queue_packets(self) -> dict[int, int]:
        """Packets per receive queue as the kernel counts them (netdev netlink family, Linux 6.10); empty without."""
        return {} if self._netlink is None else self._netlink.queue_packets()

    def set_rss_default(self) -> None:
        """Ask for the driver's own table; one that has none to give gets an even one."""
        with contextlib.suppress(OSError):
            try:
                self.set_rss(table=())
            except OSError:
                queues = self.ioctl.rx_rings()
                self.set_rss(table=[entry % queues for entry in range(len(self.rss().table))])

    def close(self) -> None:
        self.ioctl.close()
