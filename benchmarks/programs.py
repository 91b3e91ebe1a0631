"""The processes of a benchmark: C sender, C discarding receiver, and the engine in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks import workload
from benchmarks.harness import CACHE, PROJECT, compiled
from flexstream.ingest.receive_room import room_for_one
from flexstream.testing.ysb import YSB_STREAM

PATIENCE_S = 90.0


class Discard:
    """The reference: a C program that answers HELLO, receives and throws away. One session, then it ends.

    Its sockets have as much room as the engine's would.
    """

    def __init__(self, groups: int, *, cpu: int) -> None:
        reply = CACHE / f"control-{groups}.json"
        reply.parent.mkdir(parents=True, exist_ok=True)
        reply.write_text(workload.control_reply(groups))
        command = [str(compiled("discard")), "--cpu", str(cpu), "--room", str(room_for_one(groups, 0))]
        command += ["--block", str(workload.FRAME_BYTES), "--rows-per-frame", str(workload.rows_per_frame())]
        command += ["--control-json", str(reply)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline().split()[1])

    def result(self) -> dict[str, Any]:
        """Its counts, after every connection has closed."""
        output, _ = self._process.communicate(timeout=PATIENCE_S)
        found: dict[str, Any] = json.loads(output)
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


class Served:
    """A Python process of a benchmark that says it is ready, then answers each line of JSON with one."""

    def __init__(self, module: str, *arguments: str, tree: Path = PROJECT, leads_group: bool = False) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)}, process_group=0 if leads_group else None,
        )  # fmt: skip
        self.pid = self._process.pid
        self.ready = self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a benchmark's process ended with exit code {self._process.wait()}; see above")
        found: dict[str, Any] = json.loads(line)
        return found

    def ask(self, command: str, **details: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"command": command, **details}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()  # the end of its input is its end
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


class EngineProcess(Served):
    """An engine that listens, in its own process, told what to do over a pipe (`engine_process.py`)."""

    def __init__(self, groups: int, *, cpus: list[int], compile: str = "require", data_dir: str | None = None) -> None:
        arguments = ["--groups", str(groups), "--cpus", ",".join(map(str, cpus)), "--compile", compile]
        arguments += ["--data-dir", data_dir] if data_dir else []
        super().__init__("benchmarks.engine_process", *arguments)
        self.port = int(self.ready["port"])

    def rss_bytes(self) -> int:
        with open(f"/proc/{self.pid}/statm") as file:
            return int(file.read().split()[1]) * 4096


def start_program(name: str, options: Mapping[str, object]) -> subprocess.Popen[str]:
    """One of the C senders, with its options."""
    command = [str(compiled(name))]
    for option, value in options.items():
        command += [f"--{option}", str(value)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def start_sender(
    port: int,
    frames: workload.Frames,
    *,
    cpu: int,
    duration_s: float,
    stream: str = YSB_STREAM.name,
    crc: bool = False,
    rate: float = 0,
    marker_ms: int = 0,
    watermark_every: int = 4,
    sndbuf: int = 0,
) -> subprocess.Popen[str]:
    schema = YSB_STREAM.schema
    options: dict[str, Any] = {
        "port": port,
        "frames": frames.path,
        "groups": frames.groups,
        "stream": stream,
        "schema": schema.hash,
        "row-bytes": schema.row_bytes,
        "cpu": cpu,
        "duration-ms": int(duration_s * 1000),
        "time-offset": schema.field(YSB_STREAM.time).offset,
        "time-delta": frames.time_delta,
        "watermark-every": watermark_every,
        "crc": int(crc),
        "rate": int(rate),
        "marker-ms": marker_ms,
        "sndbuf": sndbuf,
        "producer": uuid.uuid4(),
    }
    return start_program("sender", options)


def sender_result(process: subprocess.Popen[str], duration_s: float) -> dict[str, Any]:
    output, _ = process.communicate(timeout=duration_s + PATIENCE_S)
    if process.returncode != 0:
        raise SystemExit("the C sender failed; see above")
    found: dict[str, Any] = json.loads(output)
    return found


def run_sender(
    port: int, frames: workload.Frames, *, cpu: int, duration_s: float, **options: Any
) -> dict[str, Any]:
    """Send for so long, wait until the receiver has taken everything, and return the sender's counts."""
    return sender_result(start_sender(port, frames, cpu=cpu, duration_s=duration_s, **options), duration_s)
