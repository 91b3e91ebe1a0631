"""The kernel's side of SIOCETHTOOL, played byte by byte: a multi-queue device with RSS where there is none.

What the structures mean is written down here a second time, from include/uapi/linux/ethtool.h, so that a slip in the
code under test is not repeated by its test. The guest of tests/nic_in_loop has the real one.
"""

from __future__ import annotations

import ctypes
import errno
import struct
from dataclasses import dataclass, field
from pathlib import Path

KEY = bytes.fromhex("6d5a56da255b0ec24167253d43a38fb0d0ca2bcbae7b30b477cb2da38030f20c6a42b73bbeac01fa")
FOUR_TUPLE_BITS = 0xF0


@dataclass
class PlayedDevice:
    """`refuse` is command -> errno. `before_6_8` wants zeros in reserved bytes, as old kernels do."""

    name: str = "eth0"
    driver: str = "virtio_net"
    bus: str = "0000:00:03.0"
    queues: int = 4
    max_queues: int = 4
    table: list[int] = field(default_factory=lambda: [entry % 4 for entry in range(128)])
    key: bytes = KEY
    function: int = 1
    transform: int = 0
    hashed: dict[int, int] = field(default_factory=lambda: {1: FOUR_TUPLE_BITS, 5: FOUR_TUPLE_BITS})
    flags: int = 1 << 28
    fixed_flags: int = 0
    rules: int = 0
    statistics: dict[str, int] = field(default_factory=dict)
    features: dict[str, bool] = field(default_factory=dict)
    fixed_features: frozenset[str] = frozenset()
    refuse: dict[int, int] = field(default_factory=dict)
    before_6_8: bool = True
    ignores_table: bool = False
    calls: list[int] = field(default_factory=list)

    def ioctl(self, fd: int, request: int, ifreq: bytearray) -> int:
        assert request == 0x8946
        name, pointer = struct.unpack_from("16sP", ifreq)
        assert len(ifreq) == 40
        if name.rstrip(b"\0").decode() != self.name:
            raise OSError(errno.ENODEV, "No such device")
        command = ctypes.c_uint32.from_address(pointer).value
        self.calls.append(command)
        if command in self.refuse:
            raise OSError(self.refuse[command], "refused")
        handler = getattr(self, f"_{command:02x}", None)
        if handler is None:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        handler(pointer)
        return 0

    def _03(self, at: int) -> None:
        for offset, text in ((4, self.driver), (36, "1.0"), (68, "fw"), (100, self.bus)):
            ctypes.memmove(at + offset, text.encode() + b"\0", len(text) + 1)

    def _25(self, at: int) -> None:
        ctypes.c_uint32.from_address(at + 4).value = self.flags

    def _26(self, at: int) -> None:
        wanted = ctypes.c_uint32.from_address(at + 4).value
        self.flags = (wanted & ~self.fixed_flags) | (self.flags & self.fixed_flags)

    def _29(self, at: int) -> None:
        flow = ctypes.c_uint32.from_address(at + 4).value
        ctypes.c_uint64.from_address(at + 8).value = self.hashed[flow]

    def _2a(self, at: int) -> None:
        flow = ctypes.c_uint32.from_address(at + 4).value
        self.hashed[flow] = ctypes.c_uint64.from_address(at + 8).value

    def _2d(self, at: int) -> None:
        ctypes.c_uint64.from_address(at + 8).value = self.queues

    def _2e(self, at: int) -> None:
        ctypes.c_uint32.from_address(at + 188).value = self.rules

    def _38(self, at: int) -> None:
        size = ctypes.c_uint32.from_address(at + 4)
        if size.value:
            (ctypes.c_uint32 * len(self.table)).from_address(at + 8)[:] = self.table
        size.value = len(self.table)

    def _39(self, at: int) -> None:
        size = ctypes.c_uint32.from_address(at + 4).value
        self._write_table(list((ctypes.c_uint32 * size).from_address(at + 8)))

    def _3c(self, at: int) -> None:
        (ctypes.c_uint32 * 8).from_address(at + 4)[:] = [0, 0, 0, self.max_queues, 0, 0, 0, self.queues]

    def _3d(self, at: int) -> None:
        wanted = list((ctypes.c_uint32 * 8).from_address(at + 4))[7]
        if not 0 < wanted <= self.max_queues:
            raise OSError(errno.EINVAL, "Invalid argument")
        self.queues = wanted
        self.table = [entry % wanted for entry in range(len(self.table))]

    def _46(self, at: int) -> None:
        entries, key = ctypes.c_uint32.from_address(at + 8), ctypes.c_uint32.from_address(at + 12)
        if entries.value or key.value:
            assert (entries.value, key.value) == (len(self.table), len(self.key))
            (ctypes.c_uint32 * len(self.table)).from_address(at + 24)[:] = self.table
            ctypes.memmove(at + 24 + 4 * len(self.table), self.key, len(self.key))
        entries.value, key.value = len(self.table), len(self.key)
        ctypes.c_uint8.from_address(at + 16).value = self.function
        ctypes.c_uint8.from_address(at + 17).value = self.transform

    def _47(self, at: int) -> None:
        entries = ctypes.c_uint32.from_address(at + 8).value
        key = ctypes.c_uint32.from_address(at + 12).value
        transform = ctypes.c_uint8.from_address(at + 17).value
        if self.before_6_8 and transform:
            raise OSError(errno.EINVAL, "Invalid argument")
        if not self.before_6_8 and transform != 0xFF:
            self.transform = transform
        count = 0 if entries == 0xFFFFFFFF else entries
        if entries == 0:
            self.table = [entry % self.queues for entry in range(len(self.table))]
        elif entries != 0xFFFFFFFF:
            self._write_table(list((ctypes.c_uint32 * count).from_address(at + 24)))
        if key:
            if key != len(self.key):
                raise OSError(errno.EINVAL, "Invalid argument")
            self.key = ctypes.string_at(at + 24 + 4 * count, key)

    def _write_table(self, table: list[int]) -> None:
        if len(table) != len(self.table) or max(table) >= self.queues:
            raise OSError(errno.EINVAL, "Invalid argument")
        if not self.ignores_table:
            self.table = table

    def _37(self, at: int) -> None:
        sets = {1 << 1: self.statistics, 1 << 4: self._feature_names()}
        ctypes.c_uint32.from_address(at + 16).value = len(sets[ctypes.c_uint64.from_address(at + 8).value])

    def _1b(self, at: int) -> None:
        sets = {1: list(self.statistics), 4: self._feature_names()}
        for index, name in enumerate(sets[ctypes.c_uint32.from_address(at + 4).value]):
            ctypes.memmove(at + 12 + 32 * index, name.encode().ljust(32, b"\0"), 32)

    def _1d(self, at: int) -> None:
        for index, value in enumerate(self.statistics.values()):
            ctypes.c_uint64.from_address(at + 8 + 8 * index).value = value

    def _feature_names(self) -> list[str]:
        """64 bits, as in today's kernels; those that the device has are at the end, in the second word."""
        return [""] * (64 - len(self.features)) + list(self.features)

    def _3a(self, at: int) -> None:
        assert ctypes.c_uint32.from_address(at + 4).value == 2
        for bit, name in enumerate(self._feature_names()):
            ctypes.c_uint32.from_address(at + 8 + 16 * (bit // 32) + 8).value |= self.features.get(name, 0) << bit % 32

    def _3b(self, at: int) -> None:
        if ctypes.c_uint32.from_address(at + 4).value != 2:
            raise OSError(errno.EINVAL, "Invalid argument")
        for bit, name in enumerate(self._feature_names()):
            valid, wanted = (ctypes.c_uint32 * 2).from_address(at + 8 + 8 * (bit // 32))
            if valid >> bit % 32 & 1 and name not in self.fixed_features:
                self.features[name] = bool(wanted >> bit % 32 & 1)

    def _10(self, at: int) -> None:
        (ctypes.c_uint32 * 8).from_address(at + 4)[:] = [1024, 0, 0, 512, 256, 0, 0, 128]

    def _0e(self, at: int) -> None:
        (ctypes.c_uint32 * 22).from_address(at + 4)[:] = list(range(1, 23))


def machine_of(device: PlayedDevice, root: Path, *, privileged: bool = True) -> Path:
    """/sys and /proc of a machine with that device: interrupts 25, 27, ... of queues 0, 1, ..."""
    function = root / "sys/devices/pci0000:00/0000:00:03.0"
    folder = function / "virtio0/net" / device.name
    folder.mkdir(parents=True)
    (function / "numa_node").write_text("0\n")
    (root / "sys/devices/system/node/node0").mkdir(parents=True)
    (root / "sys/devices/system/node/node0/cpulist").write_text("0-3\n")
    (function / "msi_irqs").mkdir()
    (root / "sys/class/net").mkdir(parents=True)
    (root / "sys/class/net" / device.name).symlink_to(folder)
    (folder / "device").symlink_to(function / "virtio0")
    for name, text in (("flags", "0x1003"), ("operstate", "up"), ("ifindex", "7")):
        (folder / name).write_text(text + "\n")
    lines = ["           CPU0       CPU1       CPU2       CPU3"]
    for queue in range(device.max_queues):
        for side, files in (("rx", {"rps_cpus": "0", "rps_flow_cnt": "0"}), ("tx", {"xps_cpus": "f"})):
            (folder / f"queues/{side}-{queue}").mkdir(parents=True)
            for name, text in files.items():
                (folder / f"queues/{side}-{queue}" / name).write_text(text + "\n")
        irq = 25 + 2 * queue
        (function / "msi_irqs" / str(irq)).touch()
        (root / f"proc/irq/{irq}").mkdir(parents=True)
        (root / f"proc/irq/{irq}/smp_affinity_list").write_text("0-3\n")
        lines.append(
            f"  {irq}:         10          0          0          0   PCI-MSI {irq}-edge      virtio0-input.{queue}"
        )
    (root / "proc/interrupts").write_text("\n".join(lines) + "\n")
    (root / "proc/self").mkdir()
    (root / "proc/self/status").write_text(f"CapEff:\t{(1 << 12) if privileged else 0:016x}\n")
    return root
