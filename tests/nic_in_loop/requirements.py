"""What the guest needs of this machine. Something missing is a failure that says what to install, never a skip."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

QEMU = "qemu-system-x86_64"
BUSYBOX_PLACES = ("/bin/busybox", "/usr/bin/busybox")
TUN = Path("/dev/net/tun")
PACKAGES = {QEMU: "qemu-system-x86", "ip": "iproute2", "ethtool": "ethtool"}


class GuestError(Exception):
    """The guest cannot be had, or did not do what it was asked; the message has the cause and the fix."""


def command(name: str) -> str | None:
    """The command's path; system commands may be missing in the PATH of ordinary users."""
    return shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")


def busybox() -> Path | None:
    """A busybox that runs without shared libraries: it is the guest's first process, alone in its memory."""
    for place in map(Path, BUSYBOX_PLACES):
        if place.is_file() and b"/ld-linux" not in place.read_bytes()[:4096]:
            return place
    return None


def missing() -> list[str]:
    """Every reason why no guest can be started here, each with its fix."""
    reasons = []
    packages = [package for name, package in PACKAGES.items() if command(name) is None]
    if busybox() is None:
        packages.append("busybox-static")
    if packages:
        names = " ".join(packages)
        reasons.append(f"not installed: {names}. As root: apt-get install --no-install-recommends {names}")
    if os.geteuid() != 0:
        reasons.append("a network namespace and a tap device need root: run this as root")
    elif not TUN.exists():
        fix = "modprobe tun; in a container, start it with --device /dev/net/tun --cap-add NET_ADMIN"
        reasons.append(f"there is no {TUN}: {fix}")
    return reasons


def check() -> None:
    if reasons := missing():
        raise GuestError("the NIC in the loop cannot run:\n  " + "\n  ".join(reasons))
