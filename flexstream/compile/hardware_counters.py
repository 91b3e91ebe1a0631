"""What the processor itself counts for the workers' threads: branch and cache misses, by perf_event_open(2).

Most virtual machines have no such counters, and a kernel may forbid them; then there is a reason, and nothing else
changes: the adaptive queries are watched by what the workers count.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_SYSCALL = {"x86_64": 298, "aarch64": 241}
_ATTRIBUTES = struct.Struct("=IIQQQQQ16x")  # type, size, config, sample period and type, read format, flags
_FORMAT_TIMES = 1 | 2  # time enabled and time running come with the value: counters may share the hardware
_USER_ONLY = 1 << 5 | 1 << 6  # exclude_kernel, exclude_hv: what an ordinary user may count
_CLOSE_ON_EXEC = 8
HARDWARE, SOFTWARE = 0, 1


@dataclass(frozen=True, slots=True)
class Event:
    name: str
    kind: int
    config: int


EVENTS = (Event("branch_misses", HARDWARE, 5), Event("cache_misses", HARDWARE, 3))


class HardwareCounters:
    """Sums over some threads since they were opened. `reason` says why there are none; then `read` gives zeros."""

    def __init__(self, threads: Iterable[int], events: Sequence[Event] = EVENTS) -> None:
        self.reason: str | None = None
        self._fds: dict[str, list[int]] = {event.name: [] for event in events}
        try:
            for thread in threads:
                for event in events:
                    self._fds[event.name].append(_open(event, thread))
        except OSError as error:
            self.close()
            self.reason = f"perf events: {_why(error)}"

    def read(self) -> dict[str, int]:
        return {name: sum(map(_value, fds)) for name, fds in self._fds.items()}

    def close(self) -> None:
        for fds in self._fds.values():
            while fds:
                os.close(fds.pop())


def _open(event: Event, thread: int) -> int:
    number = _SYSCALL.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    attributes = ctypes.create_string_buffer(
        _ATTRIBUTES.pack(event.kind, _ATTRIBUTES.size, event.config, 0, 0, _FORMAT_TIMES, _USER_ONLY), _ATTRIBUTES.size
    )
    libc = ctypes.CDLL(None, use_errno=True)
    fd = int(libc.syscall(number, attributes, ctypes.c_int(thread), -1, -1, ctypes.c_ulong(_CLOSE_ON_EXEC)))
    if fd < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return fd


def _value(fd: int) -> int:
    value, enabled, running = struct.unpack("=QQQ", os.read(fd, 24))
    return int(value * enabled / running) if running else 0


def _why(error: OSError) -> str:
    if error.errno in (errno.ENOENT, errno.EOPNOTSUPP, errno.ENODEV):
        return "this processor has no hardware counters (is it a virtual machine?)"
    if error.errno in (errno.EACCES, errno.EPERM):
        return "not allowed; it needs kernel.perf_event_paranoid of 2 or less, or CAP_PERFMON"
    return error.strerror or str(error)
