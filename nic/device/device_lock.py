"""One owner of a device at a time."""

from __future__ import annotations

import socket
import struct

from flexstream.errors import ConfigError


class DeviceLock:
    """The lock that lets one process at a time change a device: an abstract socket, which belongs to the network
    namespace as the device does. The kernel releases it with the process. It goes by the device's number: a device
    that is renamed stays locked."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._socket: socket.socket | None = None

    @property
    def held(self) -> bool:
        return self._socket is not None

    def take(self) -> None:
        """Raises ConfigError that names the process which has it."""
        if self._socket is not None:
            return
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            claim.bind(self._address)
            claim.listen(128)
            claim.setblocking(False)
        except OSError:
            claim.close()
            pid = self.holder()
            raise ConfigError(
                f"{self.device} is in use by another flexstream (process {pid if pid else 'unknown'})",
                code="nic_busy",
                hint="one daemon per device: stop that one, or give this one another device or --nic user",
            ) from None
        self._socket = claim

    def release(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def answer(self) -> None:
        """Let go of those who asked who holds it, so that there is always room for the next one."""
        while self._socket is not None:
            try:
                self._socket.accept()[0].close()
            except OSError:
                return

    def holder(self) -> int | None:
        """The process that has the device, or None."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
            caller.settimeout(2.0)
            try:
                caller.connect(self._address)
                credentials = caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            except OSError:
                return None
            return int(struct.unpack("3i", credentials)[0])

    @property
    def _address(self) -> str:
        try:
            name = str(socket.if_nametoindex(self.device))
        except OSError:  # not there (any more): then its name is all there is
            name = self.device
        return f"\0flexstream/nic/{name}"
