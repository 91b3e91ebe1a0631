"""FlexStream in the guest: its commands, and its daemon with four workers on the guest's NIC."""

from __future__ import annotations

import itertools
import json
import signal
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.nic_in_loop.machine import DEVICE, Guest

TOKEN = "only-for-this-guest"
DATA_PORT, CONTROL_PORT = 7400, 7401
GROUPS = 128
WORKERS = 4
COMMAND_S = 600.0
START_S = 600.0
STOP_S = 300.0
_numbers = itertools.count(1)


@dataclass(frozen=True)
class Said:
    """What a command said before it ended."""

    code: int
    out: str
    err: str


def wait_for_launcher(guest: Guest) -> None:
    """It imports everything: that is most of the time between boot and the first test."""
    deadline = time.monotonic() + START_S
    while not guest.call("exists", "/run/launcher.sock"):
        if time.monotonic() > deadline:
            raise guest.failure("FlexStream could not be imported in the guest")
        time.sleep(0.2)


class Command:
    """A `flexstream` command that was started in the guest."""

    def __init__(self, guest: Guest, *arguments: str) -> None:
        self._guest = guest
        self._line = f"flexstream {' '.join(arguments)}"
        number = next(_numbers)
        self._out, self._err = (f"/run/tmp/command-{number}.{kind}" for kind in ("out", "err"))
        self._pid = guest.call("launch", arguments, self._out, self._err)

    def said(self, check: bool = True) -> Said:
        """Wait for its end."""
        code = _wait_for_end(self._guest, self._pid, COMMAND_S, self._line)
        said = Said(code, self._guest.call("read", self._out), self._guest.call("read", self._err))
        if check and code:
            raise self._guest.failure(f"{self._line} ended with {code}:\n{said.out}{said.err}")
        return said


def flexstream(guest: Guest, *arguments: str) -> str:
    """Run a `flexstream` command in the guest to its end: what it said."""
    return Command(guest, *arguments).said().out


def _wait_for_end(guest: Guest, pid: int, limit_s: float, what: str) -> int:
    deadline = time.monotonic() + limit_s
    while (code := guest.call("launched_ended", pid)) is None:
        if time.monotonic() > deadline:
            raise guest.failure(f"{what} did not end in {limit_s:g} s")
        time.sleep(0.1)
    return int(code)


class Daemon:
    """`flexstream serve` in the guest. What is asked of it goes over the guest's loopback."""

    def __init__(self, guest: Guest, *options: str, data_dir: str = "/run/tmp/data") -> None:
        self._guest = guest
        number = next(_numbers)
        self._out = f"/run/tmp/daemon-{number}.out"
        self.log = f"/run/share/daemon-{number}.log"
        (guest.share / "token").write_text(TOKEN)
        (guest.share / "token").chmod(0o600)
        arguments = (
            f"serve --json --workers 0,1,2,3 --groups {GROUPS} --token-file /run/share/token --data-dir {data_dir}"
            f" --control 127.0.0.1:{CONTROL_PORT} --data [::]:{DATA_PORT} --state-memory-bytes 256MiB --compile off"
            " --hello-timeout-s 60 --idle-timeout-s 600 --session-timeout-s 600 --balance off"
        )
        self.pid: int = guest.call("launch", [*arguments.split(), *options], self._out, self.log)
        self.code: int | None = None
        self.ready = self._wait_until_ready()

    def _wait_until_ready(self) -> Any:
        deadline = time.monotonic() + START_S
        while True:
            lines = self._guest.call("read", self._out).splitlines()
            if lines:
                return json.loads(lines[0])
            code = self._guest.call("launched_ended", self.pid)
            if code is not None or time.monotonic() > deadline:
                raise self._guest.failure(f"the daemon is not ready (exit code {code})")
            time.sleep(0.1)

    def get(self, path: str) -> Any:
        return self._ask("GET", path)

    def post(self, path: str, body: Any) -> Any:
        return self._ask("POST", path, body)

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        text = None if body is None else json.dumps(body)
        status, answer = self._guest.call("http", method, CONTROL_PORT, path, TOKEN, text, 60.0)
        assert status < 300, f"{method} {path}: {status} {answer}"
        return json.loads(answer)

    def results(self, query: str, offset: int = 0) -> list[dict[str, Any]]:
        """Rows of the result log from `offset` on, their times as integers (ms)."""
        path = f"/v1/queries/{query}/results?offset={offset}&format=jsonl"
        status, answer = self._guest.call("http", "GET", CONTROL_PORT, path, TOKEN, None, 60.0)
        assert status == 200, answer
        rows = [json.loads(line) for line in answer.splitlines()]
        for row in rows:
            for name in ("window_start", "window_end"):
                row[name] = int(np.datetime64(row[name], "ms").astype(np.int64))
        return rows

    def worker_rows(self) -> list[int]:
        return [worker["rows"] for worker in self.get("/v1/status")["workers"]]

    def connections(self) -> list[dict[str, Any]]:
        """Its data connections as the kernel sees them; mapped IPv4 addresses are written as IPv4."""
        found: list[dict[str, Any]] = self._guest.call("connections", self.pid, DATA_PORT)
        for connection in found:
            for end in ("peer", "local"):
                connection[end][0] = connection[end][0].removeprefix("::ffff:")
        return found

    def stop(self) -> int:
        """SIGTERM: drain, give the device back, end. The exit code."""
        return self._end(signal.SIGTERM)

    def kill(self) -> int:
        return self._end(signal.SIGKILL)

    def _end(self, number: int) -> int:
        if self.code is None:
            self._guest.call("kill", self.pid, number)
            self.code = _wait_for_end(self._guest, self.pid, STOP_S, "the daemon")
        return self.code


def serve(guest: Guest, *options: str, **places: str) -> Daemon:
    return Daemon(guest, "--nic", f"ethtool:{DEVICE}", *options, **places)
