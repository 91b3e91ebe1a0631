"""A producer's source ports: chosen so that the NIC puts each group's connection where the group lives.

Alignment is locality and nothing else: whatever goes wrong here costs alignment, never the connection.
"""

from __future__ import annotations

import logging
import socket
from typing import Any

from flexstream.nic.contract import Steering
from flexstream.nic.rss.ports import PortChooser, Promise

log = logging.getLogger("flexstream.producer")

NOT_TOLD = "the server did not describe its table"


class Ports:
    """What the control connection taught, applied to data connections. One thread uses it, the session's."""

    def __init__(self) -> None:
        self._chooser: PortChooser | None = None
        self._source: tuple[Any, ...] = ()
        self._seen: tuple[str, str, int] = ("", "", 0)
        self._told_nat = False
        self.reason: str | None = NOT_TOLD
        self.aligned = 0
        self.unaligned = 0

    def learn(self, document: dict[str, Any], sock: socket.socket) -> None:
        """From a control connection's ACK: how the server saw us, and its table."""
        self._chooser = None
        try:
            self._source = sock.getsockname()
            peer, local = document["peer"], document["local"]
            self._seen = (str(peer[0]), str(local[0]), int(local[1]))
        except (OSError, KeyError, TypeError, ValueError, IndexError):
            self.reason = NOT_TOLD
            return
        self.learn_table(document.get("nic"))

    def learn_table(self, nic: Any) -> None:
        """The "nic" part of an ACK. One that cannot be used leaves the ports to the kernel."""
        self._chooser = None
        self.reason = NOT_TOLD
        if not isinstance(nic, dict):
            return
        self.reason = str(nic.get("reason") or NOT_TOLD)
        if nic.get("steering") is None:
            return
        seen, host, port = self._seen
        try:
            steering = Steering.from_dict(nic["steering"])
            self._chooser = PortChooser(steering, self._source, seen, (host, port))
            self.reason = self._chooser.reason
        except ValueError as error:
            self.reason = f"the producer cannot compute ports: {error}"
            log.info("connections are not aligned: %s", self.reason)

    def bind(self, sock: socket.socket, group: int) -> Promise | None:
        """Bind to a port of the group's bucket if one is to be had; None: the kernel chooses."""
        return None if self._chooser is None else self._chooser.bind(sock, group)

    def connected(self, document: dict[str, Any], promise: Promise | None) -> None:
        """From a data connection's ACK: did it arrive where it should have?"""
        aligned = document.get("aligned") is True
        self.aligned += aligned
        self.unaligned += not aligned
        peer = document.get("peer")
        if isinstance(document.get("nic"), dict):  # we used an old key, even if that was lucky
            self.learn_table(document["nic"])
        elif promise is not None and isinstance(peer, list) and peer != [self._seen[0], promise.port]:
            self._chooser = None  # what was chosen does not survive the way: leave the ports to the kernel
            expected = f"{self._seen[0]} port {promise.port}"
            self.reason = f"the server saw {' port '.join(map(str, peer))} instead of our {expected}: NAT changed it"
            if not self._told_nat:
                log.info("connections are not aligned: %s", self.reason)
            self._told_nat = True

    def stats(self) -> dict[str, Any]:
        return {
            "aligned_connections": self.aligned,
            "unaligned_connections": self.unaligned,
            "not_aligned_because": self.reason if self._chooser is None or self.reason else None,
        }
