"""bpf(2) through ctypes: maps, programs and links, with no compiler and no library on the host.

Every object holds a descriptor and gives it back in `close()`, which may be called twice; a process that dies gives
all of them back, so nothing outlives it (no pins). Errors are `BpfError`: what was tried, and in words why the kernel
refused.
"""

from __future__ import annotations

import ctypes
import enum
import errno
import mmap
import os
import struct
from collections.abc import Sequence
from pathlib import Path

from flexstream.errors import ConfigError
from flexstream.nic.device.interrupts import parse_cpus

ATTRIBUTE_BYTES = 128  # of union bpf_attr; the kernel accepts more than it knows as long as the rest is zero
LOG_BYTES = 1 << 20
LOG_SHOWN = 2000  # the end of the verifier's log says what was wrong
LICENSE = b"Apache-2.0"  # no helper that we call is for GPL programs only

_SYSCALL = {"x86_64": 321, "aarch64": 280, "riscv64": 280, "armv7l": 386, "ppc64le": 361, "s390x": 351}
_libc = ctypes.CDLL(None, use_errno=True)


class Command(enum.IntEnum):
    """enum bpf_cmd, as far as it is used."""

    MAP_CREATE = 0
    MAP_LOOKUP_ELEM = 1
    MAP_UPDATE_ELEM = 2
    PROG_LOAD = 5
    PROG_TEST_RUN = 10
    OBJ_GET_INFO_BY_FD = 15
    PROG_QUERY = 16
    LINK_CREATE = 28


class MapType(enum.IntEnum):
    ARRAY = 2
    PERCPU_ARRAY = 6
    CPUMAP = 16


class ProgramType(enum.IntEnum):
    SCHED_CLS = 3
    XDP = 6


class AttachType(enum.IntEnum):
    NONE = 0
    XDP = 37
    TCX_INGRESS = 46
    TCX_EGRESS = 47


MAP_MMAPABLE = 1 << 10  # BPF_F_MMAPABLE
XDP_GENERIC = 1 << 1  # XDP_FLAGS_SKB_MODE

CAP_NET_ADMIN, CAP_SYS_ADMIN, CAP_BPF = 12, 21, 39


class BpfError(ConfigError):
    """A bpf(2) command that the kernel refused; `errno` is its answer."""

    default_code = "bpf"

    def __init__(self, message: str, errno: int = 0, *, code: str | None = None, hint: str | None = None) -> None:
        super().__init__(message, code=code, hint=hint)
        self.errno = errno


def bpf(command: Command, attribute: bytes, doing: str) -> tuple[int, bytes]:
    """One system call: its result, and the attributes as the kernel left them."""
    machine = os.uname().machine
    if machine not in _SYSCALL:
        raise BpfError(f"{doing}: FlexStream does not know the number of bpf(2) on {machine}", errno.ENOSYS)
    buffer = ctypes.create_string_buffer(attribute, ATTRIBUTE_BYTES)
    result = _libc.syscall(_SYSCALL[machine], int(command), buffer, ATTRIBUTE_BYTES)
    if result < 0:
        number = ctypes.get_errno()
        raise BpfError(f"{doing}: {explain(number)}", number)
    return result, buffer.raw


def capabilities() -> int:
    """The process's effective capabilities, one bit each."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16)
    return 0


def missing_capabilities() -> list[str]:
    """The names of those that BPF on a device needs and this process does not have."""
    held = capabilities()
    if held >> CAP_SYS_ADMIN & 1:
        return []
    wanted = {"CAP_BPF": CAP_BPF, "CAP_NET_ADMIN": CAP_NET_ADMIN}
    return [name for name, bit in wanted.items() if not held >> bit & 1]


def explain(number: int) -> str:
    """Why the kernel answered so, in words that name the remedy."""
    answer = errno.errorcode.get(number, str(number))
    if number == errno.ENOSYS:
        return f"{answer}: this kernel has no bpf(2) (CONFIG_BPF_SYSCALL), or a sandbox hides it"
    if number == errno.EPERM:
        missing = missing_capabilities()
        if not missing:
            return (
                f"{answer}: the process has the privileges, but a user namespace (container), a seccomp "
                "filter or kernel lockdown refuses bpf(2)"
            )
        disabled = _setting("/proc/sys/kernel/unprivileged_bpf_disabled")
        closed = f"; kernel.unprivileged_bpf_disabled={disabled} closes it to others" if disabled in ("1", "2") else ""
        return f"{answer}: missing {' and '.join(missing)}{closed}; run as root or give the service these capabilities"
    return f"{answer}: {os.strerror(number)}"


def kernel_version() -> tuple[int, int]:
    major, _, rest = os.uname().release.partition(".")
    minor = ""
    for character in rest:
        if not character.isdigit():
            break
        minor += character
    return int(major), int(minor or 0)


class Descriptor:
    """Owns a descriptor that bpf(2) returned (close-on-exec, as the kernel makes them)."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def close(self) -> None:
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)


class Map(Descriptor):
    """A map with 4-byte keys."""

    def __init__(self, kind: MapType, value_bytes: int, entries: int, *, flags: int = 0, name: str) -> None:
        self.value_bytes = value_bytes
        self.entries = entries
        attribute = struct.pack("=IIIIIII16s", kind, 4, value_bytes, entries, flags, 0, 0, name.encode())
        super().__init__(bpf(Command.MAP_CREATE, attribute, f"creating the BPF map {name!r}")[0])

    def update(self, key: int, value: bytes) -> None:
        if len(value) != self.value_bytes:
            raise ValueError(f"{len(value)} bytes for a value of {self.value_bytes}")
        self._element(Command.MAP_UPDATE_ELEM, key, ctypes.create_string_buffer(value, len(value)))

    def lookup(self, key: int, copies: int = 1) -> bytes:
        """The value; of a per-CPU map one after the other for each of `copies` CPUs."""
        value = ctypes.create_string_buffer(self.value_bytes * copies)
        self._element(Command.MAP_LOOKUP_ELEM, key, value)
        return value.raw

    def _element(self, command: Command, key: int, value: ctypes.Array[ctypes.c_char]) -> None:
        key_buffer = ctypes.c_uint32(key)
        attribute = struct.pack("=IIQQQ", self.fd, 0, ctypes.addressof(key_buffer), ctypes.addressof(value), 0)
        bpf(command, attribute, f"{command.name} of entry {key}")


class SharedWords(Map):
    """64-bit words that the program reads while we write them: an array map of one value, mapped into our memory.

    A store of a word is one machine instruction, so the program sees the old or the new one. The memory goes with its
    last reader, not with `close()`.
    """

    def __init__(self, words: int, *, name: str) -> None:
        size = words * 8
        super().__init__(MapType.ARRAY, size, 1, flags=MAP_MMAPABLE, name=name)
        memory = mmap.mmap(self.fd, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
        self.words = memoryview(memory).cast("Q")[:words]


class PerCpuWords(Map):
    """64-bit counters, one set for each CPU, read as their sum."""

    def __init__(self, words: int, *, name: str) -> None:
        super().__init__(MapType.PERCPU_ARRAY, words * 8, 1, name=name)
        self._words = words
        self._cpus = possible_cpus()

    def sums(self) -> list[int]:
        values = memoryview(self.lookup(0, self._cpus)).cast("Q")
        return [sum(values[word :: self._words]) for word in range(self._words)]


class Program(Descriptor):
    """A verified program. Raises BpfError with the end of the verifier's log."""

    def __init__(self, kind: ProgramType, code: bytes, *, attach: AttachType = AttachType.NONE, name: str) -> None:
        instructions = ctypes.create_string_buffer(code, len(code))
        license_text = ctypes.create_string_buffer(LICENSE)

        def load(log: ctypes.Array[ctypes.c_char] | None) -> int:
            attribute = struct.pack(
                "=IIQQIIQII16sII",
                kind,
                len(code) // 8,
                ctypes.addressof(instructions),
                ctypes.addressof(license_text),
                0 if log is None else 1,
                0 if log is None else LOG_BYTES,
                0 if log is None else ctypes.addressof(log),
                0,
                0,
                name.encode(),
                0,
                attach,
            )
            return bpf(Command.PROG_LOAD, attribute, f"loading the BPF program {name!r}")[0]

        try:
            super().__init__(load(None))  # the log costs time; it is asked for only when there is something to read
        except BpfError as error:
            if error.errno not in (errno.EINVAL, errno.EACCES):
                raise
            log = ctypes.create_string_buffer(LOG_BYTES)
            try:
                super().__init__(load(log))
            except BpfError as second:
                text = log.value.decode(errors="replace").strip()
                raise BpfError(f"{second}; the verifier says: {text[-LOG_SHOWN:] or 'nothing'}", second.errno) from None

    def run(self, packet: bytes, repeat: int = 1) -> tuple[int, int]:
        """Run on a packet without any device: the program's result, and nanoseconds per run (BPF_PROG_TEST_RUN)."""
        data = ctypes.create_string_buffer(packet, len(packet))
        attribute = struct.pack("=IIIIQQII", self.fd, 0, len(packet), 0, ctypes.addressof(data), 0, repeat, 0)
        _, answer = bpf(Command.PROG_TEST_RUN, attribute, "running the BPF program on a test packet")
        fields = struct.unpack_from("=IIIIQQII", answer)
        return ctypes.c_int32(fields[1]).value, fields[7]


class Link(Descriptor):
    """A program attached to a device, for as long as this descriptor is open."""

    def __init__(self, program: Program, ifindex: int, attach: AttachType, *, flags: int = 0) -> None:
        attribute = struct.pack("=IIII", program.fd, ifindex, attach, flags)
        super().__init__(bpf(Command.LINK_CREATE, attribute, f"attaching ({attach.name}) to device {ifindex}")[0])

    def ifindex(self) -> int:
        """The device; 0 when the kernel has detached the program, because the device is gone."""
        info = ctypes.create_string_buffer(64)
        attribute = struct.pack("=IIQ", self.fd, len(info), ctypes.addressof(info))
        bpf(Command.OBJ_GET_INFO_BY_FD, attribute, "reading a BPF link")
        return int(struct.unpack_from("=I", info.raw, 16)[0])  # struct bpf_link_info: type, id, prog_id, then a union


def attached_programs(ifindex: int, attach: AttachType) -> Sequence[int]:
    """The ids of the tcx programs on a device. BpfError (EINVAL): this kernel has no tcx."""
    ids = (ctypes.c_uint32 * 64)()
    attribute = struct.pack("=IIIIQI", ifindex, attach, 0, 0, ctypes.addressof(ids), len(ids))
    _, answer = bpf(Command.PROG_QUERY, attribute, f"listing the {attach.name} programs of device {ifindex}")
    return list(ids)[: struct.unpack_from("=I", answer, 24)[0]]


def possible_cpus() -> int:
    """How many CPUs a per-CPU map has room for: those that could ever be plugged in."""
    return len(parse_cpus(_setting("/sys/devices/system/cpu/possible") or "0"))


def online_cpus() -> frozenset[int]:
    return frozenset(parse_cpus(_setting("/sys/devices/system/cpu/online") or "0"))


def _setting(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None
