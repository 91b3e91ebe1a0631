"""A device's receive settings through the SIOCETHTOOL ioctl: no library, every kernel.

Constants keep the kernel's names (include/uapi/linux/ethtool.h). Nothing here decides anything: each method is
one question or one order, and `OSError` is the kernel's own answer. `DeviceRefused` turns that into words.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from flexstream.errors import ConfigError

SIOCETHTOOL = 0x8946
ETHTOOL_GDRVINFO, ETHTOOL_GCOALESCE, ETHTOOL_GRINGPARAM = 0x03, 0x0E, 0x10
ETHTOOL_GSTRINGS, ETHTOOL_GSTATS, ETHTOOL_GSSET_INFO = 0x1B, 0x1D, 0x37
ETHTOOL_GFLAGS, ETHTOOL_SFLAGS = 0x25, 0x26
ETHTOOL_GRXFH, ETHTOOL_SRXFH, ETHTOOL_GRXRINGS, ETHTOOL_GRXCLSRLCNT = 0x29, 0x2A, 0x2D, 0x2E
ETHTOOL_GRXFHINDIR, ETHTOOL_SRXFHINDIR = 0x38, 0x39
ETHTOOL_GFEATURES, ETHTOOL_SFEATURES = 0x3A, 0x3B
ETHTOOL_GCHANNELS, ETHTOOL_SCHANNELS = 0x3C, 0x3D
ETHTOOL_GRSSH, ETHTOOL_SRSSH = 0x46, 0x47
ETH_SS_STATS, ETH_SS_FEATURES = 1, 4
ETH_RXFH_INDIR_NO_CHANGE = 0xFFFFFFFF
ETH_RSS_HASH_NO_CHANGE = 0
RXH_XFRM_NO_CHANGE = 0xFF
HASH_FUNCTIONS = {1: "toeplitz", 2: "xor", 4: "crc32"}
ETH_FLAGS = {"ntuple": 1 << 27, "rxhash": 1 << 28}
FLOWS = {"tcp4": 0x01, "tcp6": 0x05}
RXH_DISCARD = 1 << 31
# In the order in which Toeplitz is fed.
RXH_FIELDS = {"src_ip": 1 << 4, "dst_ip": 1 << 5, "src_port": 1 << 6, "dst_port": 1 << 7}
FOUR_TUPLE = tuple(RXH_FIELDS)

_RXFH = struct.Struct("=4I4BI")  # cmd, rss_context, indir_size, key_size, hfunc, input_xfrm, rsvd8[2], rsvd32
_RXNFC = struct.Struct("=2IQ176x")  # cmd, flow_type, data, fs and rule_cnt: 192 bytes in all
_CHANNELS = struct.Struct("=9I")
_RINGS = struct.Struct("=9I")
_COALESCE = struct.Struct("=23I")
IOCTL = Callable[[int, int, bytearray], object]


@dataclass(frozen=True, slots=True)
class Driver:
    """ETHTOOL_GDRVINFO."""

    name: str
    version: str = ""
    firmware: str = ""
    bus: str = ""


@dataclass(frozen=True, slots=True)
class Channels:
    """ETHTOOL_GCHANNELS: a combined channel has a receive and a transmit queue."""

    max_rx: int
    max_tx: int
    max_other: int
    max_combined: int
    rx: int
    tx: int
    other: int
    combined: int

    @property
    def receive(self) -> int:
        return self.rx + self.combined

    @property
    def max_receive(self) -> int:
        return max(self.max_rx, self.max_combined)


@dataclass(frozen=True, slots=True)
class Rss:
    """ETHTOOL_GRSSH: an empty table or key means that the driver has none."""

    table: tuple[int, ...]
    key: bytes
    function: str | None
    input_transform: int = 0


class DeviceRefused(ConfigError):
    """The kernel or the driver said no; `error` is its errno."""

    default_code = "nic_refused"

    def __init__(self, message: str, *, error: int = 0, hint: str | None = None, code: str | None = None) -> None:
        super().__init__(message, code=code, hint=hint)
        self.error = error


def errno_name(error: OSError) -> str:
    if error.errno == errno.EOPNOTSUPP:  # Python lists this number under its other name
        return "EOPNOTSUPP"
    return errno.errorcode.get(error.errno or 0, str(error.errno))


def refused(what: str, device: str, error: OSError, driver: str | None = None) -> DeviceRefused:
    """The kernel's answer in words, with the way out where there is one."""
    hints = {
        errno.EPERM: "it needs CAP_NET_ADMIN: run as root, or use the drop-in packaging/flexstream-nic.conf",
        errno.EACCES: "it needs root, and a /proc or /sys that is not mounted read-only",
        errno.EROFS: "/proc or /sys is mounted read-only, as in a container: do this on the host",
        errno.ENODEV: "the device is gone: `ip link` shows the devices",
        errno.EBUSY: "something else is using it: another user of the table, an XDP program or a reset",
    }
    who = f"driver {driver}" if driver else "the kernel"
    message = f"{device}: {what}: {who} answered {errno_name(error)} ({os.strerror(error.errno or 0)})"
    return DeviceRefused(message, error=error.errno or 0, hint=hints.get(error.errno or 0))


def _ioctl(fd: int, request: int, ifreq: bytearray) -> object:
    return fcntl.ioctl(fd, request, ifreq)


class EthtoolIoctl:
    """One device's SIOCETHTOOL calls. Thread-safe: a call shares nothing but the socket's number.

    `ioctl` is for tests, which play the kernel's side of it byte by byte.
    """

    transport = "ioctl"

    def __init__(self, device: str, ioctl: IOCTL = _ioctl) -> None:
        if not 0 < len(device.encode()) < 16 or "/" in device or device.strip() != device:
            raise ConfigError(
                f"{device!r} is not the name of a device", code="nic_device", hint="`ip link` shows the devices"
            )
        self.device = device
        self._ioctl = ioctl
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)

    def close(self) -> None:
        self._socket.close()

    def call(self, request: bytes) -> bytes:
        """Hand `request` to the kernel and return it as the kernel left it. Raises OSError."""
        room = ctypes.create_string_buffer(request, len(request))
        ifreq = bytearray(struct.pack("16sP16x", self.device.encode(), ctypes.addressof(room)))
        number = self._socket.fileno()
        if number < 0:  # another thread left this device meanwhile: an answer like any other
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        self._ioctl(number, SIOCETHTOOL, ifreq)
        return room.raw

    def driver(self) -> Driver:
        reply = self.call(struct.pack("=I192x", ETHTOOL_GDRVINFO))
        name, version, firmware, bus = (_text(reply[4 + 32 * i : 36 + 32 * i]) for i in range(4))
        return Driver(name, version, firmware, bus)

    def channels(self) -> Channels:
        return Channels(*_CHANNELS.unpack(self.call(_CHANNELS.pack(ETHTOOL_GCHANNELS, *[0] * 8)))[1:])

    def set_channels(self, *, rx: int | None = None, tx: int | None = None, combined: int | None = None) -> None:
        """What is not given stays. Afterwards the table may be another one, or not be applied: write it again."""
        now = self.channels()
        wanted = [
            now.rx if rx is None else rx,
            now.tx if tx is None else tx,
            now.other,
            now.combined if combined is None else combined,
        ]
        maximums = [now.max_rx, now.max_tx, now.max_other, now.max_combined]
        self.call(_CHANNELS.pack(ETHTOOL_SCHANNELS, *maximums, *wanted))

    def rx_rings(self) -> int:
        """How many queues a table entry may name."""
        return int(_RXNFC.unpack(self.call(_RXNFC.pack(ETHTOOL_GRXRINGS, 0, 0)))[2])

    def rss(self) -> Rss:
        """Table, key and function. Drivers without the newer call answer the older one, with the table only."""
        try:
            return self._rssh()
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
        return Rss(self._indirection(), b"", None)

    def _rssh(self) -> Rss:
        sizes = _RXFH.unpack_from(self.call(_RXFH.pack(ETHTOOL_GRSSH, *[0] * 8)))
        entries, key_bytes = sizes[2], sizes[3]
        reply = self.call(_RXFH.pack(ETHTOOL_GRSSH, 0, entries, key_bytes, *[0] * 5) + bytes(4 * entries + key_bytes))
        header = _RXFH.unpack_from(reply)
        key_at = _RXFH.size + 4 * entries
        return Rss(
            struct.unpack_from(f"={entries}I", reply, _RXFH.size),
            reply[key_at : key_at + key_bytes],
            HASH_FUNCTIONS.get(header[4]),
            header[5],
        )

    def _indirection(self) -> tuple[int, ...]:
        entries = struct.unpack("=2I", self.call(struct.pack("=2I", ETHTOOL_GRXFHINDIR, 0)))[1]
        reply = self.call(struct.pack("=2I", ETHTOOL_GRXFHINDIR, entries) + bytes(4 * entries))
        return struct.unpack_from(f"={entries}I", reply, 8)

    def set_rss(self, *, table: Sequence[int] | None = None, key: bytes | None = None) -> None:
        """One call for all that is given; `table=()` puts the driver's default back."""
        entries = ETH_RXFH_INDIR_NO_CHANGE if table is None else len(table)
        body = struct.pack(f"={len(table or ())}I", *(table or ())) + (key or b"")
        # Kernels before 6.8 want 0 where later ones have the input transform, and there 0 would switch it off.
        for transform in (RXH_XFRM_NO_CHANGE, 0):
            sizes = (entries, len(key or b""), ETH_RSS_HASH_NO_CHANGE, transform)
            try:
                self.call(_RXFH.pack(ETHTOOL_SRSSH, 0, *sizes, 0, 0, 0) + body)
                return
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                last = error
        if table is None or key is not None or last.errno != errno.EOPNOTSUPP:
            raise last
        self.call(struct.pack(f"=2I{len(table)}I", ETHTOOL_SRXFHINDIR, len(table), *table))

    def hash_fields(self, flow: str = "tcp4") -> tuple[str, ...]:
        """The fields that the device hashes for this kind of packet, in Toeplitz order."""
        bits = _RXNFC.unpack(self.call(_RXNFC.pack(ETHTOOL_GRXFH, FLOWS[flow], 0)))[2]
        return tuple(name for name, bit in RXH_FIELDS.items() if bits & bit)

    def set_hash_fields(self, flow: str, names: Sequence[str]) -> None:
        bits = sum(RXH_FIELDS[name] for name in names)
        self.call(_RXNFC.pack(ETHTOOL_SRXFH, FLOWS[flow], bits))

    def rule_count(self) -> int:
        """Rules of the classifier (`ethtool -n`): packets that match one do not ask the table."""
        reply = self.call(_RXNFC.pack(ETHTOOL_GRXCLSRLCNT, 0, 0))
        return int(struct.unpack_from("=I", reply, 188)[0])

    def flags(self) -> dict[str, bool]:
        """`rxhash` (off: the table is ignored by some drivers) and `ntuple` (rules may bypass the table)."""
        bits = struct.unpack("=2I", self.call(struct.pack("=2I", ETHTOOL_GFLAGS, 0)))[1]
        return {name: bool(bits & bit) for name, bit in ETH_FLAGS.items()}

    def set_flag(self, name: str, on: bool) -> None:
        bits = struct.unpack("=2I", self.call(struct.pack("=2I", ETHTOOL_GFLAGS, 0)))[1]
        bits = bits | ETH_FLAGS[name] if on else bits & ~ETH_FLAGS[name]
        self.call(struct.pack("=2I", ETHTOOL_SFLAGS, bits))

    def rings(self) -> dict[str, int]:
        values = _RINGS.unpack(self.call(_RINGS.pack(ETHTOOL_GRINGPARAM, *[0] * 8)))
        return {"rx_max": values[1], "tx_max": values[4], "rx": values[5], "tx": values[8]}

    def coalescing(self) -> dict[str, int]:
        values = _COALESCE.unpack(self.call(_COALESCE.pack(ETHTOOL_GCOALESCE, *[0] * 22)))
        names = ("rx_usecs", "rx_frames", "rx_usecs_irq", "rx_frames_irq", "tx_usecs", "tx_frames")
        return {**dict(zip(names, values[1:7], strict=True)), "adaptive_rx": values[10]}

    def statistics(self) -> dict[str, int]:
        """`ethtool -S`: the names are the driver's."""
        names = self._strings(ETH_SS_STATS)
        values = self.call(struct.pack("=2I", ETHTOOL_GSTATS, len(names)) + bytes(8 * len(names)))
        return dict(zip(names, struct.unpack_from(f"={len(names)}Q", values, 8), strict=True))

    def _strings(self, which: int) -> list[str]:
        sizes = self.call(struct.pack("=2IQI", ETHTOOL_GSSET_INFO, 0, 1 << which, 0))
        count = struct.unpack_from("=I", sizes, 16)[0]
        names = self.call(struct.pack("=3I", ETHTOOL_GSTRINGS, which, count) + bytes(32 * count))[12:]
        return [_text(names[32 * i : 32 * i + 32]) for i in range(count)]

    def features(self) -> dict[str, bool]:
        """`ethtool -k`: offloads by the kernel's own names, and whether each is in effect."""
        names = self._strings(ETH_SS_FEATURES)
        words = (len(names) + 31) // 32
        reply = self.call(struct.pack("=2I", ETHTOOL_GFEATURES, words) + bytes(16 * words))
        active = [struct.unpack_from("=4I", reply, 8 + 16 * word)[2] for word in range(words)]
        return {name: bool(active[i // 32] >> i % 32 & 1) for i, name in enumerate(names) if name}

    def set_feature(self, name: str, on: bool) -> None:
        """Ask for it. What the driver has fixed, or what depends on another one, stays: read it again."""
        index = self._strings(ETH_SS_FEATURES).index(name)
        words = [(0, 0)] * ((max(index, 63) + 32) // 32)
        words[index // 32] = (1 << index % 32, on << index % 32)
        body = b"".join(struct.pack("=2I", *word) for word in words)
        self.call(struct.pack("=2I", ETHTOOL_SFEATURES, len(words)) + body)


def _text(raw: bytes) -> str:
    return raw.split(b"\0")[0].decode("ascii", "replace")


def channel_fields(channels: Channels) -> dict[str, int]:
    return {field.name: getattr(channels, field.name) for field in fields(channels)}
