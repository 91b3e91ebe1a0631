"""Memory in whole pages, and writing it past the page cache.

What is written once and read once is not worth a copy in the page cache: on this path that copy costs more than all the
rest of the daemon's work on a row. A file system that cannot do without (O_DIRECT is refused) gets ordinary writes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
PAGE_BYTES = 4096
HUGE_BYTES = 2 << 20


def whole_pages(n: int) -> int:
    """`n` bytes rounded up to pages."""
    return -(-n // PAGE_BYTES) * PAGE_BYTES


def page_memory(n: int) -> Bytes:
    """At least `n` bytes that begin at a page and end at one. In huge pages where the kernel has some: the disk's
    driver pins memory page by page.
    """
    memory = mmap.mmap(-1, whole_pages(max(n, 1)), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if n >= HUGE_BYTES:
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


class SparePages:
    """Page memory that is used again: fresh memory costs the kernel a cleared page for each of its own."""

    def __init__(self, most: int = 12) -> None:
        self._most = most
        self._spare: list[Bytes] = []

    def take(self, n: int) -> Bytes:
        """At least `n` bytes."""
        for i, memory in enumerate(self._spare):
            if len(memory) >= n:
                return self._spare.pop(i)
        return page_memory(n)

    def give(self, memory: Bytes) -> None:
        """Back: nobody reads it, or a view into it, any more."""
        while isinstance(memory.base, np.ndarray):
            memory = memory.base
        self._spare = [*self._spare[-self._most + 1 :], memory]


def in_pages(*pieces: Any) -> tuple[Bytes, int]:
    """(a copy of the pieces in memory of whole pages, their bytes)."""
    data = b"".join(pieces)
    memory = page_memory(len(data))
    memory[: len(data)] = np.frombuffer(data, np.uint8)
    return memory, len(data)


def open_direct(path: Path, flags: int, mode: int = 0o640) -> int:
    """A descriptor that passes the page cache by, where the file system can."""
    try:
        return os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return os.open(path, (flags & ~os.O_EXCL) | os.O_CLOEXEC, mode)  # the refused call may have made the file


def write_pages(fd: int, memory: Bytes, position: int) -> None:
    """Write all of it. OSError when the disk does not take it."""
    view, at = memory.data, 0
    while at < len(view):
        try:
            at += os.pwrite(fd, view[at:], position + at)
        except OSError as error:
            if not _was_direct(fd, error):
                raise


def read_pages(fd: int, memory: Bytes, position: int, wanted: int) -> int:
    """Read at least `wanted` bytes if there are so many; returns how many were read."""
    view, at = memory.data, 0
    while at < wanted:
        try:
            n = os.preadv(fd, [view[at:]], position + at)
        except OSError as error:
            if not _was_direct(fd, error):
                raise
            continue
        if n == 0:
            break
        at += n
    return at


def _was_direct(fd: int, error: OSError) -> bool:
    """After EINVAL: whether it may be for O_DIRECT, which is off then (a short write left an odd position, say)."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    if error.errno != errno.EINVAL or not flags & os.O_DIRECT:
        return False
    fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
    return True
