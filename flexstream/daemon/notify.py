"""sd_notify(3) without libsystemd: one datagram to the socket in NOTIFY_SOCKET."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping


def notify(*lines: str, environ: Mapping[str, str] | None = None) -> bool:
    """Send "READY=1", "STATUS=...", and so on. False when nobody listens (not started by systemd).

    A failure is not an error: the service manager may be gone, and the daemon goes on without it.
    """
    address = (os.environ if environ is None else environ).get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return False
    if address.startswith("@"):
        address = "\0" + address[1:]  # an abstract socket
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.sendto("\n".join(lines).encode(), address)
    except OSError:
        return False
    return True


def watchdog_interval_s(environ: Mapping[str, str] | None = None) -> float | None:
    """Seconds between pings (half of WATCHDOG_USEC, as systemd advises); None when no watchdog is set."""
    environ = os.environ if environ is None else environ
    usec = environ.get("WATCHDOG_USEC", "")
    if not usec.isdecimal() or int(usec) == 0:
        return None
    if environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    return int(usec) / 2e6
