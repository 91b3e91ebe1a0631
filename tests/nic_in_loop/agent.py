"""The agent in the guest: reads one JSON request per line from the serial port, and answers each with a line.

Standard library only, and little of it: a Python start is seconds under emulation. What it tells about the
kernel it asks the kernel itself, never FlexStream: the tests compare the two.
"""

from __future__ import annotations

import array
import ctypes
import fcntl
import glob
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback

SIOCETHTOOL = 0x8946
ETHTOOL_GRXFHINDIR, ETHTOOL_SRXFHINDIR = 0x38, 0x39
SO_INCOMING_CPU, SO_INCOMING_NAPI_ID = 49, 56
SYS_PIDFD_OPEN, SYS_PIDFD_GETFD = 434, 438
LAUNCHER = "/run/launcher.sock"
_libc = ctypes.CDLL(None, use_errno=True)


# -- processes and files


def run(command: list[str], limit_s: float) -> tuple[int, str, str]:
    done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=limit_s, check=False)
    return done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")


def kill(pid: int, number: int) -> None:
    os.kill(pid, number)


def _ask_launcher(request: dict[str, object]) -> object:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(LAUNCHER)
        sock.sendall(json.dumps(request).encode() + b"\n")
        return json.loads(sock.makefile("rb").readline())


def launch(arguments: list[str], out: str, err: str) -> object:
    """Start `flexstream ARGUMENTS` from the process that has its modules loaded; its pid."""
    for path in (out, err):
        open(path, "ab").close()  # there from now on, for whoever looks at it next
    return _ask_launcher({"arguments": arguments, "out": out, "err": err})


def launched_ended(pid: int) -> object:
    """Its exit code (negative: the signal), or None while it runs."""
    return _ask_launcher({"ended": pid})


def exists(path: str) -> bool:
    return os.path.exists(path)


def read(path: str) -> str:
    with open(path, errors="replace") as file:
        return file.read()


def read_link(path: str) -> str:
    return os.readlink(path)


def read_all(*patterns: str) -> dict[str, str | None]:
    """Contents by path; None where the kernel refuses to say."""
    found: dict[str, str | None] = {}
    for pattern in patterns:
        for path in sorted(glob.glob(pattern)):
            try:
                found[path] = read(path).strip()
            except OSError:
                found[path] = None
    return found


def write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


# -- the device


def _ethtool(device: str, buffer: array.array[int]) -> None:
    address, _ = buffer.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, SIOCETHTOOL, struct.pack("16sP8x", device.encode(), address))


def table(device: str) -> list[int]:
    """The indirection table, read with the ioctl of 2009 (struct ethtool_rxfh_indir)."""
    head = array.array("I", [ETHTOOL_GRXFHINDIR, 0])
    _ethtool(device, head)
    whole = array.array("I", [ETHTOOL_GRXFHINDIR, head[1], *[0] * head[1]])
    _ethtool(device, whole)
    return list(whole[2:])


def set_table(device: str, entries: list[int]) -> None:
    _ethtool(device, array.array("I", [ETHTOOL_SRXFHINDIR, len(entries), *entries]))


def queue_packets(device: str) -> list[int]:
    """Packets received per queue, from the driver's statistics."""
    _, out, _ = run(["ethtool", "-S", device], 60)
    found = {}
    for line in out.splitlines():
        name, _, count = line.strip().partition(": ")
        words = name.split("_")
        if words[:2] == ["rx", "queue"] and words[3:] == ["packets"]:
            found[int(words[2])] = int(count)
    return [found[queue] for queue in sorted(found)]


# -- sockets of another process


def connections(pid: int, port: int) -> list[dict[str, object]]:
    """The TCP connections of a process on its local port, and what the kernel says of each.

    The sockets are borrowed (pidfd_getfd), so this is the kernel's word and not the process's.
    """
    pidfd = _libc.syscall(SYS_PIDFD_OPEN, pid, 0)
    if pidfd < 0:
        raise OSError(ctypes.get_errno(), f"pidfd_open({pid})")
    found = []
    try:
        for number in map(int, os.listdir(f"/proc/{pid}/fd")):
            try:
                if not os.readlink(f"/proc/{pid}/fd/{number}").startswith("socket:"):
                    continue
            except OSError:  # closed meanwhile
                continue
            borrowed = _libc.syscall(SYS_PIDFD_GETFD, pidfd, number, 0)
            if borrowed >= 0:
                found += _described(borrowed, port)
    finally:
        os.close(pidfd)
    return found


def _described(fd: int, port: int) -> list[dict[str, object]]:
    with socket.socket(fileno=fd) as sock:
        try:
            if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.getsockname()[1] != port:
                return []
            return [
                {
                    "peer": list(sock.getpeername()[:2]),
                    "local": list(sock.getsockname()[:2]),
                    "napi": sock.getsockopt(socket.SOL_SOCKET, SO_INCOMING_NAPI_ID),
                    "cpu": sock.getsockopt(socket.SOL_SOCKET, SO_INCOMING_CPU),
                }
            ]
        except OSError:  # a listener, or closed meanwhile
            return []


# -- the daemon's HTTP API, on loopback: what is asked never shows in the device's counters


def http(method: str, port: int, path: str, token: str, body: str | None, limit_s: float) -> tuple[int, str]:
    content = b"" if body is None else body.encode()
    head = f"{method} {path} HTTP/1.0\r\nHost: 127.0.0.1:{port}\r\nAuthorization: Bearer {token}\r\n"
    head += "Content-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", port), limit_s) as sock:
        sock.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        answer = b""
        while part := sock.recv(1 << 20):
            answer += part
    status, _, payload = answer.partition(b"\r\n\r\n")
    return int(status.split(b" ", 2)[1]), payload.decode()


def uptime() -> float:
    return float(read("/proc/uptime").split()[0])


# -- requests

FUNCTIONS = {
    function.__name__: function
    for function in (
        *(run, launch, launched_ended, kill, exists, read, read_link, read_all, write),
        *(table, set_table, queue_packets, connections, http, uptime),
    )
}


def answer(request: dict[str, object]) -> dict[str, object]:
    try:
        return {"value": FUNCTIONS[request["function"]](*request["arguments"])}
    except BaseException as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}


def main() -> None:
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    print(f"agent: up after {uptime()} s", file=sys.stderr, flush=True)
    while not (ports := glob.glob("/dev/vport*")):
        time.sleep(0.1)
    port = os.open(ports[0], os.O_RDWR)
    say(port, {"ready": True})
    pending = b""
    while True:
        part = os.read(port, 65536)
        if not part:  # nobody is at the other end: not yet, or no longer
            time.sleep(0.05)
            continue
        pending += part
        while b"\n" in pending:
            line, pending = pending.split(b"\n", 1)
            say(port, answer(json.loads(line)))


def say(port: int, message: dict[str, object]) -> None:
    data = json.dumps(message).encode() + b"\n"
    while data:
        data = data[os.write(port, data) :]


if __name__ == "__main__":
    main()
