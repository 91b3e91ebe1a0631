"""How much a data connection's socket may hold before its producer has to wait.

The kernel starts a connection with a window of 64 KB and lets it grow with what is read. A worker that falls behind
for a moment then pays for more than its own work: whenever it has read a little, it opens the window a little, and
over loopback its core sends the next bytes on the producer's behalf. It falls further behind and stays there. With
room for what comes in such a moment, windows are opened seldom and wide, and the worker catches up.
"""

from __future__ import annotations

import contextlib
import socket

ROOM_BYTES = 64 << 20  # shared by the connections that are open when one comes; those before it keep what they have
MOST_BYTES = 4 << 20  # for one


def room_for_one(groups: int, connections: int) -> int:
    """A connection's share. There will be one connection per group at least, so the first is given no more."""
    return min(MOST_BYTES, ROOM_BYTES // max(1, groups, connections))


def make_room(sock: socket.socket, size: int) -> None:
    """Let the socket hold `size` bytes; never makes it smaller.

    A low-water mark makes the kernel (4.18 and later) provide for it. Unlike SO_RCVBUF, that leaves the kernel free to
    give more to who is far away, and is bounded by tcp_rmem, not by rmem_max, which is smaller than this on many hosts.
    """
    with contextlib.suppress(OSError):  # a kernel without it: as it was
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)  # any byte is worth reading
