"""Network namespaces for tests: two of them with a veth between, and code that runs inside one. Needs root.

Names are unique, so that runs side by side do not meet; everything is removed when the block ends, whatever happened
in it. `run_inside` starts a process in a namespace, with a sysfs that shows it: a process that only changes its
namespace still sees the devices of the old one in /sys. A socket belongs to the namespace in which it was made, so
one process can hold both ends of a connection (`Pair.client_socket`).
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import secrets
import signal
import socket
import subprocess
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

CLONE_NEWNS, CLONE_NEWNET = 0x20000, 0x40000000
MS_REC, MS_PRIVATE = 0x4000, 1 << 18
RUN_TIMEOUT_S = 120.0

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Namespace:
    """A named network namespace, as `ip netns` knows it."""

    name: str

    @property
    def path(self) -> str:
        return f"/run/netns/{self.name}"

    def ip(self, *arguments: str) -> None:
        command("ip", "-n", self.name, *arguments)

    def execute(self, *arguments: str) -> str:
        """A command inside, with the namespace's own /sys."""
        return command("ip", "netns", "exec", self.name, *arguments)

    def enter_for_good(self) -> None:
        """This process, or at least this thread, is inside from now on; /sys stays as it is."""
        _setns(self.path)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """This thread is inside for as long as the block lasts: sockets made here belong there."""
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        try:
            _setns(self.path)
            yield
        finally:
            _check(_libc.setns(before, CLONE_NEWNET), "setns back")
            os.close(before)


@dataclass(frozen=True)
class Pair:
    """Two namespaces and a veth between them, up, with addresses of both families."""

    server: Namespace
    client: Namespace
    server_device: str
    client_device: str
    server_addresses: tuple[str, str] = ("10.77.0.1", "fd77::1")
    client_addresses: tuple[str, str] = ("10.77.0.2", "fd77::2")

    def address(self, family: socket.AddressFamily) -> str:
        return self.server_addresses[family == socket.AF_INET6]

    def client_address(self, family: socket.AddressFamily) -> str:
        return self.client_addresses[family == socket.AF_INET6]

    def client_socket(self, family: socket.AddressFamily) -> socket.socket:
        with self.client.entered():
            return socket.socket(family, socket.SOCK_STREAM)


def command(*arguments: str) -> str:
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(arguments)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


@contextlib.contextmanager
def namespace() -> Iterator[Namespace]:
    """One namespace, with loopback up."""
    made = Namespace(f"fs-{secrets.token_hex(4)}")
    command("ip", "netns", "add", made.name)
    try:
        made.ip("link", "set", "lo", "up")
        yield made
    finally:
        command("ip", "netns", "del", made.name)


@contextlib.contextmanager
def veth_pair() -> Iterator[Pair]:
    with namespace() as server, namespace() as client:
        tag = secrets.token_hex(3)
        pair = Pair(server, client, f"fss{tag}", f"fsc{tag}")
        add = f"link add {pair.server_device} netns {server.name} type veth peer name {pair.client_device}"
        command("ip", *add.split(), "netns", client.name)
        ends = (
            (server, pair.server_device, pair.server_addresses),
            (client, pair.client_device, pair.client_addresses),
        )
        for inside, device, (v4, v6) in ends:
            inside.ip("addr", "add", f"{v4}/24", "dev", device)
            inside.ip("addr", "add", f"{v6}/64", "dev", device, "nodad")
            inside.ip("link", "set", device, "up")
        yield pair


def run_inside(where: Namespace, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a module's function in a process of its own inside the namespace; returns what it returns."""
    with started_inside(where, function, *arguments) as process:
        return process.result()


class Process:
    """A function that runs inside a namespace, and can be killed."""

    def __init__(self, process: multiprocessing.process.BaseProcess, channel: Connection) -> None:
        self._process = process
        self.channel = channel

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def result(self, timeout_s: float = RUN_TIMEOUT_S) -> Any:
        """What the function returns; a failure in it is an AssertionError with its stack."""
        kind, value = self.receive(timeout_s)
        if kind != "returned":
            raise AssertionError(f"inside the namespace: {value}")
        return value

    def said(self, timeout_s: float = RUN_TIMEOUT_S) -> Any:
        """The next thing that the function sends with `say`."""
        kind, value = self.receive(timeout_s)
        if kind != "said":
            raise AssertionError(f"inside the namespace, {kind}: {value}")
        return value

    def receive(self, timeout_s: float) -> tuple[str, Any]:
        if not self.channel.poll(timeout_s):
            raise AssertionError(f"nothing from process {self.pid} within {timeout_s} s")
        try:
            received: tuple[str, Any] = self.channel.recv()
        except EOFError:
            self._process.join(10)
            raise AssertionError(f"process {self.pid} ended with {self._process.exitcode}") from None
        return received

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self._process.join(10)


@contextlib.contextmanager
def started_inside(where: Namespace, function: Callable[..., Any], *arguments: Any) -> Iterator[Process]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_main, args=(where.path, theirs, function, arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        yield Process(process, ours)
    finally:
        process.kill()
        process.join(10)
        ours.close()


_channel: Connection | None = None


def say(value: Any) -> None:
    """Inside: tell the test something before the function returns."""
    assert _channel is not None, "say() is for functions that run inside a namespace"
    _channel.send(("said", value))


def heard() -> Any:
    """Inside: wait for what the test sends over `Process.channel`."""
    assert _channel is not None
    return _channel.recv()


def _main(path: str, channel: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    global _channel
    _channel = channel
    try:
        enter(path)
        channel.send(("returned", function(*arguments)))
    except BaseException:
        channel.send(("raised", traceback.format_exc()))


def enter(path: str) -> None:
    """Move this process into the namespace for good, with a /sys that shows it."""
    _setns(path)
    _check(_libc.unshare(CLONE_NEWNS), "unshare")
    _check(_libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None), "make mounts private")
    _check(_libc.mount(b"sysfs", b"/sys", b"sysfs", 0, None), "mount /sys")


def links_in(where: Namespace) -> str:
    return where.execute("ip", "-details", "link", "show")


def _setns(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        _check(_libc.setns(descriptor, CLONE_NEWNET), f"setns {path}")
    finally:
        os.close(descriptor)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def read_sys(where: Namespace, path: str) -> str:
    """A file of the namespace's own /sys."""
    return where.execute("cat", str(Path("/sys") / path)).strip()
