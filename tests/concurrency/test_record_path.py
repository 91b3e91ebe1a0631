"""The record path makes no allocation and takes no lock: counted on the worker's thread over 10^7 rows."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
WARM_UP_ROWS = 2_000_000
COUNTED_ROWS = 10_000_000
FUTEX, MMAP, MUNMAP, BRK = "202", "9", "11", "12"  # of x86-64, <asm/unistd_64.h>


class Child:
    """A Python script that answers each line with a line of JSON."""

    def __init__(self, *command: str, environment: dict[str, str] | None = None, project: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=project,
            env={**os.environ, "PYTHONPATH": str(project), **(environment or {})},
        )  # fmt: skip

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the process ended with exit code {self._process.wait()}; see above"
        found: dict[str, Any] = json.loads(line)
        return found

    def ask(self, command: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return self.answer()

    def end(self) -> int:
        """The end of its input is the end of the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            return self._process.wait(timeout=20)
        finally:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()


@pytest.fixture
def engine(project: Path, tmp_path: Path) -> Iterator[Child]:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler: the calls of workers cannot be counted")
    library = tmp_path / "calls.so"
    flags = ["-O2", "-Wall", "-Wextra", "-shared", "-fPIC"]
    subprocess.run(["cc", *flags, "-o", str(library), str(HERE / "calls.c"), "-ldl"], check=True)
    child = Child(
        str(HERE / "counted_engine.py"), str(max(os.sched_getaffinity(0))), project=project,
        environment={"LD_PRELOAD": str(library), "FLEXSTREAM_CALLS": str(library)},
    )  # fmt: skip
    yield child
    assert child.end() == 0


def test_a_thread_that_allocates_and_locks_is_caught(engine: Child) -> None:
    """What the next test finds none of is found here: the counter can fail."""
    engine.answer()
    found = engine.ask("self-check")
    assert found["filtered"] == 1, f"this kernel refused a seccomp filter: errno {-found['filtered']}"
    missed = [kind for kind, n in found["calls"].items() if n == 0]
    assert not missed
    assert {FUTEX, MMAP, MUNMAP, BRK} <= found["trapped"].keys()


@pytest.mark.slow
def test_a_worker_allocates_nothing_and_takes_no_lock_over_ten_million_rows(engine: Child, project: Path) -> None:
    sender = Child(str(HERE / "ysb_sender.py"), engine.answer()["address"], project=project)
    try:
        sent = sender.ask(str(WARM_UP_ROWS))
        engine.ask("arm")
        before = engine.ask(f"counts {sent['rows']}")
        sent = sender.ask(str(COUNTED_ROWS))
        after = engine.ask(f"counts {sent['rows']}")
    finally:
        sender.end()

    rows = after["worker"]["rows"] - before["worker"]["rows"]
    print(f"{rows} rows, {after['worker']['receive_calls']} receive calls, {after['query']['windows_fired']} windows")
    assert rows == COUNTED_ROWS
    assert after["thread"] == "fs-worker-0"
    assert after["query"]["windows_fired"] > before["query"]["windows_fired"], "windows fired while it was counted"
    assert after["worker"]["arena_bytes"] > before["worker"]["arena_bytes"], "new keys took new memory meanwhile"
    made = {kind: after["calls"][kind] - before["calls"][kind] for kind in after["calls"]}
    assert not any(made.values()), f"calls of the worker: {made}"
    assert after["filtered"] == 1, f"this kernel refused a seccomp filter: errno {-after['filtered']}"
    assert not after["trapped"], f"system calls of the worker, by number: {after['trapped']}"
