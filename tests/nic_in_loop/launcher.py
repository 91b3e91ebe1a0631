"""Starts `flexstream` commands in the guest without importing everything again each time.

An import of the engine and the CLI is 40 s under emulation; a fork of a process that has done it is none. A
child runs the same `main()` as the installed command, with its own arguments and output, and ends as usual.
Requests come over a local socket, one JSON line per connection.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys

ADDRESS = "/run/launcher.sock"
IMPORTS = (
    "flexstream.cli",
    "flexstream.nic.ethtool",
    "flexstream.engine.engine",
    "flexstream.daemon.service",
    "uvloop",
)
LATER = (
    "flexstream.cli.machine",
    "flexstream.cli.nic_text",
    "flexstream.cli.nic_checks",
    "flexstream.nic.device.apply",
    "pyroute2",
)
IDLE_S = 1.0


def child_arguments(listener: socket.socket) -> list[str]:
    """Serve requests for ever; a child returns with the arguments of its command."""
    children: dict[int, int | None] = {}
    later = list(LATER)
    listener.settimeout(IDLE_S)
    while True:
        try:
            connection, _ = listener.accept()
        except TimeoutError:  # what the daemon does not need is imported while nobody waits
            if later:
                importlib.import_module(later.pop(0))
            continue
        with connection:
            connection.settimeout(None)
            request = json.loads(connection.makefile("rb").readline())
            if "ended" in request:
                pid = request["ended"]
                if children[pid] is None and (status := os.waitpid(pid, os.WNOHANG))[0]:
                    children[pid] = os.waitstatus_to_exitcode(status[1])
                answer: int | None = children[pid]
            else:
                answer = os.fork()
                if answer == 0:
                    connection.close()
                    listener.close()
                    _redirect(request["out"], request["err"])
                    return list(request["arguments"])
                children[answer] = None
            connection.sendall(json.dumps(answer).encode() + b"\n")


def _redirect(out: str, err: str) -> None:
    for number, path, flags in ((0, "/dev/null", os.O_RDONLY), (1, out, os.O_WRONLY), (2, err, os.O_WRONLY)):
        fd = os.open(path, flags | (os.O_CREAT | os.O_TRUNC if number else 0), 0o644)
        os.dup2(fd, number)
        os.close(fd)


def main() -> None:
    for name in IMPORTS:
        importlib.import_module(name)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(ADDRESS + ".new")
    listener.listen(16)
    os.rename(ADDRESS + ".new", ADDRESS)  # it is there when it can be used
    print("launcher: ready", file=sys.stderr, flush=True)
    sys.argv = ["flexstream", *child_arguments(listener)]
    from flexstream.cli import main as flexstream

    flexstream()


if __name__ == "__main__":
    main()
