"""A network of its own for the guest and its producers: this thread's namespace, with one tap device in it.

The namespace has no name. It lives as long as something is in it, so nothing is left behind however the
tests end.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.nic_in_loop import requirements
from tests.nic_in_loop.requirements import GuestError

CLONE_NEWNET = 0x40000000  # <linux/sched.h>
TAP = "tap0"
HOST_IPV4, HOST_IPV6 = "10.77.0.1", "fd77::1"
GUEST_IPV4, GUEST_IPV6 = "10.77.0.2", "fd77::2"
_libc = ctypes.CDLL(None, use_errno=True)


@contextmanager
def private_network(*, multi_queue: bool = True) -> Iterator[None]:
    """Inside, this thread and those that it starts are in the private namespace; afterwards it is back."""
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if _libc.unshare(CLONE_NEWNET):
            reason = os.strerror(ctypes.get_errno())
            raise GuestError(f"unshare(CLONE_NEWNET): {reason}; it needs root with CAP_SYS_ADMIN")
        try:
            _ip("link", "set", "lo", "up")
            _ip("tuntap", "add", "dev", TAP, "mode", "tap", *(["multi_queue"] if multi_queue else []))
            Path(f"/proc/sys/net/ipv6/conf/{TAP}/accept_dad").write_text("0")
            _ip("link", "set", TAP, "address", "02:00:00:00:77:01", "up")
            _ip("addr", "add", f"{HOST_IPV4}/24", "dev", TAP)
            _ip("addr", "add", f"{HOST_IPV6}/64", "dev", TAP, "nodad")
            yield
        finally:
            if _libc.setns(before, CLONE_NEWNET):
                raise GuestError(f"setns back: {os.strerror(ctypes.get_errno())}")
    finally:
        os.close(before)


def _ip(*words: str) -> None:
    done = subprocess.run(
        [requirements.command("ip") or "ip", *words], capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode:
        hint = "is the tun module there? (modprobe tun)" if "tuntap" in words else "it needs root with CAP_NET_ADMIN"
        raise GuestError(f"ip {' '.join(words)}: {done.stderr.strip()}; {hint}")
