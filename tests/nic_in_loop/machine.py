"""The guest: a 4-core machine under QEMU's software emulation, with a multi-queue NIC that has an RSS table.

Its disk is this machine's tree, read-only; an agent in it does what it is asked over a serial port.
"""

from __future__ import annotations

import ctypes
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.nic_in_loop import network, requirements
from tests.nic_in_loop.guest_kernel import GuestKernel, guest_kernel, locked
from tests.nic_in_loop.requirements import GuestError

PROJECT = Path(__file__).resolve().parents[2]
CACHE = PROJECT / ".cache" / "guest"
CORES = QUEUES = 4
DEVICE = "eth0"
MEMORY_MIB = 1536
BOOT_S = 600.0  # about 10 s on a quiet machine; emulation on a busy one takes its time
CALL_S = 300.0
SHOWN_LINES = 60
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Card:
    """A NIC that QEMU plays: its arguments, and how many queues it has on this machine's side."""

    device: str
    queues: int = 1


VIRTIO = Card(f"virtio-net-pci,mq=on,rss=on,hash=on,vectors={2 * QUEUES + 2}", QUEUES)
VMXNET3 = Card("vmxnet3")  # it takes every table, shows no key, and sends everything to one queue


class Guest:
    """A booted guest. `call` has its agent do one thing (see agent.py); every failure shows the console."""

    def __init__(self, kernel: GuestKernel, share: Path, card: Card) -> None:
        self.kernel = kernel
        self.share = share
        self._console = share.parent / "console.log"
        self._process = subprocess.Popen(
            _command(kernel, share, card),
            stdin=subprocess.DEVNULL,
            stdout=(share.parent / "qemu.log").open("wb"),
            stderr=subprocess.STDOUT,
            preexec_fn=_die_with_parent,
        )
        self._line = b""
        self._serial: socket.socket | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_for_agent(self, limit_s: float = BOOT_S) -> None:
        deadline = time.monotonic() + limit_s
        path = self.share.parent / "agent.sock"
        while self._serial is None:
            self._check_alive(deadline, "the guest's serial port")
            try:
                self._serial = socket.socket(socket.AF_UNIX)
                self._serial.connect(str(path))
            except OSError:
                assert self._serial is not None
                self._serial.close()
                self._serial = None
                time.sleep(0.05)
        if self._receive(deadline, "the agent") != {"ready": True}:
            raise self.failure("the agent's first words are not understood")

    def call(self, function: str, *arguments: Any, limit_s: float = CALL_S) -> Any:
        """Have the agent do it. Raises GuestError when it fails, or when no answer comes in time."""
        assert self._serial is not None
        request = json.dumps({"function": function, "arguments": arguments}) + "\n"
        try:
            self._serial.sendall(request.encode())
        except OSError as error:
            raise self.failure(f"the agent cannot be asked: {error}") from error
        answer = self._receive(time.monotonic() + limit_s, f"the answer to {function}{arguments!r}"[:300])
        if "error" in answer:
            raise GuestError(f"in the guest, {function}{arguments!r}: {answer['error']}"[:4000])
        return answer["value"]

    def run(self, *command: str, limit_s: float = CALL_S, check: bool = True) -> tuple[int, str, str]:
        """Run a command in the guest: exit code, output, errors."""
        code, out, err = self.call("run", command, limit_s, limit_s=limit_s + 30)
        if check and code:
            raise self.failure(f"{shlex.join(command)} ended with {code}\n{out}{err}")
        return code, out, err

    def failure(self, what: str) -> GuestError:
        """An error that shows what the guest's console and the daemon said last."""
        parts = [what]
        for path in [self._console, self.share.parent / "qemu.log", *sorted(self.share.glob("*.log"))]:
            if path.exists() and (text := path.read_text(errors="replace").strip()):
                parts.append(f"-- {path.name}, its end:\n" + "\n".join(text.splitlines()[-SHOWN_LINES:]))
        return GuestError("\n".join(parts))

    def stop(self) -> None:
        """End it: its disk is read-only and its work is in memory, so there is nothing to shut down."""
        if self._serial is not None:
            self._serial.close()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._process.wait()

    def _receive(self, deadline: float, what: str) -> Any:
        assert self._serial is not None
        while b"\n" not in self._line:
            self._check_alive(deadline, what)
            self._serial.settimeout(0.5)
            try:
                part = self._serial.recv(1 << 20)
            except TimeoutError:
                continue
            except OSError as error:
                raise self.failure(f"waiting for {what}: {error}") from error
            if not part:
                raise self.failure(f"the guest ended while this waited for {what}")
            self._line += part
        line, self._line = self._line.split(b"\n", 1)
        return json.loads(line)

    def _check_alive(self, deadline: float, what: str) -> None:
        if self._process.poll() is not None:
            raise self.failure(f"QEMU ended with {self._process.returncode} while this waited for {what}")
        if time.monotonic() > deadline:
            raise self.failure(f"no sign of {what} in time")


@contextmanager
def booted_guest(card: Card = VIRTIO) -> Iterator[Guest]:
    """A guest in a network of its own; both are gone afterwards, whatever happens."""
    requirements.check()
    kernel = guest_kernel(CACHE)
    with _run_folder() as folder, network.private_network(multi_queue=card.queues > 1):
        share = folder / "share"
        share.mkdir()
        (share / "start.sh").write_text(_start_script())
        kernel.initramfs(folder / "initramfs.cpio")
        guest = Guest(kernel, share, card)
        try:
            guest.wait_for_agent()
            yield guest
        finally:
            guest.stop()


@contextmanager
def _run_folder() -> Iterator[Path]:
    """A folder for this run, removed afterwards; what runs that were killed left is removed as well."""
    with ExitStack() as held:
        with locked(CACHE / "lock"):
            for old in CACHE.glob("run-*"):
                with suppress(OSError), locked(old / "lock", wait=False):
                    shutil.rmtree(old, ignore_errors=True)
            folder = Path(tempfile.mkdtemp(prefix="run-", dir=CACHE))
            held.callback(shutil.rmtree, folder, ignore_errors=True)
            held.enter_context(locked(folder / "lock", wait=False))
        yield folder


def _start_script() -> str:
    """What the guest does once it has its disk: addresses, then the agent under this very Python.

    The PATH has what the tests need and no compiler and no Java, which take half a minute to say their version.
    """
    python = shlex.quote(sys.executable)
    return f"""
export PATH=/usr/sbin:/sbin HOME=/run TMPDIR=/run/tmp
ulimit -n 65536
export PYTHONDONTWRITEBYTECODE=1 OPENBLAS_NUM_THREADS=1 PYTHONPATH={shlex.quote(str(PROJECT))}
cd {shlex.quote(str(PROJECT))}
exec </dev/null >/dev/console 2>&1
ip link set lo up
echo 0 >/proc/sys/net/ipv6/conf/{DEVICE}/accept_dad
ip link set {DEVICE} up
ip addr add {network.GUEST_IPV4}/24 dev {DEVICE}
ip addr add {network.GUEST_IPV6}/64 dev {DEVICE} nodad
{python} -m tests.nic_in_loop.launcher 2>/run/share/launcher.log &
{python} -S {shlex.quote(str(Path(__file__).with_name("agent.py")))}
echo "the agent ended with $?"
echo o >/proc/sysrq-trigger
/bin/sleep 60
"""


def _command(kernel: GuestKernel, share: Path, card: Card) -> list[str]:
    folder = share.parent
    # net.ifnames: the device is eth0. mitigations: emulation needs none. x86-64-v2 is what the extensions are built
    # for, and a guest with newer instructions would be slower: they are emulated one by one.
    queues = f",queues={card.queues}" if card.queues > 1 else ""
    arguments = "console=ttyS0 panic=-1 mitigations=off tsc=reliable net.ifnames=0 loglevel=6"
    command = f"""
        {requirements.command(requirements.QEMU)} -accel tcg,thread=multi,tb-size=256 -machine q35 -cpu Nehalem
        -smp {CORES} -m {MEMORY_MIB} -nodefaults -display none -no-reboot
        -device virtio-serial-pci -device virtserialport,chardev=agent
        -device {card.device},netdev=net,mac=52:54:00:77:00:02
        -netdev tap,id=net,ifname={network.TAP},script=no,downscript=no,vhost=off{queues}
    """.split()
    return [
        *command,
        *("-kernel", str(kernel.image), "-initrd", str(folder / "initramfs.cpio"), "-append", arguments),
        *("-serial", f"file:{folder / 'console.log'}"),
        *("-chardev", f"socket,id=agent,path={folder / 'agent.sock'},server=on,wait=off"),
        *("-virtfs", "local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap"),
        *("-virtfs", f"local,path={share},mount_tag=share,security_model=none"),
    ]


def _die_with_parent() -> None:
    """QEMU must not outlive the tests, not even after a kill -9 of them."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setpgid(0, 0)  # Ctrl-C is for the tests, which then stop it themselves
