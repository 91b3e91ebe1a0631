"""Connections from the client's namespace to a listener behind a KernelNic, with ports that steer them. Runs inside."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

from flexstream.nic.contract import Connection, Steering
from flexstream.nic.kernel_table import KernelNic
from flexstream.nic.rss.ports import PortChooser
from tests.nic.netns import Pair
from tests.waiting import wait_until

SO_INCOMING_CPU = 49
WAIT_S = 30.0
LOOPBACK = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}


class Flow:
    """One connection, of one group: the producer's end and the engine's."""

    def __init__(self, client: socket.socket, accepted: socket.socket, group: int, bucket: int) -> None:
        self.client = client
        self.accepted = accepted
        self.group = group
        self.bucket = bucket

    def send(self, size: int) -> None:
        """Send, and read all of it at the other end."""
        left = size
        self.client.sendall(bytes(size))
        while left:
            received = len(self.accepted.recv(min(left, 1 << 16)))
            assert received, "the connection ended"
            left -= received

    @property
    def core(self) -> int:
        """Where the latest packet was handled."""
        return self.accepted.getsockopt(socket.SOL_SOCKET, SO_INCOMING_CPU)

    def arrives_on(self, core: int) -> bool:
        """Whether what is sent now is handled there; one packet from before a change may still be on its way."""
        self.send(2000)
        return self.core == core

    def connection(self) -> Connection:
        peer, local = self.accepted.getpeername(), self.accepted.getsockname()
        return Connection(peer[:2], local[:2], self.group, incoming_cpu=self.core)

    def close(self) -> None:
        self.client.close()
        self.accepted.close()


class Rig:
    """A started NIC, a listener on its port, and flows to it."""

    def __init__(self, pair: Pair, nic: KernelNic, family: socket.AddressFamily) -> None:
        self.nic = nic
        self._pair = pair
        self._family = family
        self._loopback = nic.device == "lo"
        self.address = LOOPBACK[family] if self._loopback else pair.address(family)
        self._source = LOOPBACK[family] if self._loopback else pair.client_address(family)
        self.listener = socket.socket(family, socket.SOCK_STREAM)
        self.listener.settimeout(WAIT_S)
        self.listener.bind((self.address, 0))
        self.listener.listen(256)
        self.port: int = self.listener.getsockname()[1]
        self.flows: list[Flow] = []
        steering = nic.steering()
        assert isinstance(steering, Steering)
        self.chooser = PortChooser(steering, (self._source, 0), self._source, (self.address, self.port))

    def connect(self, group: int) -> Flow:
        client = socket.socket(self._family) if self._loopback else self._pair.client_socket(self._family)
        client.settimeout(WAIT_S)
        promise = self.chooser.bind(client, group)
        assert promise is not None, f"no port for group {group}"
        client.connect((self.address, self.port))
        accepted, _ = self.listener.accept()
        accepted.settimeout(WAIT_S)
        flow = Flow(client, accepted, group, promise.bucket)
        self.flows.append(flow)
        return flow

    def close(self) -> None:
        for flow in self.flows:
            flow.close()
        self.listener.close()
        self.nic.close()


@contextlib.contextmanager
def rig(
    pair: Pair,
    device: str,
    folder: Path,
    *,
    method: str = "auto",
    family: socket.AddressFamily = socket.AF_INET,
    groups: int = 128,
) -> Iterator[Rig]:
    """Two workers on cores 0 and 1, groups dealt out in turn."""
    nic = KernelNic(device, groups=groups, method=method, journal_folder=folder)
    made = Rig(pair, nic, family)
    try:
        nic.start([0, 1])
        nic.listeners(made.listener)
        nic.follow([group % 2 for group in range(groups)])
        yield made
    finally:
        made.close()


def eventually_arrives_on(flow: Flow, core: int) -> None:
    wait_until(lambda: flow.arrives_on(core), f"group {flow.group} on core {core}", seen=lambda: flow.core)
